"""NVIDIA FLARE, the server's half: a `Simulator` whose sites are the clients of a FLARE job.

Round loop, run folder, scores and resume are the simulator's. Only the running of a site's task differs: `FlareWorkers`
asks the site's process and waits. Calls to FLARE itself are behind `Link`.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from medfl.core.documents import Config, Document, Metrics
from medfl.core.errors import MedflError, RunError
from medfl.core.message import Message, Tensors, Weights
from medfl.core.run import examines
from medfl.core.terminal import Print
from medfl.evaluation import tally
from medfl.evaluation.evaluators import Masks
from medfl.evaluation.metrics import Cases, CasesByName
from medfl.flare import site_facts, wire
from medfl.flare.wire import Payload
from medfl.runtimes.attendance import FailedReply
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.step import StepResult
from medfl.runtimes.tasks import (
    CopyWeights,
    Introduce,
    MakeTask,
    RoundTask,
    ScoreSite,
    ScoreSiteOnAll,
    SegmentSite,
    SiteTask,
    Train,
    TrainToScore,
    WorkerTask,
)

FLARE_FOLDER = "flare"
LINES_FILE = "said.txt"
ERROR_FILE = "failed.json"
DONE_FILE = "done"
"""Folder of a job in the run folder; in it the server's lines for the user, its error, and a mark that it is done."""
_SILENCE = 1.0
"""Seconds between two checks that the sites are still connected."""
_EMPTY_RESULTS: Mapping[type[WorkerTask], Any] = {
    ScoreSiteOnAll: Cases((), {}),
    CopyWeights: {},
    SegmentSite: {},
}
"""Tasks that sites run only in a simulation, with the results that stand in elsewhere."""
_START = 300.0
"""Seconds added to the deadline of a job's first question, during which a site prepares its images."""


class Answer(NamedTuple):
    """A site's answer; the payload of a failure says why there is none."""

    question: int
    site: str
    payload: Payload


class Link(Protocol):
    """The server's connection to its sites."""

    def ask(
        self,
        task_name: str,
        sites: Sequence[str],
        payload: Payload,
        answers: queue.SimpleQueue[Answer],
    ) -> int:
        """Send one question to some sites at once; their answers come into the queue with the number returned."""

    def drop(self, question: int) -> None:
        """Accept no more answers to a question."""

    def why_lost(self, site: str) -> str:
        """Return why a site will not answer any more, "" while it is connected."""

    def is_aborted(self) -> bool:
        """Return whether the job is being aborted from outside."""


@dataclass
class _Question:
    """A question to one site, whose answer `read` takes; `message` is that of the method.

    `state_round` is that of the State that the site continues from, 0 for none.
    """

    index: int
    site: str
    task_name: str
    numbers: Mapping[str, float]
    message: Message
    read: Callable[[Payload], Any]
    extra: Weights = field(default_factory=dict)
    state_round: int = 0

    def same_as(self, question: _Question) -> bool:
        """Return whether two sites are sent the same."""
        if self.extra or question.extra or self.task_name != question.task_name:
            return False
        if self.numbers != question.numbers:
            return False

        first = self.message.flat()
        second = question.message.flat()
        return first.keys() == second.keys() and all(
            _same(tensor, second[name]) for name, tensor in first.items()
        )


class FlareWorkers(Workers):
    """The workers of a `Simulator` that are the sites of a FLARE job; all sites work at the same time.

    The sites keep their States. The run folder has the names of their files, and so the round whose State each site
    continues from, which every question says. A site that fails, disconnects, misses the deadline or sends what is
    refused is `FailedReply`.

    Args:
        federation: the run, as the server sees it.
        link: to the sites.
        simulated: sites belong to a simulation and show cases, masks and weights; otherwise they report metrics, and
            are not asked for anything else.
        roster: site -> most training items that its operator takes it to have; a site that is not in it has no limit.
        say: where lines for the user go.

    Attributes:
        deadline: seconds that the sites have for a round, None for no limit.
        reported: site -> metrics of its own items that it reported, where sites send no cases.
        tallies: site -> section -> tables of the outcomes of its own items, of a job that only examines.
        samples: site -> number of its training items that it reported.
    """

    def __init__(
        self,
        federation: Federation,
        link: Link,
        simulated: bool = True,
        roster: Mapping[str, int] | None = None,
        say: Print = str,
    ) -> None:
        """Start nothing: the sites run already."""
        super().__init__(federation, 1)
        self._link = link
        self._simulated = simulated
        self._roster = roster or {}
        self._say = say
        self.samples: dict[str, int] = {}
        self.deadline: float | None = None
        self.reported: dict[str, Metrics] = {}
        self._started = False

    def run(
        self, tasks: Sequence[MakeTask], sizes: Sequence[float] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Run tasks, those at sites all at once, and yield (position, result) as they are ready."""
        questions = []
        for index, make in enumerate(tasks):
            task = make()
            if not isinstance(task, SiteTask):
                yield index, task.run(self._federation)
            elif type(task) in _EMPTY_RESULTS and not self._simulated:
                yield index, _EMPTY_RESULTS[type(task)]
            else:
                questions.append(self._question(index, task))

        yield from self._answers(questions)

    def set_deadline(self, seconds: float | None) -> None:
        """Limit how long the sites may take for a round."""
        self.deadline = seconds

    # Asking

    def _question(self, index: int, task: SiteTask) -> _Question:
        """Return the question that asks a site for a task."""
        name = task.site
        read: Callable[[Payload], Any]
        if isinstance(task, Introduce):
            read = partial(self._introduction, name)
            numbers = wire.question_numbers(0)
            return _Question(index, name, wire.INTRODUCE, numbers, Message(), read)

        assert isinstance(task, RoundTask)
        message = self._federation.compress_broadcast(task.round, name, task.broadcast)
        sections: Sequence[str] = ()
        save = {}
        extra = {}
        match task:
            case Train(sections=sections):
                kind = wire.TRAIN
                read = partial(self._trained, task, message.num_bytes)
            case TrainToScore(sections=sections):
                kind = wire.TRAIN_TO_SCORE
                read = partial(self._cases, name, sections)
            case ScoreSite(sections=sections) if not self._simulated and examines(
                self._federation.run
            ):
                kind = wire.EXAMINE
                read = partial(self._tallied, name, sections)
            case ScoreSite(sections=sections):
                kind = wire.SCORE_SITE
                read = partial(self._cases, name, sections)
            case ScoreSiteOnAll():
                kind = wire.SCORE_ON_ALL
                read = partial(self._cases_of_all, name)
            case CopyWeights():
                kind = wire.COPY_WEIGHTS
                read = _weights
            case SegmentSite():
                ids = self._federation.shard(name, "test").ids
                kind = wire.SEGMENT
                read = partial(_masks, ids)
                save = {wire.SAVE: int(task.folder is not None)}
                positions = list(map(ids.index, task.ids))
                extra = {"positions/test": torch.tensor(positions, dtype=torch.int64)}
            case _:
                raise TypeError(f"no site of a FLARE job is asked for a {type(task).__name__}")

        numbers = wire.question_numbers(task.round, sections, **save)
        if task.state is None:
            state_round = 0
        else:
            state_round = task.state.round

        return _Question(index, name, kind, numbers, message, read, extra, state_round)

    # Waiting

    def _answers(self, questions: Sequence[_Question]) -> Iterator[tuple[int, Any]]:
        """Send the questions, equal ones to several sites at once, and yield results as they arrive."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        waiting = {}
        for group in _grouped(questions):
            first = group[0]
            sites = {question.site: question for question in group}
            rounds = {site: question.state_round for site, question in sites.items()}
            extra = {**first.extra, **wire.state_rounds(rounds)}
            payload = wire.message_payload(first.message, first.numbers, extra)
            number = self._link.ask(first.task_name, list(sites), payload, answers)
            for site, question in sites.items():
                waiting[number, site] = question

        end = None
        if self.deadline is not None:
            if self._started:
                preparing = 0.0
            else:
                preparing = _START

            end = time.monotonic() + self.deadline + preparing

        self._started = True
        numbers = {number for number, _ in waiting}
        try:
            while waiting:
                for key, payload in self._next(answers, waiting, end):
                    question = waiting.pop(key)
                    yield question.index, self._result(question, payload)
        finally:
            for number in numbers:
                self._link.drop(number)

    def _next(
        self,
        answers: queue.SimpleQueue[Answer],
        waiting: Mapping[tuple[int, str], _Question],
        end: float | None,
    ) -> list[tuple[tuple[int, str], Payload]]:
        """Return the next answer, or failures for the sites that will not answer any more."""
        patience = _SILENCE
        if end is not None:
            patience = max(0.0, min(_SILENCE, end - time.monotonic()))

        try:
            answer = answers.get(timeout=patience)
        except queue.Empty:
            if end is not None and time.monotonic() >= end:
                late = f"no answer within {self.deadline:g} s"
                return [(key, wire.failure(late)) for key in list(waiting)]

            lost = {key: self._link.why_lost(key[1]) for key in waiting}
            if not any(lost.values()) and self._link.is_aborted():
                problem = "the job was ended from outside; the last round is intact, continue with --resume"
                raise RunError(problem) from None

            return [(key, wire.failure(why)) for key, why in lost.items() if why]

        key = (answer.question, answer.site)
        if key in waiting:
            return [(key, answer.payload)]

        return []  # a second answer, or one of a question that was dropped

    def _result(self, question: _Question, payload: Payload) -> Any:
        """Return the task's result, or the site as `FailedReply` with the reason."""
        sender = f"site {question.site!r}"
        try:
            if payload.failure_reason:
                raise RunError(payload.failure_reason)
            return question.read(payload)
        except MedflError as error:
            reason = str(error)
        except (KeyError, TypeError, ValueError) as error:  # what a site sends may have any form
            reason = wire.failure(error).failure_reason

        if not reason.startswith(sender):
            reason = f"{sender}: {reason}"

        return FailedReply(question.site, reason)

    # Reading

    def _introduction(self, name: str, payload: Payload) -> Message:
        message = self._federation.decode_reply(name, payload.group("message"))
        self._federation.message_rules(name).check_reply(message)
        self.introduced_counts.pop(name, None)
        self.facts.pop(name, None)
        self.samples[name] = self._checked_count(name, payload)
        self._check_facts(name, payload)

        return message

    def item_count(self, name: str) -> int:
        """Return how many training items a site has; where they are its own, what it told first."""
        if self._simulated:
            return super().item_count(name)

        return self.introduced_counts.get(name, 0)

    def _checked_count(self, name: str, payload: Payload) -> int:
        """Return the number of training items that a site tells, at most what roster and introduction say."""
        count = payload.whole_number(wire.SAMPLES)
        most = self._roster.get(name)
        if most is not None and count > most:
            raise RunError(
                f"it tells of {count:,} training images; the server's roster has it with at most {most:,}"
            )

        if self._simulated:
            at_first = self.item_count(name)
        else:
            at_first = self.introduced_counts.setdefault(name, count)

        if count > at_first:
            raise RunError(
                f"it tells of {count:,} training images; when it introduced itself it had {at_first:,}"
            )

        return count

    def _check_facts(self, name: str, payload: Payload) -> None:
        """Note what a site with images of its own tells of them, the same each time, and say it the first time."""
        if self._simulated:
            facts = {}
        else:
            facts = site_facts.read(payload, self._federation.bundle)

        if name not in self.facts and facts:
            self._say(f"site {name!r} says that {site_facts.describe(facts)}")

        first_facts = self.facts.setdefault(name, facts)
        if facts != first_facts:
            statement = site_facts.describe(facts) or "nothing"
            first = site_facts.describe(first_facts) or "nothing"
            raise RunError(f"it tells of its data: {statement}; at first it told: {first}")

    def by_kind(self, summary: Config) -> Document:
        """Return what the sites told of their data as a run's summary has it."""
        return site_facts.by_kind(self.facts, summary, self._federation.bundle)

    def _trained(self, task: Train, bytes_down: int, payload: Payload) -> tuple[StepResult, bool]:
        """Return what `task` asked for, and whether the site has a new State."""
        federation = self._federation
        name = task.site
        arrived = federation.decode_reply(name, payload.group("message"))
        reply = federation.compression.decompress_reply(arrived, task.broadcast, f"site {name!r}")
        federation.message_rules(name).check_reply(reply)
        cases = self._cases(name, task.sections, payload)
        steps = payload.whole_number(wire.STEPS)
        self.samples[name] = self._checked_count(name, payload)
        self._check_facts(name, payload)
        loss = float(payload.numbers.get(wire.LOSS, math.nan))  # a site's policy may withhold it
        renewed = bool(payload.whole_number(wire.RENEWED))

        return StepResult({}, reply, loss, steps, cases, arrived.num_bytes, bytes_down), renewed

    def _tallied(self, name: str, sections: Sequence[str], payload: Payload) -> CasesByName:
        """Keep the tables of a site's outcomes, of which no single case is known."""
        arrived = payload.group("tally")
        for section in sections:
            tables = {}
            for key, tensor in arrived.items():
                place, _, table = key.partition("/")
                if place == section:
                    tables[table] = tensor

            sections_of_site = self.tallies.setdefault(name, {})
            sections_of_site[section] = tally.read(tables, len(self._federation.bundle.classes))

        return dict.fromkeys(sections, Cases((), {}))

    def _cases(self, name: str, sections: Sequence[str], payload: Payload) -> CasesByName:
        """Return section -> outcomes of a site's own items, without any where it reports metrics."""
        if not self._simulated:
            metrics = reported_metrics(payload, sections)
            self.reported[name] = self.reported.get(name, {}) | metrics
            return dict.fromkeys(sections, Cases((), {}))

        ids = {section: self._federation.shard(name, section).ids for section in sections}
        return wire.read_cases(payload, ids, f"site {name!r}")

    def _cases_of_all(self, name: str, payload: Payload) -> Cases:
        ids = self._federation.pooled("test").ids
        return wire.read_cases(payload, {"test": ids}, f"site {name!r}")["test"]


def _weights(payload: Payload) -> Tensors:
    return payload.group("own")


def _masks(ids: Sequence[str], payload: Payload) -> dict[str, Masks]:
    parts: dict[int, Tensors] = {}
    for key, tensor in payload.group("masks").items():
        position, _, part = key.partition("/")
        parts.setdefault(int(position), {})[part] = tensor

    masks = {}
    for index, mask in parts.items():
        masks[ids[index]] = Masks(mask["prediction"], mask["reference"], int(mask["classes"]))

    return masks


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left is right or (left.dtype == right.dtype and torch.equal(left, right))


def reported_metrics(payload: Payload, sections: Sequence[str]) -> Metrics:
    """Return the metrics that a site reported of these sections, ignoring others.

    Raises:
        RunError: a number of cases is no whole one.
    """
    site_metrics = {}
    for name, value in payload.metrics.items():
        if name.partition("/")[0] not in sections:
            continue
        if name.endswith("/cases") and not (0 <= value < 2**53 and value % 1 == 0):
            raise RunError(f"{name!r} is {value:g}; expected a whole number of at least 0")

        site_metrics[name] = value

    return site_metrics


def _grouped(questions: Sequence[_Question]) -> list[list[_Question]]:
    """Group questions that are the same for several sites."""
    groups: list[list[_Question]] = []
    for question in questions:
        for group in groups:
            if group[0].same_as(question):
                group.append(question)
                break
        else:
            groups.append([question])

    return groups
