"""Medical image data sets: layouts, data lists, readers, checks and phantoms.

A data set is one module of this folder with a `DATASET`; it is found by being there.
"""

from __future__ import annotations

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
from medfl.datasets.readers.pairs import ReadPaird, WriteMaskd, read_pair
from medfl.datasets.readers.reading import ReadPixelsd, read_pixels
from medfl.datasets.readers.volumes import CheckPatchd, ReadVolumed

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
