"""NVIDIA FLARE, the site's half: answer the server's questions with a `MedflClientAlgo`.

FLARE fails the whole job when one site's process ends, so every error becomes an answer: in a simulation with its text,
otherwise with an id under which the site's administrator finds the text in the site's log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from monai.fl.utils.constants import ExtraItems, FlStatistics, WeightType
from monai.fl.utils.exchange_object import ExchangeObject

from medfl.core import (
    Document,
    InputError,
    MedflError,
    Message,
    Metrics,
    RunError,
    Tensors,
    cpu_copies,
    error_id,
    errors_safe_to_send,
    printable,
)
from medfl.evaluation import Cases, Masks, tally
from medfl.flare import site_facts, wire
from medfl.flare.wire import Payload
from medfl.policy.policy import PLAN
from medfl.runtimes import Federation, site_step
from medfl.runtimes.monai_fl.client import BASE_ROUND, LOSS, ROUND, SCORED_SECTIONS, MedflClientAlgo
from medfl.runtimes.monai_fl.guard import in_words
from medfl.runtimes.step import copy_site_weights, score_site, score_site_on_all, segment_site
from medfl.storage import RunFolder, State

_LOG = logging.getLogger(__name__)


@dataclass
class FlareSite:
    """One site.

    Args:
        algo: the site, not yet initialized.
        name: its name in the run.
        shows: a simulation's run folder: the site then shows cases, masks and its own weights as the simulator does.
            None: it reports metrics on its own items, and sends only what the method sends.
        job: one of `medfl.policy.policy.JOBS`; only questions of such a job are answered.
        rounds: the last round that a job with a remote server may ask for; such a job gets each answer once: repeated
            answers would let it average noise away, and several models would let it distinguish cases.
    """

    algo: MedflClientAlgo
    name: str
    shows: RunFolder | None = None
    job: str = "train"
    rounds: int | None = None
    _had: set[str | int] = field(default_factory=set)
    # the first question prepares the site
    _ready: bool = False

    def answer(
        self, task_name: str, payload: Payload, stop: Callable[[], bool] | None = None
    ) -> Payload:
        """Return the answer to a question, or a failure; never raises."""
        answers = {
            wire.INTRODUCE: self._introduce,
            wire.TRAIN: self._train,
            wire.TRAIN_TO_SCORE: self._train_to_score,
            wire.SCORE_SITE: self._score_site,
            wire.SCORE_ON_ALL: self._score_on_all,
            wire.COPY_WEIGHTS: self._copy_weights,
            wire.SEGMENT: self._segment,
        }

        if self.job == "evaluate":
            answers = {wire.INTRODUCE: self._introduce, wire.EXAMINE: self._examine}
        elif self.job == PLAN:
            answers = {wire.FINGERPRINT: self._fingerprint}

        try:
            with errors_safe_to_send():
                if task_name not in answers:
                    problem = f"site {self.name!r} is asked for '{printable(task_name, 40)}'"
                    raise RunError(f"{problem}; it answers {', '.join(answers)}")

            with _stopped(self.algo, stop):
                if not self._ready:
                    self.algo.initialize({ExtraItems.CLIENT_NAME: self.name})
                    self._ready = True

                return answers[task_name](payload)
        except Exception as error:  # also an answer: the process must not end, see above
            if self.shows is not None:
                if isinstance(error, MedflError):
                    return wire.failure(error)

                return wire.failure(f"site {self.name!r}: {task_name}: {in_words(error)}")

            # an audit log that cannot be written stops replies, but a failure contains no data
            with suppress(MedflError):
                self.algo.log_failure(printable(task_name, 40), error)

            return hidden_failure(self.name, error)

    def _introduce(self, payload: Payload) -> Payload:
        reply = self.algo.get_weights()
        numbers = {wire.SAMPLES: reply.statistics[FlStatistics.DATA_COUNT]}
        return Payload(self._outgoing_tensors(reply), numbers)

    def _fingerprint(self, payload: Payload) -> Payload:
        # a bytearray: of bytes PyTorch warns that they cannot be written to
        content = bytearray(self.algo.fingerprint().encoded())
        return Payload({wire.FINGERPRINT_BYTES: torch.frombuffer(content, dtype=torch.uint8)})

    def _once(self, asked: Sequence[str | int]) -> None:
        """Refuse repeated questions of a job, and rounds for which it was not accepted."""
        if self.rounds is None:
            return

        with errors_safe_to_send():
            for answer in asked:
                is_beyond = isinstance(answer, int) and answer > self.rounds
                if answer in self._had or is_beyond:
                    raise RunError(
                        f"site {self.name!r} tells a job of {self.rounds} rounds once: {answer}"
                    )

        self._had.update(asked)

    def _examine(self, payload: Payload) -> Payload:
        self._once((*payload.sections, *[wire.SETS] * bool(payload.numbers.get(wire.SETS))))
        data = self._exchange_object(payload)
        tables = self.algo.examine(data, payload.sections)
        if payload.numbers.get(wire.SETS):
            scores = payload.whole_number(wire.SETS) - 1  # from 1: 0 asks for none
            for section, sets in self.algo.calibrate(data, scores).items():
                tables[section] = {**tables.get(section, {}), **sets}

        tensors: Tensors = {}
        for section, table in tables.items():
            for name, tensor in tally.tensors(table).items():
                tensors[f"tally/{section}/{name}"] = tensor

        return Payload(tensors)

    def _train(self, payload: Payload) -> Payload:
        data = self._exchange_object(payload)
        self._once([payload.whole_number(wire.ROUND)])
        sections = payload.sections
        metrics = {}
        if sections and not self.shows:  # of the received model, before training
            metrics = self._metrics_of(self.algo.visit(score_site, data, sections))

        self.algo.train(data, {SCORED_SECTIONS: sections if self.shows else ()})
        reply = self.algo.get_weights()
        numbers = {
            wire.STEPS: reply.statistics[FlStatistics.NUM_EXECUTED_ITERATIONS],
            wire.SAMPLES: reply.statistics[FlStatistics.DATA_COUNT],
            wire.RENEWED: int(self.algo.renewed),
        }
        loss = reply.statistics.get(LOSS)
        if loss is not None:  # the site's policy may withhold it
            numbers[wire.LOSS] = loss

        answer = Payload(self._outgoing_tensors(reply), numbers, metrics=metrics)
        if self.shows:
            return wire.with_cases(answer, self.algo.cases)

        return answer

    def _train_to_score(self, payload: Payload) -> Payload:
        """Train once more, only to score the result."""
        result = self.algo.visit(site_step, self._exchange_object(payload), payload.sections)
        return self._scored(result.cases)

    def _score_site(self, payload: Payload) -> Payload:
        data = self._exchange_object(payload)
        return self._scored(self.algo.visit(score_site, data, payload.sections))

    def _score_on_all(self, payload: Payload) -> Payload:
        self._in_simulation(wire.SCORE_ON_ALL)
        cases = self.algo.visit(score_site_on_all, self._exchange_object(payload))
        return self._scored({"test": cases})

    def _copy_weights(self, payload: Payload) -> Payload:
        self._in_simulation(wire.COPY_WEIGHTS)
        weights = self.algo.visit(copy_site_weights, self._exchange_object(payload))
        return Payload(cpu_copies({f"own/{name}": tensor for name, tensor in weights.items()}))

    def _segment(self, payload: Payload) -> Payload:
        """Segment the test items at the indices requested by the server."""
        folder = self._in_simulation(wire.SEGMENT)
        positions = payload.group("positions").get("test", torch.empty(0)).long().tolist()
        target = None
        if payload.numbers.get(wire.SAVE):
            target = str(folder.predictions_folder(self.name))

        def _masks_at(  # this name appears in audit logs
            federation: Federation, round_: int, name: str, state: State | None, down: Message
        ) -> dict[int, Masks]:
            ids = federation.shard(name, "test").ids
            by_id = segment_site(
                federation, round_, name, state, down, [ids[i] for i in positions], target
            )
            return {i: by_id[ids[i]] for i in positions if ids[i] in by_id}

        tensors: Tensors = {}
        masks = self.algo.visit(_masks_at, self._exchange_object(payload))
        for position, (prediction, reference, classes) in masks.items():
            tensors[f"masks/{position}/prediction"] = prediction
            tensors[f"masks/{position}/reference"] = reference
            tensors[f"masks/{position}/classes"] = torch.tensor(classes)

        return Payload(cpu_copies(tensors))

    def _outgoing_tensors(self, reply: ExchangeObject) -> Document:
        """Return a message's tensors, with the site's facts about its data unless the job is a simulation."""
        tensors = {f"message/{name}": tensor for name, tensor in (reply.weights or {}).items()}
        if self.shows:
            return tensors

        return {**tensors, **site_facts.tensors(reply.statistics)}

    def _exchange_object(self, payload: Payload) -> ExchangeObject:
        with errors_safe_to_send():
            statistics = {
                ROUND: payload.whole_number(wire.ROUND),
                BASE_ROUND: wire.state_round(payload, self.name),
            }
        return ExchangeObject(
            weights=payload.group("message"), weight_type=WeightType.WEIGHTS, statistics=statistics
        )

    def _scored(self, cases: Mapping[str, Cases]) -> Payload:
        if self.shows:
            return wire.with_cases(Payload(), cases)

        return Payload(metrics=self._metrics_of(cases))

    def _metrics_of(self, cases: Mapping[str, Cases]) -> Metrics:
        """Return metrics and number of cases of each non-empty section: all that a site reports about its items."""
        report = {}
        for section, outcomes in cases.items():
            if len(outcomes):
                numbers = {"cases": len(outcomes), **self.algo.metrics_of(outcomes)}
                for name, value in numbers.items():
                    report[f"{section}/{name}"] = value

        return report

    def _in_simulation(self, task_name: str) -> RunFolder:
        with errors_safe_to_send():
            if self.shows is None:
                raise InputError(
                    f"site {self.name!r} is asked for {task_name}",
                    "sites of a simulation alone answer it",
                    "do not ask",
                )

        return self.shows


def hidden_failure(name: str, error: BaseException) -> Payload:
    """Return the failure that is sent to the server for an error at a site, and log the whole error at the site.

    Errors may name files and patients: the server gets a random id instead, unless the error is about its own message.
    """
    if isinstance(error, MedflError) and error.safe_to_send:
        return wire.failure(error)
    _LOG.error("failure %s: %s", error_id(error), in_words(error), exc_info=error)
    return wire.failure(
        f"site {name!r} could not answer; its administrator finds failure {error_id(error)} in its log"
    )


@contextmanager
def _stopped(algo: MedflClientAlgo, stop: Callable[[], bool] | None) -> Iterator[None]:
    """Abort the site's work once `stop` returns true; a thread calls it twice a second."""
    over = threading.Event()

    def watch() -> None:
        while stop is not None and not over.wait(0.5):
            if stop():
                algo.abort()

    threading.Thread(target=watch, name="medfl-stop", daemon=True).start()
    try:
        yield
    finally:
        over.set()
