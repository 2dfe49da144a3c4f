"""Notebooks are stored with their outputs, say on which images they run, and run from top to bottom."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import nbformat
import pytest

from tests.support.programs import python_path
from tools.notebooks import readable

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = (
    "01_first_federation",
    "02_compare_methods",
    "03_your_own_images",
    "04_evaluate_a_run",
    "05_add_a_method",
    "06_clinical_partner",
    "07_own_python_parts",
    "08_plan_a_segmentation",
)
_PICTURES = {
    "06_clinical_partner": 1,
    "05_add_a_method": 1,
    "02_compare_methods": 2,
    "08_plan_a_segmentation": 2,
}
"""Notebook -> how many figures it shows at least; the others show three."""

BLANK = "import pytest\n\nfrom tests.support.figures import leave_blank\n\nleave_blank(pytest.MonkeyPatch())"
"""A cell before the others, so that the pages of runs have blank figures; those that a notebook shows are drawn."""

SHORTER = (
    (r"\brounds=\d+", "rounds=2"),
    (r"\blocal_epochs=\d+", "local_epochs=1"),
    (r"\bseeds=\(0, 1, 2\)", "seeds=(0, 1)"),
)
"""What is changed in the cells before they run, so that each run takes seconds: their numbers, no call and no name."""


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", 4)


def test_the_notebooks_are_these() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)


def shown(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Return the kinds of what each cell shows: text, or a figure."""
    kinds = []
    for cell in readable(notebook).cells:
        outputs = cell.get("outputs", [])
        kinds.append(
            sorted({kind for output in outputs for kind in output.get("data", ["stream"])})
        )

    return kinds


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_what_it_showed_when_it_was_run(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    figures = [kinds for kinds in shown(notebook) if "image/png" in kinds]
    assert len(figures) >= _PICTURES.get(name, 3)
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text) < 500_000
    assert not re.search(r"/tmp/|/home/|/work/|/root/|site-packages|\"error\"", text)


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
    """In a shortened form; what is stored in it was shown by the whole one."""
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(
        "TMPDIR", str(tmp_path)
    )  # the kernel's temporary folders, and all that is written, go here
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.delenv("MEDFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "whole"))  # phantoms as a user has them
    notebook = read(name)
    for cell in notebook.cells:
        for pattern, shorter in SHORTER:
            if cell.cell_type == "code":
                cell.source = re.sub(pattern, shorter, cell.source)

    notebook.cells.insert(0, nbformat.v4.new_code_cell(BLANK))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the notebook server's parts, about each other
        client.NotebookClient(
            notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
    notebook.cells.pop(0)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    assert shown(notebook) == shown(read(name))
