"""The package: its public names and their documentation, import layers, dependencies."""

import ast
import dataclasses
import importlib.metadata
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspec as js

SOURCE = Path(js.__file__).parent

LAYERS = {
    0: ["checks", "values", "loops", "transfers", "extras", "storage"],
    1: ["tiles", "slabs", "rows", "logits", "sampling", "draws"],
    2: ["trees", "proposals"],
    3: ["verify", "models"],
    4: ["draft", "layouts"],
    5: ["decode"],
    6: ["audit"],
    7: ["experiments", "bench", "testing"],
    8: ["cli", "__main__"],
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
THE_PACKAGE = "__init__"
INDEPENDENT = {("verify", "models"), ("models", "verify")}
"""Pairs of which the first must not import the second."""

FUNCTIONS = [name for name in js.__all__ if callable(getattr(js, name)) and name[0].islower()]
CLASSES = [name for name in js.__all__ if inspect.isclass(getattr(js, name))]


def isort_order(name: str) -> tuple[int, str]:
    """Constants first, then classes, then everything else."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_public_names_are_sorted_and_importable_and_nothing_else_is_defined() -> None:
    assert len(js.__all__) <= 33
    assert list(js.__all__) == sorted(js.__all__, key=isort_order)
    assert len(set(js.__all__)) == len(js.__all__)
    for name in js.__all__:
        assert hasattr(js, name), name
    visible = {name for name, value in vars(js).items() if not inspect.ismodule(value)}
    assert {name for name in visible if name[0] != "_"} <= set(js.__all__)


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", js.__version__)
    assert importlib.metadata.version("jaxspec-decoding") == js.__version__


def test_jaxspec_is_typed_and_depends_on_the_five_declared_libraries_only() -> None:
    assert (SOURCE / "py.typed").is_file()
    needs = importlib.metadata.requires("jaxspec-decoding") or []
    always = [need for need in needs if "extra" not in need]
    assert sorted(re.split(r"[^\w-]", need)[0] for need in always) == [
        "chex",
        "jax",
        "jaxlib",
        "numpy",
        "scipy",
    ]


def test_importing_the_package_loads_nothing_that_only_tests_and_plots_need() -> None:
    heavy = ["matplotlib", "nbclient", "nbformat", "IPython", "ipykernel", "pytest", "pandas"]
    heavy += ["jaxspec.audit", "jaxspec.models", "jaxspec.experiments", "jaxspec.bench"]
    code = f"import sys, jaxspec; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == "[]"


def imported(path: Path) -> set[str]:
    """Return the parts of the package that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names = [node.module or ""]
            if node.module == "jaxspec":
                parts = [alias.name for alias in node.names]
                names = [f"jaxspec.{part}" if part in LAYER_OF else "jaxspec" for part in parts]
        else:
            continue
        ours = [name for name in names if name.split(".")[0] == "jaxspec"]
        found |= {f"{name}.{THE_PACKAGE}".split(".")[1] for name in ours}
    return found


def test_imports_point_down() -> None:
    top = imported(SOURCE / "__init__.py")
    assert max(LAYER_OF[name] for name in top) <= LAYER_OF["verify"]
    for path in sorted(set(SOURCE.rglob("*.py")) - {SOURCE / "__init__.py"}):
        name = path.relative_to(SOURCE).with_suffix("").parts[0]
        assert name in LAYER_OF, f"{name} has no layer: give it one here and in the design"
        for other in imported(path) - {name}:
            if other == THE_PACKAGE:
                # It imports verification, so only the layers above that may import it.
                assert LAYER_OF[name] > LAYER_OF["verify"], f"{path} imports what imports it"
                continue
            assert LAYER_OF[other] <= LAYER_OF[name], f"{path} imports {other}"
            assert (name, other) not in INDEPENDENT, f"{path} imports {other}"


def sections(text: str) -> set[str]:
    return set(re.findall(r"^(\w+)\b.*:$", text, re.M))


def test_every_public_function_is_documented_with_its_arguments_and_results() -> None:
    for name in FUNCTIONS:
        text = inspect.getdoc(getattr(js, name)) or ""
        first, second = (*text.splitlines(), "")[:2]
        assert first.endswith("."), f"{name}: {first}"
        assert not second, name
        described = text.split("Args:")[1]
        for parameter in inspect.signature(getattr(js, name)).parameters:
            assert re.search(rf"^  \*?\*?{parameter}: ", described, re.M), f"{name}: {parameter}"
        is_result = sections(text) & {"Returns", "Raises", "Yields"}
        assert is_result or text.startswith("Return "), f"{name} does not document its result"


def test_every_public_class_is_documented_with_its_fields() -> None:
    for name in CLASSES:
        text = inspect.getdoc(getattr(js, name)) or ""
        first, second = (*text.splitlines(), "")[:2]
        assert first.endswith("."), f"{name}: {first}"
        assert not second, name
        cls = getattr(js, name)
        for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
            described = text.split("Attributes:")[1]
            assert re.search(rf"^  {field.name}: ", described, re.M), f"{name}.{field.name}"


def test_every_verifier_is_documented_with_its_guarantee_and_source() -> None:
    for name, rule in js.RULES.items():
        text = inspect.getdoc(rule.verify) or ""
        assert re.search(r"^Guarantee: lossless", text, re.M), name
        for section in ("Args:", "Returns:", "Raises:", "References:", ">>>"):
            assert section in text, (name, section)
        assert rule.name == name
        assert rule.source
        assert {rule.verify.__name__, rule.proposal.__name__} <= set(js.__all__)


def test_rules_cannot_be_changed_by_accident() -> None:
    with pytest.raises(TypeError):
        js.RULES["token"] = js.RULES["block"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        js.RULES["token"].name = "other"  # type: ignore[misc]


def test_a_rule_survives_a_pickle_as_what_it_is() -> None:
    for rule in js.RULES.values():
        assert pickle.loads(pickle.dumps(rule)) is rule
