"""The command `generate`: what it streams, marks, measures and rejects."""

import dataclasses
import io
import re

import jax.numpy as jnp
import pytest

from jaxspec import models
from jaxspec.bench.decoding import TextTiming
from jaxspec.cli import app, generate
from jaxspec.cli.streaming import Writer, marks_for
from jaxspec.decode import CompiledDecoder, DecodedText, Ending, Source
from jaxspec.models import LanguageModel
from jaxspec.models.load.chat import ChatTemplate
from jaxspec.verify import Status

SMALL = ["generate", "--prompt", "And God said", "--new-tokens", "20", "--temperature", "0"]


def test_drafted_spans_are_in_brackets_and_cost_and_speed_follow(capsys):
    """The bundled pair, greedily, drafted by the 5-gram, then measured against the plain loop."""
    assert app.main([*SMALL, "--draft", "ngram", "--depth", "3", "--compare"]) == 0
    out = capsys.readouterr().out
    text, _, rest = out.partition("\n\n")
    plain = text.replace("[", "").replace("]", "")
    assert plain.startswith("And God said")
    assert len(plain) == len("And God said") + 20
    drafted = re.findall(r"\[([^\[\]]+)\]", text)
    cost, speed, ends, measured, last = rest.splitlines()
    assert sum(map(len, drafted)) == int(re.search(r"(\d+) of \d+ drafted", cost)[1]) > 0
    calls = int(re.search(r"20 tokens \(budget\), (\d+) target calls", cost)[1])
    assert calls < 20
    per_call = float(re.search(r"([\d.]+) tokens per call", cost)[1])
    assert per_call == pytest.approx(20 / calls, abs=0.005)
    assert re.match(r"[\d.]+ tokens per second in this one run", speed)
    assert ends == "end tokens: none"
    spread = r"([\d.]+) \(([\d.]+) to ([\d.]+)\)"
    wanted = rf"5 pairs of runs: {spread} times as fast .* second {spread}, plain {spread} \(median"
    numbers = [float(number) for number in re.match(wanted, measured).groups()]
    for median, least, greatest in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        assert 0 < least <= median <= greatest
    assert last == "the plain loop's text is the same"


def test_without_compare_no_plain_loop_runs(monkeypatch, capsys):
    monkeypatch.setattr(generate, "time_pairs", lambda *_: pytest.fail("measured"))
    assert run_on(monkeypatch, saying("xyz")) == 0
    assert "plain" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--draft", "none", "--compare"], "--compare: without a drafter"),
        (["--prompt", "caf\u00e9"], "--prompt: text\\[3\\] is 'é'"),
        (["--prompt", "a" * 256], "--prompt has 256 tokens: kjv-1.6M has room for 256 in all"),
        (["--chat"], "--chat: kjv-1.6M has no chat template"),
        (["--model", "nowhere"], "--model nowhere: there is no such directory"),
        (["--draft", "nowhere"], "--draft nowhere: there is no such directory"),
        (["--model", "."], "--model .: there is no config.json"),
        (["--draft", "."], "--draft .: there is no config.json"),
    ],
)
def test_what_cannot_work_is_an_error_before_anything_is_printed(
    change, message, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    assert app.main([*SMALL, *change]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search("generate: error: .*" + message, err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--prompt", ""], "--prompt: must not be empty"),
        (["--stop", ""], "--stop: must not be empty"),
        (["--model", ""], "--model: must not be empty"),
        (["--new-tokens", "0"], "--new-tokens: must be an integer >= 1, got '0'"),
        (["--depth", "17"], "--depth: must be an integer from 1 to 16, got '17'"),
        (["--temperature", "-1"], "--temperature: must be 0 \\(greedy\\), or a number from"),
        (["--temperature", "nan"], "--temperature: .*, got 'nan'"),
        (["--temperature", "1e39"], "--temperature: .*, got '1e39'"),
        (["--temperature", "1e-39"], "--temperature: .*, got '1e-39'"),
        (["--top-k", "-2"], "--top-k: must be an integer >= -1"),
        (["--min-p", "1.5"], "--min-p: must be from 0 to 1 in float32, got '1.5'"),
        (["--top-p", "0"], "--top-p: must be above 0 and at most 1"),
        (["--top-p", "1e-39"], "--top-p: .*, got '1e-39'"),
        (["--top-p", "1.0001"], "--top-p: .*, got '1.0001'"),
        (["--seed", str(10**23)], f"--seed: .*, got '{10**23}'"),
    ],
)
def test_bad_arguments_are_named(change, message, capsys):
    with pytest.raises(SystemExit) as stop:
        app.main([*SMALL, *change])
    assert stop.value.code == 2
    assert re.search("generate: error: argument " + message, capsys.readouterr().err)


@pytest.mark.parametrize(("depth", "new_tokens", "drafted"), [(16, 4, 4), (3, 20, 3)])
def test_no_more_is_drafted_than_is_to_be_generated(depth, new_tokens, drafted):
    change = ["--draft", "ngram", "--depth", str(depth), "--new-tokens", str(new_tokens)]
    args = app.make_parser().parse_args([*SMALL, *change])
    drafter = generate.make_drafter(args, generate.load_target("pair"))
    assert drafter.capacity.max_depth == drafted


def nan_model(tokenizer, max_context=None):
    """A network whose every row is NaN; its cache holds nothing."""
    return LanguageModel(
        name="nan",
        vocab=256,
        params=jnp.float32(jnp.nan),
        forward=lambda params, cache, block: (
            params * jnp.ones((block.tokens.shape[0], 256)),
            cache,
        ),
        init_cache=jnp.zeros,
        keep=lambda cache, at, path: cache,
        takes_trees=True,
        max_context=max_context,
        tokenizer=tokenizer,
    )


def run_on(monkeypatch, target, *change):
    """Run the command on a target of two-letter prompts."""
    monkeypatch.setattr(generate, "load_target", lambda name: target)
    args = ["generate", "--prompt", "ab", "--draft", "lookup", "--new-tokens", "3", *change]
    return app.main(args)


@pytest.mark.parametrize("options", [("none",), ("lookup", "--compare")])
def test_weights_of_nan_are_explained_and_the_exit_status_is_1(options, monkeypatch, capsys):
    assert run_on(monkeypatch, nan_model(Bytes()), "--draft", *options) == 1
    out, err = capsys.readouterr()
    assert "0 tokens (undecided)" in out
    assert "round 1 decided on no token: a row of the target or the draft contains NaN" in out
    assert out.count("(NON_FINITE_ROW)") == 1
    assert "tokens per second" not in out
    assert err == ""


def test_no_speeds_are_compared_if_the_plain_loop_broke_off(monkeypatch, capsys):
    run = TextTiming(1.0, 1, 1, text_of((97,), (Source.TARGET,), Ending.BUDGET))
    stuck = dataclasses.replace(run.text, ending=Ending.UNDECIDED, status=int(Status.BAD_DRAW))
    pair = (dataclasses.replace(run, text=stuck), run)
    monkeypatch.setattr(generate, "time_pairs", lambda *args: [pair])
    assert run_on(monkeypatch, saying("xyz"), "--compare") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "the plain loop: round 1 decided on no token: a draw is not in [0, 1) (BAD_DRAW)"


class BegunError(Exception):
    """Raised where a text would begin."""


def begun_with(monkeypatch, target, *change):
    """Return the decoder that is made and the options that its text would begin with."""
    found = []

    def start(self, prompts, keys, **options):
        found.extend([self, options])
        raise BegunError

    monkeypatch.setattr(CompiledDecoder, "start", start)
    with pytest.raises(BegunError):
        run_on(monkeypatch, target, *change)
    return found


@pytest.mark.parametrize(("stops", "room"), [((), 1), ({7}, 1), (frozenset(range(9)), 9)])
def test_there_is_room_for_all_stop_tokens_of_the_tokenizer(stops, room, monkeypatch):
    class Stopping(Bytes):
        stop_tokens = stops

    decoder, options = begun_with(monkeypatch, nan_model(Stopping()))
    assert decoder.max_stop_tokens == room
    assert options["stop_tokens"] == sorted(stops)


def test_numbers_beyond_64_bits_are_bounded_by_what_they_can_mean(monkeypatch, capsys):
    huge = ["--new-tokens", str(10**23), "--top-k", str(10**23)]
    assert run_on(monkeypatch, saying("xyz", max_context=5), *huge) == 0
    assert "3 tokens (capacity)" in capsys.readouterr().out
    assert run_on(monkeypatch, nan_model(Bytes()), *huge) == 2
    assert f"--new-tokens is {10**23}: must be at most" in capsys.readouterr().err


@pytest.mark.parametrize("off", ["0", "-1"])
def test_top_k_of_0_or_minus_1_keeps_all_tokens(off, monkeypatch, capsys):
    assert run_on(monkeypatch, saying("xyz"), "--top-k", off, "--marks", "none") == 0
    assert capsys.readouterr().out.startswith("abxyz\n")


def test_end_tokens_are_printed_once_with_id_and_text(monkeypatch, capsys):
    class Stopping(Bytes):
        stop_tokens = frozenset({10, 7, 300})

    assert run_on(monkeypatch, saying("xyz", Stopping())) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "end tokens: 7 '\\x07', 10 '\\n', 300"
    assert out.count("end tokens") == 1


class Bytes:
    pieces = tuple(chr(n) for n in range(256))

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


def text_of(tokens, sources, ending=Ending.NONE):
    return DecodedText(
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


def saying(text, tokenizer=None, max_context=None):
    """A network that says a text after any prompt of two tokens, then zeros; a token is a byte."""
    tokens = jnp.array([*text.encode(), 0], jnp.int32)

    def forward(params, cache, block):
        wanted = tokens[jnp.clip(block.positions - 1, 0, len(tokens) - 1)]
        return jnp.where(jnp.arange(301)[None] == wanted[:, None], 0.0, -jnp.inf) * params, cache

    return dataclasses.replace(
        nan_model(tokenizer or Bytes(), max_context),
        name="saying",
        vocab=301,
        params=jnp.float32(1),
        forward=forward,
    )


def written(text, sizes, stops=(), prompt=(), sources=None, ending=Ending.NONE):
    """What a writer writes of the bytes of a text that comes in parts."""
    out = io.StringIO()
    writer = Writer(Bytes(), prompt, stops, ("<", ">"), out)
    tokens = tuple(text.encode() if isinstance(text, str) else text)
    sources = sources or (Source.TARGET,) * len(tokens)
    for size in sizes:
        writer(text_of(tokens[:size], sources[:size]))
    writer(text_of(tokens, sources, ending))
    return out.getvalue().replace("><", ""), writer


DRAFT, TARGET = Source.DRAFT, Source.TARGET


def test_a_character_that_is_several_tokens_is_written_once_it_is_whole():
    sources = (TARGET, DRAFT, DRAFT, DRAFT, DRAFT, TARGET, TARGET)
    assert written("aé€b", range(8), sources=sources)[0] == "a<é>€b"


def test_an_unfinished_character_at_the_end_of_a_text_is_shown():
    cut = "aé".encode()[:-1]
    assert written(cut, range(3))[0] == "a"
    assert written(cut, range(3), ending=Ending.BUDGET)[0] == "a\ufffd"


def test_the_stop_token_that_ended_a_text_is_not_written():
    sources = (TARGET, DRAFT, DRAFT)
    assert written("ab.", [], sources=sources, ending=Ending.STOP)[0] == "a<b>"
    assert written("ab.", [], ending=Ending.BUDGET)[0] == "ab."


def test_text_ends_before_a_stop_string_and_each_character_keeps_its_mark():
    sources = (TARGET, DRAFT, TARGET, DRAFT, DRAFT, TARGET, TARGET)
    for sizes in (range(8), [], [3, 5]):
        text, writer = written("a.b..c.", sizes, ["..c", "x"], sources=sources)
        assert text == "a<.>b"
        assert (writer.is_stopped, writer.taken) == (True, 6)
    text, writer = written("a.b..", range(6), ["..c"], ending=Ending.BUDGET)
    assert (text, writer.is_stopped) == ("a.b..", False)


def test_a_stop_string_ends_the_run_and_what_was_decoded_after_it_is_counted(monkeypatch, capsys):
    options = ["--new-tokens", "40", "--draft", "none", "--marks", "none"]
    says = "one\n\ntwo" + "a" * 40
    assert run_on(monkeypatch, saying(says), "--stop", "\n\n", "--stop", "zz", *options) == 0
    out = capsys.readouterr().out
    assert out.startswith("abone\n\nsaying: 8 tokens (stop string, 3 of them decoded after it")


def test_a_word_is_written_behind_the_space_that_its_token_has(monkeypatch, tmp_path, capsys):
    library = pytest.importorskip("tokenizers")
    pieces = ["<unk>", "▁the", "▁cat"]
    model = library.models.WordLevel({piece: n for n, piece in enumerate(pieces)}, "<unk>")
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace()
    tokenizer.decoder = library.decoders.Metaspace()
    words = models.TextTokenizer(tokenizer)
    target = dataclasses.replace(saying("\1\1\1\1"), tokenizer=words)
    assert run_on(monkeypatch, target, "--prompt", "the cat", "--marks", "none") == 0
    assert capsys.readouterr().out.startswith("the cat the the the\n\n")


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"ab", "ab"),
        (b"ab\n", "ab"),
        (b"ab\r\n", "ab"),
        (b"ab\n\n", "ab\n"),
        (b"\xef\xbb\xbfab", "ab"),
    ],
    ids=repr,
)
def test_a_prompt_may_come_from_a_file_or_standard_input(content, prompt, monkeypatch, tmp_path):
    (tmp_path / "prompt").write_bytes(content)
    parse = app.make_parser().parse_args
    from_file = parse(["generate", "--prompt-file", str(tmp_path / "prompt")])
    assert generate.read_prompt(from_file) == prompt
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert generate.read_prompt(parse(["generate", "--prompt", "-"])) == prompt


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no such file"),
        (lambda path: path.mkdir(), "it is a directory"),
        (lambda path: path.write_bytes(b"a\xff"), "can't decode byte 0xff"),
        (lambda path: path.write_bytes(b"\n"), "is empty"),
    ],
    ids=["none", "a directory", "not UTF-8", "empty"],
)
def test_a_prompt_file_that_gives_no_text_is_named(make, message, tmp_path, capsys):
    path = tmp_path / "prompt"
    make(path)
    assert app.main(["generate", "--prompt-file", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(rf"generate: error: --prompt-file {path}.*{message}", err)


class Chatting(Bytes):
    chat_template = ChatTemplate(
        "{{ bos_token }}<{{ messages[0]['content'] }}>", {"bos_token": "s"}
    )

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        assert text == "s<ab>"
        return list(b"ab")


def test_chat_puts_the_prompt_in_the_template_of_any_tokenizer_that_has_one(monkeypatch, capsys):
    pytest.importorskip("jinja2")
    assert run_on(monkeypatch, saying("xyz", Chatting()), "--chat", "--marks", "none") == 0
    assert capsys.readouterr().out.startswith("ab\n\nxyz\n\n")


def test_a_chat_template_that_fails_and_a_model_without_one_are_errors(monkeypatch, capsys):
    pytest.importorskip("jinja2")

    class Failing(Bytes):
        chat_template = ChatTemplate("{{ raise_exception('no users') }}")

    for tokenizer, message in (
        (Failing(), "--prompt: the chat template failed: no users"),
        (Bytes(), "--chat: saying has no chat template"),
    ):
        assert run_on(monkeypatch, saying("xyz", tokenizer), "--chat") == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err


def test_marks_are_colours_on_a_terminal_and_brackets_elsewhere(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert marks_for("auto", Terminal()) == "colour"
    assert marks_for("auto", io.StringIO()) == "brackets"
    assert marks_for("none", Terminal()) == "none"
    monkeypatch.setenv("NO_COLOR", "1")
    assert marks_for("auto", Terminal()) == "brackets"
