"""The same training step at several sites at once, where that is faster than at one after the other.

`Together` is what visits abreast (`medfl.training.accelerate.interleave`) meet for. It has three ways of doing their
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

from medfl.training.accelerate.compiled import compiled
from medfl.training.accelerate.recordings import Home, Recording, Repeatable, moved
from medfl.training.accelerate.vmapped import Grouped, noted

QUEUED = 16
"""Steps of a visit that are done at a time, so that the visits need not meet for each."""

ALONE, BESIDE, GROUPED, EAGER = "one after the other", "beside each other", "grouped", "eagerly"
WAYS = ALONE, BESIDE, GROUPED
_TIMED, _REPEATS = 4, 3
_MOST = 4  # groups kept, each with the memory of all its sites
_ALIGNED = 64  # bytes


Clock = Callable[[Tensor], float]
"""Returns the time at which the device of a tensor has done all that it was asked for."""


@dataclass
class Request:
    """Steps that a visit asks for.

    Attributes:
        key: equal where one recording serves both visits.
        shape: equal where the steps differ in no more than their numbers, as learning rates; they take the same time.
        step: does one.
        home: where the tensors of the visit live.
        graph: makes something that records a step.
        batches: the arguments of each.
        losses: (steps,), to be filled.
        whole: does a step that can be grouped, which a compiled one cannot; None: `step` does.
        replayed: how many were done by replays, to be filled.
        eager: why none were, to be filled.
    """

    key: Hashable
    shape: Hashable
    step: Callable[..., Tensor]
    home: Home
    graph: Callable[[], Repeatable]
    batches: list[tuple[Tensor, ...]] = field(default_factory=list)
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    whole: Callable[..., Tensor] | None = None
    replayed: int = 0
    eager: str = ""


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
        """Return it as a line."""
        told = [f"{way} {1000 * seconds:.2f} ms" for way, seconds in self.seconds.items()]
        told += [f"not {way}: {why}" for way, why in self.refused.items()]
        return f"steps of {self.sites} sites {self.way} ({', '.join(told)})"


class Rows:
    """Memory for the tensors of several visits, laid out as the home of each.

    Args:
        home: of one of them.
        count: visits, K.
        apart: bytes of which the distance of two rows is a multiple; with 1 they lie end to end, so that what is in one
            piece at home is so in all rows together.

    Attributes:
        stacked: (K, ...) for each tensor, of all visits.
    """

    def __init__(self, home: Home, count: int, apart: int = 1) -> None:
        """Take the memory, with the values of the home in each row."""
        pitches = [-(-part.numel() // apart) * apart for part in home.parts]
        made = [
            torch.empty(count, n, dtype=torch.uint8, device=p.device) for n, p in zip(pitches, home.parts, strict=True)
        ]
        ends = [part.numel() for part in home.parts]
        self._rows = [[block[place, :end] for block, end in zip(made, ends, strict=True)] for place in range(count)]
        self.stacked = []
        for tensor, (place, offset, _) in zip(home.tensors, home.layout, strict=True):
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            strides = (pitches[place] // tensor.element_size(), *tensor.stride())
            self.stacked.append(whole.set_(made[place].untyped_storage(), offset, (count, *tensor.shape), strides))
        for place in range(count):
            self.enter(place, home)

    def memory(self, place: int) -> list[Tensor]:
        """Return the pieces of memory of a row, as bytes."""
        return self._rows[place]

    def enter(self, place: int, home: Home) -> None:
        """Copy the values of a visit into a row."""
        if home.parts:
            torch._foreach_copy_(self._rows[place], home.parts)

    def leave(self, place: int, home: Home) -> None:
        """Bring them home."""
        if home.parts:
            torch._foreach_copy_(home.parts, self._rows[place])


class Pack:
    """A recording of one step of several sites.

    Args:
        request: of one of them; nothing of it changes.
        count: sites, K.
        way: `BESIDE` or `GROUPED`.

    Raises:
        RuntimeError: it cannot be recorded.
    """

    def __init__(self, request: Request, count: int, way: str) -> None:
        """Record the step; what it does meanwhile is forgotten."""
        home, batch = request.home, request.batches[0]
        self._graph, self._rows = request.graph(), Rows(home, count, _ALIGNED if way == BESIDE else 1)
        self._inputs = [torch.stack([part] * count) for part in batch]
        step = self._beside(request, count) if way == BESIDE else self._grouped(request, count)
        self._losses = self._graph.capture(step)

    def _beside(self, request: Request, count: int) -> Callable[[], Tensor]:
        def step() -> Tensor:
            losses = []
            for place in range(count):
                with self._graph.branch(place), moved(request.home, self._rows.memory(place)):
                    losses.append(request.step(*[part[place] for part in self._inputs]))
            self._graph.join(count)
            return torch.stack(losses)

        return step

    def _grouped(self, request: Request, count: int) -> Callable[[], Tensor]:
        with moved(request.home, [part.clone() for part in request.home.parts]):
            operations = noted(request.whole or request.step, request.home.tensors, request.batches[0])
        grouped, stacked = Grouped(operations, count), self._rows.stacked
        if request.whole is not None:
            made = compiled(lambda *batch: grouped(stacked, batch), stacked, self._inputs)
            return partial(made, stacked, self._inputs)
        grouped(stacked, self._inputs)  # whatever cannot be grouped is found here, not amid a recording
        return partial(grouped, stacked, self._inputs)

    def replay(self) -> None:
        """Do the step of all rows once more, on the same batches."""
        self._graph.replay()

    def do(self, requests: Sequence[Request]) -> None:
        """Do all steps of at most K visits."""
        for place, request in enumerate(requests):
            self._rows.enter(place, request.home)
        losses = []
        for index in range(max(len(request.batches) for request in requests)):
            left = [(place, one) for place, one in enumerate(requests) if index < len(one.batches)]
            for place, request in left:
                for mine, part in zip(self._inputs, request.batches[index], strict=True):
                    mine[place].copy_(part, non_blocking=True)
            self._graph.replay()
            losses.append(self._losses.clone())
            for place, request in left:
                if index == len(request.batches) - 1:
                    self._rows.leave(place, request.home)
        table = torch.stack(losses)
        for place, request in enumerate(requests):
            request.losses.copy_(table[: len(request.batches), place])


class _Group:
    """How the steps with one key are done.

    Attributes:
        choice: what was measured, and the way.
        eager: why they are done eagerly, "" where they are not.
    """

    def __init__(
        self, request: Request, size: int, clock: Clock, ways: Sequence[str], known: Choice | None = None
    ) -> None:
        """Measure the ways, or go by what was measured of the same step with other numbers."""
        self._clock = clock
        self._single: Recording | None = None
        self._pack: Pack | None = None
        seconds, refused = dict[str, float](), dict[str, str]()
        replay: Callable[[], None]
        for way in ways if known is None else [way for way in ways if way in (ALONE, known.way)]:
            try:
                if way == ALONE:
                    self._single = Recording(request.graph(), request.step, request.home, request.batches[0])
                    replay, times = partial(self._single.replay, request.batches[0]), size
                else:
                    pack = Pack(request, size, way)
                    replay, times = pack.replay, 1
                took = known.seconds.get(way, math.inf) if known else times * self._timed(replay, request)
            except RuntimeError as error:  # an operation that cannot be recorded or grouped, too little memory
                refused[way] = str(error).splitlines()[0]
                continue
            if way != ALONE and took < min(seconds.values(), default=math.inf):
                self._pack = pack
            seconds[way] = took
        way = min(seconds, key=lambda one: seconds[one]) if seconds else EAGER
        self.eager = "" if seconds else f"a capture failed: {next(iter(refused.values()))}"
        self._alone, self._packed = seconds.get(ALONE, math.inf) / size, seconds.get(way, math.inf)
        self.choice = Choice(size, way, seconds, refused)

    def _timed(self, replay: Callable[[], None], request: Request) -> float:
        """Return the seconds of a replay, the least of some repeats."""
        device = request.losses
        replay()
        found = []
        for _ in range(_REPEATS):
            started = self._clock(device)
            for _ in range(_TIMED):
                replay()
            found.append((self._clock(device) - started) / _TIMED)
        return min(found)

    def do(self, requests: Sequence[Request]) -> None:
        """Do the steps of some visits."""
        if self._pack is not None and len(requests) * self._alone > self._packed:
            self._pack.do(requests)
            return
        for request in requests:
            if self._single is not None:
                self._single.enter(request.home)
            for index, batch in enumerate(request.batches):
                request.losses[index].copy_(self._step(request, batch))
            if self._single is not None:
                self._single.leave(request.home)

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


class Together:
    """What visits meet for.

    Attributes:
        size: visits at once.
        choices: what was measured, in the order in which steps of new shapes came.
    """

    def __init__(self, size: int, clock: Clock = _now, ways: Sequence[str] = WAYS) -> None:
        """Know no step; of these ways the fastest is taken."""
        self.size, self.choices = size, list[Choice]()
        self._clock, self._ways = clock, ways
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self._measured: dict[Hashable, Choice] = {}

    def __call__(self, requests: Sequence[Request]) -> None:
        """Do what some visits ask for: those with the same key together."""
        for key in dict.fromkeys(request.key for request in requests):
            mine = [request for request in requests if request.key == key]
            group = self._group(mine[0])
            group.do(mine)
            for request in mine:
                request.replayed = 0 if group.eager else len(request.batches)
                request.eager = group.eager

    def _group(self, request: Request) -> _Group:
        """Return how the steps of a request are done; the memory of those that were not done for long is given back."""
        found = self._groups.pop(request.key, None)
        while found is None and len(self._groups) >= _MOST:
            self._groups.popitem(last=False)
        if found is None:
            known = self._measured.get(request.shape)
            found = _Group(request, self.size, self._clock, self._ways, known)
            if known is None:
                self._measured[request.shape] = found.choice
                self.choices.append(found.choice)
        self._groups[request.key] = found
        return found
