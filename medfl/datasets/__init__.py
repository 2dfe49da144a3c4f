"""Medical image data sets: layouts, data lists, readers, checks and phantoms.

A data set is one module of this folder with a `DATASET`, and its sheet in `sheets/`; it is found by being there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medfl.datasets.base import (
    DataSet,
    Download,
    Item,
    checksum,
    datalist,
    get,
    is_phantom,
    locate,
    names,
    notes,
    sections,
    splits,
    trial,
)
from medfl.datasets.phantoms.phantom import write_phantom
from medfl.datasets.readers.checking import CheckReport, check
from medfl.datasets.readers.pairs import read_pair
from medfl.datasets.readers.reading import read_pixels

if TYPE_CHECKING:
    from medfl.datasets.readers.transforms import (
        CheckPatchd,
        ReadPaird,
        ReadPixelsd,
        ReadVolumed,
        WriteMaskd,
    )

__all__ = [
    "CheckPatchd",
    "CheckReport",
    "DataSet",
    "Download",
    "Item",
    "ReadPaird",
    "ReadPixelsd",
    "ReadVolumed",
    "WriteMaskd",
    "check",
    "checksum",
    "datalist",
    "get",
    "is_phantom",
    "locate",
    "names",
    "notes",
    "read_pair",
    "read_pixels",
    "sections",
    "splits",
    "trial",
    "write_phantom",
]


def __getattr__(name: str) -> Any:
    """Import a transform when it is first used: MONAI takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from medfl.datasets.readers import transforms

    return globals().setdefault(name, getattr(transforms, name))
