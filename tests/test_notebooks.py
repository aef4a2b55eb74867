"""The notebooks run from top to bottom, and are stored with the outputs that running them gives."""

import pathlib
import warnings

import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SIZE = 400_000
"""Most bytes of a notebook with its pictures."""

EXECUTE = "jupyter execute --inplace --NotebookClient.record_timing=False notebooks/*.ipynb"


def costs(path: pathlib.Path) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.networks,) if path.stem == "03_real_models" else ()


def outputs_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def pictures_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for output in outputs_of(notebook) if "image/png" in output.get("data", {})]


def text_of(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in outputs_of(notebook) if output.get("name") == "stdout")


def calls_of_show(notebook: nbformat.NotebookNode) -> int:
    return sum("plt.show()" in cell.source for cell in notebook.cells)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_outputs(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), f"run it again: {EXECUTE}"
    assert len(pictures_of(notebook)) == calls_of_show(notebook) > 0
    assert not [each for each in outputs_of(notebook) if each.get("name") == "stderr"]
    assert path.stat().st_size < SIZE


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=costs(path), id=path.stem) for path in NOTEBOOKS]
)
def test_a_notebook_runs_and_prints_what_is_stored(
    path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    stored = nbformat.read(path, as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the notebook machinery are not ours
        from nbclient import NotebookClient

        fresh = nbformat.read(path, as_version=4)
        client = NotebookClient(fresh, timeout=300, resources={"metadata": {"path": tmp_path}})
        client.execute()
    assert text_of(fresh) == text_of(stored), f"run it again: {EXECUTE}"
    assert len(pictures_of(fresh)) == calls_of_show(fresh)
