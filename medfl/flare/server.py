"""NVIDIA FLARE, the server's half: a `Simulator` whose sites are the clients of a FLARE job.

Round loop, run folder, scores and resume are the simulator's. Only a site's task is run differently: `FlareWorkers`
asks the site's process and waits. Calls to FLARE itself are behind `Link`.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from medfl.core import (
    Config,
    Document,
    Floats,
    MedflError,
    Message,
    Metrics,
    Print,
    RunError,
    Tensors,
    Weights,
    examines,
    map_values,
)
from medfl.data import Fingerprint, fingerprint
from medfl.evaluation import Cases, CasesByName, Masks, conformal, tally
from medfl.flare import site_facts, wire
from medfl.flare.wire import Payload
from medfl.problem.tasks.regression import scale_of
from medfl.runtimes import FailedReply, Federation
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
from medfl.storage import save_weights

FLARE_FOLDER = "flare"
LINES_FILE = "said.txt"
ERROR_FILE = "failed.json"
DONE_FILE = "done"
"""Folder of a job in the run folder, with the server's lines for the user, its error, and a mark when done."""
_SILENCE = 1.0
"""Seconds between two checks that the sites are still connected."""
_EMPTY_RESULTS: Mapping[type[WorkerTask], Any] = {
    ScoreSiteOnAll: Cases((), {}),
    CopyWeights: {},
    SegmentSite: {},
}
"""Tasks that sites run only in a simulation, with the results used elsewhere."""
_SETS = ("validate/sets", "test/sets", "test/half")
"""Calibration tables in a site's answer."""
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
        """Send one question to some sites at once; their answers enter the queue with the returned number."""

    def drop(self, question: int) -> None:
        """Accept no more answers to a question."""

    def why_lost(self, site: str) -> str:
        """Return why a site will not answer any more, "" while it is connected."""

    def is_aborted(self) -> bool:
        """Return whether the job is being aborted from outside."""


@dataclass
class _Question:
    """A question to one site, whose answer `read` parses; `message` is that of the method.

    `state_round` is the round of the State that the site continues from, 0 for none.
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
        # positions of its own images, which no other site has
        if self.extra or question.extra or self.task_name != question.task_name:
            return False
        if self.numbers != question.numbers:
            return False

        first = self.message.flat()
        second = question.message.flat()
        return first.keys() == second.keys() and all(
            # most sites get the very same tensors: no need to read them
            tensor is second[name]
            or (tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]))
            for name, tensor in first.items()
        )


class Asking:
    """Asks the sites of a FLARE job, and waits for their answers.

    Attributes:
        deadline: time limit for the sites in a round, in seconds, None for no limit.
    """

    def __init__(self, link: Link) -> None:
        """Store the connection."""
        self._link = link
        self.deadline: float | None = None
        self._started = False

    def set_deadline(self, seconds: float | None) -> None:
        """Limit how long the sites may take for a round."""
        self.deadline = seconds

    def fingerprints(self, names: Sequence[str]) -> Iterator[tuple[str, Fingerprint | FailedReply]]:
        """Request planning fingerprints from all sites at once, and yield each site's answer."""
        questions = []
        for index, name in enumerate(names):
            read = partial(_fingerprint, name)
            numbers = wire.question_numbers(0)
            questions.append(_Question(index, name, wire.FINGERPRINT, numbers, Message(), read))

        for index, answer in self._answers(questions):
            yield names[index], answer

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
            end = time.monotonic() + self.deadline
            if not self._started:
                end += _START

        self._started = True
        numbers = {number for number, _ in waiting}
        try:
            while waiting:
                for key, payload in self._next(answers, waiting, end):
                    question = waiting.pop(key)
                    yield question.index, self._result(question, payload)
        finally:
            # also after an error: nobody waits for the rest any more
            for number in numbers:
                self._link.drop(number)

    def _next(
        self,
        answers: queue.SimpleQueue[Answer],
        waiting: Mapping[tuple[int, str], _Question],
        end: float | None,
    ) -> list[tuple[tuple[int, str], Payload]]:
        """Return the next answer, or failures for sites that will not answer any more."""
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
                raise RunError(
                    "the job was ended from outside; the last round is intact, continue with --resume"
                ) from None

            return [(key, wire.failure(why)) for key, why in lost.items() if why]

        key = (answer.question, answer.site)
        if key in waiting:
            return [(key, answer.payload)]

        return []  # a second answer, or one to a dropped question

    def _result(self, question: _Question, payload: Payload) -> Any:
        """Return the task's result, or the site as `FailedReply` with the reason."""
        sender = f"site {question.site!r}"
        try:
            if payload.failure_reason:
                raise RunError(payload.failure_reason)
            return question.read(payload)
        except MedflError as error:
            reason = str(error)
        except (KeyError, TypeError, ValueError) as error:  # a site may send anything
            reason = wire.failure(error).failure_reason

        if not reason.startswith(sender):
            reason = f"{sender}: {reason}"

        return FailedReply(question.site, reason)


class FlareWorkers(Asking, Workers):
    """The workers of a `Simulator` that are the sites of a FLARE job; all sites work at the same time.

    The sites keep their States. The run folder records the names of their files, and so the round whose State each site
    continues from, which every question includes. A site that fails, disconnects, misses the deadline or sends
    something that is refused is a `FailedReply`.

    Args:
        federation: the run, as the server sees it.
        link: to the sites.
        simulated: sites belong to a simulation and show cases, masks and weights; otherwise they report metrics, and
            are asked for nothing else.
        roster: site -> maximum number of training items according to its operator; other sites have no limit.
        say: prints lines for the user.
        sets: for an evaluation-only job, the scores by which it is also calibrated, from 1 on; 0: none.

    Attributes:
        reported: site -> metrics that it reported on its own items, if sites send no cases.
        tallies: site -> section -> tables of the outcomes of its own items, for an evaluation-only job.
        set_tables: "site/section/name" -> its calibration table (`evaluation.conformal.table_of`).
        samples: site -> number of its training items that it reported.
    """

    def __init__(
        self,
        federation: Federation,
        link: Link,
        simulated: bool = True,
        roster: Mapping[str, int] | None = None,
        say: Print = str,
        sets: int = 0,
    ) -> None:
        """Start nothing: the sites are already running."""
        Workers.__init__(self, federation, 1)
        Asking.__init__(self, link)
        self._simulated = simulated
        self._roster = roster or {}
        self._say = say
        self.sets = sets
        self.set_tables: dict[str, Floats] = {}
        self.samples: dict[str, int] = {}
        self.reported: dict[str, Metrics] = {}

    def run(
        self, tasks: Sequence[MakeTask], sizes: Sequence[float] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Run tasks, those at sites all at once, and yield (position, result) as they finish."""
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

    # Asking

    def _question(self, index: int, task: SiteTask) -> _Question:
        """Return the question that requests a task from a site."""
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
                # once: its answer covers all sections
                if "test" in sections:
                    save = {wire.SETS: self.sets}

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

    # Reading

    def _introduction(self, name: str, payload: Payload) -> Message:
        message = self._federation.decode_reply(name, payload.group("message"))
        self._federation.message_rules(name).check_reply(message)
        # a site that was started anew begins with what it tells now
        self.introduced_counts.pop(name, None)
        self.facts.pop(name, None)
        self.samples[name] = self._checked_count(name, payload)
        self._check_facts(name, payload)

        return message

    def item_count(self, name: str) -> int:
        """Return a site's number of training items; if they are its own, the number that it reported first."""
        if self._simulated:
            return super().item_count(name)

        return self.introduced_counts.get(name, 0)

    def _checked_count(self, name: str, payload: Payload) -> int:
        """Return the number of training items reported by a site, at most that of roster and introduction."""
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
        """Record what a site with its own images reports about them, always the same, and print it the first time."""
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
        """Return what the sites reported about their data, in the form of a run's summary."""
        return site_facts.by_kind(self.facts, summary, self._federation.bundle)

    def _trained(self, task: Train, bytes_down: int, payload: Payload) -> tuple[StepResult, bool]:
        """Return the result of `task`, and whether the site has a new State."""
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
        """Keep the tables of a site's outcomes, whose single cases are unknown."""
        arrived = payload.group("tally")
        for section in sections:
            tables = {}
            for key, tensor in arrived.items():
                place, _, table = key.partition("/")
                if place == section and key not in _SETS:
                    tables[table] = tensor

            sections_of_site = self.tallies.setdefault(name, {})
            sections_of_site[section] = tally.read(tables, len(self._federation.bundle.classes))

        for key in _SETS:
            if self.sets and key in arrived:
                self.set_tables[f"{name}/{key}"] = conformal.read_table(arrived[key])

        return dict.fromkeys(sections, Cases((), {}))

    def save_sets(self, path: Path) -> None:
        """Write the sites' calibration tables, for `medfl calibrate`."""
        bundle = self._federation.bundle
        tensors = map_values(torch.from_numpy, self.set_tables)
        tensors[conformal.SCORES] = torch.tensor(self.sets)
        if bundle.task == "regression":
            tensors[conformal.SCALE] = scale_of(bundle.metadata, len(bundle.classes))[1]

        save_weights(path, tensors)

    def _cases(self, name: str, sections: Sequence[str], payload: Payload) -> CasesByName:
        """Return section -> outcomes of a site's own items, none if it reports metrics."""
        if not self._simulated:
            metrics = reported_metrics(payload, sections)
            self.reported[name] = self.reported.get(name, {}) | metrics
            return dict.fromkeys(sections, Cases((), {}))

        ids = {section: self._federation.shard(name, section).ids for section in sections}
        return wire.read_cases(payload, ids, f"site {name!r}")

    def _cases_of_all(self, name: str, payload: Payload) -> Cases:
        ids = self._federation.pooled("test").ids
        return wire.read_cases(payload, {"test": ids}, f"site {name!r}")["test"]


def _fingerprint(name: str, payload: Payload) -> Fingerprint:
    content = payload.tensors[wire.FINGERPRINT_BYTES]
    return fingerprint.read(content.numpy().tobytes(), f"site {name!r}")


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


def reported_metrics(payload: Payload, sections: Sequence[str]) -> Metrics:
    """Return the metrics that a site reported on these sections, ignoring others.

    Raises:
        RunError: a number of cases is not an integer.
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
