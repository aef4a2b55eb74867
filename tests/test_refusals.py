"""What `compare` and `bench` refuse beforehand, and what they do about files that fail afterwards."""

import json

import jax
import pytest

from jaxspec import experiments
from jaxspec.bench import decoding
from jaxspec.cli import app as command_line
from jaxspec.cli import bench, compare
from jaxspec.cli import bench as report
from jaxspec.storage import RecordError


@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_compare_refuses_a_folder_as_a_file_before_any_decode(
    option, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(compare, "decode_all", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(experiments, "assert_plottable", lambda _: None)
    place = tmp_path / "taken.json"
    place.mkdir()
    assert command_line.main(["compare", option, str(place)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"python -m jaxspec compare: error: {option} {place}: is a folder, not a file to replace\n"
    )


@pytest.fixture
def decoded(monkeypatch):
    """The command `compare` with its work done before, by n-gram models."""
    models = compare.models_of("ngram")
    tokens = compare.encode_prompt("And", models.alphabet)
    done = compare.decode_all(models, tokens, 2, 0, lambda *_: None)
    monkeypatch.setattr(compare, "decode_all", lambda *_: done)
    return ["compare", "--models", "ngram", "--law-runs", "0", "--prompt", "And"]


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError(28, "No space left"), "No space left"), (RecordError("not finite"), "not finite")],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_results_are_printed_if_a_file_then_cannot_be_written(
    form, error, why, decoded, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise error

    plotted = []
    monkeypatch.setattr(compare, "save_rounds", fail)
    monkeypatch.setattr(experiments, "assert_plottable", lambda _: None)
    monkeypatch.setattr(experiments, "plot", lambda _, path: plotted.append(path))
    save, plot = str(tmp_path / "a.json"), str(tmp_path / "a.png")
    assert command_line.main([*decoded, *form, "--save", save, "--plot", plot]) == 2
    captured = capsys.readouterr()
    if form:
        assert len(json.loads(captured.out)["runs"]) == 4
    else:
        assert "REAL TEXT: 2 characters" in captured.out
    wanted = f"python -m jaxspec compare: error: --save {save}: not written: {why}\n"
    assert captured.err == wanted
    assert plotted == [plot]  # one file that fails does not keep the other from being written


@pytest.fixture
def untimed(monkeypatch):
    """Benchmarks that must not be begun, and SmolLM2 as if it were installed."""
    for name in ("measure", "measure_pair", "measure_smollm2"):
        monkeypatch.setattr(report, name, lambda *_, **__: pytest.fail("timed"))
    monkeypatch.setattr(report, "find_smollm2", lambda: "a file")
    monkeypatch.setattr(report, "smollm2_room", lambda: 8000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--new-tokens", "600"], "--new-tokens is 600: after its longest prompt, pair has room"),
        (["--parts", "pair", "--new-tokens", "196"], "pair has room for 195"),
        (["--parts", "smollm2", "--new-tokens", "8001"], "smollm2 has room for 8000"),
        (["--new-tokens", "1"], "--new-tokens is 1: must be at least 2"),
        (["--temperature", "1e39"], "--temperature is 1e+39: must be finite in float32"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--temperature", "0.5", "-2"], "--temperature is -2.0"),
        (["--seed", str(10**23)], f"--seed is {10**23}: must be from 0 to 2147483647"),
        (["--seed", "-1"], "--seed is -1"),
    ],
)
def test_bench_refuses_before_anything_is_timed(arguments, words, untimed, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.main(["bench", *arguments])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    _, _, message = captured.err.partition("python -m jaxspec bench: error: ")
    assert words in message


def test_bench_says_what_smollm2_lacks_before_anything_is_timed(untimed, monkeypatch, capsys):
    def lacking():
        raise ImportError("pip install gguf")

    monkeypatch.setattr(report, "smollm2_room", lacking)
    with pytest.raises(SystemExit) as stop:
        bench.main(["--parts", "verifiers", "smollm2"])
    assert stop.value.code == 2
    assert "error: --parts smollm2: pip install gguf" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["pair", "smollm2"])
def test_what_just_has_room_is_timed(part, untimed, monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(report, f"measure_{part}", lambda **sizes: timed.append(sizes) or [])
    room = {"pair": 195, "smollm2": 8000}[part]
    assert bench.main(["--parts", part, "--new-tokens", str(room), "--pairs", "9"]) == 0
    assert [(sizes["new_tokens"], sizes["repeats"]) for sizes in timed] == [(room, 9)]


@pytest.mark.parametrize("repeats", [3, 25])
def test_as_many_pairs_are_measured_as_asked_for(repeats, monkeypatch):
    monkeypatch.setattr(decoding, "_measure", lambda target, drafters, requests, *_: requests)
    groups = decoding.measure_pair(repeats=repeats, new_tokens=8, temperatures=[0, 0.5], seed=0)
    assert list(groups) == ["shipped pair, temperature 0", "shipped pair, temperature 0.5"]
    assert [each.options["temperature"] for each in groups["shipped pair, temperature 0.5"]] == (
        [0.5] * repeats
    )
    requests = groups["shipped pair, temperature 0"]
    assert len(requests) == repeats
    keys = {tuple(jax.random.key_data(each.key).tolist()) for each in requests}
    assert len(keys) == repeats
    distinct = len({tuple(each.prompt) for each in requests})
    assert distinct == min(repeats, 10)
