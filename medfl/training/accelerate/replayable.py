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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medfl.core.message import Message
from medfl.core.task import Task
from medfl.data.prepared import Prepared, Shard
from medfl.data.public import Public
from medfl.training.network_pool import Networks
from medfl.training.site import LocalSettings, Site

_MAX_OBJECTS = 200_000  # that a step may reach; a walk through more takes too long
_FORBIDDEN = {
    torch.Tag.data_dependent_output: "reads a number back",
    torch.Tag.dynamic_output_shape: "makes a tensor whose size depends on numbers",
    torch.Tag.inplace_view: "changes the form of a tensor in place",
    getattr(torch.Tag, "cudagraph_unsafe", None): "cannot be captured",  # newer than torch 2.8
}
_UNTAGGED_READBACKS = ("aten::_linalg_check_errors",)


class StorageIds:
    """Ids of memory, unique for as long as this object lives: memory that is freed meanwhile passes its id to none."""

    def __init__(self) -> None:
        self._references: dict[int, StorageWeakRef] = {}

    def id_of(self, tensor: Tensor) -> int:
        """Return the id of a tensor's memory, the same for its views; raise NotImplementedError if it has none."""
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return int(self._references.setdefault(reference.cdata, reference).cdata)


class OperationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Log the operations of a step while they happen, those of the backward pass among them.

    Two steps do the same if their `operations` are equal; both have to use the same `StorageIds`.

    Attributes:
        operations: of each its name, its arguments, and for a tensor where it comes from.
        outside: ids of the memory that was there before the step, its batch aside, and that it used.
        obstacle: why the step cannot be recorded, "" where nothing was seen.
        draws: whether it draws random numbers.
    """

    def __init__(self, device: torch.device, inputs: Sequence[Tensor], storage_ids: StorageIds) -> None:
        """Prepare to log a step on a device `with_index`; its inputs differ from step to step."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Any] = []
        self.outside: set[int] = set()
        self.obstacle, self.draws = "", False
        self._device, self._storage_ids = device, storage_ids
        self._generator = _default_generator(device)
        self._seed = self._generator.initial_seed()
        self._origin: dict[int, tuple[str, int, int]] = {}
        for index, tensor in enumerate(inputs):
            self._origin.setdefault(storage_ids.id_of(tensor), ("input", index, int(tensor.storage_offset())))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func.namespace == "profiler":
            return func(*args, **options)
        arguments = tree_leaves((args, sorted(options.items())))
        described = [self._describe(leaf) for leaf in arguments]
        result = func(*args, **options)
        for index, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self._origin.setdefault(self._id_of(leaf), ("made", len(self.operations), index))
        self.operations.append((str(func), described))
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        self.obstacle = self.obstacle or self._obstacle(func, arguments, tree_leaves(result))
        return result

    def _describe(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        storage_id = self._id_of(leaf)
        origin, index, start = self._origin.get(storage_id, ("outside", storage_id, 0))
        if origin == "input":  # a batch may be a part of a larger tensor
            return origin, index, leaf.storage_offset() - start, leaf.shape, leaf.dtype
        if origin == "outside":
            self.outside.add(storage_id)
        return origin, index, start, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype

    def _id_of(self, tensor: Tensor) -> int:
        try:
            return self._storage_ids.id_of(tensor)
        except (NotImplementedError, RuntimeError):
            self.obstacle = self.obstacle or "it has a tensor without plain memory (a sparse one)"
            return 0

    def _obstacle(self, func: Any, arguments: list[Any], results: list[Any]) -> str:
        name = func._schema.name
        for leaf in arguments:
            if isinstance(leaf, torch.Generator) and leaf is not self._generator:
                return f"{name} draws from a generator of its own"
        if torch.Tag.nondeterministic_seeded in func.tags and self._generator.initial_seed() != self._seed:
            return f"{name} draws from a generator that is seeded within the step"
        tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        indexing = name.startswith(("aten::index", "aten::_index_put", "aten::_unsafe_index"))
        if indexing and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:]):
            return f"{name} chooses by a mask"
        for tag, reason in _FORBIDDEN.items():
            if tag in func.tags and not indexing:
                return f"{name} {reason}"
        if name in _UNTAGGED_READBACKS:
            return f"{name} reads a number back"
        copies = "copy" in name
        for leaf in tensors:
            if leaf.device != self._device and (copies or leaf.ndim):
                return f"{name} uses a tensor on {leaf.device}"
        if any(isinstance(leaf, Tensor) and leaf.device != self._device for leaf in results):
            return f"{name} makes a tensor elsewhere"
        return ""


class ReachableState:
    """Everything that a step can reach in Python, at one moment.

    Tensors stand for their memory, not for their values; data, networks of the pool and settings for themselves.

    Attributes:
        state: equal for two moments between which nothing changed but values of tensors.
        signature: equal for two steps with the same code and the same numbers, on tensors of the same shapes: they do
            the same. A site's seed, name and round are not in it.
        tensors: what it reaches, `inputs` aside, in an order that only `signature` decides.
        obstacle: what could not be looked into, "" where all could.
    """

    def __init__(self, root: object, inputs: Sequence[Tensor], storage_ids: StorageIds, device: torch.device) -> None:
        """Walk through what `root` reaches; the newest `inputs` count as the same thing at any moment."""
        self.obstacle = ""
        self.tensors: list[Tensor] = []
        self._ids: list[int] = []
        self._device = device
        self._signature: list[Any] = []
        self._states: list[Any] = [_unrecorded_generators(device)]
        self._storage_ids = storage_ids
        self._inputs = {storage_ids.id_of(tensor): index for index, tensor in enumerate(inputs)}
        self._walk(root)
        self.signature = hashlib.sha256(repr(self._signature).encode()).hexdigest()
        self.state = (tuple(self._signature), tuple(self._states))

    def _walk(self, root: object) -> None:
        seen: dict[int, tuple[int, object]] = {}  # holds what it has seen, so that no other object gets its id
        waiting = [root]
        while waiting and not self.obstacle:
            thing = waiting.pop()
            if isinstance(thing, _PLAIN):
                self._signature.append(repr(thing))
            elif id(thing) in seen:
                self._signature.append(("again", seen[id(thing)][0]))
            else:
                seen[id(thing)] = (len(seen), thing)
                members = self._visit(thing)
                self._signature.append((type(thing).__qualname__, len(members)))
                waiting.extend(reversed(members))
            if len(seen) > _MAX_OBJECTS:
                self.obstacle = "it reaches too many things"

    def _visit(self, thing: Any) -> list[object]:
        """Note one object and return its members."""
        if isinstance(thing, Tensor):
            self._visit_tensor(thing)
            return [thing._backward_hooks, getattr(thing, "_post_accumulate_grad_hooks", None)]
        if isinstance(thing, torch.Generator):
            self._states.append(thing.get_state().numpy().tobytes())
            return []
        if isinstance(thing, np.ndarray):
            self._signature.append((thing.shape, str(thing.dtype), hashlib.sha256(thing.tobytes()).digest()))
            return []
        if isinstance(thing, _CONSTANT):
            self._signature.append(getattr(thing, "__qualname__", ""))
            self._states.append(id(thing))
            return []
        for kind, members_of in _MEMBERS:
            if isinstance(thing, kind):
                return members_of(thing)
        members = _attributes(thing)
        if members is None:
            self.obstacle = f"it uses a {type(thing).__qualname__}, which cannot be looked into"
            return []
        return members

    def _visit_tensor(self, tensor: Tensor) -> None:
        try:
            storage_id = self._storage_ids.id_of(tensor)
        except (NotImplementedError, RuntimeError):
            self.obstacle = "it has a tensor without plain memory (a sparse one)"
            return
        index = self._inputs.get(storage_id)
        form = (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device), tensor.requires_grad)
        self._signature.append((index, *form))
        self._states.append((storage_id, tensor.storage_offset()) if index is None else index)
        if index is None:
            self.tensors.append(tensor)
            self._ids.append(storage_id)

    def find(self, storage_ids: Collection[int]) -> tuple[tuple[int, ...], bool]:
        """Return the indices of the tensors that lie in some memory, and whether these are all that is there.

        They are not if it holds something that cannot be reached, or that is on another device than the step.
        """
        indices = [index for index, storage_id in enumerate(self._ids) if storage_id in storage_ids]
        here = [index for index in indices if self.tensors[index].device == self._device]
        return tuple(here), here == indices and {self._ids[index] for index in here} == set(storage_ids)


_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, Enum, np.generic, itertools.count,
)  # fmt: skip
"""What its representation says everything about."""

_CONSTANT = (
    type, types.ModuleType, logging.Logger, re.Pattern, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
    Networks, Shard, Prepared, Public, Task, LocalSettings, Message,
)  # fmt: skip
"""What a step does not change: constants, and what the types of a federation promise."""


def _function(thing: types.FunctionType) -> list[object]:
    """Return a function's code, what it closes over, and the numbers and containers of its module that it names."""
    code = thing.__code__
    members: list[object] = [code.co_filename, code.co_firstlineno, code.co_name, code.co_code, code.co_names]
    for cell in thing.__closure__ or ():
        try:
            members.append(cell.cell_contents)
        except ValueError:
            members.append("empty")
    global_values = [thing.__globals__.get(name) for name in code.co_names]
    members += [value for value in global_values if isinstance(value, bool | int | float | str)]
    members += [len(value) for value in global_values if isinstance(value, list | dict | set | deque)]
    return [*members, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]


def _mapping(thing: Mapping[Any, Any]) -> list[object]:
    members = [each for pair in thing.items() for each in pair]
    return members + ([] if type(thing) is dict else _attributes(thing) or [])


def _module(thing: nn.Module) -> list[object]:
    """Return a module's attributes but for the empty ones, most of them: the walk then takes half the time."""
    full = [
        pair for pair in vars(thing).items() if pair[1] is not None and not (isinstance(pair[1], dict) and not pair[1])
    ]
    return [each for pair in full for each in pair]


def _items(thing: Any) -> list[object]:
    return [*thing, *(_attributes(thing) or [])]


_MEMBERS: tuple[tuple[Any, Callable[[Any], list[object]]], ...] = (
    (nn.Module, _module),
    (Site, lambda site: [site.loss, site.penalty, site.settings.amp]),
    (types.FunctionType, _function),
    (types.MethodType, lambda method: [method.__func__, method.__self__]),
    (types.BuiltinFunctionType, lambda builtin: [builtin.__name__, builtin.__self__]),
    (functools.partial, lambda partial: [partial.func, partial.args, partial.keywords]),
    (weakref.ref, lambda reference: [reference()]),
    ((dict, types.MappingProxyType), _mapping),
    ((list, tuple, set, frozenset, deque), _items),
)


def _attributes(thing: object) -> list[object] | None:
    """Return an object's attributes as they are stored, None if it stores none."""
    kind: Any = type(thing)
    slots, stored = _slots(kind), list[object]()
    for name in slots:
        with suppress(AttributeError):  # not set
            stored += [name, object.__getattribute__(thing, name)]
    try:
        attributes = vars(thing)
    except TypeError:
        return stored if slots else None
    return stored + [each for pair in attributes.items() for each in pair]


@functools.cache
def _slots(cls: Any) -> tuple[str, ...]:
    names = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else [*slots]
    return tuple(name for name in names if not name.startswith("__"))


def with_index(device: torch.device) -> torch.device:
    """Return a device as its tensors name it: the current one where "cuda" leaves open which."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def generator_states(device: torch.device) -> bytes:
    """Return the states of all generators that code on a device may draw from without being given one."""
    return _unrecorded_generators(device) + _default_generator(with_index(device)).get_state().numpy().tobytes()


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _unrecorded_generators(device: torch.device) -> bytes:
    """Return a hash of the states of the generators that a recording does not move."""
    numbers = np.random.get_state(legacy=False)  # noqa: NPY002 (looked at, nothing is drawn)
    states = [
        repr(random.getstate()).encode(),
        numbers["state"]["key"].tobytes(),
        repr(numbers["state"]["pos"]).encode(),
    ]
    if device.type != "cpu":
        states.append(torch.default_generator.get_state().numpy().tobytes())
    return hashlib.sha256(b"".join(states)).digest()
