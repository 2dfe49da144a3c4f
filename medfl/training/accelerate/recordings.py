"""Recordings of a step that outlive the visit they were made in.

A recording repeats operations on the memory on which they were recorded. So that it may serve other sites, rounds and
networks, and can overwrite nothing that somebody else holds, that memory is its own: while a step is recorded the
tensors of the visit lie there; afterwards their values move in before the first replay of a visit, and home after its
last one, in one copy each way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_MOST = 16  # recordings kept, each with the memory of a network and its optimiser
_KEPT: OrderedDict[Hashable, Recording] = OrderedDict()


class Repeatable(Protocol):
    """What records a step and repeats it."""

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        """Do a step and record it.

        Returns:
            The step's loss, in memory where each replay writes its own.

        Raises:
            RuntimeError: it cannot be recorded; the step was not done.
        """

    def replay(self) -> None:
        """Repeat the recorded operations."""

    def branch(self, place: int) -> AbstractContextManager[None]:
        """Return the context of operations of a capture that may be done beside those of its other branches."""

    def join(self, count: int) -> None:
        """Let what follows in a capture wait for its branches, 0 to count - 1."""


class Home:
    """Where the tensors of a visit live.

    Attributes:
        tensors: of one device, in an order that all visits share.
        layout: equal for visits of which one can take the other's place: who shares memory with whom, and where.
        parts: the pieces of memory, as bytes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Look at where they are."""
        places: dict[int, int] = {}
        self.tensors, self.parts = list(tensors), list[Tensor]()
        layout = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            name = StorageWeakRef(storage).cdata  # type: ignore[no-untyped-call]
            if name not in places:
                places[name] = len(places)
                self.parts.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            layout.append((places[name], tensor.storage_offset(), storage.nbytes()))
        self.layout = tuple(layout)


class Recording:
    """A recorded step with its own memory.

    Args:
        graph: has recorded nothing yet.
        step: to be recorded.
        home: the memory that it uses.
        batch: its arguments; those of later steps have the same shapes.

    Raises:
        RuntimeError: the step cannot be recorded; it was not done.
    """

    def __init__(self, graph: Repeatable, step: Callable[..., Tensor], home: Home, batch: Sequence[Tensor]) -> None:
        """Do the step and record it."""
        self._graph = graph
        self._inputs = [torch.empty_like(part) for part in batch]
        self._own = [part.clone() for part in home.parts]
        self.busy = False
        for mine, given in zip(self._inputs, batch, strict=True):
            mine.copy_(given)
        with moved(home, self._own):
            self._loss = graph.capture(lambda: step(*self._inputs))

    @property
    def loss(self) -> Tensor:
        """Loss of the newest step, which no later one overwrites."""
        return self._loss.clone()

    def enter(self, home: Home) -> None:
        """Take the values over from where they live; until `leave` it belongs to them."""
        self.busy = True
        if home.parts:
            torch._foreach_copy_(self._own, home.parts)

    def replay(self, batch: Sequence[Tensor]) -> None:
        """Do the step of another batch."""
        for mine, given in zip(self._inputs, batch, strict=True):
            mine.copy_(given, non_blocking=True)
        self._graph.replay()

    def leave(self, home: Home) -> None:
        """Bring the values home."""
        if home.parts:
            torch._foreach_copy_(home.parts, self._own)
        self.busy = False


@contextmanager
def moved(home: Home, memory: Sequence[Tensor]) -> Iterator[None]:
    """Let the tensors of a visit lie in other memory, pieces as long as its own, inside the block."""
    before = [tensor.data for tensor in home.tensors]
    try:
        for tensor, (place, offset, _) in zip(home.tensors, home.layout, strict=True):
            there = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            start = memory[place].storage_offset() // tensor.element_size() + offset
            tensor.data = there.set_(memory[place].untyped_storage(), start, tensor.shape, tensor.stride())
        yield
    finally:
        for tensor, data in zip(home.tensors, before, strict=True):
            tensor.data = data


def keep(key: Hashable, recording: Recording) -> None:
    """Keep a recording for later visits with the same key; the one that was not used for longest goes."""
    _KEPT[key] = recording
    while len(_KEPT) > _MOST:
        _KEPT.popitem(last=False)


def kept(key: Hashable) -> Recording | None:
    """Return the recording of a key, None if there is none or somebody is using it."""
    found = _KEPT.get(key)
    if found is None or found.busy:
        return None
    _KEPT.move_to_end(key)
    return found


def forget() -> None:
    """Keep none."""
    _KEPT.clear()
