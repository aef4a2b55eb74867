"""The command `audit`, and the program without a command: what they print and return."""

import contextlib
import io
import itertools
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js
from jaxspec.audit import instances_for, precision
from jaxspec.audit import report as reports
from jaxspec.cli import app, audit, compare
from jaxspec.models import bundled_text, split_text

GRIDS = {"single_path": [2500, 7500], "two_level_tree": [2000, 500, 3000, 4500]}
MEAN_ACCEPTED = {
    ("token", "contract single path"): Fraction(3, 4),
    ("token", "toy of two"): Fraction(10, 9),
    ("block", "contract single path"): Fraction(3, 4),
    ("block", "toy of two"): Fraction(11, 9),
    ("point_mass", "contract two-level tree"): Fraction(2),
    ("point_mass", "kill row, top two"): Fraction(4, 5),
    ("with_replacement", "kill row, two siblings"): Fraction(47, 80),
    ("without_replacement", "kill row, two siblings"): Fraction(107, 160),
}
"""Mean accepted tokens that are known exactly, by rule and instance."""
DECODERS = ["plain", "path", "fixed tree", "adaptive tree"]

AUDIT = """
import pathlib, pickle, sys
from jaxspec.audit.report import audit_rules
calls = []
report = audit_rules(lambda *step: calls.append(step))
pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps((report, calls)))
"""


@pytest.fixture(scope="module")
def audited(users_environment, tmp_path_factory):
    """Audit in a separate process, which compiles the proofs as the user's does."""
    path = tmp_path_factory.mktemp("audit") / "report.pickle"
    command = [sys.executable, "-c", AUDIT, str(path)]
    subprocess.run(command, env=users_environment, check=True)
    return pickle.loads(path.read_bytes())


@pytest.fixture
def with_report(audited, monkeypatch):
    """Replace the audit by its result, or by another one."""

    def use(report=audited[0]):
        monkeypatch.setattr(audit, "audit_rules", lambda progress: report)

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
    for law in report.laws:
        assert law.total_mass == pytest.approx(1, abs=1e-12)
        assert (law.impossible, law.cells.misses) == (0, 0)


def test_mean_acceptances_and_joint_laws_that_are_known_exactly_are_found(audited):
    laws = {(law.rule, law.case): law for law in audited[0].laws}
    for place, expected in MEAN_ACCEPTED.items():
        assert laws[place].expected_accepted == pytest.approx(float(expected), abs=1e-6)
        assert laws[place].known_accepted == pytest.approx(float(expected), abs=1e-7)
    text = laws["point_mass", "contract two-level tree"].target_text
    joint = text.sum(axis=tuple(range(2, text.ndim)))
    np.testing.assert_allclose(joint[:2, :2], [[0.2, 0.05], [0.3, 0.45]], rtol=0, atol=1e-7)


def test_progress_is_called_at_the_start_and_after_each_step(audited):
    report, calls = audited
    steps = len(report.grids) + len(report.laws) + len(report.batches)
    assert [done for _, done, _ in calls] == list(range(steps + 1))
    assert {total for _, _, total in calls} == {steps}
    expected = {"compiling", "grid: single path", "grid: two level tree"}
    expected |= {f"{law.rule}: {law.case}" for law in report.laws}
    expected |= {f"{name}: batches" for name in js.RULES}
    assert {what for what, _, _ in calls} == expected


def test_json_is_one_object_with_exact_grids_and_a_law_for_each_rule_and_case(
    audited, with_report, capsys
):
    assert app.main(["audit", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["grids"] == GRIDS
    assert printed["proved"] is True
    assert printed["device"].startswith(jax.default_backend())
    assert set(printed["versions"]) == {"jaxspec", "python", "jax", "jaxlib", "numpy"}
    assert printed["versions"]["jaxspec"] == js.__version__
    for law, found in zip(printed["laws"], audited[0].laws, strict=True):
        assert (law["rule"], law["case"], law["tv"]) == (found.rule, found.case, found.tv)
        assert law["proved"] is True
    single_path = printed["laws"][0]
    assert single_path["expected_accepted"] == single_path["known_accepted"] == 0.75


def test_the_audit_prints_a_line_for_each_count_and_law_within_the_width(
    audited, with_report, capsys
):
    assert app.main(["audit"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert sum(line.endswith(" ok") for line in lines) == 2 + len(audited[0].laws) + len(js.RULES)
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
    names = ("contract single path", "kill row")
    cases = [each for each in instances_for(broken) if each.name in names]
    monkeypatch.setattr(reports, "instances_for", lambda rule: cases)
    monkeypatch.setattr(reports, "batch_faults", lambda rule, plain: ())
    # The grids are correct, and slow to count.
    monkeypatch.setattr(reports, "grid_counts", lambda name: reports.KNOWN_COUNTS[name])
    assert app.main(["audit"]) == 1
    out = capsys.readouterr().out
    assert "NOT PROVED: token, kill row: total variation 5.5e-01 from the target's law" in out
    assert "NOT PROVED: token, kill row: emitted token 0: token" in out
    assert "PROVED in" not in out
    kill_row = next(line for line in out.splitlines() if line.startswith(" " * 23 + "kill row"))
    assert kill_row.endswith(" FAIL")


def test_a_wrong_count_alone_makes_the_exit_status_1(audited, with_report, capsys):
    with_report(replace(audited[0], grids={**audited[0].grids, "single_path": (2501, 7499)}))
    assert app.main(["audit", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["proved"] is False
    assert app.main(["audit"]) == 1
    wanted = "NOT PROVED: single_path: counted [2501, 7499], wanted [2500, 7500]"
    assert wanted in capsys.readouterr().out


def agreement(draft_tokens, draft_rows, target_rows, uniforms):
    """Draw from the target for as long as the draft agrees: lossless, but accepts little."""
    emitted = []
    for row, u, drafted in zip(target_rows, uniforms, [*draft_tokens, None], strict=True):
        last = int(row.nonzero()[0][-1])  # rounding may leave no running total above a draw
        emitted.append(min(int((row.cumsum() <= u).sum()), last))
        if emitted[-1] != drafted:
            break
    return emitted


def first_candidate(draft_tokens, draft_rows, target_rows, generator):
    """Accept whatever was drafted."""
    return [*draft_tokens, 0]


@pytest.fixture
def my_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_module", sys.modules[__name__])


def test_a_verifier_named_on_the_command_line_is_checked(my_module, capsys):
    arguments = ["audit", "--kind", "path", "--verifier"]
    few = ["--randomness", "uniforms", "--budget", "40000"]
    assert app.main([*arguments, "my_module:agreement", *few]) == 0
    out = capsys.readouterr().out
    assert out.startswith("LOSSLESS: verifier of kind 'path'")
    assert max(map(len, out.splitlines())) <= 96
    wasteful = [*arguments, "my_module:agreement", *few]
    assert app.main([*wasteful, "--rule", "token"]) == 1
    assert "where token accepts" in capsys.readouterr().out
    biased = [*arguments, "my_module:first_candidate", "--budget", "2000", "--json"]
    assert app.main(biased) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["lossless"], report["budget"], report["randomness"]) == (False, 2000, "numpy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "path"], "--kind is for a verifier"),
        (["--verifier", "my_module:first_candidate"], "--verifier needs --kind, one of path, "),
        (["--verifier", "my_module", "--kind", "path"], "must be package.module:function"),
        (["--verifier", "my_module:none", "--kind", "path"], "has no attribute 'none'"),
        (["--verifier", "no_module:none", "--kind", "path"], "No module named 'no_module'"),
        (["--verifier", "my_module:GRIDS", "--kind", "path"], "not a function"),
        (
            ["--verifier", "my_module:first_candidate", "--kind", "with_replacement"],
            "the verifier raised TypeError",
        ),
    ],
    ids=["kind", "no kind", "form", "attribute", "module", "no function", "raises"],
)
def test_a_verifier_that_cannot_be_checked_is_an_error_of_arguments(
    my_module, arguments, message, capsys
):
    assert app.main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err


def rows_named(lines, name):
    return [line for line in lines if line.startswith(f"  {name:<14} ")]


def shown_text(lines, name):
    """The text at the end for the prompt or a decoder, its lines joined."""
    at = lines.index(rows_named(lines, name)[-1])
    rest = itertools.takewhile(lambda line: line.startswith(" " * 17), lines[at + 1 :])
    return " ".join([lines[at][17:], *(line.strip() for line in rest)])


def test_without_a_command_the_audit_is_followed_by_real_text(with_report, monkeypatch, capsys):
    monkeypatch.setattr(compare, "NEW_TOKENS", 60)
    assert app.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
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
    # The prompt is held-out text, and each decoder continues it differently.
    prompt = shown_text(lines, "prompt").removesuffix(" /")
    assert prompt in split_text(bundled_text(), held_out=True)
    assert prompt not in split_text(bundled_text())
    assert len({shown_text(lines, name) for name in DECODERS}) == 4


def test_acceptance_off_its_mean_makes_the_exit_status_1(with_report, monkeypatch, capsys):
    monkeypatch.setattr(compare, "MAX_DEVIATION", 1e-6)
    monkeypatch.setattr(compare, "NEW_TOKENS", 30)
    assert app.main([]) == 1
    assert "NOT AS EXPECTED" in capsys.readouterr().out.splitlines()[-1]


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
            app.main(arguments)
        shown.append(sys.stdout.getvalue())
        assert max(map(len, shown[-1].splitlines())) <= 40
    for law in audited[0].laws:
        assert f"{law.expected_accepted:.6f}" in shown[0]
    for name in DECODERS:
        assert f"\n  {name}\n    rounds " in shown[1]


@pytest.mark.parametrize(("greatest", "status"), [(2e-6, 0), (2.1e-6, 1)])
def test_precision_is_a_markdown_table_and_fails_beyond_its_limit(
    greatest, status, monkeypatch, capsys
):
    measured = [
        precision.Precision("peaked", "logits", dtype, vocab, 1e-8, 3e-5, bonus, 4e-5)
        for dtype, vocab, bonus in itertools.product(
            ("float32", "float16"), (32000, 262144), (1e-7, greatest)
        )
    ]
    monkeypatch.setattr(precision, "precisions", lambda: iter(measured))
    assert app.main(["audit", "--precision"]) == status
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4
    assert rows[0] == f"| logits, float32 | 32000 | 1.0e-08 | 3.0e-05 | {greatest:.1e} | 4.0e-05 |"
    assert app.main(["audit", "--precision", "--json"]) == status
    assert len(json.loads(capsys.readouterr().out)) == 8
