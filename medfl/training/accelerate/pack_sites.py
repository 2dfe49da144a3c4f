"""The same training step at several sites at once, where that is faster than at one after the other.

Interleaved visits (`medfl.training.accelerate.interleave`) wait for a `Packer`, which has three ways of doing their
steps: one site after the other by the recording of one step; *beside* each other, the recordings of all sites as
branches of one, which a GPU may run at the same time; and *grouped*, every operation once for all sites
(`medfl.training.accelerate.vmapped`). The first two do the same arithmetic to the bit, the third does not. Which is the
fastest is measured before the first such step, and said.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from medfl.training.accelerate.compiled import compile_step
from medfl.training.accelerate.cuda_graphs import CudaGraph
from medfl.training.accelerate.recordings import Recording, VisitMemory, relocated
from medfl.training.accelerate.vmapped import GroupedStep, trace_step

QUEUE_LENGTH = 16
"""Steps of a visit that are done at a time, so that the visits need not wait for each."""

ALONE, BESIDE, GROUPED, EAGER = "one after the other", "beside each other", "grouped", "eagerly"
WAYS = ALONE, BESIDE, GROUPED
_TIMED_STEPS, _REPEATS = 4, 3
_MAX_GROUPS = 4  # each has the memory of all its sites
_ALIGNMENT = 64  # bytes


Clock = Callable[[Tensor], float]
"""Returns the time at which the device of a tensor has done all that it was asked for."""


@dataclass
class Request:
    """Steps that a visit asks for.

    Attributes:
        key: equal where one recording serves both visits.
        shape: equal where the steps differ in no more than their numbers, as learning rates; they take the same time.
        step: does one.
        memory: of the visit.
        make_graph: makes what records a step.
        batches: the arguments of each.
        losses: (steps,), to be filled.
        eager_step: does a step that can be grouped, where `step` is compiled and cannot; None: `step` does.
        replayed: how many were done by replays, to be filled.
        eager_reason: why none were, to be filled.
    """

    key: Hashable
    shape: Hashable
    step: Callable[..., Tensor]
    memory: VisitMemory
    make_graph: Callable[[], CudaGraph]
    batches: list[tuple[Tensor, ...]] = field(default_factory=list)
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    eager_step: Callable[..., Tensor] | None = None
    replayed: int = 0
    eager_reason: str = ""


@dataclass(frozen=True)
class Choice:
    """What was measured, and the way that was taken.

    Attributes:
        sites: at once.
        way: `ALONE`, `BESIDE` or `GROUPED`; `EAGER` if nothing could be recorded.
        seconds: way -> seconds of one step of all of them.
        refused: way -> why it cannot be had.
    """

    sites: int
    way: str
    seconds: dict[str, float]
    refused: dict[str, str]

    def __str__(self) -> str:
        details = [f"{way} {1000 * seconds:.2f} ms" for way, seconds in self.seconds.items()]
        details += [f"not {way}: {why}" for way, why in self.refused.items()]
        return f"steps of {self.sites} sites {self.way} ({', '.join(details)})"


class StackedMemory:
    """Memory for the tensors of several visits, each row laid out as the memory of one.

    Args:
        memory: of one of them.
        count: visits, K.
        alignment: bytes of which the distance of two rows is a multiple; with 1 they lie end to end, so that what is in
            one piece in a visit is so in all rows at once.

    Attributes:
        rows: the blocks of memory of each row, as bytes.
        stacked: (K, ...) for each tensor, of all visits.
    """

    def __init__(self, memory: VisitMemory, count: int, alignment: int = 1) -> None:
        """Take the memory, with the values of the visit in each row."""
        lengths = [block.numel() for block in memory.blocks]
        pitches = [-(-length // alignment) * alignment for length in lengths]
        blocks = [
            torch.empty(count, pitch, dtype=torch.uint8, device=block.device)
            for pitch, block in zip(pitches, memory.blocks, strict=True)
        ]
        self.rows = [
            [block[row, :length] for block, length in zip(blocks, lengths, strict=True)] for row in range(count)
        ]
        self.stacked = []
        for tensor, (index, offset, _) in zip(memory.tensors, memory.layout, strict=True):
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            strides = (pitches[index] // tensor.element_size(), *tensor.stride())
            self.stacked.append(view.set_(blocks[index].untyped_storage(), offset, (count, *tensor.shape), strides))
        for row in range(count):
            self.load(row, memory)

    def load(self, row: int, memory: VisitMemory) -> None:
        """Copy the values of a visit into a row."""
        if memory.blocks:
            torch._foreach_copy_(self.rows[row], memory.blocks)

    def store(self, row: int, memory: VisitMemory) -> None:
        """Copy them back to the visit."""
        if memory.blocks:
            torch._foreach_copy_(memory.blocks, self.rows[row])


class PackedStep:
    """A recording of one step of K sites, `BESIDE` each other or `GROUPED`; nothing changes in the request of one.

    Raises:
        RuntimeError: it cannot be recorded.
    """

    def __init__(self, request: Request, count: int, way: str) -> None:
        """Record the step; what it does meanwhile is forgotten."""
        memory, batch = request.memory, request.batches[0]
        self.graph = request.make_graph()
        self._memory = StackedMemory(memory, count, _ALIGNMENT if way == BESIDE else 1)
        self._inputs = [torch.stack([tensor] * count) for tensor in batch]
        step = self._beside(request, count) if way == BESIDE else self._grouped(request, count)
        self._losses = self.graph.capture(step)

    def _beside(self, request: Request, count: int) -> Callable[[], Tensor]:
        def step() -> Tensor:
            losses = []
            for row in range(count):
                with self.graph.branch(row), relocated(request.memory, self._memory.rows[row]):
                    losses.append(request.step(*[tensor[row] for tensor in self._inputs]))
            self.graph.join(count)
            return torch.stack(losses)

        return step

    def _grouped(self, request: Request, count: int) -> Callable[[], Tensor]:
        memory, stacked = request.memory, self._memory.stacked
        with relocated(memory, [block.clone() for block in memory.blocks]):
            operations = trace_step(request.eager_step or request.step, memory.tensors, request.batches[0])
        grouped = GroupedStep(operations, count)
        if request.eager_step is not None:
            compiled = compile_step(lambda *batch: grouped(stacked, batch), stacked, self._inputs)
            return partial(compiled, stacked, self._inputs)
        grouped(stacked, self._inputs)  # whatever cannot be grouped is found here, not amid a recording
        return partial(grouped, stacked, self._inputs)

    def serve(self, requests: Sequence[Request]) -> None:
        """Do all steps of at most K visits."""
        for row, request in enumerate(requests):
            self._memory.load(row, request.memory)
        losses = []
        for index in range(max(len(request.batches) for request in requests)):
            unfinished = [(row, request) for row, request in enumerate(requests) if index < len(request.batches)]
            for row, request in unfinished:
                for stacked, tensor in zip(self._inputs, request.batches[index], strict=True):
                    stacked[row].copy_(tensor, non_blocking=True)
            self.graph.replay()
            losses.append(self._losses.clone())
            for row, request in unfinished:
                if index == len(request.batches) - 1:
                    self._memory.store(row, request.memory)
        table = torch.stack(losses)
        for row, request in enumerate(requests):
            request.losses.copy_(table[: len(request.batches), row])


class _Group:
    """The steps with one key, done in the fastest way: `choice`, or eagerly, and then `eager_reason` says why."""

    def __init__(
        self, request: Request, size: int, clock: Clock, ways: Sequence[str], measured: Choice | None = None
    ) -> None:
        """Measure the ways, or go by what was measured of the same step with other numbers."""
        self._clock = clock
        self._single: Recording | None = None
        self._packed: PackedStep | None = None
        seconds, refused = dict[str, float](), dict[str, str]()
        replay: Callable[[], None]
        for way in ways if measured is None else [way for way in ways if way in (ALONE, measured.way)]:
            try:
                if way == ALONE:
                    self._single = Recording(request.make_graph(), request.step, request.memory, request.batches[0])
                    replay, times = partial(self._single.replay, request.batches[0]), size
                else:
                    packed = PackedStep(request, size, way)
                    replay, times = packed.graph.replay, 1
                duration = measured.seconds.get(way, math.inf) if measured else times * self._timed(replay, request)
            except RuntimeError as error:  # an operation that cannot be recorded or grouped, too little memory
                refused[way] = str(error).splitlines()[0]
                continue
            if way != ALONE and duration < min(seconds.values(), default=math.inf):
                self._packed = packed
            seconds[way] = duration
        fastest = min(seconds, key=lambda way: seconds[way]) if seconds else EAGER
        self.eager_reason = "" if seconds else f"a capture failed: {next(iter(refused.values()))}"
        self._seconds_alone = seconds.get(ALONE, math.inf) / size
        self._seconds_packed = seconds.get(fastest, math.inf)
        self.choice = Choice(size, fastest, seconds, refused)

    def _timed(self, replay: Callable[[], None], request: Request) -> float:
        """Return the seconds of a replay, the least of some repeats."""
        replay()
        durations = []
        for _ in range(_REPEATS):
            started = self._clock(request.losses)
            for _ in range(_TIMED_STEPS):
                replay()
            durations.append((self._clock(request.losses) - started) / _TIMED_STEPS)
        return min(durations)

    def serve(self, requests: Sequence[Request]) -> None:
        """Do the steps of some visits."""
        if self._packed is not None and len(requests) * self._seconds_alone > self._seconds_packed:
            self._packed.serve(requests)
            return
        for request in requests:
            if self._single is not None:
                self._single.load(request.memory)
            for index, batch in enumerate(request.batches):
                request.losses[index].copy_(self._step(request, batch))
            if self._single is not None:
                self._single.store(request.memory)

    def _step(self, request: Request, batch: tuple[Tensor, ...]) -> Tensor:
        if self._single is None:
            return request.step(*batch)
        self._single.replay(batch)
        return self._single.loss


def _now(like: Tensor) -> float:
    """Return the time at which the device of a tensor has done all that it was asked for."""
    if like.device.type == "cuda":
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


class Packer:
    """Serves the requests of interleaved visits; `choices` come in the order of steps of new shapes."""

    def __init__(self, size: int, clock: Clock = _now, ways: Sequence[str] = WAYS) -> None:
        """Start without recordings; of these ways the fastest is taken."""
        self.size, self.choices = size, list[Choice]()
        self._clock, self._ways = clock, ways
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self._measured: dict[Hashable, Choice] = {}

    def __call__(self, requests: Sequence[Request]) -> None:
        """Do the steps that some visits ask for: those with the same key at once."""
        for key in dict.fromkeys(request.key for request in requests):
            same = [request for request in requests if request.key == key]
            group = self._group(same[0])
            group.serve(same)
            for request in same:
                request.replayed = 0 if group.eager_reason else len(request.batches)
                request.eager_reason = group.eager_reason

    def _group(self, request: Request) -> _Group:
        """Return the group of a request; those that were not used for longest give their memory back."""
        group = self._groups.pop(request.key, None)
        while group is None and len(self._groups) >= _MAX_GROUPS:
            self._groups.popitem(last=False)
        if group is None:
            measured = self._measured.get(request.shape)
            group = _Group(request, self.size, self._clock, self._ways, measured)
            if measured is None:
                self._measured[request.shape] = group.choice
                self.choices.append(group.choice)
        self._groups[request.key] = group
        return group
