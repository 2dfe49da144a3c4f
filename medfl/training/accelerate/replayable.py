"""Whether a step of training can be repeated from a recording: what it does, and what Python remembers of it.

A recording (a CUDA graph) repeats the operations of one step on the memory that they were on, and nothing of Python: a
counter that chose one of them, a number that was passed to one, a list that got another entry stay as they were. So a
step may be recorded if

- two steps in a row issue the same operations, with the same numbers, on the same tensors, and read nothing back;
- everything that Python can reach from the step, tensors' values apart, is the same after it as before.

Neither asks for a name of a method: what counts, draws or collects by itself is seen.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import random  # noqa: TID251 (its state is looked at, nothing is drawn)
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from medfl.core.message import Message
from medfl.core.task import Task
from medfl.data.prepared import Prepared, Shard
from medfl.data.public import Public
from medfl.training.site import LocalSettings, Networks, Site

_LARGEST = 200_000  # things that a step may reach; a walk through more is no quick look
_READING = {
    torch.Tag.data_dependent_output: "reads a number back",
    torch.Tag.dynamic_output_shape: "makes a tensor whose size depends on numbers",
    torch.Tag.inplace_view: "changes the form of a tensor in place",
    getattr(torch.Tag, "cudagraph_unsafe", None): "cannot be captured",  # newer than torch 2.8
}
_CHECKING = ("aten::_linalg_check_errors",)  # reads back without saying so


class Storages:
    """Names of memory that hold for as long as this object lives: what is freed meanwhile gives its name to nothing."""

    def __init__(self) -> None:
        """Know none."""
        self._held: dict[int, StorageWeakRef] = {}

    def name(self, tensor: Tensor) -> int:
        """Return the name of a tensor's memory, the same for its views; raises NotImplementedError if it has none."""
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return int(self._held.setdefault(reference.cdata, reference).cdata)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note the operations of a step while they happen, those of the backward pass among them.

    Two steps do the same if their `operations` are equal; both have to know memory by the same names.

    Attributes:
        operations: of each its name, its arguments, and for a tensor where it comes from.
        outside: names of the memory that was there before the step, its batch aside, and that it used.
        obstacle: why the step cannot be recorded, "" where nothing was seen.
        draws: whether it draws random numbers.
    """

    def __init__(self, device: torch.device, inputs: Sequence[Tensor], storages: Storages) -> None:
        """Be about to watch a step on an `indexed` device with these inputs, which differ from step to step."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Any] = []
        self.outside: set[int] = set()
        self.obstacle, self.draws = "", False
        self._device, self._storages = device, storages
        self._generator = _default_generator(device)
        self._seed = self._generator.initial_seed()
        self._origin: dict[int, tuple[str, int, int]] = {}
        for place, tensor in enumerate(inputs):
            self._origin.setdefault(storages.name(tensor), ("input", place, int(tensor.storage_offset())))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do and note one operation."""
        settings = dict(kwargs or {})
        if func.namespace == "profiler":
            return func(*args, **settings)
        given = list(_leaves([args, settings]))
        noted = [self._note(leaf) for leaf in given]
        made = func(*args, **settings)
        for place, leaf in enumerate(_leaves(made)):
            if isinstance(leaf, Tensor):
                self._origin.setdefault(self._name(leaf), ("made", len(self.operations), place))
        self.operations.append((str(func), noted))
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        self.obstacle = self.obstacle or self._reason(func, given, list(_leaves(made)))
        return made

    def _note(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        name = self._name(leaf)
        kind, place, start = self._origin.get(name, ("outside", name, 0))
        if kind == "input":  # a batch may be a part of a larger tensor
            return kind, place, leaf.storage_offset() - start, leaf.shape, leaf.dtype
        if kind == "outside":
            self.outside.add(name)
        return kind, place, start, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype

    def _name(self, tensor: Tensor) -> int:
        try:
            return self._storages.name(tensor)
        except (NotImplementedError, RuntimeError):
            self.obstacle = self.obstacle or "it has a tensor without plain memory (a sparse one)"
            return 0

    def _reason(self, func: Any, given: list[Any], made: list[Any]) -> str:
        name = func._schema.name
        for leaf in given:
            if isinstance(leaf, torch.Generator) and leaf is not self._generator:
                return f"{name} draws from a generator of its own"
        if torch.Tag.nondeterministic_seeded in func.tags and self._generator.initial_seed() != self._seed:
            return f"{name} draws from a generator that is seeded within the step"
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        indexing = name.startswith(("aten::index", "aten::_index_put", "aten::_unsafe_index"))
        if indexing and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:]):
            return f"{name} chooses by a mask"
        for tag, told in _READING.items():
            if tag in func.tags and not indexing:
                return f"{name} {told}"
        if name in _CHECKING:
            return f"{name} reads a number back"
        copied = "copy" in name
        for leaf in tensors:
            if leaf.device != self._device and (copied or leaf.ndim):
                return f"{name} uses a tensor on {leaf.device}"
        if any(isinstance(leaf, Tensor) and leaf.device != self._device for leaf in made):
            return f"{name} makes a tensor elsewhere"
        return ""


class Remembered:
    """Everything that a step can reach in Python, at one moment.

    Tensors stand for their memory, not for their values; data, networks at rest and settings for themselves.

    Attributes:
        state: equal for two moments between which nothing changed but values of tensors.
        kind: equal for two steps with the same code and the same numbers, on tensors of the same shapes: they do the
            same. A site's seed, name and round are not in it.
        tensors: what it reaches, `inputs` aside, in an order that only `kind` decides.
        obstacle: what could not be looked into, "" where all could.
    """

    def __init__(self, root: object, inputs: Sequence[Tensor], storages: Storages, device: torch.device) -> None:
        """Look at what `root` reaches; the newest `inputs` are the same thing as those of another moment."""
        self.obstacle = ""
        self.tensors: list[Tensor] = []
        self._names: list[int] = []
        self._device = device
        self._kinds: list[Any] = []
        self._states: list[Any] = [_drawing(device)]
        self._storages = storages
        self._inputs = {storages.name(tensor): place for place, tensor in enumerate(inputs)}
        self._walk(root)
        self.kind = hashlib.sha256(repr(self._kinds).encode()).hexdigest()
        self.state = (tuple(self._kinds), tuple(self._states))

    def _walk(self, root: object) -> None:
        seen: dict[int, tuple[int, object]] = {}  # holds what it has seen, so that no other thing gets its id
        waiting = [root]
        while waiting and not self.obstacle:
            thing = waiting.pop()
            if isinstance(thing, _PLAIN):
                self._kinds.append(repr(thing))
            elif id(thing) in seen:
                self._kinds.append(("again", seen[id(thing)][0]))
            else:
                seen[id(thing)] = (len(seen), thing)
                inner = self._inside(thing)
                self._kinds.append((type(thing).__qualname__, len(inner)))
                waiting.extend(reversed(inner))
            if len(seen) > _LARGEST:
                self.obstacle = "it reaches too many things"

    def _inside(self, thing: Any) -> list[object]:
        """Note one thing and return what it holds."""
        if isinstance(thing, Tensor):
            self._tensor(thing)
            return [thing._backward_hooks, getattr(thing, "_post_accumulate_grad_hooks", None)]
        if isinstance(thing, torch.Generator):
            self._states.append(thing.get_state().numpy().tobytes())
            return []
        if isinstance(thing, np.ndarray):
            self._kinds.append((thing.shape, str(thing.dtype), hashlib.sha256(thing.tobytes()).digest()))
            return []
        if isinstance(thing, _AT_REST):
            self._kinds.append(getattr(thing, "__qualname__", ""))
            self._states.append(id(thing))
            return []
        for kind, look in _LOOKS:
            if isinstance(thing, kind):
                inner: list[object] = look(thing)
                return inner
        held = _attributes(thing)
        if held is None:
            self.obstacle = f"it uses a {type(thing).__qualname__}, which cannot be looked into"
            return []
        return held

    def _tensor(self, tensor: Tensor) -> None:
        try:
            name = self._storages.name(tensor)
        except (NotImplementedError, RuntimeError):
            self.obstacle = "it has a tensor without plain memory (a sparse one)"
            return
        place = self._inputs.get(name)
        form = (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device), tensor.requires_grad)
        self._kinds.append((place, *form))
        self._states.append((name, tensor.storage_offset()) if place is None else place)
        if place is None:
            self.tensors.append(tensor)
            self._names.append(name)

    def among(self, names: Collection[int]) -> tuple[tuple[int, ...], bool]:
        """Tell which of the tensors lie in some memory, by their places, and whether these are all that is there.

        They are not if it holds something that cannot be reached, or that is on another device than the step.
        """
        places = [place for place, name in enumerate(self._names) if name in names]
        here = [place for place in places if self.tensors[place].device == self._device]
        return tuple(here), here == places and {self._names[place] for place in here} == set(names)


_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, Enum, np.generic, itertools.count,
)  # fmt: skip
"""What its representation says everything about."""

_AT_REST = (
    type, types.ModuleType, logging.Logger, re.Pattern, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
    Networks, Shard, Prepared, Public, Task, LocalSettings, Message,
)  # fmt: skip
"""What a step does not change: constants, and what the types of a federation promise."""


def _function(thing: types.FunctionType) -> list[object]:
    """Return a function's code, what it closes over, and the numbers and containers of its module that it names."""
    code = thing.__code__
    held: list[object] = [code.co_filename, code.co_firstlineno, code.co_name, code.co_code, code.co_names]
    for cell in thing.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            held.append("empty")
    named = [thing.__globals__.get(name) for name in code.co_names]
    held += [value for value in named if isinstance(value, bool | int | float | str)]
    held += [len(value) for value in named if isinstance(value, list | dict | set | deque)]
    return [*held, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]


def _mapping(thing: Mapping[Any, Any]) -> list[object]:
    held = [each for pair in thing.items() for each in pair]
    return held + ([] if type(thing) is dict else _attributes(thing) or [])


def _module(thing: nn.Module) -> list[object]:
    """Return a module's attributes; most hold nothing, and to go on without these takes half the time."""
    full = [
        pair for pair in vars(thing).items() if pair[1] is not None and not (isinstance(pair[1], dict) and not pair[1])
    ]
    return [each for pair in full for each in pair]


def _members(thing: Any) -> list[object]:
    return [*thing, *(_attributes(thing) or [])]


_LOOKS: tuple[tuple[Any, Callable[[Any], list[object]]], ...] = (
    (nn.Module, _module),
    (Site, lambda site: [site.loss, site.penalty, site.settings.amp]),
    (types.FunctionType, _function),
    (types.MethodType, lambda method: [method.__func__, method.__self__]),
    (types.BuiltinFunctionType, lambda one: [one.__name__, one.__self__]),
    (functools.partial, lambda one: [one.func, one.args, one.keywords]),
    (weakref.ref, lambda reference: [reference()]),
    ((dict, types.MappingProxyType), _mapping),
    ((list, tuple, set, frozenset, deque), _members),
)


def _attributes(thing: object) -> list[object] | None:
    """Return an object's attributes as they are stored, None if it stores none."""
    kind: Any = type(thing)
    slots, stored = _slots(kind), list[object]()
    for name in slots:
        with suppress(AttributeError):  # not set
            stored += [name, object.__getattribute__(thing, name)]
    try:
        own = vars(thing)
    except TypeError:
        return stored if slots else None
    return stored + [each for pair in own.items() for each in pair]


@functools.cache
def _slots(cls: Any) -> tuple[str, ...]:
    found = []
    for base in cls.__mro__:
        named = base.__dict__.get("__slots__", ())
        found += [named] if isinstance(named, str) else [*named]
    return tuple(name for name in found if not name.startswith("__"))


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        yield from (leaf for branch in tree for leaf in _leaves(branch))
    elif isinstance(tree, dict):
        for key in sorted(tree):
            yield key
            yield from _leaves(tree[key])
    else:
        yield tree


def indexed(device: torch.device) -> torch.device:
    """Return a device as its tensors name it: the current one where "cuda" leaves open which."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def standing(device: torch.device) -> bytes:
    """Return where all generators stand that code on a device may draw from without being given one."""
    return _drawing(device) + _default_generator(indexed(device)).get_state().numpy().tobytes()


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _drawing(device: torch.device) -> bytes:
    """Return where the generators stand that a recording does not move."""
    numbers = np.random.get_state(legacy=False)  # noqa: NPY002 (looked at, nothing is drawn)
    drawn = [
        repr(random.getstate()).encode(),
        numbers["state"]["key"].tobytes(),
        repr(numbers["state"]["pos"]).encode(),
    ]
    if device.type != "cpu":
        drawn.append(torch.default_generator.get_state().numpy().tobytes())
    return hashlib.sha256(b"".join(drawn)).digest()
