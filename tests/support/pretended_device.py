"""A pretended device: tensors that say they lie on another device, compute on the CPU, and mix as CUDA's do.

What a GPU would refuse is refused here too: tensors of two devices in one operation, a CPU generator for draws on the
device, a device tensor taken for a NumPy array, products of integers. All numbers are the CPU's, so a run on this
device gives every bit of a run on the CPU. What it cannot show: other random numbers (dropout draws here from the CPU's
global generator), other rounding, memory that is short, and mixed precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration

from medfl.core.settings import SETTINGS
from medfl.runs import plan

NAME = "pretended"
DEVICE = torch.device("cpu")  # the pretended one as soon as `register` has run

_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten._to_copy.default)
_INDEXING = (
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
)
_PRODUCTS = (
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.mv.default,
)
_WITH_NUMBER = (_aten.fill_.Tensor, _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor)
_SIZED_LATER = (
    "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm", "randperm.generator",
)  # fmt: skip
"""Operations that torch would make of an empty tensor and a change of its size, which a wrapper cannot follow."""
_BELOW = ("copy_", "_local_scalar_dense")
"""Operations with which torch makes tensors of lists, where it looks for no `__torch_dispatch__`."""
_libraries: list[Any] = []


class _Module:
    """What torch asks of a device's module."""

    def is_initialized(self) -> bool:
        return False

    def is_available(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def available() -> bool:
    """Tell whether this torch lets a device be written in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def let_runs_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take its name where a run's device is given; the command line knows no such device."""
    monkeypatch.setattr(plan, "device_named", lambda name: name)
    monkeypatch.setitem(
        cast(dict[str, Any], SETTINGS), "device", replace(SETTINGS["device"], parse=None)
    )


def register() -> torch.device:
    """Make the device known to torch, once a process; nothing takes it that does not name it."""
    global DEVICE
    if not _libraries:

        class Hook(torch._C._acc.PrivateUse1Hooks):  # type: ignore[name-defined, misc]
            def is_available(self) -> bool:
                return False

            def has_primary_context(self, index: int) -> bool:
                return False

            def is_built(self) -> bool:
                return False

        # the first backward pass starts a thread for each device there is, and threads forbid the forks of other tests
        with torch.enable_grad():
            torch.ones((), requires_grad=True).backward()
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Module(), Hook())
        every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        every.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
        for name in _SIZED_LATER + _BELOW:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(_aten, packet), overload or "default")
            aten.impl(name, lambda *args, op=op, **kwargs: _run(op, args, kwargs), "PrivateUse1")
        _libraries.extend((every, aten))
        DEVICE = torch.device(NAME, 0)
    return DEVICE


@contextmanager
def in_use() -> Iterator[torch.device]:
    """Give the device for the length of a block; backward passes inside run in the calling thread, as on the CPU."""
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # parameters stay the objects they are, as with CUDA
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield register()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)


@dataclass(frozen=True)
class Crossing:
    """A copy between the CPU and the device."""

    shape: torch.Size
    dtype: torch.dtype
    arrives: bool
    """On the device; else it left."""


_seen: list[list[Crossing]] = []


@contextmanager
def crossings() -> Iterator[list[Crossing]]:
    """Collect what crosses between the devices inside the block."""
    found: list[Crossing] = []
    _seen.append(found)
    try:
        yield found
    finally:
        _seen.remove(found)


class Pretended(Tensor):
    """A tensor on the device.

    Attributes:
        inner: the CPU tensor with its numbers.
    """

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        form: dict[str, Any] = {"dtype": inner.dtype, "layout": inner.layout, "device": DEVICE}
        if inner.layout == torch.strided:
            form |= {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, **form)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse, as CUDA tensors do, unless forced."""
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first."
            )
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        """Return the numbers, as any tensor does."""
        return self.detach().cpu().tolist()

    @property
    def data(self) -> Tensor:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise NotImplementedError(
            "the pretended device does not exchange a tensor's storage; copy_ into it"
        )

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a change to what is inside tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        return type(value)(_mapped(change, member) for member in value)
    return (
        {key: _mapped(change, member) for key, member in value.items()}
        if type(value) is dict
        else change(value)
    )


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on the inner tensors what CUDA would not refuse."""
    leaves: list[Any] = []

    def opened(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf.inner if isinstance(leaf, Pretended) else leaf

    inner, named = _mapped(opened, args), _mapped(opened, kwargs)
    outer = {id(getattr(leaf, "inner", leaf)): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    lands = True
    if kwargs.get("device") is not None:
        lands, named["device"] = torch.device(kwargs["device"]).type == NAME, torch.device("cpu")
    _refuse(func, args, kwargs, leaves)
    if _seen:
        _note(func, args, lands)
    made = func(*inner, **named)

    def closed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in outer:  # done in place
            return _unchanged(outer[id(value)], value, func)
        return Pretended(value) if lands else value

    return _mapped(closed, made)


def _unchanged(outer: Tensor, inner: Tensor, func: Any) -> Tensor:
    if outer.shape != inner.shape:
        raise NotImplementedError(
            f"{func} changes the shape of a tensor of the pretended device in place"
        )
    return outer


def _refuse(func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> None:
    """Raise what CUDA would raise."""
    if any(isinstance(leaf, torch.Generator) and leaf.device.type == "cpu" for leaf in leaves):
        raise RuntimeError(f"{func}: Expected a '{NAME}' device type for generator but found 'cpu'")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if func in _PRODUCTS and not (tensors[0].is_floating_point() or tensors[0].is_complex()):
        raise NotImplementedError(f'"{func}" not implemented for {tensors[0].dtype}')
    if func in _COPIES or all(isinstance(leaf, Pretended) for leaf in tensors):
        return
    if func in _INDEXING:
        if not isinstance(args[0], Pretended) and any(
            isinstance(index, Pretended) for index in args[1]
        ):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        tensors = [
            args[0],
            *(leaf for leaf in args[2:3] if leaf.ndim or isinstance(leaf, Pretended)),
        ]
    elif torch.Tag.pointwise in func.tags or func in _WITH_NUMBER or "_foreach" in str(func):
        written = _written(func, args, kwargs)
        tensors = [
            leaf
            for leaf in tensors
            if leaf.ndim or isinstance(leaf, Pretended) or id(leaf) in written
        ]
    devices = {leaf.device for leaf in tensors}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found {found}"
        )


def _written(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Return the ids of the tensors that an operation writes into."""
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            _mapped(found.append, args[index] if index < len(args) else kwargs.get(argument.name))
    return set(map(id, found))


def _note(func: Any, args: Any, lands: bool) -> None:
    if func not in _COPIES:
        return
    if func is _aten.copy_.default:
        lands, source = isinstance(args[0], Pretended), args[1]
    else:
        source = args[0]
    if isinstance(source, Pretended) != lands:
        for found in _seen:
            found.append(Crossing(source.shape, source.dtype, lands))
