"""The values of masks as class indices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from medfl.core import Array, InputError, listed

Values = Array
"""Values of pixels or voxels, or indices, of any whole or real type."""
Classes = int | Sequence[int]
"""How many classes masks have, by the values 0, 1, ...; or the values of the classes, ascending."""
ANY = 2**16  # what uint16 can tell apart
"""Classes of masks whose values are not known yet: each is its own index."""
_MOST_NAMED = 20  # values that an error lists
_ROUNDING = 1e-3  # 255 stored with the slope 1/255 is not quite 1


def class_indices(mask: str, voxels: Values, classes: Classes) -> Values:
    """Return the class index of each pixel or voxel, uint8, or uint16 of more than 256 classes.

    Args:
        mask: its file, for the error.
        voxels: its values (...), as read.
        classes: that it may have.

    Raises:
        InputError: it has other values.
    """
    allowed = "its labels are "
    with np.errstate(invalid="ignore"):  # NaN and infinity are no class
        values = voxels
        if voxels.dtype.kind == "f":
            rounded = np.rint(voxels)
            values = np.where(np.abs(voxels - rounded) <= _ROUNDING, rounded, voxels)

        # White is the foreground of two classes, whichever file format wrote it.
        if classes == 2 and ((values == 0) | (values == 255)).all():
            return (values > 0).astype(np.uint8)
        if isinstance(classes, int):
            allowed += f"the whole numbers 0 to {classes - 1}" + ", or 0 and 255" * (classes == 2)
            indices: Values = values.astype(_kind(classes))
            wrong = (indices != values) | (indices >= classes)
        else:
            allowed += listed([*map(str, classes)], _MOST_NAMED)
            class_values = np.array(classes)
            indices = np.searchsorted(class_values, values).clip(max=len(class_values) - 1)
            wrong = class_values[indices] != values
            indices = indices.astype(_kind(len(class_values)))

    if wrong.any():
        odd_values = [f"{value:g}" for value in np.unique(values[wrong]).tolist()]
        places = "voxels"
        if voxels.ndim == 2:
            places = "pixels"

        raise InputError(
            f"mask {mask} has the value{'s' * (len(odd_values) > 1)} {listed(odd_values)} "
            f"at {int(wrong.sum())} {places}",
            allowed,
            "relabel the mask, or remove the case",
        )

    return indices


def _kind(count: int) -> type[np.uint8 | np.uint16]:
    return np.uint8 if count <= 256 else np.uint16


def stored(indices: Values, values: Sequence[int], count: int) -> Values:
    """Return the values of class indices: uint8, or uint16 where one exceeds it; indices if not `count` are given."""
    if not values or len(values) != count:
        return indices

    return np.array(values, _kind(max(values) + 1))[indices]


def picture_values(count: int) -> Sequence[int]:
    """Return the values of so many classes in a picture: black and white where they are two."""
    return (0, 255) if count == 2 else range(count)


def check_classes(classes: Classes | None, most: int) -> None:
    """Raise an InputError if a configuration names fewer than two classes or more than `most`, or values twice."""
    values = [*range(classes)] if isinstance(classes, int) else [*(classes or ())]
    if not 2 <= len(values) <= most or values != sorted({*values}) or values[-1] >= ANY:
        raise InputError(
            f"classes={classes}",
            f"a number from 2 to {most}, the background among them, or as many values of masks, ascending",
            "give the number of values that masks have",
        )
