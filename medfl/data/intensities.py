"""The intensity scaling in a bundle's transforms: the values to which it maps a picture's black and white."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from monai.transforms import Compose

from medfl.core import Constants, InputError

_KEEPING = tuple(f"monai.transforms.{room}." for room in ("io", "spatial", "croppad", "utility"))
_CHANGING = ("Lambda", "Add", "Histogram")


def constants(steps: Sequence[Any]) -> Constants:
    """Return mean and standard deviation with which the transforms normalise a picture with values 0 to 1.

    Random transforms are ignored.

    Raises:
        InputError: they scale each image by its own values, or by something unreadable; names the transform.
    """
    mean: Any = None
    sd: Any = None
    for step in Compose([*steps]).flatten().transforms:  # type: ignore[no-untyped-call]
        if "image" not in getattr(step, "keys", ("image",)):
            continue

        by = getattr(step, "scaler", getattr(step, "normalizer", step))
        kind = type(by).__name__
        if kind == "ScaleIntensityRange" and by.b_min is not None and by.b_max is not None:
            # From x to b_min + x (b_max - b_min), written as (x - mean) / sd.
            mean = -np.float64(by.b_min) / (by.b_max - by.b_min)
            sd = 1 / np.float64(by.b_max - by.b_min)
        elif kind == "ScaleIntensity" and by.factor is None and not by.channel_wise:
            mean = -np.float64(by.minv) / (by.maxv - by.minv)
            sd = 1 / np.float64(by.maxv - by.minv)
        elif (
            kind == "NormalizeIntensity"
            and None not in (by.subtrahend, by.divisor, mean)
            and not by.nonzero
        ):
            # Of ((x - mean) / sd - subtrahend) / divisor.
            mean = mean + sd * np.asarray(by.subtrahend, float).reshape(-1)
            sd = sd * np.asarray(by.divisor, float).reshape(-1)
        elif not _keeps(by):
            raise _unread(f"transform {type(step).__name__}")

    if mean is None:
        raise _unread("transforms without one that scales to a range")

    mean, sd = np.broadcast_arrays(np.atleast_1d(mean) + 0.0, np.atleast_1d(sd))
    if not (np.isfinite(mean).all() and np.isfinite(sd).all() and (sd != 0).all()):
        raise _unread(f"a mean of {mean.tolist()} and a standard deviation of {sd.tolist()}")

    return tuple(mean.tolist()), tuple(sd.tolist())


def _keeps(step: Any) -> bool:
    """Tell whether a transform keeps intensities, or is random."""
    name = type(step).__name__
    module = type(step).__module__
    if name.startswith("Rand") or module.startswith("medfl.datasets"):
        return True
    return module.startswith(_KEEPING) and not name.startswith(_CHANGING)


def _unread(what: str) -> InputError:
    return InputError(
        what,
        "constants of the images' intensities are read from ScaleIntensityRanged, ScaleIntensityd and "
        "NormalizeIntensityd with a subtrahend and a divisor",
        "say which they are with --set normalise=MEAN/SD, for example 0.5/0.25",
    )
