"""README and guide are true: their code runs, their commands parse, their tables are complete."""

import collections
import contextlib
import doctest
import importlib
import io
import re
import shlex
from pathlib import Path

import pytest

import jaxspec as js
from jaxspec.cli.app import main

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "notebooks").rglob("*.md"))]
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python": "run", "pycon": "run as doctests", "sh": "parsed", "text": "formulas"}


def blocks(page, *languages):
    return [found[1] for found in BLOCK.findall(PAGES[page]) if found[0] in languages]


def first_cells(page):
    rows = [line for line in PAGES[page].splitlines() if line.startswith("| `")]
    return " ".join(row.split(" | ")[0] for row in rows)


def pages_with(*languages):
    return [page for page in PAGES if blocks(page, *languages)]


@pytest.mark.parametrize("page", pages_with("python", "pycon"))
def test_the_code_of_a_page_runs_in_order_and_prints_what_its_comments_say(page):
    space = {}
    for language, block in BLOCK.findall(PAGES[page]):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block, page, "exec"), space)
            expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
            assert out.getvalue().splitlines() == expected
        elif language == "pycon":
            test = doctest.DocTestParser().get_doctest(block, space, page, page, 0)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            assert runner.run(test, clear_globs=False).failed == 0
            space = test.globs


@pytest.mark.parametrize("page", pages_with("sh"))
def test_the_commands_of_a_page_parse(page):
    for line in "\n".join(blocks(page, "sh")).splitlines():
        command = line.split("&&")[-1]
        if "python -m jaxspec" not in command:
            continue
        arguments = shlex.split(command.split("python -m jaxspec")[1])
        printed = io.StringIO()
        with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(printed):
            main([*arguments, "--help"])
        assert end.value.code == 0
        options = {each for each in arguments if each.startswith("--")}
        assert options <= set(re.findall(r"--[\w-]+", printed.getvalue()))


def test_blocks_are_of_the_languages_that_are_checked():
    languages = {language for text in PAGES.values() for language, _ in BLOCK.findall(text)}
    assert languages <= set(LANGUAGES)
    indented = re.compile(r"\n\n {4}\w")  # Markdown's other form of code
    assert not [page for page, text in PAGES.items() if indented.search(BLOCK.sub("", text))]


def test_the_readme_is_short_and_begins_with_a_batch():
    readme = PAGES["README.md"]
    assert readme.count("\n") <= 160
    first = blocks("README.md", "python")[0]
    assert "jax.vmap(step" in first
    assert sum(bool(line.strip()) for line in first.splitlines()) <= 12
    assert readme[: readme.index(first)].count("\n") < 40


def test_one_line_runs_the_main_job_and_one_the_tests_as_ci_does():
    main_job, tests = (block.strip() for block in blocks("README.md", "sh"))
    assert main_job.endswith("python -m jaxspec")
    assert tests.endswith("python -m pytest")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert ci[-1] == tests


@pytest.mark.parametrize("page", ["README.md", "notebooks/verify.md"])
def test_the_table_of_rules_is_that_of_the_registry(page):
    rows = [line.strip("| ").split(" | ") for line in PAGES[page].splitlines()]
    assert [row for row in rows if row[0].strip("`") in js.RULES] == [
        [f"`{rule.name}`", f"`{rule.verify.__name__}`", f"`{rule.proposal.__name__}`", rule.source]
        for rule in js.RULES.values()
    ]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("notebooks/errors.md", js.Status.__members__),
        ("notebooks/verify.md", js.Verdict.__dataclass_fields__),
    ],
)
def test_every_status_and_every_field_of_the_verdict_is_described(page, names):
    assert set(names) <= set(re.findall(r"`(\w+)`", first_cells(page)))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", PAGES[page]):
        assert (folder / link).exists(), f"{page}: {link}"


def test_every_public_name_is_on_one_page_of_the_reference():
    pages = "\n".join(text for page, text in PAGES.items() if "/api/" in page)
    shown = collections.Counter()
    for entry in re.findall(r"^::: (\S+)$", pages, re.MULTILINE):
        module, name = entry.rsplit(".", 1)
        shown[id(getattr(importlib.import_module(module), name))] += 1
    assert set(shown.values()) == {1}
    for package in ("", ".layouts", ".models", ".draft", ".decode", ".audit", ".experiments"):
        module = importlib.import_module(f"jaxspec{package}")
        for name in module.__all__:
            assert name == "__version__" or id(getattr(module, name)) in shown, name
