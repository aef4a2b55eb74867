"""The command `generate`: what it streams, marks, measures and refuses."""

import dataclasses
import io
import re

import jax.numpy as jnp
import pytest

from jaxspec import __main__ as command_line
from jaxspec import generate
from jaxspec.decode import fused
from jaxspec.language_model import LanguageModel
from jaxspec.verify import Status

SMALL = ["generate", "--prompt", "And God said", "--new-tokens", "20", "--temperature", "0"]


@pytest.fixture(scope="module")
def spoken():
    """What `generate` prints for the shipped pair, greedily, drafted by the 5-gram."""
    args = command_line.make_parser().parse_args([*SMALL, "--draft", "ngram", "--depth", "3"])
    out = io.StringIO()
    assert generate.run(args, out) == 0
    return out.getvalue()


def test_the_text_follows_the_prompt_and_drafted_stretches_stand_in_brackets(spoken):
    text, _, _ = spoken.partition("\n\n")
    plain = text.replace("[", "").replace("]", "")
    assert plain.startswith("And God said")
    assert len(plain) == len("And God said") + 20
    drafted = re.findall(r"\[([^\[\]]+)\]", text)
    accepted = int(re.search(r"(\d+) of \d+ drafted", spoken)[1])
    assert sum(map(len, drafted)) == accepted > 0


def test_it_ends_with_tokens_per_call_and_the_plain_loop_of_the_same_run(spoken):
    calls = int(re.search(r"20 tokens \(budget\), (\d+) target calls", spoken)[1])
    per_call = float(re.search(r"([\d.]+) tokens per call", spoken)[1])
    assert per_call == pytest.approx(20 / calls, abs=0.005)
    assert calls < 20
    mine, plain, ratio = map(
        float,
        re.search(
            r"([\d.]+) tokens per second, plain loop ([\d.]+): ([\d.]+) times as fast", spoken
        ).groups(),
    )
    assert ratio == pytest.approx(mine / plain, rel=0.05)
    assert spoken.endswith("the plain loop's text is the same\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "caf\u00e9"], "--prompt: text\\[3\\] is 'é'"),
        (["--prompt", "a" * 256], "--prompt has 256 tokens: kjv-1.6M has room for 256 in all"),
        (["--new-tokens", "0"], "--new-tokens is 0"),
        (["--depth", "0"], "--depth is 0"),
        (["--depth", "17"], "--depth is 17: must be at most 16, as each level is one more forward"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--temperature", "1e39"], "--temperature is 1e\\+39"),
        (["--top-k", "0"], "--top-k is 0"),
        (["--top-p", "0"], "--top-p is 0.0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--seed", str(10**23)], f"--seed is {10**23}"),
        (["--draft", ""], "--draft is empty: name a folder, lookup, ngram, pair or none"),
        (["--model", ""], "--model : there is no such folder"),
        (["--chat"], "it needs --model smollm2"),
        (["--model", "nowhere"], "--model nowhere: there is no such folder"),
        (["--draft", "nowhere"], "--draft nowhere: there is no such folder"),
    ],
)
def test_bad_arguments_are_named_and_the_exit_status_is_2(change, message, capsys):
    assert command_line.main([*SMALL, *change]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search("generate: error: .*" + message, captured.err)
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("depth", "new_tokens", "drafted"), [(16, 4, 4), (3, 20, 3)])
def test_no_more_is_drafted_than_is_to_be_generated(depth, new_tokens, drafted):
    change = ["--draft", "ngram", "--depth", str(depth), "--new-tokens", str(new_tokens)]
    args = command_line.make_parser().parse_args([*SMALL, *change])
    drafter = generate.make_drafter(args, generate.load_target("pair"))
    assert drafter.capacity.max_depth == drafted


def nan_model(tokenizer, max_context=None):
    """A network whose every row is NaN; its cache holds nothing."""
    return LanguageModel(
        name="nan",
        vocab=256,
        params=jnp.float32(jnp.nan),
        forward=lambda params, tokens, positions, mask, cache, at: (
            params * jnp.ones((tokens.shape[0], 256)),
            cache,
        ),
        init_cache=jnp.zeros,
        keep=lambda cache, at, path: cache,
        takes_trees=True,
        max_context=max_context,
        tokenizer=tokenizer,
    )


def a_run(monkeypatch, target, *change, decode=None):
    """Run the command on a target, its decodes replaced by `decode(decoder, options)` if given."""
    monkeypatch.setattr(generate, "load_target", lambda name: target)
    if decode is not None:
        monkeypatch.setattr(
            generate, "decode", lambda loop, prompt, key, show, options: decode(loop, options)
        )
    args = ["generate", "--prompt", "ab", "--draft", "lookup", "--new-tokens", "3", *change]
    return command_line.main(args)


@pytest.mark.parametrize("draft", ["lookup", "none"])
def test_weights_of_nan_are_said_in_words_and_the_exit_status_is_1(draft, monkeypatch, capsys):
    assert a_run(monkeypatch, nan_model(Bytes()), "--draft", draft) == 1
    out, err = capsys.readouterr()
    assert "0 tokens (undecided)" in out
    assert "round 1 decided on no token: a row of the target or of the draft holds NaN" in out
    assert out.count("(NON_FINITE_ROW)") == (1 if draft == "none" else 2)
    assert "tokens per second" not in out
    assert err == ""


@pytest.mark.parametrize("stuck", ["drafted", "plain"])
def test_no_speeds_are_compared_if_either_text_broke_off(stuck, monkeypatch, capsys):
    def decode(loop, options):
        is_plain = isinstance(loop.drafter, fused.Plain)
        ending = fused.Ending.UNDECIDED if is_plain == (stuck == "plain") else fused.Ending.BUDGET
        text = text_of((97,), (fused.Source.TARGET,), ending)
        return generate.Timed(dataclasses.replace(text, status=int(Status.BAD_DRAW)), 0.5)

    assert a_run(monkeypatch, nan_model(Bytes()), decode=decode) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    named = "the plain loop: " if stuck == "plain" else ""
    assert last == f"{named}round 1 decided on no token: a draw is not in [0, 1) (BAD_DRAW)"


@pytest.mark.parametrize(("stops", "room"), [((), 4), ((7,), 4), (tuple(range(9)), 9)])
def test_both_loops_have_room_for_all_stop_tokens_of_the_tokenizer(stops, room, monkeypatch):
    class Stopping(Bytes):
        stop_tokens = stops

    rooms = []

    def decode(loop, options):
        rooms.append(loop.max_stop_tokens)
        assert options["stop_tokens"] == stops
        return generate.Timed(text_of((97,), (fused.Source.TARGET,), fused.Ending.BUDGET), 0.5)

    assert a_run(monkeypatch, nan_model(Stopping()), decode=decode) == 0
    assert rooms == [room, room]


def test_numbers_beyond_64_bits_are_bounded_by_what_they_can_mean(monkeypatch):
    def decode(loop, options):
        assert (options["new_tokens"], options["top_k"]) == (50, 256)
        return generate.Timed(text_of((97,), (fused.Source.TARGET,), fused.Ending.BUDGET), 0.5)

    target = nan_model(Bytes(), max_context=50)
    huge = ["--new-tokens", str(10**23), "--top-k", str(10**23)]
    assert a_run(monkeypatch, target, *huge, decode=decode) == 0


def test_a_reader_who_leaves_is_no_error_of_the_arguments(monkeypatch, capsys):
    def leave(args, out):
        raise BrokenPipeError(32, "Broken pipe")

    args = command_line.make_parser().parse_args(SMALL)
    monkeypatch.setattr(generate, "run", leave)
    with pytest.raises(BrokenPipeError):  # which the command line takes for what it is
        generate.main(args)
    assert capsys.readouterr().err == ""


class Bytes:
    pieces = tuple(chr(n) for n in range(256))

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


def text_of(tokens, sources, ending=fused.Ending.NONE):
    return fused.FusedText(
        tokens=tokens,
        prompt_length=0,
        sources=sources,
        rounds_at=(1,) * len(tokens),
        ending=ending,
        status=0,
        rounds=1,
        drafted=0,
        accepted=0,
    )


def test_a_character_that_is_several_tokens_is_written_once_it_is_whole():
    out = io.StringIO()
    write = generate.writer_of(Bytes(), ("<", ">"), out)
    tokens = tuple("aé€b".encode())
    draft, target = fused.Source.DRAFT, fused.Source.TARGET
    sources = (target, draft, draft, draft, draft, target, target)
    for count in range(len(tokens) + 1):
        write(text_of(tokens[:count], sources[:count]))
    assert out.getvalue().replace("><", "") == "a<é>€b"


def test_the_stop_token_that_ended_a_text_is_not_written():
    out = io.StringIO()
    write = generate.writer_of(Bytes(), ("<", ">"), out)
    target, draft = fused.Source.TARGET, fused.Source.DRAFT
    write(text_of(tuple(b"ab."), (target, draft, draft), fused.Ending.STOP))
    assert out.getvalue() == "a<b>"
    write = generate.writer_of(Bytes(), ("<", ">"), out)
    write(text_of(tuple(b"ab."), (target,) * 3, fused.Ending.BUDGET))
    assert out.getvalue() == "a<b>ab."


def test_marks_are_colours_on_a_terminal_and_brackets_elsewhere(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert generate.marks_for("auto", Terminal()) == "colour"
    assert generate.marks_for("auto", io.StringIO()) == "brackets"
    assert generate.marks_for("none", Terminal()) == "none"
    monkeypatch.setenv("NO_COLOR", "1")
    assert generate.marks_for("auto", Terminal()) == "brackets"
