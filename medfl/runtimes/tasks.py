"""Tasks: work that the server asks a runtime to do at one site, or with the server's model.

A task contains all it needs except the federation, so a runtime may run it in this process, in a worker process, or on
another machine. A site's State is read from its file where the task runs: no process holds the States of all sites,
and none of them passes through the server's process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from medfl.core import MedflError, Message, RunError
from medfl.evaluation import Cases, CasesByName, Masks
from medfl.runtimes.attendance import FailedReply
from medfl.runtimes.federation import Federation
from medfl.runtimes.profiling import CHECKPOINT, EVALUATION, TRAINING, during
from medfl.runtimes.step import (
    StepResult,
    copy_site_weights,
    introduce,
    refuse_other_state,
    score,
    score_newcomer,
    score_site,
    score_site_on_all,
    segment,
    segment_site,
    site_step,
)
from medfl.storage import State, load_state, save_state, to_device
from medfl.storage.run_folder import StateFile

Answer = Any
"""Result of a task; its kind defines the type."""


class WorkerTask(ABC):
    """One piece of work."""

    @abstractmethod
    def run(self, federation: Federation) -> object:
        """Do the work and return its result."""


Results = Iterator[tuple[int, Answer]]
"""(index of the task, its result) as they arrive; the result is a `FailedReply` if a site fails."""

MakeTask = Callable[[], WorkerTask]
"""Makes a task when its turn comes, so that the messages of thousands of sites need not be ready."""


def result_or_failure(task: WorkerTask, run: Callable[[], object]) -> object:
    """Run a task; if a site fails, return its `FailedReply`.

    Raises:
        RunError: a task of the server failed.
    """
    try:
        return run()
    except RunError as error:
        if not isinstance(task, SiteTask):
            raise
        # drop the exception itself: its traceback would keep the site's tensors alive
        return FailedReply(task.site, str(error))


# At a site


@dataclass(frozen=True)
class SiteTask(WorkerTask):
    """A task at the site of this name."""

    site: str


@dataclass(frozen=True)
class Introduce(SiteTask):
    """Return a site's message to the server before round 1."""

    def run(self, federation: Federation) -> Message:
        """Return the introduction."""
        return introduce(federation, self.site)


@dataclass(frozen=True)
class RoundTask(SiteTask):
    """A task at one site in a round.

    Attributes:
        round: its number.
        state: the site's State, None before its first training.
        broadcast: what the server sends it.
        function: of `step`, does the work: (federation, round, site, State, broadcast, *arguments).
        part: of the profile that its time is assigned to.
    """

    round: int
    state: StateFile | None
    broadcast: Message

    function: ClassVar[Callable[..., Answer]]
    part: ClassVar[str] = EVALUATION

    @property
    def arguments(self) -> tuple[object, ...]:
        """Further arguments of the function: the fields that a kind of task adds."""
        # dataclass fields of a base come first
        common = len(fields(RoundTask))
        return tuple(getattr(self, field.name) for field in fields(self)[common:])

    def run(self, federation: Federation) -> Answer:
        """Call the function at the site."""
        with during(f"site {self.site}"):
            return self._call(federation)

    def _call(self, federation: Federation) -> Answer:
        state = None
        if self.state is not None:
            with during(CHECKPOINT):
                state = to_device(load_state(self.state.path), federation.networks.device)

        with during(self.part):
            try:
                return type(self).function(
                    federation, self.round, self.site, state, self.broadcast, *self.arguments
                )
            except Exception as error:  # a State of any form may make it fail in any way
                if state and self.state and not isinstance(error, MedflError):
                    refuse_other_state(
                        federation, self.round, self.site, state, self.state.path, error
                    )
                raise


@dataclass(frozen=True)
class Train(RoundTask):
    """Train at one site, write its next State, if any, and score the trained model on some sections."""

    new_state: Path
    sections: tuple[str, ...] = ()

    function = site_step
    part = TRAINING

    @property
    def arguments(self) -> tuple[object, ...]:
        """The sections."""
        return (self.sections,)

    def run(self, federation: Federation) -> tuple[StepResult, bool]:
        """Return the result of the step, without the State, and whether that was written."""
        with during(f"site {self.site}"):
            result = self._call(federation)
            if result.state:
                with during(CHECKPOINT):
                    save_state(self.new_state, result.state, self.round)
        # the State is in its file; the server's process could not hold all of them
        return replace(result, state={}), bool(result.state)


@dataclass(frozen=True)
class TrainToScore(RoundTask):
    """Train at one site only to score the trained model: nothing is sent or saved."""

    sections: tuple[str, ...]

    function = site_step
    part = TRAINING

    def run(self, federation: Federation) -> CasesByName:
        """Return the outcomes by section."""
        cases: CasesByName = super().run(federation).cases
        return cases


@dataclass(frozen=True)
class ScoreSite(RoundTask):
    """Score the network that a site is judged by on the site's own items: section -> outcomes."""

    sections: tuple[str, ...]

    function = score_site


@dataclass(frozen=True)
class ScoreSiteOnAll(RoundTask):
    """Score the network that a site is judged by on all test items."""

    function = score_site_on_all


@dataclass(frozen=True)
class CopyWeights(RoundTask):
    """Return a copy of the weights that a site is judged by."""

    function = copy_site_weights


@dataclass(frozen=True)
class SegmentSite(RoundTask):
    """Segment a site's test items with the network that it is judged by.

    Attributes:
        ids: cases whose masks are returned.
        folder: where the masks of all its cases are written, None for none.
    """

    ids: list[str]
    folder: str | None
    largest: Collection[str] = ()

    function = segment_site


# At the server


@dataclass(frozen=True)
class ServerTask(WorkerTask):
    """A task that uses the server's State after a round."""

    round: int
    server: State

    def run(self, federation: Federation) -> Answer:
        """Return the result of the work with the server's network, None if there is no such network."""
        with during(EVALUATION), federation.scope():
            network = federation.method.global_predictor(federation.host(self.round), self.server)
            if network is None:
                return None

            return self.work(federation, network)

    def work(self, federation: Federation, network: nn.Module) -> object:
        """Do the work with the server's network."""


@dataclass(frozen=True)
class ScoreGlobal(ServerTask):
    """Score the server's network on the items start..stop of a section."""

    section: str
    start: int
    stop: int

    def work(self, federation: Federation, network: nn.Module) -> Cases:
        """Return the outcomes."""
        pooled = federation.pooled(self.section)
        part = replace(pooled, indices=pooled.indices[self.start : self.stop])
        return score(federation, network, part, self.section)


@dataclass(frozen=True)
class ScoreNewcomer(ServerTask):
    """Score the model of a site that has not trained on the site's items: section -> outcomes."""

    site: str
    sections: tuple[str, ...]

    def run(self, federation: Federation) -> CasesByName | None:
        """Return the outcomes, None if the server has a model for each of its sites but none for others."""
        with during(EVALUATION):
            try:
                with federation.networks.scope():
                    host = federation.host(self.round)
                    down = federation.method.broadcast(host, self.server, self.site)
            except KeyError:
                return None

            return score_newcomer(federation, self.round, self.site, down, self.sections)


@dataclass(frozen=True)
class SegmentGlobal(ServerTask):
    """Segment a site's test items with the server's network, as `SegmentSite`."""

    site: str
    ids: list[str]
    folder: str | None
    largest: Collection[str] = ()

    def work(self, federation: Federation, network: nn.Module) -> dict[str, Masks]:
        """Return id -> masks."""
        return segment(federation, network, self.site, self.ids, self.folder, self.largest)
