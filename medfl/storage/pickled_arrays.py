"""NumPy arrays and numbers in third-party pickles, rebuilt from type, shape and bytes.

NumPy trusts what a pickle says about a type: one that claims not to hold objects turns the file's bytes into pointers.
So the replacements here accept plain numbers only, and leave nothing else for a pickle to change.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_KIND = re.compile(r"[biufc?][0-9]{0,2}|[?bBhHiIlLqQefdFD]", re.ASCII)


class PickledType:
    """Replaces `numpy.dtype`: a type of number and its byte order."""

    def __init__(self, kind: Any, *_: Any) -> None:
        """Store the type, e.g. `f4`; UnpicklingError for anything but a type of number."""
        if not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise pickle.UnpicklingError("it holds an array of other things than numbers")
        self.dtype = np.dtype(kind)

    def __setstate__(self, state: Any) -> None:
        """Set the byte order from a state; its other entries concern types that are not numbers."""
        order = ""
        if isinstance(state, tuple) and len(state) > 1:
            order = state[1]

        if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("it holds an array of other things than numbers")
        self.dtype = self.dtype.newbyteorder(order)  # type: ignore[arg-type]  # one of the four above


class PickledArray(np.ndarray[Any, Any]):
    """Replaces `numpy.ndarray` and the function that creates an empty one: its state alone gives the contents."""

    def __new__(cls, *_: Any) -> PickledArray:
        """Return an empty array, whatever is requested."""
        return super().__new__(cls, (0,), np.uint8)

    def __setstate__(self, state: Any) -> None:  # type: ignore[override]  # what a pickle gives, of any type
        """Set shape, type, order and bytes; UnpicklingError if they do not fit together."""
        shape, kind, by_columns, data = state[-4:] if isinstance(state, tuple) else (None,) * 4
        if isinstance(data, str):
            data = data.encode("latin1")

        sides = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
        if not (sides and isinstance(kind, PickledType) and isinstance(data, bytes)):
            raise pickle.UnpicklingError("it holds an array that is not described as NumPy does it")
        if math.prod(shape) * kind.dtype.itemsize != len(data):
            raise pickle.UnpicklingError("it holds an array of another size than it says")

        super().__setstate__((1, shape, kind.dtype, bool(by_columns), data))  # type: ignore[arg-type]  # asks for np.bool


def number(kind: Any, data: Any) -> Any:
    """Return a NumPy number from its type and bytes; UnpicklingError if they are invalid."""
    if (
        not isinstance(kind, PickledType)
        or not isinstance(data, bytes)
        or len(data) != kind.dtype.itemsize
    ):
        raise pickle.UnpicklingError("it holds a number that is not described as NumPy does it")
    return np.frombuffer(data, kind.dtype)[0]


def latin1(text: str, *_: Any) -> bytes:
    """Return bytes that a pickle of protocol 2 stores as text."""
    return text.encode("latin1")


STAND_INS: Mapping[str, Any] = {
    "numpy.ndarray": PickledArray,
    "numpy.dtype": PickledType,
    **{f"numpy.{core}.multiarray._reconstruct": PickledArray for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": number for core in ("core", "_core")},
}
"""Name in a pickle -> its replacement."""
