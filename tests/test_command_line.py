"""The command line as its user sees it: what it prints, what it returns."""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxspec as js
from jaxspec import __main__ as command_line
from jaxspec import bench
from jaxspec.audit import instances_for
from jaxspec.audit import report as reports
from jaxspec.models import shipped_text, split_text

GRIDS = {"single_path": [2500, 7500], "two_level_tree": [2000, 500, 3000, 4500]}


@pytest.fixture(scope="module")
def audited():
    told = []
    report = reports.audit_rules(lambda *step: told.append(step))
    return report, told


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


@pytest.fixture(scope="module")
def whole_run(audited):
    """Run `python -m jaxspec`, its audit done before; return the exit status and the lines."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(command_line, "audit_rules", lambda progress: audited[0])
        status = command_line.main([])
    return status, out.getvalue().splitlines()


def test_without_a_command_the_audit_is_followed_by_real_text(whole_run):
    status, lines = whole_run
    assert status == 0
    assert max(map(len, lines)) <= 96
    laws = next(n for n, line in enumerate(lines) if line.startswith("EXACT LAWS"))
    text = next(n for n, line in enumerate(lines) if line.startswith("REAL TEXT"))
    assert laws < text
    for name in ("path, 4 ", "tree, 3 x 2 x 1 x 1 "):
        (row,) = (line for line in lines if line.startswith("  " + name))
        _, calls, per_call, drafted, rate, mean, _, error, is_expected = row.rsplit(maxsplit=8)
        assert float(per_call) == pytest.approx(600 / int(calls), abs=0.005)
        assert 1 < float(per_call) <= 5
        assert int(drafted) > 600
        assert abs(float(rate) - float(mean)) <= 5 * float(error)
        assert is_expected == "ok"
    assert lines[-1].startswith("PROVED in ")


def test_the_prompt_shown_is_held_out_and_its_continuations_differ(whole_run):
    _, lines = whole_run
    at = {
        name: n
        for n, line in enumerate(lines)
        for name in ("prompt", "path", "tree")
        if line.startswith(f"  {name:<8}")
    }
    prompt = lines[at["prompt"]][10:].removesuffix(" /")
    assert prompt in split_text(shipped_text(), held_out=True)
    assert prompt not in split_text(shipped_text())
    assert lines[at["path"]][10:] != lines[at["tree"]][10:]


def test_acceptance_off_its_mean_makes_the_exit_status_1(with_report, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "MAX_DEVIATION", 1e-6)
    monkeypatch.setattr(command_line, "NUM_TOKENS", 40)
    assert command_line.main([]) == 1
    assert "NOT AS EXPECTED" in capsys.readouterr().out.splitlines()[-1]


def test_progress_shows_on_a_terminal_and_leaves_an_empty_line(monkeypatch):
    err = io.StringIO()
    err.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("COLUMNS", "30")
    progress = command_line.Progress()
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
        (["--help"], ["audit", "bench", "--version", "exit status: 0"]),
        (["audit", "--help"], ["--json", "total variation", "exit status: 0"]),
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
    "arguments", [["nonsense"], ["--json"], ["audit", "--jsn"], ["audit", "x"]]
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
        assert command_line.main(["audit", "--json"]) == 1
    assert capfd.readouterr().err == ""


def test_an_interrupt_ends_the_run_without_a_traceback(monkeypatch, capsys):
    def interrupted(progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "audit_rules", interrupted)
    assert command_line.main(["audit"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
