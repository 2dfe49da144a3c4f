"""Run the notebooks and keep what they show, so that they can be read where nothing runs.

    python tools/notebooks.py [FILE ...]

Progress and warnings are left out, temporary folders have no machine's name.
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
_TEMPORARY = re.compile(r"[^\s'\"<>:(]*/(medfl-notebook)-\w+")


def readable(notebook: Any) -> Any:
    """Return a notebook with outputs that name no machine and no time."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue

        cell.execution_count = None
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = None
            if output.output_type == "stream":
                output.text = _TEMPORARY.sub(r"\1", output.text)
            for kind, content in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = _TEMPORARY.sub(r"\1", content)

    return notebook


def main(files: list[str]) -> None:
    """Run the notebooks, one after the other."""
    warnings.simplefilter("ignore")  # of the notebook server's parts, about each other
    for path in map(Path, files or sorted(map(str, FOLDER.glob("*.ipynb")))):
        notebook = nbformat.read(path, 4)
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=1800, resources=resources).execute()

        nbformat.write(readable(notebook), path)
        print(f"{path.name}: written", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
