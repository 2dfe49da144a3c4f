"""The components that a configuration may name: each `_target_` is a listed object of MONAI, PyTorch, ignite or medfl.

A dotted name is looked up in the namespace of one module, never by walking through attributes, and what is found has to
be a listed object, compared by identity however it was spelled. That object, not its name, is what is called later.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeGuard

from medfl.core.untrusted import Refused, printable
from medfl.policy.allowed import COMPONENTS, MONAI_COMPONENTS, TRANSFORMS

_HOMES = (
    "monai.transforms", "monai.losses", "monai.networks.nets", "monai.networks.schedulers", "monai.data",
    "monai.handlers", "monai.inferers", "monai.metrics", "monai.engines", "monai.optimizers", "monai.apps",
    "monai.apps.vista3d.transforms", "monai.apps.detection.utils.anchor_utils",
    "monai.apps.detection.transforms.array", "monai.apps.detection.transforms.dictionary",
    "monai.apps.generation.maisi.networks.autoencoderkl_maisi",
    "monai.apps.generation.maisi.networks.diffusion_model_unet_maisi",
    "monai.apps.generation.maisi.networks.controlnet_maisi",
)  # fmt: skip
"""Where MONAI hands out its components, in the order in which a short name is looked for."""
_BASES = {"torch.nn": "Module", "torch.optim": "Optimizer", "torch.optim.lr_scheduler": "LRScheduler"}
"""Modules of PyTorch of which every class with this base is listed."""
_TARGET = re.compile(r"[A-Za-z]\w*(\.[a-z_]\w*)*(\.[A-Za-z]\w*)?", re.ASCII)


def component(target: str) -> Callable[..., Any]:
    """Return the class or function that a `_target_` names.

    Raises:
        Refused: it is not on the list; nothing but the listed modules was imported to find out.
    """
    refused = Refused(f"_target_ {printable(target)!r}, which is not on the list")
    if not _TARGET.fullmatch(target) or "__" in target:
        raise refused
    short, listed = _listed()
    if "." not in target:
        if target not in short:
            raise refused
        return short[target]
    module, _, name = target.rpartition(".")
    found = listed.get(id(_in_module(module, name)))
    if found is None:
        raise refused
    return found


def torch_component(path: str) -> Callable[..., Any] | None:
    """Return the listed class of PyTorch or ignite at a path, which expressions may use too; None if it is none."""
    if path.partition(".")[0] not in ("torch", "ignite"):
        return None  # one of MONAI's may import what its first argument names
    try:
        return component(path)
    except Refused:
        return None


def _in_module(module: str, name: str) -> object:
    """Return what a loaded module of the listed packages calls by a name, None if there is none; imports nothing."""
    if module not in sys.modules or module.partition(".")[0] not in ("monai", "torch", "ignite", "medfl"):
        return None
    return vars(sys.modules[module]).get(name)


@cache
def _listed() -> tuple[dict[str, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return the components of MONAI by their short names, and all listed ones by identity."""
    short: dict[str, Callable[..., Any]] = {}
    identities: dict[int, Callable[..., Any]] = {}
    for home in _HOMES:
        module = importlib.import_module(home)
        for name in _monai_names():
            found = getattr(module, name, None)
            if _of_package(found, "monai"):
                short.setdefault(name, found)
                identities[id(found)] = found
    for path in COMPONENTS:
        module_name, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(module_name), name, None)
        if _of_package(found, path.partition(".")[0]):
            identities[id(found)] = found
    for module_name, base in _BASES.items():
        module = importlib.import_module(module_name)
        for found in vars(module).values():
            if inspect.isclass(found) and issubclass(found, getattr(module, base)) and _of_package(found, "torch"):
                identities[id(found)] = found
    return short, identities


def _monai_names() -> Iterator[str]:
    yield from MONAI_COMPONENTS
    for name in TRANSFORMS:
        yield from (name, f"{name}d", f"{name}D", f"{name}Dict")


def _of_package(found: object, package: str) -> TypeGuard[Callable[..., Any]]:
    kind = inspect.isclass(found) or inspect.isfunction(found)
    return kind and str(getattr(found, "__module__", "")).partition(".")[0] == package
