"""Recordings of a training step that outlive the visit they were made in.

A recording repeats operations on the memory on which they were recorded. So that it may serve other sites, rounds and
networks, and can overwrite nothing that somebody else holds, that memory is its own: while a step is recorded the
tensors of the visit lie there; later visits copy their values in before their first replay and back after the last one,
in one copy each way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from medfl.training.accelerate.cuda_graphs import CudaGraph

_MAX_RECORDINGS = 16  # each has the memory of a network and its optimiser
_RECORDINGS: OrderedDict[Hashable, Recording] = OrderedDict()


class VisitMemory:
    """The memory of the tensors that a visit's steps use.

    Attributes:
        tensors: of one device, in an order that all visits share.
        layout: equal for visits of which one can take the other's place: which tensors share memory, and where.
        blocks: the blocks of memory, as bytes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        indices: dict[int, int] = {}
        self.tensors, self.blocks = list(tensors), list[Tensor]()
        layout = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storage_id = StorageWeakRef(storage).cdata  # type: ignore[no-untyped-call]
            if storage_id not in indices:
                indices[storage_id] = len(indices)
                self.blocks.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            layout.append((indices[storage_id], tensor.storage_offset(), storage.nbytes()))
        self.layout = tuple(layout)


class Recording:
    """A recorded step with its own memory.

    Attributes:
        busy: whether the values of a visit are in it.

    Raises:
        RuntimeError: the step cannot be recorded; it was not done.
    """

    def __init__(
        self, graph: CudaGraph, step: Callable[..., Tensor], memory: VisitMemory, batch: Sequence[Tensor]
    ) -> None:
        self._graph = graph
        self._inputs = [tensor.detach().clone() for tensor in batch]
        self._blocks = [block.clone() for block in memory.blocks]
        self.busy = False
        with relocated(memory, self._blocks):
            self._loss = graph.capture(lambda: step(*self._inputs))

    @property
    def loss(self) -> Tensor:
        """Loss of the newest step, which no later one overwrites."""
        return self._loss.clone()

    def load(self, memory: VisitMemory) -> None:
        """Copy the values of a visit in; until `store` the recording belongs to it."""
        self.busy = True
        if memory.blocks:
            torch._foreach_copy_(self._blocks, memory.blocks)

    def replay(self, batch: Sequence[Tensor]) -> None:
        """Do the step of another batch."""
        for recorded, tensor in zip(self._inputs, batch, strict=True):
            recorded.copy_(tensor, non_blocking=True)
        self._graph.replay()

    def store(self, memory: VisitMemory) -> None:
        """Copy the values back to the visit."""
        if memory.blocks:
            torch._foreach_copy_(memory.blocks, self._blocks)
        self.busy = False


@contextmanager
def relocated(memory: VisitMemory, blocks: Sequence[Tensor]) -> Iterator[None]:
    """Let the tensors of a visit lie in other blocks, as long as their own, inside the block of code."""
    before = [tensor.data for tensor in memory.tensors]
    try:
        for tensor, (index, offset, _) in zip(memory.tensors, memory.layout, strict=True):
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            start = blocks[index].storage_offset() // tensor.element_size() + offset
            tensor.data = view.set_(blocks[index].untyped_storage(), start, tensor.shape, tensor.stride())
        yield
    finally:
        for tensor, data in zip(memory.tensors, before, strict=True):
            tensor.data = data


def keep(key: Hashable, recording: Recording) -> None:
    """Keep a recording for later visits with the same key; the one that was not used for longest goes."""
    _RECORDINGS[key] = recording
    while len(_RECORDINGS) > _MAX_RECORDINGS:
        _RECORDINGS.popitem(last=False)


def find_free(key: Hashable) -> Recording | None:
    """Return the recording of a key, None if there is none or a visit is using it."""
    recording = _RECORDINGS.get(key)
    if recording is None or recording.busy:
        return None
    _RECORDINGS.move_to_end(key)
    return recording


def forget() -> None:
    """Keep no recording."""
    _RECORDINGS.clear()
