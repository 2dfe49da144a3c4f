"""Captured steps: on a GPU one training step is recorded as a CUDA graph and replayed for the others of its shape.

With batches of 8 a GPU waits for Python to launch one small kernel after the other; a replay launches all of them at
once. The first steps of a visit to a site run eagerly, then one is captured, and it is replayed for every later batch
of the same shape. All of them are steps of the training, and the numbers are drawn as in eager steps.

What cannot be captured runs eagerly by itself (`medfl.training.accelerate.replayable` finds out before anything is
captured); why is in the report of `fit`. The verdict on a step holds for all visits with the same code, numbers and
shapes, so it is found once, and the recording serves them all from their second step on
(`medfl.training.accelerate.recordings`).

Two more ways of doing a step begin here, as they need the same verdict: compiled
(`medfl.training.accelerate.compiled`), and packed with the same step of other sites
(`medfl.training.accelerate.pack_sites`).

After "CUDA Graphs", whole-network capture, in PyTorch's documentation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizers

from medfl.core.seeding import snapshot_rng
from medfl.training.accelerate import recordings
from medfl.training.accelerate.compiled import compile_enabled, compile_for_visit
from medfl.training.accelerate.cuda_graphs import GRAPHS, CudaGraph, count_in_tensors
from medfl.training.accelerate.interleave import current_visit
from medfl.training.accelerate.pack_sites import QUEUE_LENGTH, Request
from medfl.training.accelerate.recordings import Recording, VisitMemory
from medfl.training.accelerate.replayable import OperationLog, ReachableState, StorageIds, with_index
from medfl.training.accelerate.vmapped import CannotBeTraced, Step
from medfl.training.site import Site

MIN_STEPS = 32
"""Steps of one shape in a visit from which a capture pays even if no other visit is like it. An estimate."""

_MAX_VERDICTS = 4096
_VERDICT_STEPS = 4  # steps of a visit in which a verdict is found: one makes what lasts, two are logged, one captured
_MAX_UNSHARED = 64  # verdicts that no second visit asked for, from which on short visits are not looked at

_ENABLED: ContextVar[bool] = ContextVar("capturing", default=False)
_FAILED: dict[str, str] = {}


@contextmanager
def capture_steps(enabled: bool = True) -> Iterator[None]:
    """Let `fit` capture its steps inside the block, or keep it from it."""
    token = _ENABLED.set(enabled)
    try:
        yield
    finally:
        _ENABLED.reset(token)


@dataclass(frozen=True)
class Verdict:
    """What was found out about a step.

    Attributes:
        obstacle: why it cannot be captured, "" if it can.
        used: the indices of the tensors that it uses among those that it reaches (`ReachableState.tensors`).
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
        self._verdicts: dict[Hashable, Verdict] = {}
        self._unshared: set[Hashable] = set()

    def get(self, key: Hashable) -> Verdict | None:
        """Return a verdict that an earlier visit found."""
        self._unshared.discard(key)
        return self._verdicts.get(key)

    def add(self, key: Hashable, verdict: Verdict) -> None:
        """Keep a verdict."""
        if len(self._verdicts) >= _MAX_VERDICTS:
            self._verdicts.clear()
            self._unshared.clear()
        self._verdicts[key] = verdict
        self._unshared.add(key)

    @property
    def useful(self) -> bool:
        """Whether it pays to look at the steps of a short visit, as others like it come."""
        return len(self._unshared) < _MAX_UNSHARED


_VERDICTS = Verdicts()


class StepRunner:
    """Does the steps of one visit: eagerly, by replays of a captured one, or by a compiled one.

    Attributes:
        replayed: how many were replays or compiled.
        eager_reason: why none could be, "" where some were, or where nobody asked for it.
    """

    def __init__(
        self,
        step: Step,
        optimizer: Optimizer,
        device: torch.device,
        expected: int,
        obstacle: str = "",
        varying_rates: bool = False,
    ) -> None:
        """Prepare the optimiser if steps may be captured or compiled.

        Args:
            step: does one step; everything that it uses is reached from it.
            optimizer: its optimiser, which has neither stepped nor been restored yet.
            device: where the network is.
            expected: steps with the shape of the first one.
            obstacle: why it cannot be captured, as far as the caller knows.
            varying_rates: whether the optimiser's learning rates are others in other rounds.
        """
        self.replayed, self.eager_reason = 0, ""
        self._step, self._device, self._expected = step, device, expected
        self._eager_only = True
        self._graph: CudaGraph | None = None
        self._recording: Recording | None = None
        self._request: Request | None = None  # steps that were promised
        self._compiled: Step | None = None
        self._loss_dtype = torch.float32
        self._memory: VisitMemory | None = None
        self._form: Any = None
        self._log: OperationLog | None = None
        self._verdict: Verdict | None = None
        self._key: Hashable = None
        self._last_batch: tuple[Tensor, ...] = ()
        self._storage_ids = StorageIds()
        captures = _ENABLED.get() and device.type in GRAPHS
        if not (captures or compile_enabled()) or expected < (_VERDICT_STEPS if compile_enabled() else 2):
            return
        self.eager_reason = obstacle or (_FAILED.get(device.type, "") if captures else "") or _listener()
        if not self.eager_reason:
            self._eager_only, self._device = False, with_index(device)
            self._graph = GRAPHS[device.type](self._device) if captures else None
            prepare = self._graph.prepare if self._graph else count_in_tensors
            prepare(optimizer, varying_rates)

    def __call__(self, *batch: Any) -> Tensor:
        """Do the step of a batch and return its loss, which no later step overwrites."""
        if self._eager_only:
            return self._step(*batch)
        form = _form(batch)
        if form is None:
            return self._give_up("a batch is not made of plain tensors")(*batch)
        if self._form is None:  # the first step makes what lasts
            self._form, self._last_batch = form, batch
            with self._warming():
                loss = self._step(*batch)
            self._loss_dtype = loss.dtype
            return loss
        if form != self._form:
            self.finish()
            return self._step(*batch)
        if self._request is not None:
            return self._promise(self._request, batch)
        if compile_enabled() and self._compiled is None and self._recording is None:
            loss_of_eager = self._compile(batch)
            if loss_of_eager is not None:
                return loss_of_eager
        if self._compiled is not None and self._graph is None:
            self.replayed += 1
            return self._compiled(*batch)
        return self._warm_up(batch) if self._recording is None else self._replay(self._recording, batch)

    def finish(self) -> None:
        """Copy the values back that replays left in the recording's memory; to be called after the last step."""
        self.flush()
        if self._recording is not None and self._memory is not None and self._recording.busy:
            self._recording.store(self._memory)

    def flush(self) -> None:
        """Have the steps done whose losses were promised; to be called before one of these is looked at."""
        visit = current_visit()
        if visit is None or self._request is None or not self._request.batches:
            return
        request, self._request = self._request, self._new_request(self._request)
        request.losses = request.losses[: len(request.batches)]
        visit.wait_for(request)
        self.replayed += request.replayed
        self.eager_reason = request.eager_reason

    def _promise(self, request: Request, batch: tuple[Tensor, ...]) -> Tensor:
        """Queue a step that is done at once with those of other visits; return where its loss will be."""
        request.batches.append(batch)
        loss = request.losses[len(request.batches) - 1]
        if len(request.batches) == QUEUE_LENGTH:
            self.flush()
        return loss

    def _new_request(self, like: Request) -> Request:
        losses = torch.empty(QUEUE_LENGTH, dtype=self._loss_dtype, device=self._device)
        return replace(like, batches=[], losses=losses)

    def _replay(self, recording: Recording, batch: tuple[Tensor, ...]) -> Tensor:
        assert self._memory is not None
        if not recording.busy:
            recording.load(self._memory)
        recording.replay(batch)
        self.replayed += 1
        return recording.loss

    def _warming(self) -> AbstractContextManager[None]:
        return self._graph.warming() if self._graph else nullcontext()

    def _look(self) -> tuple[ReachableState, tuple[Any, ...]]:
        """Return what the step reaches now, and the key of its verdict."""
        state = ReachableState(self._step, self._last_batch, self._storage_ids, self._device)
        return state, (state.signature, self._form, self._device, _kernel_settings())

    def _warm_up(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Do a step before there is a recording: look for one, for a verdict, or make them."""
        before, key = self._look()
        changed = self._verdict is not None and not self._verdict.obstacle and key != self._key
        if self._log is None or changed:  # an eager step since the verdict can have made it another step
            self._key, self._log, self._verdict = key, None, _VERDICTS.get(key)
        if self._verdict is None:
            too_few = self._too_few_steps() if self._log is None else ""
            return self._give_up(too_few)(*batch) if too_few else self._log_step(key, before, batch)
        if self._verdict.obstacle:
            return self._give_up(self._verdict.obstacle)(*batch)
        self._memory = VisitMemory([before.tensors[index] for index in self._verdict.used])
        recording_key = (key, self._memory.layout)
        if current_visit() is not None and self._verdict.complete and not self._verdict.draws:
            make_graph = partial(GRAPHS[self._device.type], self._device)
            shape, step = (*key[1:], self._memory.layout), self._compiled or self._step
            eager_step = self._step if self._compiled else None
            request = Request(recording_key, shape, step, self._memory, make_graph, eager_step=eager_step)
            self._request = self._new_request(request)
            return self._promise(self._request, batch)
        self._recording = recordings.find_free(recording_key) if self._verdict.complete else None
        if self._recording is not None:
            return self._replay(self._recording, batch)
        return self._capture(recording_key, batch)

    def _compile(self, batch: tuple[Tensor, ...]) -> Tensor | None:
        """Have the step compiled; if it cannot be, do it, and all others of the visit, eagerly.

        Which steps are compiled must not depend on what the process has seen, for they have other last bits. So a step
        that is only looked at is undone.
        """
        before, key = self._look()
        verdict, loss = _VERDICTS.get(key), None
        if verdict is None:
            verdict, loss = self._judge_and_undo(before, batch)
            _VERDICTS.add(key, verdict)
        why = verdict.obstacle or ("" if verdict.complete else "it uses tensors that cannot be reached from it")
        why = why or ("it draws random numbers" if verdict.draws else "")
        if not why:
            self._memory = VisitMemory([before.tensors[index] for index in verdict.used])
            try:
                self._compiled = compile_for_visit(key, self._step, self._memory, batch)
                return None
            except CannotBeTraced as error:
                why = str(error)
        self._give_up(why)
        return self._step(*batch) if loss is None else loss

    def _judge_and_undo(self, before: ReachableState, batch: tuple[Tensor, ...]) -> tuple[Verdict, Tensor | None]:
        """Log a step, and its repetition where both can be undone; return the loss of one that was not undone."""
        memory = VisitMemory([tensor for tensor in before.tensors if tensor.device == self._device])
        blocks, restore_rng, logs = [block.clone() for block in memory.blocks], snapshot_rng(), list[OperationLog]()
        obstacle, verdict = before.obstacle, Verdict(before.obstacle)
        while not obstacle and len(logs) < 2:
            logs.append(OperationLog(self._device, batch, self._storage_ids))
            with self._warming(), logs[-1]:
                loss = self._step(*batch)
            after, _ = self._look()
            obstacle = _obstacle(before, after, logs)
            verdict = Verdict(obstacle, *after.find(logs[-1].outside), logs[-1].draws)
            if not verdict.complete or verdict.draws:
                break
        if not logs or (len(logs) == 1 and (obstacle or not verdict.complete or verdict.draws)):
            return verdict, loss if logs else None
        if memory.blocks:
            torch._foreach_copy_(memory.blocks, blocks)
        restore_rng()
        return verdict, None

    def _too_few_steps(self) -> str:
        """Return why steps of which nothing is known are not looked at."""
        if self._expected >= MIN_STEPS or (self._expected >= _VERDICT_STEPS and _VERDICTS.useful):
            return ""
        if self._expected < _VERDICT_STEPS:
            return f"a visit has fewer than {_VERDICT_STEPS} steps of the same shape"
        return "each visit has few steps, with code or numbers of its own"

    def _log_step(self, key: Hashable, before: ReachableState, batch: tuple[Tensor, ...]) -> Tensor:
        """Do a step and log it; the second one of two gives the verdict."""
        log = OperationLog(self._device, batch, self._storage_ids)
        with self._warming(), log:
            loss = self._step(*batch)
        self._last_batch = batch
        after, _ = self._look()
        obstacle = _obstacle(before, after, [self._log or log, log])
        if obstacle or self._log is not None:
            used, complete = after.find(log.outside)
            self._verdict = Verdict(obstacle, used, complete, log.draws)
            _VERDICTS.add(key, self._verdict)
        self._log = log
        return loss

    def _capture(self, recording_key: Hashable, batch: tuple[Tensor, ...]) -> Tensor:
        """Capture this step; if that fails, do it eagerly, and all others of the process too."""
        assert self._graph is not None
        assert self._memory is not None
        assert self._verdict is not None
        try:
            self._recording = Recording(self._graph, self._compiled or self._step, self._memory, batch)
        except RuntimeError as error:
            _FAILED[self._device.type] = f"a capture failed: {str(error).splitlines()[0]}"
            recordings.forget()
            return self._give_up(_FAILED[self._device.type])(*batch)
        if self._verdict.complete:
            recordings.keep(recording_key, self._recording)
        self._recording.busy = True
        self.replayed += 1
        return self._recording.loss

    def _give_up(self, why: str) -> Step:
        """Return the step, which is done eagerly from now on."""
        self._eager_only, self._log, self.eager_reason = True, None, why
        return self._step


def runner_of_visit(step: Step, optimizer: Optimizer, site: Site) -> StepRunner:
    """Return the runner of `fit`'s steps at a site, which decides how many are expected and what obstacle there is."""
    settings = site.settings
    expected = settings.epochs * max(1, len(site.train) // settings.batch_size)
    changes = settings.lr_decay != 1 or settings.rates is not None
    return StepRunner(step, optimizer, site.device, expected, visit_obstacle(site), changes)


def visit_obstacle(site: Site) -> str:
    """Return why the steps of a visit cannot be captured, as far as the settings tell, "" for no reason."""
    if site.settings.amp and site.device.type == "cuda":
        return "mixed precision in float16 reads back whether gradients are finite"
    if (site.settings.epoch_factor != 1 or site.settings.rates) and site.settings.epochs > 1:
        return "the learning rate changes within a visit"
    return ""


def _obstacle(before: ReachableState, after: ReachableState, logs: Sequence[OperationLog]) -> str:
    """Return why a step cannot be repeated: by what was before and after it, and by the first and the last log."""
    obstacle = before.obstacle or after.obstacle or logs[-1].obstacle
    if not obstacle and before.state != after.state:
        obstacle = "it remembers something from one step to the next"
    if not obstacle and logs[0].operations != logs[-1].operations:
        obstacle = "two steps in a row differ in what they do"
    return obstacle


def _form(batch: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return shapes and types of a batch, None if it is not made of plain tensors."""
    if any(type(tensor) is not Tensor or tensor.layout != torch.strided for tensor in batch):
        return None
    return tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in batch)


def _listener() -> str:
    """Return an obstacle if something listens to every step of every optimiser, as replays do not call it."""
    hooks = (_optimizers._global_optimizer_pre_hooks, _optimizers._global_optimizer_post_hooks)
    return "every step of an optimiser is listened to (--profile)" if any(hooks) else ""


def _kernel_settings() -> tuple[Any, ...]:
    """Return the settings of the process that choose the kernels of a step."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    chosen = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, torch.get_num_threads())
    return (compile_enabled(), *chosen, torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled())
