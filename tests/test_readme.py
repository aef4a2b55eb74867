"""The README says what is so: its code runs, its commands are those that are run, its tables hold."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import jaxspec as js

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def rows_of_tables():
    lines = [line for line in README.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_code_runs_in_order_and_prints_what_its_comments_say():
    space = {}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for block in blocks("python"):
            exec(compile(block, "README.md", "exec"), space)
    said = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(blocks("python")), re.MULTILINE)
    assert out.getvalue().splitlines() == said
    assert len(said) == sum(block.count("print(") for block in blocks("python"))


def test_library_use_on_the_first_screen_is_short_and_holds_a_batch():
    first = blocks("python")[0]
    assert "jax.vmap(verify_round" in first
    assert sum(bool(line.strip()) for line in first.splitlines()) <= 12
    assert README[: README.index(first)].count("\n") < 40


def test_one_line_runs_the_main_job_and_one_the_tests_as_ci_does():
    main_job, tests = (block.strip() for block in blocks("sh"))
    assert main_job.endswith("python -m jaxspec")
    assert tests.endswith("python -m pytest")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert ci[-1] == tests


def test_the_table_of_rules_is_that_of_the_registry():
    listed = [row for row in rows_of_tables() if row[0].strip("`") in js.RULES]
    assert listed == [
        [f"`{rule.name}`", f"`{rule.verify.__name__}`", f"`{rule.proposal.__name__}`", rule.source]
        for rule in js.RULES.values()
    ]


@pytest.mark.parametrize("names", [js.Status.__members__, js.Verdict.__dataclass_fields__])
def test_every_status_and_every_field_of_the_verdict_is_described(names):
    listed = " ".join(row[0] for row in rows_of_tables())
    assert set(names) <= set(re.findall(r"`(\w+)`", listed))
