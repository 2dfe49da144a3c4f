"""Pictures of a run: PNG files with embedded title and caption, how they are drawn, and which a report shows."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from medfl.core import Bytes, Document, InputError, Refused, read_bytes
from medfl.data.partition.table import shorten
from medfl.report.style import INK, SOFT
from medfl.storage import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Colour: TypeAlias = str | tuple[float, float, float, float]
"""A colour in matplotlib's format."""

# Inches, and dots an inch, of a plot: twice the pixels of a column of the report.
WIDTH = 4.8
_DPI = 200
LETTER = 0.085  # inches per letter
ENTRY = 28  # letters of a legend's entry; two fit beside each other
_THUMBNAIL = 256  # maximum pixels of the longer side of a single image
_MOST_BYTES = 1 << 26  # of a file that is read
_COLUMNS = 2  # of a legend
_ROWS = 6  # of a legend; more make the figure higher
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # names of classes and sites may contain a dollar sign
    "font.size": 10,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


@dataclass(frozen=True)
class Picture:
    """A picture; its title and caption are stored inside the PNG file.

    Attributes:
        name: file name without extension.
        png: the file.
        title: what it shows, in one line.
        caption: how to read it.
        mark: of its content, by which pictures are sorted or recognised as unchanged.
    """

    name: str
    png: bytes
    title: str
    caption: str
    mark: str = ""

    @classmethod
    def read(cls, path: Path) -> Picture:
        """Read a picture written by medfl, or put into a run's folder by somebody to be shown.

        Raises:
            OSError: it cannot be read, is a link, or is not a complete PNG file.
        """
        if path.is_symlink() or path.parent.is_symlink():
            raise OSError(f"{path.name} is a link, and a report shows a run's own pictures")

        try:
            png = read_bytes(path, _MOST_BYTES)
            # no other format: Pillow's other readers are an attack surface for crafted files
            with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
                image.load()
                texts = dict(getattr(image, "text", {}))
        # Pillow's exception depends on what is damaged
        except (Refused, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise OSError(f"{path.name} is no whole PNG file") from error

        return cls(
            name=path.stem,
            png=png,
            title=str(texts.get("Title", path.stem)),
            caption=str(texts.get("Description", "")),
            mark=str(texts.get("Mark", "")),
        )

    @property
    def pixels(self) -> Bytes:
        """The picture as (H, W, 3)."""
        with Image.open(io.BytesIO(self.png)) as image:
            return np.asarray(image.convert("RGB"))

    @property
    def embedded(self) -> tuple[str, str, str]:
        """Title, caption and the file in base64, for a page."""
        return self.title, self.caption, base64.b64encode(self.png).decode()


def image_picture(name: str, image: Floats, title: str, caption: str) -> Picture:
    """Return one image, (H, W) or (H, W, 3) in 0 to 1, as a picture; a large one is downsized."""
    texts = PngInfo()
    file = io.BytesIO()
    for key, text in (("Title", title), ("Description", caption), ("Mark", "")):
        texts.add_itxt(key, text)

    thumbnail = Image.fromarray((255 * np.nan_to_num(image).clip(0, 1)).round().astype(np.uint8))
    thumbnail.thumbnail((_THUMBNAIL, _THUMBNAIL))
    thumbnail.save(file, format="png", pnginfo=texts)
    return Picture(name, file.getvalue(), title, caption)


def plot(
    name: str,
    title: str,
    caption: str,
    draw: Callable[[Figure, Axes], None],
    height: float,
    mark: str = "",
) -> Picture:
    """Return a picture with one axes below its title, filled by `draw`; its height is in inches."""

    def fill(figure: Figure) -> None:
        draw(figure, figure.subplots())

    return render(name, title, caption, (WIDTH, height), fill, mark=mark, layout="compressed")


def render(
    name: str,
    title: str,
    caption: str,
    size: tuple[float, float],
    fill: Callable[[Figure], None],
    *,
    dpi: int = _DPI,
    mark: str = "",
    layout: Literal["compressed", "constrained"] | None = None,
) -> Picture:
    """Return a picture of this size in inches, drawn by `fill`, below its title if matplotlib has to lay it out."""
    import matplotlib as mpl  # imported here: it takes longer than most commands
    from matplotlib.figure import Figure

    file = io.BytesIO()
    entries = {"Title": title, "Description": caption, "Mark": mark}
    texts: dict[str, str | None] = {name: text for name, text in entries.items() if text}
    texts["Software"] = None  # otherwise matplotlib's version would be in the file

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, dpi=dpi, facecolor="white", layout=layout)  # not pyplot's
        if layout is not None:
            figure.suptitle(title, size=11, weight="bold", color=INK)

        fill(figure)
        figure.savefig(file, format="png", metadata=texts)

    return Picture(name, file.getvalue(), title, caption, mark)


def require_png(file: Path, flag: str) -> None:
    """Raise an InputError if the file that a flag names does not end in .png."""
    if file.suffix.lower() != ".png":
        raise InputError(
            f"{flag} {file}", f"the {flag[2:]} are a PNG file", f"give {file.with_suffix('.png')}"
        )


def write_png(picture: Picture, file: Path) -> Path:
    """Write a picture and return its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, picture.png)
    return file


def slant(degrees: float) -> Document:
    """Return the style of labels below an axis, rotated by this angle."""
    return {"rotation": degrees, "ha": "right", "rotation_mode": "anchor"}


def colours(count: int) -> list[Colour]:
    """Return distinct colours, for up to ten those of matplotlib's own cycle."""
    import matplotlib as mpl

    if count <= 10:
        return list(map(mpl.colormaps["tab10"], range(count)))
    return [mpl.colormaps["turbo"](index / (count - 1)) for index in range(count)]


def add_legend(
    figure: Figure, entries: Sequence[tuple[Colour, str]], synthetic: bool = False, title: str = ""
) -> None:
    """Add a legend below: a colour for each entry and, with `synthetic`, the markers of real and generated items."""
    from matplotlib.lines import Line2D

    def handle(colour: Colour, marker: str, text: str) -> Line2D:
        return Line2D([], [], linestyle="", marker=marker, color=colour, label=text, markersize=7)

    handles = [handle(colour, "o", shorten(text, ENTRY)) for colour, text in entries]
    if synthetic:
        handles += [handle(SOFT, "o", "test items"), handle(SOFT, "^", "generated")]

    extra_rows = max(0, (len(handles) + 1) // _COLUMNS - _ROWS)
    # otherwise a long legend would take the axes' space
    figure.set_figheight(figure.get_figheight() + 0.2 * extra_rows)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=_COLUMNS,
        title=title or None,
        title_fontproperties={"size": 9},
        columnspacing=1.2,
        handletextpad=0.2,
    )


# Which pictures in a run folder its report shows, and in which order.

WORST = 12
"""Number of the judged model's worst test images that a run keeps."""
_FEATURES = ("features-pca", "features-tsne", "spectrum")
_MAX_GRIDS = 4  # grids of generated images
_MAX_MASK_SITES = 6  # sites with segmented cases
T = TypeVar("T")


def grid_name(round_: int) -> str:
    """Return the name of the grid of images that were generated after a round."""
    return f"generated-{round_:04d}"


def generated_grids(folder: Path) -> list[Path]:
    """Return the grids of generated images in a run folder, by round."""
    # by length first: rounds from 10,000 on have one more digit
    return sorted(
        (folder / "pictures").glob("generated-[0-9]*.png"),
        key=lambda path: (len(path.stem), path.stem),
    )


def model_pictures(folder: Path) -> tuple[list[Picture], int]:
    """Read the pictures of text embeddings, generated images and features.

    Returns:
        The pictures, and how many more grids of generated images the folder has.

    Raises:
        OSError: a picture cannot be read.
    """
    grids = generated_grids(folder)
    shown = _spaced(grids, _MAX_GRIDS)
    features = [folder / "pictures" / f"{name}.png" for name in _FEATURES]
    paths = [folder / "pictures" / "text-embeddings.png", *shown, *features]
    pictures = [Picture.read(path) for path in paths if path.is_file()]
    return pictures, len(grids) - len(shown)


def mask_pictures(folder: Path) -> tuple[list[Picture], int]:
    """Read the strips of Dice and the pictures of segmented cases, for sites from the worst to the best.

    Returns:
        The pictures, and how many more sites have cases.

    Raises:
        OSError: a picture cannot be read.
        ValueError: a picture's mark is not a number.
    """
    strips = _read_all(folder, "dice*.png")
    sites = _read_all(folder, "masks-*.png")
    # the mark is the site's median Dice
    shown = _spaced(sorted(sites, key=lambda picture: float(picture.mark or 0)), _MAX_MASK_SITES)
    return [*strips, *shown], len(sites) - len(shown)


def worst_images(folder: Path) -> list[Picture]:
    """Read the images of the worst classified test cases, worst first.

    Raises:
        OSError: one cannot be read.
    """
    return _read_all(folder, "worst-[0-9]*.png")


def _read_all(folder: Path, pattern: str) -> list[Picture]:
    return list(map(Picture.read, sorted((folder / "pictures").glob(pattern))))


def _spaced(entries: Sequence[T], count: int) -> Sequence[T]:
    """Return at most `count` equally spaced entries, including the first and the last."""
    last = len(entries) - 1
    if len(entries) > count:
        return [entries[i * last // (count - 1)] for i in range(count)]

    return entries
