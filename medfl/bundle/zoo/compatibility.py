"""Bundles written for older MONAI and NumPy: safe and exact adaptations, and their names.

A run records the names of its adaptations (`Run.adapted`), and the user is told.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import monai.apps.detection.transforms.dictionary
import monai.networks.nets
import monai.transforms
import numpy as np
import torch
from torch import Tensor, nn

from medfl.core import without
from medfl.storage.pickled_arrays import STAND_INS

FLOAT_LABELS = "labels:float"
_EQUAL = """
    product=prod cumproduct=cumprod alltrue=all sometrue=any row_stack=vstack trapz=trapezoid
    round_=round float_=float64 complex_=complex128 unicode_=str_ string_=bytes_ bool8=bool_
    Inf=inf Infinity=inf infty=inf PINF=inf NaN=nan
"""
_SAME = dict(pair.split("=") for pair in _EQUAL.split())
"""Names that NumPy 2 removed, and their equivalents."""
_PYTHON: dict[str, type] = {"float": float, "int": int, "bool": bool}
"""Names that NumPy removed, and the Python built-ins that they were."""
_GONE = {
    old: vars(np)[new] for old, new in _SAME.items() if old not in vars(np) and new in vars(np)
}
_GONE |= without(_PYTHON, vars(np))
# (?!) matches nothing, where NumPy has all names still
_USES = re.compile(rf"\b(?:np|numpy)\.({'|'.join(_GONE) or '(?!)'})\b")
_CHECKED_ONLY = {"SwinUNETR": {"img_size"}}
"""Arguments of networks that were only validated, and later removed."""
_PADDING = {"constant_values", "value", "end_values", "stat_length", "reflect_type"}
"""Arguments that a zoom may pass on to padding; any other fails when it pads, and is otherwise ignored."""
_MONAI = {"_target_", "_requires_", "_disabled_", "_desc_", "_mode_"}


def give_numpy_names(texts: Iterable[str]) -> set[str]:
    """Restore the NumPy names used in these texts that have an equivalent; return what was done."""
    names = set().union(*map(_USES.findall, texts))
    for name in names:
        setattr(np, name, _GONE[name])
    return {f"numpy.{name}" for name in names}


def python_texts(root: Path) -> list[str]:
    """Return the text of a bundle's own Python files."""
    paths = (*root.glob("*.py"), *root.glob("*/**/*.py"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def arrays_in_pickles() -> AbstractContextManager[None]:
    """Return a context in which `torch.load` reads NumPy arrays and numbers beside tensors, and still no code."""
    return torch.serialization.safe_globals(
        [(stand_in, name) for name, stand_in in STAND_INS.items()]
    )


def idle_arguments(target: str, arguments: Iterable[str]) -> set[str]:
    """Return a component's arguments that this MONAI lacks and without which it behaves the same."""
    if target in _CHECKED_ONLY:
        parameters = inspect.signature(getattr(monai.networks.nets, target)).parameters
        return set(arguments) & _CHECKED_ONLY[target] - parameters.keys()

    if zooming := re.fullmatch(r"(Rand)?Zoom(Box)?(d|D|Dict)?", target):
        if zooming[2]:
            home: ModuleType = monai.apps.detection.transforms.dictionary
        else:
            home = monai.transforms

        parameters = inspect.signature(getattr(home, target)).parameters
        return set(arguments) - parameters.keys() - _PADDING - _MONAI

    return set()


def with_float_labels(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss that receives boolean labels, or a byte per output, as 1.0 and 0.0."""

    def cast_to_float(prediction: Any, target: Any) -> Tensor:
        """Return the loss with the labels as floats."""
        # bytes of another shape are class indices
        is_mask = target.dtype == torch.uint8 and target.shape == getattr(prediction, "shape", None)
        if is_mask or target.dtype == torch.bool:
            target = target.float()

        return loss(prediction, target)

    return cast_to_float


@torch.no_grad()
def needs_float_labels(loss: object, device: torch.device) -> bool:
    """Tell whether a PyTorch-style loss fails on boolean labels but not on 1.0 and 0.0."""
    if not isinstance(loss, nn.Module):
        return False

    output = torch.zeros(1, 2, 4, 4, device=device)
    with suppress(Exception):  # it may expect other shapes
        try:
            loss(output, output > 0)
        except RuntimeError:
            loss(output, output)
            return True

    return False


def said(name: str) -> str:
    """Describe an adaptation by its name in `Run.adapted`."""
    subject, _, detail = name.partition(".")
    if name == FLOAT_LABELS:
        return "its loss gets labels that are true or false, or bytes, as 1.0 and 0.0, as this MONAI needs"

    if subject == "numpy":
        if detail in _PYTHON:
            now = f"is Python's {detail}"
        else:
            now = f"this NumPy calls {_SAME[detail]}"

        return f"it uses numpy.{detail}, which {now}; it gets that"

    if ":" in name:
        return "{} of it is made as {}, which does the same in this MONAI".format(*name.split(":"))

    return f"{subject} is made without {detail!r}, which this MONAI does not have and which sets nothing"
