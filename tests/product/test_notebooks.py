"""Notebooks are stored without outputs, say on which images they run, and run from top to bottom."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import nbformat
import pytest

from tests.support.programs import python_path

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = (
    "01_first_federation",
    "02_compare_methods",
    "03_your_own_images",
    "04_evaluate_a_run",
    "05_add_a_method",
    "06_clinical_partner",
    "07_own_python_parts",
)
_PICTURES = {"06_clinical_partner": 1, "05_add_a_method": 1, "02_compare_methods": 2}
"""Notebook -> how many figures it shows at least; the others show three."""

BLANK = "import pytest\n\nfrom tests.support.figures import leave_blank\n\nleave_blank(pytest.MonkeyPatch())"
"""A cell before the others, so that the pages of runs have blank figures; those that a notebook shows are drawn."""


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", 4)


def test_the_notebooks_are_these() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_stored_without_outputs(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code)
    assert all(cell.execution_count is None for cell in code)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_says_on_which_images_it_runs_and_names_no_machine(name: str) -> None:
    notebook = read(name)
    first = notebook.cells[0].source
    assert first.startswith("# ")
    assert re.search("phantom|drawn", first, re.IGNORECASE)
    assert "offline" in first
    everything = "\n".join(cell.source for cell in notebook.cells)
    assert not re.search(r"/home/|/work/|/Users/|https?://", everything)
    assert max(len(line) for line in everything.splitlines()) <= 140


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(
        "TMPDIR", str(tmp_path)
    )  # the kernel's temporary folders, and all that is written, go here
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.delenv("MEDFL_DATA", raising=False)
    notebook = read(name)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BLANK))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the notebook server's parts, about each other
        client.NotebookClient(
            notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) >= _PICTURES.get(name, 3)
