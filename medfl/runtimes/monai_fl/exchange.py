"""A simulation whose sites are `ClientAlgo`s of MONAI FL, all in this process: `--runtime monai-fl`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monai.fl.utils.constants import ExtraItems, FlStatistics
from monai.fl.utils.exchange_object import ExchangeObject

from medfl.core import Count, Message, RunError, matches_type
from medfl.evaluation import CasesByName
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.client import (
    LOSS,
    ROUND,
    SCORED_SECTIONS,
    SECTION,
    MedflClientAlgo,
    exchange_object,
)
from medfl.runtimes.monai_fl.states import States
from medfl.runtimes.profiling import MESSAGES, during
from medfl.runtimes.registry import Runtime
from medfl.runtimes.simulator import Simulator
from medfl.runtimes.step import StepResult
from medfl.runtimes.tasks import (
    Introduce,
    MakeTask,
    Results,
    RoundTask,
    ScoreSite,
    Train,
    TrainToScore,
    WorkerTask,
    result_or_failure,
)
from medfl.storage import State, load_state, save_state, to_device


class Exchange(Workers):
    """Runs the tasks of a `Simulator`: its sites are `MedflClientAlgo` objects in this process.

    A visit to a site consists of the calls of a MONAI FL host: initialize, train and get_weights, or evaluate, and
    finalize. Server and site exchange only `ExchangeObject`s; outcomes of single cases, which a simulation shows, are
    read from the site directly. The States are in the run folder, as with the simulator.
    """

    def __init__(self, federation: Federation, jobs: int = 1) -> None:
        # no worker processes: the sites' objects live here
        super().__init__(federation, 1)
        self.sites = {name: MedflClientAlgo(federation, name) for name in federation.participants}

    def run(self, tasks: Sequence[MakeTask], sizes: Sequence[float] | None = None) -> Results:
        """Run tasks one after another and yield (position, result)."""
        for index, make in enumerate(tasks):
            task = make()
            yield index, result_or_failure(task, partial(self._run, task))

    def _run(self, task: WorkerTask) -> Any:
        match task:
            case Introduce():
                return self._introduction(task.site)
            case Train():
                return self._train(task)
            case TrainToScore():
                return self._visit(task).cases
            case ScoreSite():
                return self._evaluate(task)
            case RoundTask():
                return self._visit(task)

        return task.run(self._federation)

    def _introduction(self, name: str) -> Message:
        with self._at(name, States()) as site:
            message = self._arrived(name, site.get_weights())
        self._federation.message_rules(name).check_reply(message)
        return message

    def _train(self, task: Train) -> tuple[StepResult, bool]:
        federation = self._federation
        states = _TaskStates(task, task.new_state, self._federation.networks.device)
        data, bytes_down = self._sent(task)
        with self._at(task.site, states) as site:
            site.train(data, {SCORED_SECTIONS: task.sections})
            answer = site.get_weights()
            cases = site.cases

        with during(MESSAGES):
            wire = self._arrived(task.site, answer)
            reply = federation.compression.decompress_reply(
                wire, task.broadcast, f"site {task.site!r}"
            )
            federation.message_rules(task.site).check_reply(reply)

        statistics = answer.statistics or {}
        loss = statistics.get(LOSS)
        steps = statistics.get(FlStatistics.NUM_EXECUTED_ITERATIONS, -1)
        if not (isinstance(loss, float) and matches_type(steps, Count)):
            raise RunError(f"site {task.site!r}: its loss is {loss!r:.40}, in {steps!r:.40} steps")

        return StepResult({}, reply, loss, steps, cases, wire.num_bytes, bytes_down), states.written

    def _evaluate(self, task: ScoreSite) -> CasesByName:
        """Have a site evaluate a model, one section at a time."""
        cases: CasesByName = {}
        data, _ = self._sent(task)
        states = _TaskStates(task, None, self._federation.networks.device)
        with self._at(task.site, states) as site:
            for section in task.sections:
                site.evaluate(data, {SECTION: section})
                cases |= site.cases

        return cases

    def _visit(self, task: RoundTask) -> Any:
        # the training is discarded, so no State is written
        states = _TaskStates(task, None, self._federation.networks.device)
        data, _ = self._sent(task)
        with self._at(task.site, states) as site:
            return site.visit(type(task).function, data, *task.arguments, part=task.part)

    @contextmanager
    def _at(self, name: str, states: States) -> Iterator[MedflClientAlgo]:
        """Visit a site; its memory is released afterwards, since there may be thousands."""
        site = self.sites[name]
        with during(f"site {name}"):
            site.initialize({ExtraItems.CLIENT_NAME: name}, states)
            try:
                yield site
            finally:
                site.finalize()

    def _sent(self, task: RoundTask) -> tuple[ExchangeObject, int]:
        """Return a broadcast as it is sent, and its bytes."""
        with during(MESSAGES):
            wire = self._federation.compress_broadcast(task.round, task.site, task.broadcast)
            return exchange_object(wire.flat(), {ROUND: task.round}), wire.num_bytes

    def _arrived(self, name: str, answer: ExchangeObject) -> Message:
        if not isinstance(answer, ExchangeObject):
            raise RunError(f"site {name!r}: its answer is a {type(answer).__name__}")

        return self._federation.decode_reply(name, answer.weights or {})


class _TaskStates(States):
    """A site's State in the run folder's files that a task names; `written` tells whether there is a new one."""

    def __init__(self, task: RoundTask, new_state: Path | None, device: torch.device) -> None:
        super().__init__()
        self._old = task.state
        self._new = new_state
        self._device = device
        self.written = False

    def newest(self, round_: int) -> State | None:
        if self._old is None:
            return None

        return to_device(load_state(self._old.path), self._device)

    of = newest  # a task names the one State that there is

    def keep(self, round_: int, state: State, base: int | None = None) -> None:
        if state and self._new is not None:
            save_state(self._new, state, round_)
            self.written = True


RUNTIME = Runtime(
    lambda execution: Simulator(execution, Exchange).execute(),
    no_jobs="its sites share one process",
)
