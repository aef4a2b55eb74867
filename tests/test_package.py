"""The package: public names, what their docstrings say, which way imports point, what it needs."""

import ast
import dataclasses
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspec as js

SOURCE = Path(js.__file__).parent

FLOORS = {
    0: ["checks", "loops", "transfers", "extras", "storage"],
    1: ["rows", "logits", "draws"],
    2: ["trees", "proposals"],
    3: ["verify", "models"],
    4: ["draft"],
    5: ["decode"],
    6: ["audit"],
    7: ["experiments", "bench"],
    8: ["cli", "__main__"],
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}
THE_PACKAGE = "__init__"
STRANGERS = {("verify", "models"), ("models", "verify")}
"""Pairs of which the first must not import the second."""

FUNCTIONS = [name for name in js.__all__ if callable(getattr(js, name)) and name[0].islower()]
CLASSES = [name for name in js.__all__ if inspect.isclass(getattr(js, name))]
RECORDS = ["Draws", "RoundDraws", "Logits", "Probabilities", "Tree", "Verdict", "Rule"]
PROPOSALS = ["PointMass", "WithReplacement", "WithoutReplacement", "Proposal"]


def isort_order(name: str) -> tuple[int, str]:
    """Constants first, then classes, then everything else."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_public_names_are_sorted_and_importable_and_nothing_else_is_defined() -> None:
    assert list(js.__all__) == sorted(js.__all__, key=isort_order)
    assert len(set(js.__all__)) == len(js.__all__)
    for name in js.__all__:
        assert hasattr(js, name), name
    visible = {name for name, value in vars(js).items() if not inspect.ismodule(value)}
    assert {name for name in visible if name[0] != "_"} <= set(js.__all__)


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", js.__version__)
    assert importlib.metadata.version("jaxspec-decoding") == js.__version__


def test_run_time_needs_the_five_declared_libraries_and_nothing_else() -> None:
    needs = importlib.metadata.requires("jaxspec-decoding") or []
    always = [need for need in needs if "extra" not in need]
    assert sorted(re.split(r"[^\w-]", need)[0] for need in always) == [
        "chex",
        "jax",
        "jaxlib",
        "numpy",
        "scipy",
    ]


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").is_file()


def test_importing_the_package_loads_nothing_that_only_tests_and_plots_need() -> None:
    heavy = ["matplotlib", "nbclient", "nbformat", "IPython", "ipykernel", "pytest", "pandas"]
    heavy += ["jaxspec.audit", "jaxspec.models", "jaxspec.experiments", "jaxspec.bench"]
    code = f"import sys, jaxspec; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == "[]"


def top_level(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def imported(path: Path) -> set[str]:
    """Return the parts of the package that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            module = node.module or ""
            names = [module]
            if module == "jaxspec":
                parts = [alias.name for alias in node.names]
                names = [f"jaxspec.{part}" if part in FLOOR_OF else "jaxspec" for part in parts]
        else:
            continue
        found |= {f"{name}.{THE_PACKAGE}".split(".")[1] for name in names if is_ours(name)}
    return found


def is_ours(module: str) -> bool:
    return module.split(".")[0] == "jaxspec"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    name = top_level(path)
    assert name in FLOOR_OF, f"{name} has no floor: give it one here and in the design"
    for other in imported(path) - {name}:
        if other == THE_PACKAGE:
            # It imports verification, so that only what stands above that may import it.
            assert FLOOR_OF[name] > FLOOR_OF["verify"], f"{name} imports what imports it"
            continue
        assert FLOOR_OF[other] <= FLOOR_OF[name], f"{name} imports {other}"
        assert (name, other) not in STRANGERS, f"{name} imports {other}"


def test_the_package_itself_imports_only_verification() -> None:
    assert max(FLOOR_OF[name] for name in imported(SOURCE / "__init__.py")) <= FLOOR_OF["verify"]


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_every_public_object_says_in_one_line_what_it_is_for(name: str) -> None:
    text = inspect.getdoc(getattr(js, name))
    assert text
    first, *rest = text.splitlines()
    assert first.endswith("."), first
    assert not rest or rest[0] == ""


def sections(name: str) -> set[str]:
    return set(re.findall(r"^(\w+)\b.*:$", inspect.getdoc(getattr(js, name)) or "", re.M))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_document_what_they_take_and_give_or_raise(name: str) -> None:
    parameters = inspect.signature(getattr(js, name)).parameters
    text = inspect.getdoc(getattr(js, name)) or ""
    assert "Args" in sections(name)
    described = text.split("Args:")[1]
    for parameter in parameters:
        assert re.search(rf"^  \*?\*?{parameter}: ", described, re.M), f"{name}: {parameter}"
    documented = sections(name) & {"Returns", "Raises", "Yields"}
    assert documented or text.startswith("Return "), f"{name} says not what it gives"


@pytest.mark.parametrize("name", [*RECORDS, *PROPOSALS])
def test_public_records_document_every_field(name: str) -> None:
    text = inspect.getdoc(getattr(js, name)) or ""
    assert "Attributes:" in text
    described = text.split("Attributes:")[1]
    record = getattr(js, name)
    for field in dataclasses.fields(record) if dataclasses.is_dataclass(record) else ():
        assert re.search(rf"^  {field.name}: ", described, re.M), f"{name}.{field.name}"


@pytest.mark.parametrize("name", js.RULES)
def test_every_verifier_states_its_guarantee_and_source(name: str) -> None:
    rule = js.RULES[name]
    text = inspect.getdoc(rule.verify) or ""
    assert re.search(r"^Guarantee: lossless", text, re.M)
    for section in ("Args:", "Returns:", "Raises:", "References:", ">>>"):
        assert section in text, section
    assert rule.name == name
    assert rule.source
    assert rule.verify.__name__ in js.__all__
    assert rule.proposal.__name__ in js.__all__


def test_rules_cannot_be_changed_by_accident() -> None:
    with pytest.raises(TypeError):
        js.RULES["token"] = js.RULES["block"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        js.RULES["token"].name = "other"  # type: ignore[misc]


def test_errors_of_the_host_are_value_errors() -> None:
    for error in (js.DrawError, js.RowError, js.TreeError):
        assert issubclass(error, ValueError)
