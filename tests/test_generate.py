"""The command `generate`: what it streams, marks, measures and refuses."""

import io
import re

import pytest

from jaxspec import __main__ as command_line
from jaxspec import generate
from jaxspec.decode import fused

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
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--top-k", "0"], "--top-k is 0"),
        (["--top-p", "0"], "--top-p is 0.0"),
        (["--seed", "-1"], "--seed is -1"),
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
