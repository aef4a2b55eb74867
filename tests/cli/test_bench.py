"""The command `bench`: its tables, what it measures, and what it rejects before timing anything."""

import argparse
import io

import jax
import pytest

from jaxspec.bench import decoding
from jaxspec.bench.decoding import Speed
from jaxspec.bench.verifiers import Measurement
from jaxspec.cli import app, bench

SPEEDS = [
    Speed("pair", "plain", 1.0, 1234.5, 1.0),
    Speed("pair", "sampled tree (2, 2, 1, 1)", 2.5, 999.9, 0.81),
    Speed("other", "lookup", 3.25, 10.0, 2.0),
]
VERIFIERS = [Measurement("point-mass tree, probabilities", 16, 12.34, 10.0, 1.23)]
WIDE = """\
cpu, pair; B = 1, float32
                                  tokens/call   tokens/s  of plain
plain                                    1.00     1234.5      1.00
sampled tree (2, 2, 1, 1)                2.50      999.9      0.81

cpu, other; B = 1, float32
                                  tokens/call   tokens/s  of plain
lookup                                   3.25       10.0      2.00

cpu, V = 100, T = 5, float32; per sequence
                                    B    time us   floor us   ratio
point-mass tree, probabilities     16       12.3       10.0    1.23

"""


def printed(monkeypatch, *, is_terminal, columns):
    class Out(io.StringIO):
        def isatty(self):
            return is_terminal

    out = Out()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", out)
    bench.print_speeds("cpu", SPEEDS)
    bench.print_verifiers("cpu", argparse.Namespace(vocab=100, drafted=5), VERIFIERS)
    return out.getvalue()


@pytest.mark.parametrize(("is_terminal", "columns"), [(False, 40), (True, 80)])
def test_tables_are_laid_out_in_columns_where_there_is_room(is_terminal, columns, monkeypatch):
    assert printed(monkeypatch, is_terminal=is_terminal, columns=columns) == WIDE


def test_on_a_narrow_terminal_every_number_is_there_and_no_line_is_too_long(monkeypatch):
    text = printed(monkeypatch, is_terminal=True, columns=40)
    assert max(map(len, text.splitlines())) <= 40
    for word in WIDE.split():
        assert word.rstrip(",;") in text


@pytest.fixture
def no_timing(monkeypatch):
    """Benchmarks that must not start, and SmolLM2 as if it were installed."""
    for name in ("measure", "measure_pair", "measure_smollm2"):
        monkeypatch.setattr(bench, name, lambda *_, **__: pytest.fail("timed"))
    monkeypatch.setattr(bench, "find_smollm2", lambda: "a file")
    monkeypatch.setattr(bench, "smollm2_room", lambda: 8000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--new-tokens", "600"], "--new-tokens is 600: after its longest prompt, pair has room"),
        (["--parts", "pair", "--new-tokens", "196"], "pair has room for 195"),
        (["--parts", "smollm2", "--new-tokens", "8001"], "smollm2 has room for 8000"),
        (["--vocab", "15"], "--vocab must be at least 3 T + 1"),
    ],
)
def test_what_does_not_fit_is_an_error_before_anything_is_timed(
    arguments, words, no_timing, capsys
):
    assert app.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m jaxspec bench: error: ")
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--new-tokens", "1"], "--new-tokens: must be an integer >= 2, got '1'"),
        (["--batch", "1", "0"], "--batch: must be an integer >= 1, got '0'"),
        (["--temperature", "0.5", "-2"], "--temperature: must be 0 (greedy), or a number from"),
        (["--seed", "-1"], "--seed: must be an integer from 0 to 2147483647, got '-1'"),
        (["--parts", "pairs"], "--parts: invalid choice: 'pairs'"),
    ],
)
def test_bad_arguments_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        app.main(["bench", *arguments])
    assert stop.value.code == 2
    assert f"python -m jaxspec bench: error: argument {words}" in capsys.readouterr().err


def test_what_smollm2_lacks_is_an_error_before_anything_is_timed(no_timing, monkeypatch, capsys):
    def missing():
        raise ImportError("pip install gguf")

    monkeypatch.setattr(bench, "smollm2_room", missing)
    assert app.main(["bench", "--parts", "verifiers", "smollm2"]) == 2
    assert "error: --parts smollm2: pip install gguf" in capsys.readouterr().err


@pytest.mark.parametrize(("part", "room"), [("pair", 195), ("smollm2", 8000)])
def test_what_just_has_room_is_timed(part, room, no_timing, monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(bench, f"measure_{part}", lambda **sizes: timed.append(sizes) or [])
    assert app.main(["bench", "--parts", part, "--new-tokens", str(room), "--pairs", "9"]) == 0
    assert [(sizes["new_tokens"], sizes["repeats"]) for sizes in timed] == [(room, 9)]


@pytest.mark.parametrize("repeats", [3, 25])
def test_each_pair_has_its_prompt_and_key_and_all_temperatures_share_them(repeats, monkeypatch):
    monkeypatch.setattr(decoding, "_measure", lambda target, drafters, requests, *_: requests)
    groups = decoding.measure_pair(repeats=repeats, new_tokens=8, temperatures=[0, 0.5], seed=0)
    assert list(groups) == ["bundled pair, temperature 0", "bundled pair, temperature 0.5"]
    cold, warm = groups.values()
    assert [each.options["temperature"] for each in warm] == [0.5] * repeats
    assert [each.prompt for each in warm] == [each.prompt for each in cold]
    keys = {tuple(jax.random.key_data(each.key).tolist()) for each in cold}
    assert len(cold) == len(keys) == repeats
    assert len({tuple(each.prompt) for each in cold}) == min(repeats, 10)
