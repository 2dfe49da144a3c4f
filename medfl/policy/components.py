"""The components that a configuration may name: each `_target_` is a listed object of MONAI, PyTorch, ignite or medfl.

A dotted name is looked up in the namespace of one module, never by walking through attributes, and what is found has to
be a listed object, compared by identity however it was spelled. That object, not its name, is what is called later.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import EnumMeta
from functools import cache
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from medfl.core.untrusted import Refused, printable
from medfl.policy.allowed import (
    COMPONENTS,
    LOADS_WEIGHTS,
    MONAI_COMPONENTS,
    TRANSFORMS,
    TRUST_INDICES,
    WRITERS,
    why_argument_refused,
    why_component_refused,
    without_ending,
)
from medfl.policy.allowed_in_expressions import TORCH_FUNCTIONS

_HOMES = (
    "monai.transforms", "monai.losses", "monai.networks.nets", "monai.networks.schedulers", "monai.data",
    "monai.handlers", "monai.inferers", "monai.metrics", "monai.engines", "monai.optimizers", "monai.apps",
    "monai.apps.vista3d.transforms", "monai.apps.detection.utils.anchor_utils",
    "monai.apps.detection.transforms.array", "monai.apps.detection.transforms.dictionary",
    "monai.apps.detection.networks.retinanet_network", "monai.apps.detection.metrics.coco",
    "monai.apps.deepedit.interaction", "monai.apps.deepgrow.interaction",
    "monai.apps.generation.maisi.networks.autoencoderkl_maisi",
    "monai.apps.generation.maisi.networks.diffusion_model_unet_maisi",
    "monai.apps.generation.maisi.networks.controlnet_maisi",
)  # fmt: skip
"""Where MONAI hands out its components, in the order in which a short name is looked for."""
_APPS = (
    "monai.apps.deepedit.", "monai.apps.deepgrow.", "monai.apps.detection.", "monai.apps.nuclick.",
    "monai.apps.pathology.", "monai.apps.vista3d.", "monai.networks.blocks.",
)  # fmt: skip
"""Applications and blocks of MONAI of which every transform, network and inferer is listed."""
_IN_EXPRESSIONS = (
    "torch.", "ignite.", "monai.networks.", "monai.losses.", "monai.metrics.", "monai.inferers.", "monai.transforms.",
    "monai.apps.",
)  # fmt: skip
"""Where components lie that expressions may make too."""
_LOADERS = frozenset({"DataLoader", "ThreadDataLoader"})
"""They start processes."""
_PACKAGES = ("monai", "torch", "torchvision", "numpy", "ignite", "medfl")
UNFILLED = ("Tensor", "FloatTensor", "LongTensor")
"""What PyTorch makes of values, or of a size in memory that it does not fill."""
_TYPED = (
    "arange",
    "array",
    "asarray",
    "astype",
    "full",
    "linspace",
    "ones",
    "type",
    "view",
    "zeros",
)
"""What takes a dtype at any place: each of its arguments could be one."""
_LONGEST = 200  # characters of a target
_TARGET = re.compile(r"[A-Za-z]\w*(\.[a-z_]\w*)*(\.[A-Za-z]\w*)?", re.ASCII)


def component(target: str) -> Callable[..., Any]:
    """Return the class or function that a `_target_` names.

    Raises:
        Refused: it is not on the list; nothing but the listed modules was imported to find out.
    """
    refused = Refused(f"_target_ {printable(target)!r}, which is not on the list")
    if len(target) > _LONGEST or not _TARGET.fullmatch(target) or "__" in target:
        raise refused

    short, listed = _listed()
    if "." not in target:
        if target not in short:
            raise refused
        return short[target]

    module, _, name = target.rpartition(".")
    member = listed.get(id(_in_module(module, name)))
    if member is None:
        package = module.partition(".")[0]
        if package in _PACKAGES and importlib.util.find_spec(package) is None:
            raise Refused(f"_target_ {printable(target)!r} of {package}, which is not installed")
        raise refused

    return member


def for_expressions(path: str) -> object:
    """Return the listed component, or the member of one of MONAI's enumerations, at a path; None if it is none."""
    module, _, name = path.rpartition(".")
    # Of `a.b.C.D` the enumeration is `C`, in the module `a.b`.
    enumeration = _in_module(*module.rpartition(".")[::2])
    if isinstance(enumeration, EnumMeta) and enumeration.__module__.startswith("monai.utils."):
        return enumeration.__members__.get(name)
    if _is_plain_function(module, name):
        return _in_module(module, name)

    try:
        member = component(path)
    except Refused:
        return None

    listed = member.__module__.startswith(_IN_EXPRESSIONS) and name not in LOADS_WEIGHTS | _LOADERS
    if listed and not is_never_made(member):
        return member

    return None


def is_listed(member: object) -> bool:
    """Tell whether a class or function is a listed component, by its identity."""
    return id(member) in _listed()[1]


def is_never_made(member: Callable[..., Any]) -> bool:
    """Tell whether a component writes files, or is a handler of a trainer's events: they load, save and set others."""
    from ignite.metrics import Metric

    if without_ending(member.__name__) in WRITERS:
        return True
    is_metric = inspect.isclass(member) and issubclass(member, Metric)
    return member.__module__.startswith(("monai.handlers.", "ignite.handlers.")) and not is_metric


def _is_plain_function(module: str, name: str) -> bool:
    """Tell whether this is a listed function of PyTorch, or one of NumPy's for each element, in C."""
    if module == "numpy":
        return isinstance(_in_module(module, name), np.ufunc)
    # PyTorch's own of this name, and nothing that was put in its place.
    listed = module == "torch" and name in TORCH_FUNCTIONS
    return listed and _in_module(module, name) is getattr(torch._C._VariableFunctions, name, module)


def _makes_objects(value: object) -> bool:
    """Tell whether an array of this type, however it is spelled, would hold Python's objects, or unfilled memory."""
    if value is None or value is ...:
        return False
    try:
        kind = np.dtype(value)  # type: ignore[call-overload]
        # g and G are long doubles, with bytes that nothing fills.
        return bool(kind.hasobject or kind.names or kind.char in "gG")
    except (TypeError, ValueError, SyntaxError):
        return False


def _are_numbers(arguments: Sequence[Any], named: Mapping[str, object]) -> bool:
    """Tell whether a tensor is made of numbers in a row, or of what is not known yet, and not of sizes."""
    if named or len(arguments) != 1 or isinstance(arguments[0], torch.Size):
        return False
    return arguments[0] is ... or np.ndim(arguments[0]) > 0


def check_arguments(
    function: Any,
    arguments: Sequence[object],
    named: Mapping[str, object],
    *,
    unpickles: bool = False,
) -> dict[str, object]:
    """Check what a function or component is called with, and return it by name; `...` is what is not known yet.

    `unpickles` is for `torch.load`, which is reached with its permission only.

    Raises:
        Refused: an argument has a meaning of its own and may not have this value.
    """
    called = getattr(function, "__name__", "")
    try:
        signature = inspect.signature(function)
        by_name = {**signature.bind_partial(*arguments).arguments, **named}
        parameters = signature.parameters.values()
        further = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        # Of C: it tells no names of its positional arguments.
        by_name = dict(named)
        further = []

    # These two take a device at any place; the first argument of the method `to` is its tensor.
    if called in ("device", "to") and arguments:
        by_name["device"] = [str(value) for value in arguments[called == "to" :]]

    # MONAI hands them on to where nobody checks them.
    of_monai = str(getattr(function, "__module__", None)).startswith("monai.")
    if of_monai and any(by_name.get(name) for name in further):
        raise Refused(f"{called or 'a call'} with more arguments than it has names for")

    values = (*arguments, *by_name.values())
    if any(map(_makes_objects, values if called in _TYPED else [by_name.get("dtype")])):
        raise Refused("an array of objects, or of memory that is not filled")
    if called in UNFILLED and not _are_numbers(arguments, named):
        raise Refused("a tensor of a size, in memory that others have used")
    if "where" in named:
        raise Refused("'where', which leaves memory that others have used")
    for value in values:
        if isinstance(value, Mapping) and any(str(key).startswith("__") for key in value):
            raise Refused("a key with two underscores, which would become an attribute")

    for name, value in by_name.items():
        # Who has the permission to unpickle may unpickle more than weights.
        if unpickles and name == "weights_only":
            continue
        if why := why_argument_refused(name, value):
            raise Refused(why)

    if why := why_component_refused(called, by_name):
        raise Refused(why)

    return by_name


def _in_module(module: str, name: str) -> object:
    """Return what a loaded module of the listed packages calls by a name, None if there is none; imports nothing."""
    if module not in sys.modules or module.partition(".")[0] not in _PACKAGES:
        return None
    return vars(sys.modules[module]).get(name)


@cache
def _listed() -> tuple[dict[str, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return the components of MONAI by their short names, and all listed ones by identity."""
    from monai.engines import PrepareBatch
    from monai.inferers import Inferer
    from monai.transforms import Transform

    short: dict[str, Callable[..., Any]] = {}
    identities: dict[int, Callable[..., Any]] = {}

    for home in _HOMES:
        module = importlib.import_module(home)
        for name in (*MONAI_COMPONENTS, *TRANSFORMS, *(f"{name}d" for name in TRANSFORMS)):
            entry = getattr(module, name, None)
            if _of_package(entry, "monai"):
                short.setdefault(name, entry)
                identities[id(entry)] = entry

        # MONAI's other names of the same: `Unet`, `LoadImageD`.
        for name, entry in vars(module).items():
            if id(entry) in identities:
                short.setdefault(name, entry)

    for path in COMPONENTS:
        module_name, _, name = path.rpartition(".")
        if importlib.util.find_spec(module_name.partition(".")[0]) is None:
            continue  # torchvision is optional

        entry = getattr(importlib.import_module(module_name), name, None)
        if _of_package(entry, path.partition(".")[0]):
            identities[id(entry)] = entry

    bases = (Transform, nn.Module, PrepareBatch, Inferer)
    for module_name in [name for name in sys.modules if name.startswith(_APPS)]:
        for name, entry in vars(sys.modules[module_name]).items():
            # Where it is defined counts: a module's names hold what it imports, too.
            is_kind = inspect.isclass(entry) and issubclass(entry, bases)
            if is_kind and entry.__module__.startswith(_APPS) and not _fetches(entry):
                short.setdefault(name, entry)
                identities[id(entry)] = entry

    # Every class of PyTorch with these bases.
    bases_of = {nn: nn.Module, optim: optim.Optimizer, lr_scheduler: lr_scheduler.LRScheduler}
    for module, base in bases_of.items():
        for entry in vars(module).values():
            is_kind = inspect.isclass(entry) and issubclass(entry, base)
            if not is_kind or not _of_package(entry, "torch"):
                continue
            # A ParameterDict sets attributes of any name.
            if entry is not nn.ParameterDict and entry.__name__ not in TRUST_INDICES:
                identities[id(entry)] = entry

    return short, identities


def _fetches(factory: Callable[..., Any]) -> bool:
    """Tell whether a network fetches weights unless told otherwise."""
    pretrained = inspect.signature(factory).parameters.get("pretrained")
    return pretrained is not None and pretrained.default is not False


def _of_package(value: object, package: str) -> TypeGuard[Callable[..., Any]]:
    kind = inspect.isclass(value) or inspect.isfunction(value)
    return kind and str(getattr(value, "__module__", "")).partition(".")[0] == package
