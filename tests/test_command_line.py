"""The command line as its user sees it: what it prints, what it returns."""

import contextlib
import errno
import importlib
import io
import itertools
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxspec as js
from jaxspec import audit, experiments
from jaxspec.audit import instances_for
from jaxspec.audit import report as reports
from jaxspec.cli import app as command_line
from jaxspec.cli import bench, compare
from jaxspec.cli.terminal import Progress
from jaxspec.models import bundled_text, split_text

GRIDS = {"single_path": [2500, 7500], "two_level_tree": [2000, 500, 3000, 4500]}


AUDIT = """
import pathlib, pickle, sys
from jaxspec.audit.report import audit_rules
told = []
report = audit_rules(lambda *step: told.append(step))
pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps((report, told)))
"""


@pytest.fixture(scope="module")
def audited(users_environment, tmp_path_factory):
    """Audit in a process of its own, which compiles the proofs as the user's does."""
    path = tmp_path_factory.mktemp("audit") / "report.pickle"
    command = [sys.executable, "-c", AUDIT, str(path)]
    subprocess.run(command, env=users_environment, check=True)
    return pickle.loads(path.read_bytes())


@pytest.fixture
def with_report(audited, monkeypatch):
    """Spare the command line the audit, which has been done; or give it another's outcome."""

    def use(report=audited[0]):
        monkeypatch.setattr(command_line, "audit_rules", lambda progress: report)

    use()
    return use


def test_the_audit_proves_every_rule_in_every_instance(audited):
    report, _ = audited
    assert report.is_proved
    expected = [(rule.name, i.name) for rule in js.RULES.values() for i in instances_for(rule)]
    assert [(law.rule, law.case) for law in report.laws] == expected
    known = {law.rule: law for law in report.laws if law.known_accepted is not None}
    assert set(known) >= {"token", "block", "point_mass", "with_replacement"}
    assert report.greatest_tv == max(law.tv for law in report.laws) <= 1e-6


def test_progress_is_told_at_the_start_and_after_each_step(audited):
    report, told = audited
    steps = len(report.grids) + len(report.laws)
    assert [done for _, done, _ in told] == list(range(steps + 1))
    assert {total for _, _, total in told} == {steps}
    expected = {"compiling", "grid: single path", "grid: two level tree"}
    expected |= {f"{law.rule}: {law.case}" for law in report.laws}
    assert {what for what, _, _ in told} == expected


def test_json_is_one_object_with_exact_grids_and_a_law_for_each_rule_and_case(
    audited, with_report, capsys
):
    assert command_line.main(["audit", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["grids"] == GRIDS
    assert printed["proved"] is True
    assert printed["device"].startswith(jax.default_backend())
    assert set(printed["versions"]) == {"jaxspec", "python", "jax", "jaxlib", "numpy"}
    assert printed["versions"]["jaxspec"] == js.__version__
    assert len(printed["laws"]) == len(audited[0].laws)
    for law, found in zip(printed["laws"], audited[0].laws, strict=True):
        assert (law["rule"], law["case"], law["tv"]) == (found.rule, found.case, found.tv)
        assert law["proved"] is True
        assert law["misses"] == 0
    single_path = printed["laws"][0]
    assert single_path["expected_accepted"] == single_path["known_accepted"] == 0.75


def test_the_audit_prints_a_line_for_each_count_and_law_within_the_width(
    audited, with_report, capsys
):
    assert command_line.main(["audit"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert sum(line.endswith(" ok") for line in lines) == 2 + len(audited[0].laws)
    assert max(map(len, lines)) <= 96
    assert captured.out.isascii()
    assert lines[-1].startswith("PROVED in ")
    assert captured.err == ""  # not a terminal: no progress


def test_a_broken_verifier_is_not_proved_and_the_exit_status_is_1(monkeypatch, capsys):
    def accept_all(draws, proposal, rows, bonus=False):
        always = replace(draws, accept=jnp.zeros_like(draws.accept))
        return js.verify_path(always, proposal, rows, bonus)

    broken = replace(js.RULES["token"], verify=accept_all)
    monkeypatch.setattr(reports, "RULES", {"token": broken})
    for name, counts in GRIDS.items():  # what they are without a fault; that costs time
        monkeypatch.setattr(reports, f"{name}_counts", lambda counts=counts: counts)
    assert command_line.main(["audit"]) == 1
    out = capsys.readouterr().out
    assert "NOT PROVED: token, kill row: tv 5.5e-01" in out
    assert "PROVED in" not in out
    kill_row = next(line for line in out.splitlines() if line.startswith(" " * 23 + "kill row"))
    assert kill_row.endswith(" FAIL")


@pytest.mark.parametrize("arguments", [["audit"], ["audit", "--json"]])
def test_a_wrong_count_alone_makes_the_exit_status_1(audited, with_report, capsys, arguments):
    with_report(replace(audited[0], grids={**audited[0].grids, "single_path": (2501, 7499)}))
    assert command_line.main(arguments) == 1
    out = capsys.readouterr().out
    if "--json" in arguments:
        assert json.loads(out)["proved"] is False
    else:
        assert "NOT PROVED: single_path: counted [2501, 7499], wanted [2500, 7500]" in out


DECODERS = ["plain", "path", "fixed tree", "adaptive tree"]


def rows_named(lines, name):
    return [line for line in lines if line.startswith(f"  {name:<14} ")]


def shown_text(lines, name):
    """The text at the end for the prompt or a decoder, its lines joined again."""
    at = lines.index(rows_named(lines, name)[-1])
    rest = itertools.takewhile(lambda line: line.startswith(" " * 17), lines[at + 1 :])
    return " ".join([lines[at][17:], *(line.strip() for line in rest)])


@pytest.fixture(scope="module")
def whole_run(audited):
    """Run `python -m jaxspec`, its audit done before; return the exit status and the lines."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(command_line, "audit_rules", lambda progress: audited[0])
        patch.setattr(compare, "NEW_TOKENS", 60)
        status = command_line.main([])
    return status, out.getvalue().splitlines()


def test_without_a_command_the_audit_is_followed_by_real_text(whole_run):
    status, lines = whole_run
    assert status == 0
    assert max(map(len, lines)) <= 96
    laws = next(n for n, line in enumerate(lines) if line.startswith("EXACT LAWS"))
    text = next(n for n, line in enumerate(lines) if line.startswith("REAL TEXT: 60 characters"))
    assert laws < text
    for name in DECODERS:
        cost = rows_named(lines[text:], name)[0][16:].split()
        rounds, per_batch, _, queries, calls, batches, *draft = cost
        assert batches == rounds
        assert int(calls) >= int(rounds)  # the prompt is read in chunks
        assert float(per_batch) == pytest.approx(60 / int(batches), abs=0.005)
        assert (float(per_batch) > 1) == (name != "plain")
        assert (draft == ["0", "0", "0"]) == (name == "plain")
        assert int(queries) >= 60
    for name in DECODERS[1:]:
        rate, mean, _, error, is_expected = rows_named(lines[text:], name)[1][16:].split()
        assert abs(float(rate) - float(mean)) <= 5 * float(error)
        assert is_expected == "ok"
    assert lines[-1].startswith("PROVED in ")


def test_the_prompt_shown_is_held_out_and_its_continuations_differ(whole_run):
    _, lines = whole_run
    prompt = shown_text(lines, "prompt").removesuffix(" /")
    assert prompt in split_text(bundled_text(), held_out=True)
    assert prompt not in split_text(bundled_text())
    assert len({shown_text(lines, name) for name in DECODERS}) == 4


def test_acceptance_off_its_mean_makes_the_exit_status_1(with_report, monkeypatch, capsys):
    monkeypatch.setattr(compare, "MAX_DEVIATION", 1e-6)
    monkeypatch.setattr(compare, "NEW_TOKENS", 30)
    assert command_line.main([]) == 1
    assert "NOT AS EXPECTED" in capsys.readouterr().out.splitlines()[-1]


COMPARE = ["compare", "--prompt", "And the LORD ", "--new-tokens", "12", "--law-runs"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Run `compare` with all that it can write; return the folder and the lines printed."""
    folder = tmp_path_factory.mktemp("compare")
    out, err = io.StringIO(), io.StringIO()
    files = ["--save", str(folder / "rounds.json"), "--plot", str(folder / "plot.png")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert command_line.main([*COMPARE, "3", *files]) == 0
    assert err.getvalue() == f"rounds of the adaptive tree saved to {folder / 'rounds.json'}\n"
    return folder, out.getvalue().splitlines()


def test_compare_prints_costs_acceptance_laws_and_texts_within_the_width(compared):
    _, lines = compared
    assert lines[0] == "REAL TEXT: 12 characters, target kjv-1.6M, draft kjv-0.1M"
    assert len({len(line) for line in lines[1:7]}) == 1
    assert max(map(len, lines)) <= 96
    for name in DECODERS[1:]:
        laws = [line for line in lines if line.startswith(f"  {name} against plain, G-test on the")]
        assert len(laws) == 1
    assert shown_text(lines, "prompt") == "And the LORD"
    assert all(shown_text(lines, name) for name in DECODERS)


def test_compare_writes_a_plot(compared):
    assert (compared[0] / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_compare_as_json_is_one_object_and_the_same_for_the_same_seed(compared, capsys):
    assert command_line.main([*COMPARE, "3", "--json"]) == 0
    first = capsys.readouterr()
    assert first.err == ""
    printed = json.loads(first.out)
    assert list(printed) == ["prompt", "runs", "laws"]
    assert printed["prompt"] == "And the LORD "
    assert [run["name"] for run in printed["runs"]] == DECODERS
    counts = {"rounds", "new_tokens", "drafted", "accepted"} | {
        f"{model}_{what}"
        for model in ("target", "draft")
        for what in ("queries", "calls", "batches")
    }
    always = {"name", "decoder", "prompt", "seed", "text", "finished", "by_depth", "by_rank"}
    always |= counts | {"tokens_per_target_batch", "block_efficiency"}
    for run in printed["runs"]:
        assert set(run) == always | (set() if run["name"] == "plain" else {"acceptance"})
        assert run["new_tokens"] == len(run["text"]) == 12
        assert (run["seed"], run["finished"]) == (0, "budget")
        assert run["decoder"]["target"] == "kjv-1.6M"
        assert all(type(run[name]) is int for name in counts)
    assert set(printed["laws"]) == set(DECODERS[1:])
    for law in printed["laws"].values():
        assert (law["tokens"], law["runs"]) == (2, [3, 3])
        assert 0 <= law["p_value"] <= 1
        assert "detectable_tv" not in law  # of 3 runs
    assert command_line.main([*COMPARE, "3", "--json"]) == 0
    assert capsys.readouterr().out == first.out
    assert command_line.main([*COMPARE, "0", "--json", "--seed", "1"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["laws"] == {}
    for run, again in zip(printed["runs"], other["runs"], strict=True):
        assert run["text"] != again["text"]


def test_compare_takes_the_ngram_models_when_asked(capsys):
    arguments = ["--models", "ngram", "--new-tokens", "5", "--law-runs", "0", "--json"]
    assert command_line.main(["compare", *arguments]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {run["decoder"]["target"] for run in runs} == {"kjv 5-gram"}


def test_a_prompt_that_fills_the_network_is_refused(capsys):
    assert command_line.main(["compare", "--prompt", "a" * 256]) == 2
    assert "--prompt has 256 characters: kjv-1.6M has room for 256" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_law_that_differs_makes_the_exit_status_1(arguments, monkeypatch, capsys):
    biased = experiments.LawComparison(2, None, None, audit.g_test([90, 10], [10, 90]))
    monkeypatch.setattr(experiments, "compare_laws", lambda *_, **__: biased)
    assert command_line.main(["compare", "--new-tokens", "5", "--law-runs", "1", *arguments]) == 1
    assert ('"p_value": ' if arguments else "path against plain, G-test") in capsys.readouterr().out


def test_one_new_token_leaves_nothing_to_draft(capsys):
    assert command_line.main(["compare", "--new-tokens", "1", "--law-runs", "0"]) == 0
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
        (["--prompt", ""], "--prompt is empty"),
        (["--new-tokens", "0"], "--new-tokens is 0: must be at least 1"),
        (["--law-runs", "-1"], "--law-runs is -1: must be at least 0"),
        (["--seed", "-1"], "--seed is -1: must be from 0 to 2147483647"),
        (["--seed", str(2**31)], "--seed is 2147483648"),
        (["--plot", "plot.txt"], "plot.txt: its suffix must be one of"),
        (["--plot", "plot"], "plot: its suffix must be one of"),
        (["--plot", "nowhere/plot.png"], "there is no folder nowhere"),
        (["--save", "rounds.txt"], "--save rounds.txt: the name must end in .json or .npz"),
        (["--save", "nowhere/rounds.npz"], "there is no folder nowhere"),
        (["--save", "x" * 300 + ".json"], "xxx.json: the name is too long"),
        (["--save", "a\0b.json"], "a name of a file holds no NUL character"),
        (["--save", "/dev/full.json"], "--save /dev/full.json: lies in the folder of the devices"),
        (["--plot", "/dev/full.png"], "--plot /dev/full.png: lies in the folder of the devices"),
    ],
)
def test_what_compare_cannot_do_is_refused_before_any_decode(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(compare, "decode_all", lambda *_: pytest.fail("decoded"))
    assert command_line.main(["compare", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m jaxspec compare: error: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_without_matplotlib_a_plot_is_refused_by_the_name_of_the_extra(monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert command_line.main(["compare", "--plot", "plot.png"]) == 2
    assert "pip install -e '.[plot]'" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_makes_the_exit_status_2(tmp_path, capsys):
    (tmp_path / "taken.json").mkdir()
    arguments = ["--new-tokens", "1", "--law-runs", "0", "--save", str(tmp_path / "taken.json")]
    assert command_line.main(["compare", *arguments]) == 2
    assert "taken.json" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_results_are_printed_although_a_file_could_not_be_written(
    option, tmp_path, monkeypatch, capsys
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compare, "save_rounds", full)
    monkeypatch.setattr(experiments, "plot", full)
    file = tmp_path / ("x.json" if option == "--save" else "x.png")
    arguments = ["--models", "ngram", "--new-tokens", "1", "--law-runs", "0", option, str(file)]
    assert command_line.main(["compare", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("REAL TEXT: 1 character")
    why = f"{option} {file}: not written: there is no space left on the device"
    assert captured.err == f"python -m jaxspec compare: error: {why}\n"


def test_saved_rounds_replay_without_a_difference(compared, capsys):
    path = compared[0] / "rounds.json"
    rounds = len(json.loads(path.read_text())["content"])
    assert rounds >= 3
    assert command_line.main(["replay", str(path)]) == 0
    assert capsys.readouterr().out == f"{rounds} rounds replayed, 0 differ\n"


def test_a_doctored_round_is_named_and_the_exit_status_is_1(compared, tmp_path, capsys):
    record = json.loads((compared[0] / "rounds.json").read_text())
    (first, second, *_) = record["content"]
    verdict = second["verdict"]
    was = verdict["tokens"]["data"][0]
    verdict["tokens"]["data"][0] = (was + 1) % 73
    path = tmp_path / "doctored.json"
    path.write_text(json.dumps(record))
    assert command_line.main(["replay", str(path)]) == 1
    named, total = capsys.readouterr().out.splitlines()
    assert named.startswith(f"round 1 (root at position {second['position']}): tokens was ")
    assert first["position"] < second["position"]
    assert total == f"{len(record['content'])} rounds replayed, 1 differ"


def deep(depth):
    content = b"[" * depth + b"]" * depth
    return b'{"schema": "jaxspec/1", "kind": "rounds", "content": ' + content + b"}"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.json", None, "missing.json"),
        ("garbage.json", b"\x00\xff{", "not a record"),
        ("garbage.npz", b"PK\x03\x04no", "not a record"),
        ("list.json", b"[]", "names no schema"),
        (
            "kind.json",
            b'{"schema": "jaxspec/1", "kind": "snapshot", "content": {}}',
            "holds 'snapshot', wanted 'rounds'",
        ),
        ("old.json", b'{"schema": "jaxspec/0", "kind": "rounds", "content": []}', "jaxspec/0"),
        ("hole.json", b'{"schema": "jaxspec/1", "kind": "rounds", "content": [{}]}', "round 0"),
        ("rounds.txt", b"", "a .json or a .npz"),
        ("nofile.npz", None, "nofile.npz: there is no such file"),
        ("x" * 300 + ".json", None, "the name is too long"),
        ("a\0b.json", None, "a name of a file holds no NUL character"),
        ("two\nlines.json", None, "two lines.json: there is no such file"),
        ("deep.json", deep(500), "nested deeper than 64"),
        ("deeper.json", deep(100_000), "nested too deep to be read"),
    ],
)
def test_what_holds_no_rounds_is_no_replay_and_the_exit_status_is_2(
    name, content, words, tmp_path, capsys
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert command_line.main(["replay", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_progress_shows_on_a_terminal_and_leaves_an_empty_line(monkeypatch):
    err = io.StringIO()
    err.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("COLUMNS", "30")
    progress = Progress()
    progress("token: contract single path and more", 3, 29)
    progress("traversal: draft support exhausted", 29, 29)
    first, last = err.getvalue().strip("\r").split("\r\r")
    assert first == "3/29  token: contract single "
    assert last == " " * 29


def test_version_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-m", "jaxspec", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jaxspec {js.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--help"],
            ["audit", "compare", "generate", "replay", "bench", "--version", "exit status: 0"],
        ),
        (["audit", "--help"], ["--json", "total variation", "exit status: 0"]),
        (
            ["compare", "--help"],
            ["--prompt TEXT", "--new-tokens N", "--plot FILE.png", "--save FILE", "status: 0"],
        ),
        (
            ["generate", "--help"],
            [
                "--prompt TEXT",
                "DIR|smollm2|pair",
                "DIR|lookup|ngram|pair|none",
                "--top-p",
                "status: 0",
            ],
        ),
        (["replay", "--help"], ["FILE", "compare --save", "exit status: 0"]),
        (["bench", "--help"], ["--vocab", "--batch"]),
    ],
)
def test_help_names_what_there_is(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.main(arguments)
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: python -m jaxspec {' '.join(arguments[:-1])}".strip() in out
    for word in words:
        assert word in out


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["--json"], ["audit", "--jsn"], ["audit", "x"], ["compare", "x"]]
)
def test_bad_arguments_are_named_and_the_exit_status_is_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.main(arguments)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert arguments[-1] in captured.err


def test_bench_is_handed_its_arguments_and_its_exit_status_is_returned(monkeypatch):
    handed = []
    monkeypatch.setattr(bench, "main", lambda argv: handed.append(argv) or 3)
    assert command_line.main(["bench", "--vocab", "512", "--batch", "1", "2", "--json"]) == 3
    assert command_line.main(["bench", "--version", "-h"]) == 3
    assert handed == [["--vocab", "512", "--batch", "1", "2", "--json"], ["--version", "-h"]]


def test_a_reader_that_leaves_ends_the_run_without_a_traceback(with_report, monkeypatch, capfd):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert command_line.main(["audit", "--json"]) == 141
    assert capfd.readouterr().err == ""


def test_an_interrupt_ends_the_run_without_a_traceback(monkeypatch, capsys):
    def interrupted(progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "audit_rules", interrupted)
    assert command_line.main(["audit"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["adit"], "invalid choice: 'adit' (choose from"),
        (["adit"], "; did you mean 'audit'?"),
        (["audit", "--jsn"], "unrecognized arguments: --jsn; did you mean '--json'?"),
        (["compare", "--modles=ngram"], "; did you mean '--models'?"),
        (["compare", "--models", "ngrm"], "; did you mean 'ngram'?"),
        (["generate", "--promt", "x"], "is required; did you mean '--prompt'?"),
        (["bench", "--vocba", "5"], "; did you mean '--vocab'?"),
    ],
)
def test_an_unknown_word_gets_the_nearest_known_one(arguments, words, capsys):
    with pytest.raises(SystemExit):
        command_line.main(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nonsense"], ["--zzz"], ["audit", "--js", "x"]])
def test_nothing_is_suggested_where_nothing_is_near(arguments, capsys):
    with pytest.raises(SystemExit):
        command_line.main(arguments)
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "name"), [("/usr/bin/jaxspec", "jaxspec"), ("/x/__main__.py", "python -m jaxspec")]
)
def test_help_and_errors_call_the_program_what_the_user_calls_it(path, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path])
    with pytest.raises(SystemExit):
        command_line.main(["compare", "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {name} compare ")
    assert command_line.main(["replay", "none.json"]) == 2
    assert capsys.readouterr().err.startswith(f"{name} replay: error: none.json: ")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_of_40_columns_gets_lines_of_40_columns(with_report, monkeypatch, audited):
    monkeypatch.setenv("COLUMNS", "40")
    shown = []
    for arguments in (
        ["audit"],
        ["compare", "--models", "ngram", "--new-tokens", "6", "--law-runs", "1"],
        ["--help"],
    ):
        monkeypatch.setattr(sys, "stdout", Terminal())
        with contextlib.suppress(SystemExit):
            command_line.main(arguments)
        shown.append(sys.stdout.getvalue())
        assert max(map(len, shown[-1].splitlines())) <= 40
    for law in audited[0].laws:
        assert f"{law.expected_accepted:.6f}" in shown[0]
    for name in DECODERS:
        assert f"\n  {name}\n    rounds " in shown[1]


FULL = "/dev/full"
needs_a_full_disk = pytest.mark.skipif(not os.path.exists(FULL), reason=f"there is no {FULL}")


@needs_a_full_disk
@pytest.mark.parametrize("arguments", [["audit"], ["audit", "--json"], ["--help"], ["replay"]])
@pytest.mark.parametrize("buffering", [1, -1])
def test_a_full_disk_is_one_line_and_the_exit_status_2(
    arguments, buffering, compared, with_report, monkeypatch, capsys
):
    if arguments == ["replay"]:
        arguments = ["replay", str(compared[0] / "rounds.json")]
    with open(FULL, "w", buffering) as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert command_line.main(arguments) == 2
    why = "standard output: there is no space left on the device"
    assert capsys.readouterr().err == f"python -m jaxspec: error: {why}\n"


def test_a_closed_standard_output_is_one_line_and_the_exit_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    for arguments in (["compare"], ["replay", "none.json"], ["--help"]):
        assert command_line.main(arguments) == 2
        assert capsys.readouterr().err == (
            "python -m jaxspec: error: standard output is closed: there is nowhere to print to\n"
        )


def test_a_closed_standard_error_takes_nothing_away(compared, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    try:
        assert command_line.main(["replay", str(compared[0] / "rounds.json")]) == 0
        assert command_line.main(["replay", "none.json"]) == 2
    finally:
        sys.stderr.close()
    assert capsys.readouterr().out.endswith(" rounds replayed, 0 differ\n")


INTERRUPTED = """
import sys, threading
from jaxspec.cli import app as command_line
def compile_and_be_interrupted(progress):
    print("printed before")
    threading.Thread(target=threading.Event().wait).start()  # it ends no sooner than the process
    raise KeyboardInterrupt
command_line.audit_rules = compile_and_be_interrupted
sys.argv[1:] = ["audit"]
command_line.main()
"""


def test_an_interrupted_process_ends_at_once_with_status_130(users_environment):
    command = [sys.executable, "-c", INTERRUPTED]
    environment = {**users_environment, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (130, "printed before\n")
    assert done.stderr == "\ninterrupted\n"


def test_an_interrupt_where_nothing_can_be_raised_ends_the_process_too(users_environment):
    # Python only reports what is raised in a callback of its garbage collector, and goes on.
    lost = """
def audit(progress):
    import gc
    def interrupted_here(*of_the_collector):
        raise KeyboardInterrupt
    gc.callbacks.append(interrupted_here)
    gc.collect()
    print("went on")
command_line.audit_rules = audit
"""
    script = f"from jaxspec.cli import app as command_line\n{lost}\ncommand_line.main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "audit"],
        env=users_environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")
