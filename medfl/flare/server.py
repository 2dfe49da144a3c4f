"""NVIDIA FLARE, the server's half: a `Simulator` whose sites are the clients of a FLARE job.

The round loop, the run folder, the scores and the resume are the simulator's own. What differs is who runs a task at a
site: `FlareWorkers` asks the site's process and waits. What FLARE itself is needed for hides behind `Link`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from medfl.core.errors import MedflError, RunError
from medfl.core.message import Message
from medfl.core.seeding import derive
from medfl.evaluation.evaluators import Masks
from medfl.evaluation.metrics import Cases
from medfl.flare import wire
from medfl.flare.wire import Payload
from medfl.runtimes import profiling
from medfl.runtimes.absent import Absent
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.view import moved_message
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
    Task,
    Train,
    TrainToScore,
)

FLARE_FOLDER, LINES_FILE, ERROR_FILE, DONE_FILE = "flare", "said.txt", "failed.json", "done"
"""In a run folder: what goes with a job; in it what the server says, what ended the run, and that it is finished."""
_SILENCE = 1.0
"""Seconds between two looks at whether sites are still there."""
_NOTHING: Mapping[type[Task], Any] = {ScoreSiteOnAll: Cases((), {}), CopyWeights: {}, SegmentSite: {}}
"""What is not asked for outside of a simulation, and what stands for it."""
_START = 300.0
"""Seconds beyond the deadline for the first question of a job, with which a site prepares its images."""
"""Round, site, file of the site's State, broadcast."""


class Answer(NamedTuple):
    """What came back from a site: a payload, or why none comes."""

    question: int
    site: str
    payload: Payload


class Link(Protocol):
    """What the server can do with its sites."""

    def ask(self, word: str, sites: Sequence[str], payload: Payload, answers: queue.SimpleQueue[Answer]) -> int:
        """Send one question to some sites at once; their answers come into the queue with the number returned."""

    def drop(self, question: int) -> None:
        """Take no more answers to a question."""

    def lost(self, site: str) -> str:
        """Say why no answer of a site will come any more; "" while it is there."""

    def over(self) -> bool:
        """Tell whether the job is being ended from outside."""


@dataclass
class _Question:
    """A question to one site.

    Attributes:
        index: position of its task.
        site: to whom.
        word: what is asked for.
        numbers: that go with it.
        message: what the method says, as it crosses; None at the introduction.
        read: makes the task's result of the answer.
        extra: further tensors.
        kept: round of the site's newest reply that was taken with a State, 0 for none.
    """

    index: int
    site: str
    word: str
    numbers: Mapping[str, float]
    message: Message | None
    read: Callable[[Payload], Any]
    extra: Mapping[str, torch.Tensor]
    kept: int

    def same_as(self, other: _Question) -> bool:
        """Tell whether two sites are told the same."""
        here, there = (q.message.flat() if q.message else {} for q in (self, other))
        return (
            (self.word, self.numbers, self.extra.keys()) == (other.word, other.numbers, other.extra.keys())
            and not self.extra
            and here.keys() == there.keys()
            and all(_same(here[name], there[name]) for name in here)
        )


class FlareWorkers(Workers):
    """What a `Simulator` runs its tasks with: the sites of a FLARE job, which all work at the same time.

    The sites keep their States; in the run folder are the names that the files would have, and so the round from whose
    State each site goes on, which it is told with every question. A site that fails, vanishes, misses the deadline or
    sends what is refused is `Absent`.

    Args:
        federation: the run, as the server sees it.
        link: to the sites.
        shown: the sites are a simulation's and show cases, masks and weights; else they tell metrics, nothing is asked
            for that they would not show, and it counts as empty.

    Attributes:
        deadline: seconds a round that the sites have, None for as long as they need.
        reported: site -> metrics of its own items that it reported, where sites send no cases.
        samples: site -> number of its training items, as it told.
    """

    def __init__(self, federation: Federation, link: Link, shown: bool = True) -> None:
        """Start nothing: the sites are there."""
        super().__init__(federation, 1)
        self._link, self._shown = link, shown
        self.samples: dict[str, int] = {}
        self.deadline: float | None = None
        self.reported: dict[str, dict[str, float]] = {}
        self._begun = False

    def run(self, tasks: Sequence[MakeTask], sizes: Sequence[float] | None = None) -> Iterator[tuple[int, Any]]:
        """Run tasks, those at sites all at once, and yield (position, result) as they are ready."""
        questions: list[_Question] = []
        for index, make in enumerate(tasks):
            task = make()
            if not isinstance(task, SiteTask):
                yield index, task.run(self._federation)
            elif type(task) in _NOTHING and not self._shown:
                yield index, _NOTHING[type(task)]
            else:
                questions.append(self._question(index, task))
        yield from self._answers(questions)

    # Asking

    def _question(self, index: int, task: SiteTask) -> _Question:
        """Return the question that asks a site for a task."""
        name = task.site
        match task:
            case Introduce():
                return _Question(
                    index, name, wire.INTRODUCE, wire.question_numbers(0), None, self._introduction(name), {}, 0
                )
            case Train():
                message = self._wire(task)
                read = self._trained(name, task.broadcast, task.sections, message.num_bytes)
                numbers = wire.question_numbers(task.round, task.sections)
                return _Question(index, name, wire.TRAIN, numbers, message, read, {}, _state_round(task))
            case TrainToScore():
                return self._ask(index, wire.TRY, task, self._cases(name, task.sections), task.sections)
            case ScoreSite():
                return self._ask(index, wire.JUDGE, task, self._cases(name, task.sections), task.sections)
            case ScoreSiteOnAll():
                return self._ask(index, wire.ABROAD, task, self._abroad(name))
            case CopyWeights():
                return self._ask(index, wire.WEIGHTS, task, lambda payload: payload.group("own"))
            case SegmentSite():
                ids = self._federation.shard(name, "test").ids
                positions = torch.tensor([ids.index(ident) for ident in task.ids], dtype=torch.int64)
                question = self._ask(index, wire.MASKS, task, self._masks(name, ids))
                question.numbers = {**question.numbers, wire.SAVE: int(task.folder is not None)}
                question.extra = {"positions/test": positions}
                return question
        raise TypeError(f"no site of a FLARE job is asked for a {type(task).__name__}")

    def _ask(
        self, index: int, word: str, task: RoundTask, read: Callable[[Payload], Any], sections: Sequence[str] = ()
    ) -> _Question:
        message, numbers = self._wire(task), wire.question_numbers(task.round, sections)
        return _Question(index, task.site, word, numbers, message, read, {}, _state_round(task))

    def _wire(self, task: RoundTask) -> Message:
        """Return a broadcast as it crosses."""
        federation = self._federation
        with profiling.during(profiling.MESSAGES):
            seed = derive(federation.host(task.round).seed, "messages", task.site)
            return federation.messages.broadcast(task.broadcast, seed)

    # Waiting

    def _answers(self, questions: Sequence[_Question]) -> Iterator[tuple[int, Any]]:
        """Send the questions, what is the same for several sites once, and yield results as they come."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        waiting: dict[tuple[int, str], _Question] = {}
        for group in _grouped(questions):
            first = group[0]
            extra = {**first.extra, **wire.state_rounds({question.site: question.kept for question in group})}
            payload = wire.message_payload(first.message or Message(), first.numbers, extra)
            number = self._link.ask(first.word, [question.site for question in group], payload, answers)
            waiting |= {(number, question.site): question for question in group}
        given = None if self.deadline is None else self.deadline + (0.0 if self._begun else _START)
        end, self._begun = None if given is None else time.monotonic() + given, True
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
        self, answers: queue.SimpleQueue[Answer], waiting: Mapping[tuple[int, str], _Question], end: float | None
    ) -> list[tuple[tuple[int, str], Payload]]:
        """Return what has come since, or who will not answer any more."""
        patience = _SILENCE if end is None else max(0.0, min(_SILENCE, end - time.monotonic()))
        try:
            with profiling.during(None):
                answer = answers.get(timeout=patience)
        except queue.Empty:
            if end is not None and time.monotonic() >= end:
                late = f"no answer within {self.deadline:g} s"
                return [(key, wire.failure(late)) for key in list(waiting)]
            lost = {key: self._link.lost(key[1]) for key in waiting}
            if not any(lost.values()) and self._link.over():
                told = "the job was ended from outside; the last round is intact, continue with --resume"
                raise RunError(told) from None
            return [(key, wire.failure(why)) for key, why in lost.items() if why]
        key = (answer.question, answer.site)
        if key not in waiting:
            return []
        return [(key, answer.payload)]

    def _result(self, question: _Question, payload: Payload) -> Any:
        """Return the task's result, or who is absent and why."""
        sender = f"site {question.site!r}"
        try:
            if payload.failed:
                raise RunError(payload.failed)
            with profiling.during(profiling.MESSAGES):
                return question.read(payload)
        except MedflError as error:
            why = str(error)
        except (KeyError, TypeError, ValueError) as error:  # what a site sends may have any form
            why = wire.failure(error).failed
        return Absent(question.site, why if why.startswith(sender) else f"{sender}: {why}")

    # Reading

    def _introduction(self, name: str) -> Callable[[Payload], Message]:
        def read(payload: Payload) -> Message:
            message = self._arrived(name, payload)
            self._federation.check(name, message)
            self.samples[name] = payload.whole_number(wire.SAMPLES)
            return message

        return read

    def _trained(
        self, name: str, down: Message, judge: Sequence[str], bytes_down: int
    ) -> Callable[[Payload], tuple[StepResult, bool]]:
        federation, sender = self._federation, f"site {name!r}"

        def read(payload: Payload) -> tuple[StepResult, bool]:
            arrived = self._arrived(name, payload)
            reply = federation.messages.opened_reply(arrived, down, sender)
            federation.check(name, reply)
            cases = self._cases(name, judge)(payload)
            steps, self.samples[name] = payload.whole_number(wire.STEPS), payload.whole_number(wire.SAMPLES)
            loss = float(payload.numbers.get(wire.LOSS, float("nan")))  # a site need not tell it
            renewed = bool(payload.whole_number(wire.RENEWED))
            return StepResult({}, reply, loss, steps, cases, arrived.num_bytes, bytes_down), renewed

        return read

    def _cases(self, name: str, sections: Sequence[str]) -> Callable[[Payload], dict[str, Cases]]:
        def read(payload: Payload) -> dict[str, Cases]:
            if not self._shown:
                self.reported[name] = {**self.reported.get(name, {}), **reported_metrics(payload, sections)}
                return {section: Cases((), {}) for section in sections}
            ids = {section: self._federation.shard(name, section).ids for section in sections}
            return wire.read_cases(payload, ids, f"site {name!r}")

        return read

    def _abroad(self, name: str) -> Callable[[Payload], Cases]:
        ids = self._federation.pooled("test").ids
        return lambda payload: wire.read_cases(payload, {"test": ids}, f"site {name!r}")["test"]

    def _masks(self, name: str, ids: Sequence[str]) -> Callable[[Payload], dict[str, Masks]]:
        def read(payload: Payload) -> dict[str, Masks]:
            found: dict[int, dict[str, torch.Tensor]] = {}
            for key, tensor in payload.group("masks").items():
                at, _, part = key.partition("/")
                found.setdefault(int(at), {})[part] = tensor
            return {ids[i]: Masks(m["prediction"], m["reference"], int(m["classes"])) for i, m in found.items()}

        return read

    def _arrived(self, name: str, payload: Payload) -> Message:
        message = self._federation.arrived(name, payload.group("message"))
        return moved_message(message, self._federation.networks.device)


def _state_round(task: RoundTask) -> int:
    """Return the round of the State that a site goes on from, 0 for none."""
    return 0 if task.state is None else task.state.round


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))


def reported_metrics(payload: Payload, sections: Sequence[str]) -> dict[str, float]:
    """Return the metrics of these sections that a site told; others are not looked at."""
    return {name: value for name, value in payload.metrics.items() if name.partition("/")[0] in sections}


def _grouped(questions: Sequence[_Question]) -> list[list[_Question]]:
    """Put questions together that are the same for several sites."""
    groups: list[list[_Question]] = []
    for question in questions:
        group = next((group for group in groups if group[0].same_as(question)), None)
        if group is None:
            groups.append([question])
        else:
            group.append(question)
    return groups
