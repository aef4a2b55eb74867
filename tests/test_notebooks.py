"""The notebooks run from top to bottom, and are committed without what running them leaves."""

import pathlib
import warnings

import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


def costs(path: pathlib.Path) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.networks,) if path.stem == "03_real_models" else ()


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=costs(path), id=path.stem) for path in NOTEBOOKS]
)
def test_a_notebook_runs_and_draws_its_plots(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the notebook machinery are not ours
        from nbclient import NotebookClient

        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}})
        client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    plots = [output for output in outputs if "image/png" in output.get("data", {})]
    shown = sum("plt.show()" in cell.source for cell in notebook.cells)
    assert len(plots) == shown > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs"), f"clear the outputs of {path.name} before committing"
        assert cell.get("execution_count") is None
