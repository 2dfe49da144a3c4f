"""Captured steps: on a GPU one training step is recorded as a CUDA graph and replayed for the others of its shape.

With batches of 8 a GPU waits for Python to launch one small kernel after the other; a replay launches all of them at
once. Within one visit to a site the first steps run eagerly, then one is captured, and it is replayed for every later
batch of the same shape. All of them are steps of the training, and the numbers are drawn as in eager steps.

What cannot be captured runs eagerly by itself (`medfl.watching` finds out before anything is captured); why is in the
report of `fit`. The verdict on a step holds for all visits with the same code, numbers and shapes, so it is found once.

After "CUDA Graphs", whole-network capture, in PyTorch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizers

from medfl.importing import without_collecting
from medfl.watching import Remembered, Storages, Watch, indexed

Step = Callable[[Any, Any], Tensor]
"""(inputs, targets) of a batch -> its loss, detached; trains the network on the way."""

ENOUGH = 32
"""Steps of one shape in a visit from which a capture is worth its cost. An estimate, not measured."""

_KNOWN = 4096  # verdicts kept


class Graph(Protocol):
    """What records a step and repeats it."""

    def prepare(self, optimizer: Optimizer) -> None:
        """Make an optimiser that has not stepped yet fit to be captured."""

    def warming(self) -> AbstractContextManager[None]:
        """Return the context of the eager steps before the capture."""

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        """Do a step and record it.

        Returns:
            The step's loss, in memory where each replay writes its own.

        Raises:
            RuntimeError: it cannot be recorded; the step was not done.
        """

    def replay(self) -> None:
        """Repeat the recorded operations."""


class CudaGraph:
    """A step as a CUDA graph; all graphs of a device share one pool of memory."""

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    _pools: ClassVar[dict[torch.device, Any]] = {}
    _last: ClassVar[dict[torch.device, CudaGraph]] = {}  # a pool lives as long as one of its graphs does

    def __init__(self, device: torch.device) -> None:
        """Be about to capture on an `indexed` device, on the stream of the warm-up (libraries tie handles to one)."""
        self._device = device
        if self._device not in self._streams:
            self._streams[self._device] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pools[self._device] = torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()

    def prepare(self, optimizer: Optimizer) -> None:
        """Let the optimiser count its steps on the device, if it counts them."""
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]  # some steps are eager

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Run a block on the stream of the capture."""
        stream, current = self._streams[self._device], torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        """Record a step, then do it by its first replay."""
        generator = torch.cuda.default_generators[self._device.index]
        drawn = generator.get_state()
        try:
            with self.warming(), without_collecting():  # which could free device memory amid a capture
                self._graph.capture_begin(pool=self._pools[self._device], capture_error_mode="thread_local")
                try:
                    loss = step()
                except BaseException:
                    with suppress(RuntimeError):
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()
        except RuntimeError:
            fresh = torch.Generator(self._device)  # the old one may take itself to be captured still
            fresh.set_state(drawn)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            raise
        self._last[self._device] = self
        self.replay()
        return loss

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


GRAPHS: dict[str, Callable[[torch.device], Graph]] = {"cuda": CudaGraph}
"""Type of device -> what records steps there; on all others they run eagerly."""

_ALLOWED: ContextVar[bool] = ContextVar("capturing", default=False)
_VERDICTS: dict[Any, str] = {}
_FAILED: dict[str, str] = {}


@contextmanager
def allowed(yes: bool = True) -> Iterator[None]:
    """Let `fit` capture its steps inside the block, or keep it from it."""
    token = _ALLOWED.set(yes)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


class Steps:
    """The steps of one visit, each done eagerly or by a replay.

    Attributes:
        replayed: how many were replays.
        eager: why none could be, "" where some were, or where nobody asked for it.
    """

    def __init__(
        self, step: Step, optimizer: Optimizer, device: torch.device, expected: int, obstacle: str = ""
    ) -> None:
        """Be about to train.

        Args:
            step: does one step; everything that it uses is reached from it.
            optimizer: its optimiser, which has neither stepped nor been restored yet.
            device: where the network is.
            expected: steps with the shape of the first one.
            obstacle: why it cannot be captured, as far as the caller knows.
        """
        self.replayed, self.eager = 0, ""
        self._step, self._device = step, device
        self._graph: Graph | None = None
        self._form: Any = None
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._loss: Tensor | None = None
        self._done = 0
        self._verdict: str | None = None
        self._first: Watch | None = None
        self._seen: tuple[Tensor, ...] = ()
        self._storages = Storages()
        if not _ALLOWED.get() or device.type not in GRAPHS or expected < ENOUGH:
            return
        self.eager = obstacle or _FAILED.get(device.type, "") or _listened()
        if not self.eager:
            self._device = indexed(device)
            self._graph = GRAPHS[device.type](self._device)
            self._graph.prepare(optimizer)

    def __call__(self, x: Any, y: Any) -> Tensor:
        """Do the step of a batch and return its loss, which no later step overwrites."""
        if self._graph is None:
            return self._step(x, y)
        form = _form(x, y)
        if form is None:
            return self._refuse("a batch is no pair of tensors")(x, y)
        self._form = self._form or form
        if form != self._form:
            return self._step(x, y)
        self._done += 1
        if self._loss is not None and self._inputs is not None:
            for kept, new in zip(self._inputs, (x, y), strict=True):
                kept.copy_(new, non_blocking=True)
            self._graph.replay()
            self.replayed += 1
            return self._loss.clone()
        return self._warm(self._graph, x, y)

    def _warm(self, graph: Graph, x: Tensor, y: Tensor) -> Tensor:
        """Do one of the first steps: the first makes what lasts, two are watched unless the verdict is known."""
        if self._done == 1:
            self._seen = x, y
            with graph.warming():
                return self._step(x, y)
        if self._verdict is None:
            return self._watch(graph, x, y)
        if self._verdict:
            return self._refuse(self._verdict)(x, y)
        return self._capture(graph, x, y)

    def _watch(self, graph: Graph, x: Tensor, y: Tensor) -> Tensor:
        """Do a step and look at it; the second one of two gives the verdict."""
        before = Remembered(self._step, self._seen, self._storages, self._device)
        key = (before.kind, self._form, self._device.type)
        if self._first is None and key in _VERDICTS:
            self._verdict = _VERDICTS[key]
            return self._warm(graph, x, y)
        watch = Watch(self._device, (x, y), self._storages)
        with graph.warming(), watch:
            loss = self._step(x, y)
        self._seen = (x, y)
        after = Remembered(self._step, self._seen, self._storages, self._device)
        obstacle = before.obstacle or after.obstacle or watch.obstacle
        if not obstacle and before.state != after.state:
            obstacle = "it remembers something from one step to the next"
        if not obstacle and self._first is not None and self._first.operations != watch.operations:
            obstacle = "two steps in a row differ in what they do"
        if obstacle or self._first is not None:
            self._verdict = obstacle
            if len(_VERDICTS) >= _KNOWN:
                _VERDICTS.clear()
            _VERDICTS[key] = obstacle
        self._first = watch
        return loss

    def _capture(self, graph: Graph, x: Tensor, y: Tensor) -> Tensor:
        """Capture this step; if that fails, do it eagerly, and all others of the process too."""
        self._first = None
        self._inputs = torch.empty_like(x), torch.empty_like(y)
        for kept, new in zip(self._inputs, (x, y), strict=True):
            kept.copy_(new)
        try:
            loss = graph.capture(lambda: self._step(*self._inputs))  # type: ignore[misc]
        except RuntimeError as error:
            _FAILED[self._device.type] = f"a capture failed: {str(error).splitlines()[0]}"
            return self._refuse(_FAILED[self._device.type])(x, y)
        self._loss = loss
        self.replayed += 1
        return loss.clone()

    def _refuse(self, why: str) -> Step:
        self._graph, self._first, self.eager = None, None, why
        return self._step


def _form(*batch: Any) -> tuple[Any, ...] | None:
    """Return shapes and types of a batch, None if it is not made of plain tensors."""
    if any(type(part) is not Tensor for part in batch):
        return None
    return tuple((part.shape, part.dtype, part.device) for part in batch)


def _listened() -> str:
    """Tell whether something wants to hear of every step of every optimiser, which replays do not tell of."""
    hooks = (_optimizers._global_optimizer_pre_hooks, _optimizers._global_optimizer_post_hooks)
    return "every step of an optimiser is listened to (--profile)" if any(hooks) else ""
