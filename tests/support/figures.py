"""Blank figures: a run's page and pictures are there, but with nothing on them, where no test looks at them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

WHOLE_RUNS = {
    "benchmarks", "bundle", "cli", "compare", "export", "flare", "product", "runs", "runtimes", "training", "zoo",
}  # fmt: skip
"""Folders whose tests run federations."""

RENDERED = {
    "cli/test_report.py", "compare/test_curves.py", "compare/test_gains.py", "compare/test_side_by_side.py",
    "product/test_deploy.py", "product/test_docs.py", "runtimes/test_overlays.py", "runtimes/test_pictures.py",
}  # fmt: skip
"""Files in them whose figures are rendered; those of report/ and partner/ are too."""

DRAWN = {"product/test_docs_commands.py", "runs/test_launch.py", "zoo/test_federated.py"}
"""Files whose runs draw all that they have to draw, but do not render it: no run's data make the drawing fail."""

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><g/></svg>'


def are_blank(path: Path) -> bool:
    """Tell whether the figures of a test file are left blank."""
    return _name(path).partition("/")[0] in WHOLE_RUNS and _name(path) not in RENDERED


def _name(path: Path) -> str:
    return path.as_posix().rpartition("tests/")[2]


def leave_blank(patch: pytest.MonkeyPatch, path: Path | None = None) -> None:
    """Let matplotlib's figures be saved as a pixel, with the same words in them; most of a run are not even drawn."""
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    from medfl.report import charts, partition_plot

    rendered = Figure.savefig

    def savefig(self: Figure, file: str | Path | IO[Any], **given: Any) -> None:
        form = given.get("format") or Path(str(file)).suffix[1:]
        if form == "svg" and isinstance(file, io.StringIO):
            file.write(SVG)
        elif form == "png":
            words = PngInfo()
            for key, word in (given.get("metadata") or {}).items():
                if word is not None:
                    words.add_itxt(key, word)
            Image.new("L", (1, 1)).save(file, "png", pnginfo=words)
        else:
            rendered(self, file, **given)

    def plot(*given: Any) -> None:
        Figure().savefig(given[-1])

    patch.setattr(Figure, "savefig", savefig)
    if path is None or _name(path) not in DRAWN:
        patch.setattr(TSNE, "fit_transform", lambda _, points: points[:, :2])
        patch.setattr(charts, "_svg", lambda draw, label, *_: charts._inline(SVG, label))
        patch.setattr(partition_plot, "plot", plot)
