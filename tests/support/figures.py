"""Blank figures: a run's page and pictures are there, but with nothing on them, where no test looks at them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

WHOLE_RUNS = {
    "benchmarks", "bundle", "cli", "compare", "export", "flare", "policy", "problem", "product", "runs", "runtimes",
    "starter", "storage", "tools", "training", "zoo",
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

    from medfl.report import overlays, picture, site_chart, templating

    # half a second, which each run of a comparison would take in a process of its own
    pages = templating._environment()
    for name in pages.list_templates():
        pages.get_template(name)

    rendered = Figure.savefig

    def savefig(self: Figure, file: str | Path | IO[Any], **given: Any) -> None:
        form = given.get("format") or Path(str(file)).suffix[1:]
        if form == "svg" and isinstance(file, io.StringIO):
            file.write(SVG)
        elif form == "png":
            save_pixel(file, given.get("metadata") or {})
        else:
            rendered(self, file, **given)

    def plot(*given: Any) -> None:
        Figure().savefig(given[-1])

    def render(
        name: str, title: str, caption: str, *_: Any, mark: str = "", **__: Any
    ) -> picture.Picture:
        file = io.BytesIO()
        save_pixel(file, {"Title": title, "Description": caption, "Mark": mark})
        return picture.Picture(name, file.getvalue(), title, caption, mark)

    patch.setattr(Figure, "savefig", savefig)
    if path is None or _name(path) not in DRAWN:
        patch.setattr(TSNE, "fit_transform", lambda _, points: points[:, :2])
        blank_charts(patch)
        patch.setattr(site_chart, "plot", plot)
        for module in (picture, overlays):
            patch.setattr(module, "render", render)


def save_pixel(file: str | Path | IO[Any], metadata: Mapping[str, str | None]) -> None:
    """Save a pixel with the words that a picture has."""
    words = PngInfo()
    for key, word in metadata.items():
        if word:
            words.add_itxt(key, word)
    Image.new("L", (1, 1)).save(file, "png", pnginfo=words)


def blank_charts(patch: pytest.MonkeyPatch) -> None:
    """Let the charts of a page have their labels but nothing drawn."""
    from medfl.report import charts

    patch.setattr(charts, "_svg", lambda draw, label, *_: charts._inline(SVG, label))
