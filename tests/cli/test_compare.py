"""The commands `compare` and `replay`: what they print, write, reject and return."""

import contextlib
import errno
import io
import itertools
import json
import os
import sys

import pytest

from jaxspec import audit, experiments
from jaxspec.cli import app, compare

DECODERS = ["plain", "path", "fixed tree", "adaptive tree"]
COMPARE = ["compare", "--prompt", "And the LORD ", "--new-tokens", "12", "--law-runs"]


def rows_named(lines, name):
    return [line for line in lines if line.startswith(f"  {name:<14} ")]


def shown_text(lines, name):
    """The text at the end for the prompt or a decoder, its lines joined."""
    at = lines.index(rows_named(lines, name)[-1])
    rest = itertools.takewhile(lambda line: line.startswith(" " * 17), lines[at + 1 :])
    return " ".join([lines[at][17:], *(line.strip() for line in rest)])


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Run `compare` with all that it can write; return the folder and the lines printed."""
    folder = tmp_path_factory.mktemp("compare")
    out, err = io.StringIO(), io.StringIO()
    files = ["--save", str(folder / "rounds.json"), "--plot", str(folder / "plot.png")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert app.main([*COMPARE, "3", *files]) == 0
    assert err.getvalue() == f"rounds of the adaptive tree saved to {folder / 'rounds.json'}\n"
    return folder, out.getvalue().splitlines()


def test_compare_prints_costs_acceptance_laws_and_texts_within_the_width_and_plots(compared):
    folder, lines = compared
    assert lines[0] == "REAL TEXT: 12 characters, target kjv-1.6M, draft kjv-0.1M"
    assert len({len(line) for line in lines[1:7]}) == 1
    assert max(map(len, lines)) <= 96
    for name in DECODERS[1:]:
        laws = [line for line in lines if line.startswith(f"  {name} against plain, G-test on the")]
        assert len(laws) == 1
    assert shown_text(lines, "prompt") == "And the LORD"
    assert all(shown_text(lines, name) for name in DECODERS)
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_compare_as_json_is_one_object_and_the_same_for_the_same_seed(compared, capsys):
    assert app.main([*COMPARE, "3", "--json"]) == 0
    first = capsys.readouterr()
    assert first.err == ""
    printed = json.loads(first.out)
    assert list(printed) == ["prompt", "seed", "runs", "laws"]
    assert (printed["prompt"], printed["seed"]) == ("And the LORD ", 0)
    assert [run["name"] for run in printed["runs"]] == DECODERS
    for run in printed["runs"]:
        metrics = run["metrics"]
        assert metrics["new_tokens"] == len(run["text"]) == 12
        assert run["finished"] == "budget"
        assert run["decoder"]["target"] == "kjv-1.6M"
        assert (metrics["acceptance"] is None) == (run["name"] == "plain")
        assert metrics["tokens_per_target_batch"] == 12 / metrics["target_batches"]
    assert set(printed["laws"]) == set(DECODERS[1:])
    for law in printed["laws"].values():
        assert (law["tokens"], law["tv"], law["test"]["sizes"]) == (2, None, [3, 3])
        assert 0 <= law["test"]["p_value"] <= 1
        assert law["test"]["detectable"] is None  # of 3 runs
    assert app.main([*COMPARE, "3", "--json"]) == 0
    assert capsys.readouterr().out == first.out
    assert app.main([*COMPARE, "0", "--json", "--seed", "1"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["laws"] == {}
    for run, again in zip(printed["runs"], other["runs"], strict=True):
        assert run["text"] != again["text"]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_law_that_differs_makes_the_exit_status_1(form, monkeypatch, capsys):
    biased = experiments.LawComparison(2, None, None, audit.g_test([90, 10], [10, 90]))
    monkeypatch.setattr("jaxspec.experiments.comparison.compare_laws", lambda *_, **__: biased)
    options = ["--models", "ngram", "--new-tokens", "5", "--law-runs", "1"]
    assert app.main(["compare", *options, *form]) == 1
    out = capsys.readouterr().out
    if form:
        runs = json.loads(out)["runs"]
        assert {run["decoder"]["target"] for run in runs} == {"kjv 5-gram"}
    else:
        assert "path against plain, G-test" in out


def test_one_new_token_leaves_nothing_to_draft(capsys):
    assert app.main(["compare", "--new-tokens", "1", "--law-runs", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("REAL TEXT: 1 character,")
    for name in DECODERS:
        cost, text = rows_named(lines, name)
        *counts, calls, batches, _, _, _ = cells = cost[16:].split()
        assert counts == ["1", "1.00", "-", "1"]
        assert int(calls) >= 1  # the prompt is read in chunks
        assert [batches, *cells[6:]] == ["1", "0", "0", "0"]
        assert text
    assert not any("acceptance" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "na\u00efve"], "'\u00ef' is not among the 73 characters"),
        (["--prompt", "a" * 256], "--prompt has 256 characters: kjv-1.6M has room for 256"),
        (["--plot", "plot.txt"], "plot.txt: its suffix must be one of"),
        (["--plot", "nowhere/plot.png"], "there is no folder nowhere"),
        (["--plot", "/dev/full.png"], "--plot /dev/full.png: is in the folder of the devices"),
        (["--save", "rounds.txt"], "--save rounds.txt: the name must end in .json or .npz"),
        (["--save", "nowhere/rounds.npz"], "there is no folder nowhere"),
        (["--save", "x" * 300 + ".json"], "xxx.json: the name is too long"),
        (["--save", "a\0b.json"], "the name of a file cannot hold a NUL"),
        (["--save", "folder.json"], "--save folder.json: is a folder, not a file to replace"),
    ],
)
def test_what_cannot_work_is_an_error_before_anything_is_decoded(
    arguments, words, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(compare, "decode", lambda *_: pytest.fail("decoded"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    assert app.main(["compare", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m jaxspec compare: error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", ""], "--prompt: must not be empty"),
        (["--new-tokens", "0"], "--new-tokens: must be an integer >= 1, got '0'"),
        (["--new-tokens", "2.5"], "--new-tokens: must be an integer >= 1, got '2.5'"),
        (["--law-runs", "-1"], "--law-runs: must be an integer >= 0, got '-1'"),
        (["--seed", str(2**31)], "--seed: must be an integer from 0 to 2147483647"),
    ],
)
def test_bad_arguments_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        app.main(["compare", *arguments])
    assert stop.value.code == 2
    assert f"python -m jaxspec compare: error: argument {words}" in capsys.readouterr().err


def test_without_matplotlib_a_plot_is_an_error_that_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert app.main(["compare", "--plot", "plot.png"]) == 2
    assert "pip install -e '.[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_results_are_printed_although_a_file_could_not_be_written(
    form, tmp_path, monkeypatch, capsys
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plotted = []
    monkeypatch.setattr(compare, "save", full)
    monkeypatch.setattr(experiments, "plot", lambda _, path: plotted.append(path))
    save, plot = str(tmp_path / "a.json"), str(tmp_path / "a.png")
    options = ["--models", "ngram", "--law-runs", "0", "--new-tokens", "2", *form]
    assert app.main(["compare", *options, "--save", save, "--plot", plot]) == 2
    out, err = capsys.readouterr()
    if form:
        assert len(json.loads(out)["runs"]) == 4
    else:
        assert "REAL TEXT: 2 characters" in out
    why = f"--save {save}: not written: there is no space left on the device"
    assert err == f"python -m jaxspec compare: error: {why}\n"
    assert plotted == [plot]  # a file that fails does not keep the other from being written


# --- replay


def test_saved_rounds_replay_without_a_difference(compared, capsys):
    path = compared[0] / "rounds.json"
    rounds = len(json.loads(path.read_text())["content"])
    assert rounds >= 3
    assert app.main(["replay", str(path)]) == 0
    assert capsys.readouterr().out == f"{rounds} rounds replayed, 0 differ\n"


def test_a_corrupted_round_is_named_and_the_exit_status_is_1(compared, tmp_path, capsys):
    record = json.loads((compared[0] / "rounds.json").read_text())
    second = record["content"][1]
    tokens = second["verdict"]["tokens"]["data"]
    tokens[0] = (tokens[0] + 1) % 73
    path = tmp_path / "corrupted.json"
    path.write_text(json.dumps(record))
    assert app.main(["replay", str(path)]) == 1
    named, total = capsys.readouterr().out.splitlines()
    assert named.startswith(f"round 1 (root at position {second['position']}): tokens was ")
    assert total == f"{len(record['content'])} rounds replayed, 1 differ"


def deep(depth):
    content = b"[" * depth + b"]" * depth
    return b'{"schema": "jaxspec/1", "kind": "rounds", "content": ' + content + b"}"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.json", None, "missing.json: there is no such file"),
        ("garbage.json", b"\x00\xff{", "not a record"),
        ("garbage.npz", b"PK\x03\x04no", "not a record"),
        (
            "kind.json",
            b'{"schema": "jaxspec/1", "kind": "snapshot", "content": {}}',
            "holds 'snapshot', wanted",
        ),
        ("hole.json", b'{"schema": "jaxspec/1", "kind": "rounds", "content": [{}]}', "round 0"),
        ("rounds.txt", b"", "a .json or a .npz"),
        ("x" * 300 + ".json", None, "the name is too long"),
        ("a\0b.json", None, "the name of a file cannot hold a NUL"),
        ("two\nlines.json", None, "two lines.json: there is no such file"),
        ("deeper.json", deep(100_000), "nested too deep to be read"),
    ],
)
def test_what_holds_no_rounds_is_an_error_on_one_line(name, content, words, tmp_path, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert app.main(["replay", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
