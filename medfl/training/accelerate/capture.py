"""Captured steps: on a GPU one training step is recorded as a CUDA graph and replayed for the others of its shape.

With batches of 8 a GPU waits for Python to launch one small kernel after the other; a replay launches all of them at
once. The first steps of a visit to a site run eagerly, then one is captured, and it is replayed for every later batch
of the same shape. All of them are steps of the training, and the numbers are drawn as in eager steps.

What cannot be captured runs eagerly by itself (`medfl.training.accelerate.replayable` finds out before anything is
captured); why is in the report of `fit`. The verdict on a step holds for all visits with the same code, numbers and
shapes, so it is found once, and the recording serves them all from their second step on
(`medfl.training.accelerate.recordings`).

Two more ways of doing a step begin here, as they need the same verdict: compiled
(`medfl.training.accelerate.compiled`), and together with the same step of other sites
(`medfl.training.accelerate.pack_sites`).

After "CUDA Graphs", whole-network capture, in PyTorch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizers

from medfl.core.seeding import snapshot_rng
from medfl.training.accelerate.compiled import of_visit, wanted
from medfl.training.accelerate.cuda_graphs import GRAPHS, Graph, NoGraph, Warming
from medfl.training.accelerate.interleave import current
from medfl.training.accelerate.pack_sites import QUEUED, Request
from medfl.training.accelerate.recordings import Home, Recording, forget, keep, kept
from medfl.training.accelerate.replayable import Remembered, Storages, Watch, indexed
from medfl.training.accelerate.vmapped import CannotBeNoted

Step = Callable[..., Tensor]
"""The tensors of a batch -> its loss, detached; trains the network on the way."""

ENOUGH = 32
"""Steps of one shape in a visit from which a capture pays even if no other visit is like it. An estimate."""

_KNOWN = 4096  # verdicts kept
_WATCHED = 4  # steps of a visit in which a verdict can be found: one makes what lasts, two are watched, one is captured
_ALONE = 64  # verdicts that no second visit asked for, from which on short visits are not watched

_ALLOWED: ContextVar[bool] = ContextVar("capturing", default=False)
_FAILED: dict[str, str] = {}


@contextmanager
def allowed(yes: bool = True) -> Iterator[None]:
    """Let `fit` capture its steps inside the block, or keep it from it."""
    token = _ALLOWED.set(yes)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


@dataclass(frozen=True)
class Verdict:
    """What was found out about a step.

    Attributes:
        obstacle: why it cannot be captured, "" if it can.
        used: which of the tensors that it reaches it uses, by their place (`Remembered.tensors`).
        complete: whether these are all that it uses besides its batch, all on its device.
        draws: whether it draws random numbers.
    """

    obstacle: str
    used: tuple[int, ...] = ()
    complete: bool = False
    draws: bool = False


class Verdicts:
    """The verdicts of a process, by code, numbers and shapes of a step."""

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[Hashable, Verdict] = {}
        self._unused: set[Hashable] = set()

    def get(self, key: Hashable) -> Verdict | None:
        """Return a verdict that an earlier visit found."""
        self._unused.discard(key)
        return self._known.get(key)

    def add(self, key: Hashable, verdict: Verdict) -> None:
        """Keep a verdict."""
        if len(self._known) >= _KNOWN:
            self._known.clear()
            self._unused.clear()
        self._known[key] = verdict
        self._unused.add(key)

    @property
    def useful(self) -> bool:
        """Whether it pays to look at the steps of a short visit, as others like it come."""
        return len(self._unused) < _ALONE


_VERDICTS = Verdicts()


class Steps:
    """The steps of one visit, each done eagerly or by a replay.

    Attributes:
        replayed: how many were replays.
        eager: why none could be, "" where some were, or where nobody asked for it.
    """

    def __init__(
        self,
        step: Step,
        optimizer: Optimizer,
        device: torch.device,
        expected: int,
        obstacle: str = "",
        varies: bool = False,
    ) -> None:
        """Be about to train.

        Args:
            step: does one step; everything that it uses is reached from it.
            optimizer: its optimiser, which has neither stepped nor been restored yet.
            device: where the network is.
            expected: steps with the shape of the first one.
            obstacle: why it cannot be captured, as far as the caller knows.
            varies: whether the optimiser's learning rates are others in other rounds.
        """
        self.replayed, self.eager = 0, ""
        self._step, self._device, self._expected = step, device, expected
        self._graph: Warming | None = None
        self._recording: Recording | None = None
        self._asked: Request | None = None  # steps that were promised
        self._compiled: Step | None = None
        self._loss = torch.float32
        self._home: Home | None = None
        self._form: Any = None
        self._first: Watch | None = None
        self._verdict: Verdict | None = None
        self._key: Hashable = None
        self._seen: tuple[Tensor, ...] = ()
        self._storages = Storages()
        self._records = _ALLOWED.get() and device.type in GRAPHS
        if not (self._records or wanted()) or expected < (_WATCHED if wanted() else 2):
            return
        self.eager = obstacle or (_FAILED.get(device.type, "") if self._records else "") or _listened()
        if not self.eager:
            self._device = indexed(device)
            self._graph = GRAPHS[device.type](self._device) if self._records else NoGraph(self._device)
            self._graph.prepare(optimizer, varies)

    def __call__(self, *batch: Any) -> Tensor:
        """Do the step of a batch and return its loss, which no later step overwrites."""
        if self._graph is None:
            return self._step(*batch)
        form = _form(batch)
        if form is None:
            return self._refuse("a batch is not made of plain tensors")(*batch)
        if self._form is None:  # the first step makes what lasts
            self._form, self._seen = form, batch
            with self._graph.warming():
                loss = self._step(*batch)
            self._loss = loss.dtype
            return loss
        if form != self._form:
            self.finish()
            return self._step(*batch)
        if self._asked is not None:
            return self._queue(self._asked, batch)
        if wanted() and self._compiled is None and self._recording is None:
            done = self._compile(self._graph, batch)
            if done is not None:
                return done
        if self._compiled is not None and not self._records:
            self.replayed += 1
            return self._compiled(*batch)
        if self._recording is None:
            return self._warm(self._graph, batch)
        return self._replay(self._recording, batch)

    def finish(self) -> None:
        """Bring the values home that replays left in the recording's memory; to be called after the last step."""
        self.flush()
        if self._recording is not None and self._home is not None and self._recording.busy:
            self._recording.leave(self._home)

    def flush(self) -> None:
        """Have the steps done whose losses were promised; to be called before one of these is looked at."""
        visit = current()
        if visit is None or self._asked is None or not self._asked.batches:
            return
        asked, self._asked = self._asked, self._asking(self._asked)
        asked.losses = asked.losses[: len(asked.batches)]
        visit.meet(asked)
        self.replayed += asked.replayed
        self.eager = asked.eager

    def _queue(self, asked: Request, batch: tuple[Tensor, ...]) -> Tensor:
        """Promise a step that is done together with those of other visits."""
        asked.batches.append(batch)
        loss = asked.losses[len(asked.batches) - 1]
        if len(asked.batches) == QUEUED:
            self.flush()
        return loss

    def _asking(self, like: Request) -> Request:
        return replace(like, batches=[], losses=torch.empty(QUEUED, dtype=self._loss, device=self._device))

    def _replay(self, recording: Recording, batch: tuple[Tensor, ...]) -> Tensor:
        assert self._home is not None
        if not recording.busy:
            recording.enter(self._home)
        recording.replay(batch)
        self.replayed += 1
        return recording.loss

    def _warm(self, graph: Warming, batch: tuple[Tensor, ...]) -> Tensor:
        """Do a step before there is a recording: look for one, for a verdict, or make them."""
        before = Remembered(self._step, self._seen, self._storages, self._device)
        key = (before.kind, self._form, self._device, _arithmetic())
        another = self._verdict is not None and not self._verdict.obstacle and key != self._key
        if self._first is None or another:  # an eager step since the verdict can have made it another step
            self._key, self._first, self._verdict = key, None, _VERDICTS.get(key)
        if self._verdict is None:
            few = self._few() if self._first is None else ""
            return self._refuse(few)(*batch) if few else self._watch(graph, key, before, batch)
        if self._verdict.obstacle:
            return self._refuse(self._verdict.obstacle)(*batch)
        self._home = Home([before.tensors[place] for place in self._verdict.used])
        if current() is not None and self._verdict.complete and not self._verdict.draws:
            make = partial(GRAPHS[self._device.type], self._device)
            whole = self._step if self._compiled else None
            shape, step = (*key[1:], self._home.layout), self._compiled or self._step
            self._asked = self._asking(Request((key, self._home.layout), shape, step, self._home, make, whole=whole))
            return self._queue(self._asked, batch)
        self._recording = kept((key, self._home.layout)) if self._verdict.complete else None
        if self._recording is not None:
            return self._replay(self._recording, batch)
        return self._capture(cast("Graph", graph), key, batch)

    def _compile(self, graph: Warming, batch: tuple[Tensor, ...]) -> Tensor | None:
        """Have the step compiled; if it cannot be, do it, and all others of the visit, eagerly.

        Which steps are compiled must not depend on what the process has seen, for they have other last bits. So a step
        that is only looked at is undone.
        """
        before = Remembered(self._step, self._seen, self._storages, self._device)
        key = (before.kind, self._form, self._device, _arithmetic())
        verdict, done = _VERDICTS.get(key), None
        if verdict is None:
            verdict, done = self._looked_at(graph, before, batch)
            _VERDICTS.add(key, verdict)
        why = verdict.obstacle or ("" if verdict.complete else "it uses tensors that cannot be reached from it")
        why = why or ("it draws random numbers" if verdict.draws else "")
        if not why:
            self._home = Home([before.tensors[place] for place in verdict.used])
            try:
                self._compiled = of_visit(key, self._step, self._home, batch)
                return None
            except CannotBeNoted as error:
                why = str(error)
        self._refuse(why)
        return self._step(*batch) if done is None else done

    def _looked_at(
        self, graph: Warming, before: Remembered, batch: tuple[Tensor, ...]
    ) -> tuple[Verdict, Tensor | None]:
        """Look at a step, and at its repetition where both can be undone; return its loss if it was not undone."""
        reached = Home([tensor for tensor in before.tensors if tensor.device == self._device])
        kept, back, watches = [part.clone() for part in reached.parts], snapshot_rng(), list[Watch]()
        obstacle, verdict = before.obstacle, Verdict(before.obstacle)
        while not obstacle and len(watches) < 2:
            watches.append(Watch(self._device, batch, self._storages))
            with graph.warming(), watches[-1]:
                loss = self._step(*batch)
            after = Remembered(self._step, self._seen, self._storages, self._device)
            obstacle = _found(before, after, watches)
            verdict = Verdict(obstacle, *after.among(watches[-1].outside), watches[-1].draws)
            if not verdict.complete or verdict.draws:
                break
        if not watches or (len(watches) == 1 and (obstacle or not verdict.complete or verdict.draws)):
            return verdict, loss if watches else None
        if reached.parts:
            torch._foreach_copy_(reached.parts, kept)
        back()
        return verdict, None

    def _few(self) -> str:
        """Return why steps of which nothing is known are not watched."""
        if self._expected >= ENOUGH or (self._expected >= _WATCHED and _VERDICTS.useful):
            return ""
        if self._expected < _WATCHED:
            return f"a visit has fewer than {_WATCHED} steps of the same shape"
        return "each visit has few steps, with code or numbers of its own"

    def _watch(self, graph: Warming, key: Hashable, before: Remembered, batch: tuple[Tensor, ...]) -> Tensor:
        """Do a step and look at it; the second one of two gives the verdict."""
        watch = Watch(self._device, batch, self._storages)
        with graph.warming(), watch:
            loss = self._step(*batch)
        self._seen = batch
        after = Remembered(self._step, self._seen, self._storages, self._device)
        obstacle = _found(before, after, [self._first or watch, watch])
        if obstacle or self._first is not None:
            used, complete = after.among(watch.outside)
            self._verdict = Verdict(obstacle, used, complete, watch.draws)
            _VERDICTS.add(key, self._verdict)
        self._first = watch
        return loss

    def _capture(self, graph: Graph, key: Hashable, batch: tuple[Tensor, ...]) -> Tensor:
        """Capture this step; if that fails, do it eagerly, and all others of the process too."""
        assert self._home is not None
        assert self._verdict is not None
        try:
            self._recording = Recording(graph, self._compiled or self._step, self._home, batch)
        except RuntimeError as error:
            _FAILED[self._device.type] = f"a capture failed: {str(error).splitlines()[0]}"
            forget()
            return self._refuse(_FAILED[self._device.type])(*batch)
        if self._verdict.complete:
            keep((key, self._home.layout), self._recording)
        self._recording.busy = True
        self.replayed += 1
        return self._recording.loss

    def _refuse(self, why: str) -> Step:
        self._graph, self._first, self.eager = None, None, why
        return self._step


def _found(before: Remembered, after: Remembered, watches: Sequence[Watch]) -> str:
    """Return why a step cannot be repeated: by what was before and after it, and by the first and the last watch."""
    obstacle = before.obstacle or after.obstacle or watches[-1].obstacle
    if not obstacle and before.state != after.state:
        obstacle = "it remembers something from one step to the next"
    if not obstacle and watches[0].operations != watches[-1].operations:
        obstacle = "two steps in a row differ in what they do"
    return obstacle


def _form(batch: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return shapes and types of a batch, None if it is not made of plain tensors."""
    if any(type(part) is not Tensor for part in batch):
        return None
    return tuple((part.shape, part.stride(), part.dtype, part.device) for part in batch)


def _listened() -> str:
    """Tell whether something wants to hear of every step of every optimiser, which replays do not tell of."""
    hooks = (_optimizers._global_optimizer_pre_hooks, _optimizers._global_optimizer_post_hooks)
    return "every step of an optimiser is listened to (--profile)" if any(hooks) else ""


def _arithmetic() -> tuple[Any, ...]:
    """Return the settings of the process that choose the kernels of a step."""
    backends, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    chosen = (backends.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, torch.get_num_threads())
    return (wanted(), *chosen, torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled())
