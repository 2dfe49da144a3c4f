"""A simulation whose sites are `ClientAlgo`s of MONAI FL, in this one process: `--runtime monai-fl`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from monai.fl.utils.constants import ExtraItems, FlStatistics
from monai.fl.utils.exchange_object import ExchangeObject

from medfl.core.message import Message
from medfl.core.seeding import derive
from medfl.core.storage import State, load_state, save_state, to_device
from medfl.evaluation.metrics import Cases
from medfl.runtimes import profiling
from medfl.runtimes.federation import Federation
from medfl.runtimes.local import visits
from medfl.runtimes.local.workers import Later, Task, Workers
from medfl.runtimes.monai_fl.client import JUDGE, LOSS, ROUND, MedflClientAlgo, exchange_object
from medfl.runtimes.monai_fl.states import InMemory, States
from medfl.runtimes.monai_fl.view import moved_message
from medfl.runtimes.registry import Execution, Runtime
from medfl.runtimes.simulator import simulated
from medfl.runtimes.step import StepResult, introduce, site_step


class Exchange(Workers):
    """What a `Simulator` runs its tasks with: sites that are `MedflClientAlgo` objects of this process.

    A visit to a site is what a host of MONAI FL does: initialize, train and get_weights, or evaluate, and finalize. All
    that server and site say to each other are `ExchangeObject`s; only the outcomes of single cases, which a simulation
    shows, are read off the site. The States are in the run folder, as the simulator's.
    """

    def __init__(self, federation: Federation, jobs: int = 1) -> None:
        """Make the sites; there are no other processes."""
        super().__init__(federation, 1)
        self.sites = {name: MedflClientAlgo(federation, name) for name in federation.participants}

    def run(self, tasks: Sequence[Task | Later], sizes: Sequence[float] | None = None) -> Iterator[tuple[int, Any]]:
        """Run tasks one after the other and yield (position, result)."""
        at_sites: Mapping[Callable[..., Any], Callable[..., Any]] = {
            introduce: self._introduced,
            visits.train: self._trained,
            visits.tried: self._tried,
            visits.scored: self._scored,
        }
        for index, task in enumerate(tasks):
            function, arguments = task() if callable(task) else task
            if function in at_sites:
                yield index, visits.answered(function, arguments, at_sites[function])
            else:
                yield index, function(self._federation, *arguments)

    def _introduced(self, name: str) -> Message:
        with self._at(name, InMemory()) as site:
            message = self._arrived(name, site.get_weights())
        self._federation.check(name, message)
        return message

    def _trained(
        self, round_: int, name: str, kept: str | None, fresh: str, down: Message, judge: Sequence[str]
    ) -> tuple[StepResult, bool]:
        federation, files = self._federation, _RunFiles(kept, fresh, self._federation.networks.device)
        data, bytes_down = self._sent(round_, name, down)
        with self._at(name, files) as site:
            site.train(data, {JUDGE: judge})
            told, cases = site.get_weights(), site.cases
        with profiling.during(profiling.MESSAGES):
            wire = self._arrived(name, told)
            reply = federation.messages.opened_reply(wire, down, f"site {name!r}")
            federation.check(name, reply)
        loss, steps = (told.statistics[key] for key in (LOSS, FlStatistics.NUM_EXECUTED_ITERATIONS))
        return StepResult({}, reply, loss, steps, cases, wire.num_bytes, bytes_down), files.written

    def _tried(self, round_: int, name: str, kept: str | None, down: Message, judge: Sequence[str]) -> dict[str, Cases]:
        result: StepResult = self._visited(site_step, round_, name, kept, down, judge, part=profiling.STEP)
        return result.cases

    def _scored(
        self, function: Callable[..., Any], round_: int, name: str, kept: str | None, down: Message, *rest: Any
    ) -> Any:
        return self._visited(function, round_, name, kept, down, *rest)

    def _visited(
        self,
        function: Callable[..., Any],
        round_: int,
        name: str,
        kept: str | None,
        down: Message,
        *rest: Any,
        part: str = profiling.EVALUATION,
    ) -> Any:
        files = _RunFiles(kept, None, self._federation.networks.device)
        data, _ = self._sent(round_, name, down)
        with self._at(name, files) as site:
            return site.visit(function, data, *rest, part=part)

    @contextmanager
    def _at(self, name: str, states: States) -> Iterator[MedflClientAlgo]:
        """Be at a site; what it holds in memory is let go of afterwards, for there may be thousands."""
        site = self.sites[name]
        with profiling.visit(name):
            site.initialize({ExtraItems.CLIENT_NAME: name})
            site.states = states
            try:
                yield site
            finally:
                site.finalize()

    def _sent(self, round_: int, name: str, down: Message) -> tuple[ExchangeObject, int]:
        """Return a broadcast as it crosses, and its bytes."""
        federation = self._federation
        with profiling.during(profiling.MESSAGES):
            wire = federation.messages.broadcast(down, derive(federation.host(round_).seed, "messages", name))
            return exchange_object(wire.flat(), {ROUND: round_}), wire.num_bytes

    def _arrived(self, name: str, told: ExchangeObject) -> Message:
        federation = self._federation
        return moved_message(federation.arrived(name, told.weights or {}), federation.networks.device)


class _RunFiles:
    """A site's State in the run folder, where the simulator has said.

    Attributes:
        written: whether there is a new State.
    """

    last = 0

    def __init__(self, kept: str | None, fresh: str | None, device: torch.device) -> None:
        self._kept, self._fresh, self._device, self.written = kept, fresh, device, False

    def newest(self, round_: int) -> State | None:
        return None if self._kept is None else to_device(load_state(Path(self._kept)), self._device)

    of = newest

    def keep(self, round_: int, state: State, base: int | None = None) -> None:
        if state and self._fresh is not None:
            save_state(Path(self._fresh), state)
            self.written = True


def _execute(asked: Execution) -> dict[str, Any]:
    """Execute a run with sites that are clients of MONAI FL."""
    return simulated(asked, Exchange)


RUNTIME = Runtime(_execute, no_jobs="its sites share one process")
