"""MONAI FL: a site as a `ClientAlgo` of MONAI, for any bundle and any method.

Messages are `ExchangeObject`s. With medfl's own server, `weights` is a flat message (`Message.flat`: names
`group/name`, numbers as `scalars/name`), compressed as the run says, and `statistics` has the round. With a plain
averaging host, which knows only weights, `weights` is part of a state dict under its own names. That is correct for
methods that keep FedAvg's server half (`medfl.methods.has_fedavg_server`); other methods are refused.

What MONAI's own `MonaiAlgo` leaves open is decided as follows:
    What leaves: the tensors that the method declares, none of them personal, copied to the CPU. The number of
        training items is always included.
    What is received: tensors and arrays, checked for names, shapes, types and finite values before use. No path and no
        configuration: the bundle is the site's own; the host's app root and logging file are ignored.
    Optimiser: a new one each round; state that must persist is kept by the method in the site's State. None is sent.
    `abort` ends an evaluation as well as a training; the State remains that of the previous round.
    `evaluate` scores the network that the site is judged by, which may be personal.
    One pool of networks and one set of prepared images serve training, evaluation and statistics.
With rules for what leaves (`policy.outbound`), only permitted values leave; with an audit log (`policy.audit`),
everything sent or received is logged. Without them nothing changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.fl.client import ClientAlgo, ClientAlgoStats
from monai.fl.utils.constants import ExtraItems, FlPhase, FlStatistics, WeightType
from monai.fl.utils.exchange_object import ExchangeObject
from torch import Tensor

from medfl import methods
from medfl.core import (
    SECTIONS,
    Document,
    InputError,
    MedflError,
    Message,
    Metrics,
    RunError,
    Tensors,
    Weights,
    either,
    errors_safe_to_send,
    map_values,
    printable,
)
from medfl.data import Fingerprint
from medfl.evaluation import Cases, CasesByName, Scored, Tally, conformal, summarise, tally
from medfl.policy.policy import JOBS, PLAN, UNNAMED_JOBS, Outbound
from medfl.policy.suppression import LEAST
from medfl.runtimes.federation import Federation
from medfl.runtimes.monai_fl.data_stats import Bins
from medfl.runtimes.monai_fl.guard import Activity, Guard, in_words
from medfl.runtimes.monai_fl.held import HeldSite
from medfl.runtimes.monai_fl.states import States, StatesInFolder
from medfl.runtimes.monai_fl.view import Aborted, SiteEnd, SiteView
from medfl.runtimes.profiling import CHECKPOINT, EVALUATION, MESSAGES, TRAINING, during
from medfl.runtimes.step import UNSENT, StepResult, introduce, score_sets, score_site, site_step
from medfl.storage import State, safe_file_name

HOSTS = ("medfl", "averaging")
Extra = Document | None
"""What a host says beside a question, by MONAI's or medfl's names; each method reads only what it names."""
ROUND = "round"
BASE_ROUND = "kept"
LOSS = "train_loss"
"""Names in `statistics`: the round of a broadcast; the round whose State the site continues from (that of its newest
reply that the server accepted, 0 for none; if missing: the newest State); and a reply's mean training loss.
"""
SCORED_SECTIONS = "judge"
SECTION = "section"
FINGERPRINT = "fingerprint"
"""Names in `extra`: the sections on which `train` scores the trained model, the section that `evaluate` uses, and
the request for the site's fingerprint instead of statistics."""
_LAST_ROUND = 1_000_000
_SETS = ("validate", "half", "test")
"""Parts of a site's items, for `Kind.sets`."""
# phase -> its kind in the audit log, and its name in error messages
_PHASES = {
    FlPhase.TRAIN: ("train", "training"),
    FlPhase.EVALUATE: ("evaluate", "evaluation"),
    FlPhase.GET_WEIGHTS: ("introduce", "introduction"),
    FlPhase.GET_DATA_STATS: ("statistics", "statistics"),
}


class MedflClientAlgo(ClientAlgo, ClientAlgoStats):
    """One site, driven by any host that drives a `ClientAlgo`.

    `get_weights` returns the newest message: before the first training the method's introduction of the site, or with a
    plain averaging host the run's initial weights; then the reply of the last training.

    Args:
        federation: the run with this site's images, or a function that makes it when the site is initialized, or a site
            whose work is done elsewhere (`HeldSite`).
        name: the site's name in it; "" uses the host's `ExtraItems.CLIENT_NAME`.
        folder: where the State is stored; without one, in memory.
        host: "medfl", or "averaging" for a host that averages weights and knows no methods.
        outbound: rules for what leaves; None or the default ones: what the method sends.
        audit: file of the site's audit log; None: no log.
        jobs: permitted purposes of the site, of `medfl.policy.policy.JOBS`; if none: `UNNAMED_JOBS`.
        say: reports, after each reply, the cumulative privacy loss of all replies.

    Attributes:
        states: the stored State.
        cases: section -> outcomes of the trained model, for the sections that `train` was asked to score, or the one
            that `evaluate` was; they stay here.
        renewed: whether the last training produced a State.

    Raises:
        InputError: there is no such kind of host.
    """

    def __init__(
        self,
        federation: Federation | Callable[[], Federation | HeldSite],
        name: str = "",
        *,
        folder: Path | str | None = None,
        host: str = "medfl",
        outbound: Outbound | None = None,
        audit: Path | str | None = None,
        jobs: Collection[str] = (),
        say: Callable[[str], object] = str,
    ) -> None:
        if host not in HOSTS:
            raise InputError(f"host {host!r}", f"one of {either(HOSTS)}", "choose one")

        self.name = name
        self.host = host
        self.folder = folder
        self.jobs = tuple(jobs)
        self.phase = FlPhase.IDLE
        self.states: States = States()
        self.cases: CasesByName = {}
        self.renewed = self._training_begun = False
        self._federation = federation
        self._guard = Guard(outbound, audit, None if folder is None else Path(folder), say, name)
        self._stop = threading.Event()
        self._view: SiteEnd | None = None
        self._reply: ExchangeObject | None = None

    def initialize(self, extra: Extra = None, states: States | None = None) -> None:
        """Prepare the site; from `extra` only `ExtraItems.CLIENT_NAME` is read.

        `states` replace the folder.

        Raises:
            InputError: there is no such site in the run, or a plain averaging host lacks the method's server half.
        """
        built = self._federation if isinstance(self._federation, Federation) else self._federation()
        name = _entry(extra, ExtraItems.CLIENT_NAME, str) or self.name
        if name not in built.participants or self.name not in ("", name):
            allowed = self.name or ", ".join(built.participants)
            raise InputError(f"site {name!r}", f"its name here is {allowed}", "use that name")

        view: SiteEnd
        if isinstance(built, Federation):
            if self.host == "averaging":
                refuse_other_servers(built)
            view = SiteView(built, name, self._stop)
        else:
            self._stop = built.stop
            view = built

        self.name = name
        self._training_begun = False
        self._view = view
        if self.folder is not None:
            # another run's State is of another network
            path = Path(self.folder) / view.run_hash[:16] / safe_file_name(name)
            self.states = StatesInFolder(path, view.device)

        # a simulation keeps them in the run folder
        if states is not None:
            self.states = states

        self._guard.open_account(name, view.run.data.folder)

    @property
    def summary(self) -> Document:
        """The site, its last round, and what it has told so far of its images: None without rules for what leaves."""
        return {"site": self.name, "round": self.states.last, "privacy": self._guard.privacy}

    def train(self, data: ExchangeObject, extra: Extra = None) -> None:
        """Train for one round; `get_weights` then returns the reply.

        `extra["judge"]` names sections on which the trained model is scored.

        Raises:
            RunError: what was received is not what the method expects, or training failed; nothing has changed.
        """
        view = self._ready()
        sections = _entry(extra, SCORED_SECTIONS, list, tuple, set) or ()
        score_on = tuple(section for section in SECTIONS if section in sections)
        # before anything can fail: `get_weights` must not send the last round's reply again
        self._reply = None
        self._training_begun = True
        self.cases = {}

        with self._busy(FlPhase.TRAIN, self.states.last + 1) as activity:
            round_, base, received = self._decoded(view, data, activity)
            with errors_safe_to_send():
                latest = f"a State of round {base}" if base else "none; rounds count from 1"
                view.rules.require((base or 0) < round_, f"its round is {round_}, after {latest}")

            with during(CHECKPOINT):
                before = self._state(round_ - 1, base)

            result = self._call_step(TRAINING, site_step, round_, before, received, score_on)
            with during(MESSAGES):
                reply, state = self._reply_of(view, round_, result, received)

            with during(CHECKPOINT):
                self.states.keep(round_, state, base)

            self._reply = reply
            self.cases = result.cases
            self.renewed = bool(state)

    def get_weights(self, extra: Extra = None) -> ExchangeObject:
        """Return the newest message, with the number of the site's training items in `statistics`.

        Raises:
            InputError: a best or final model is requested.
            RunError: the last training failed or was aborted.
        """
        view = self._ready()
        kind = _entry(extra, ExtraItems.MODEL_TYPE, object)
        if kind is not None:
            raise InputError(
                f"site {self.name!r}: model type {printable(kind, 40)}",
                "a site keeps no such model",
                "ask the server",
            )

        if self._reply is None:
            if self._training_begun:
                raise RunError(
                    f"site {self.name!r} has nothing to send: its last training did not end"
                )
            with self._busy(FlPhase.GET_WEIGHTS, 0) as activity:
                message = view.introduction(None if self.host == "averaging" else introduce)
                self._reply = self._outgoing(view, message, {}, activity)

        return self._reply

    def evaluate(self, data: ExchangeObject, extra: Extra = None) -> ExchangeObject:
        """Return the metrics, on the site's own items, of the network it is judged by; `cases` has the outcomes.

        `extra["section"]` may be train, validate (default) or test.

        Raises:
            RunError: what was received is not what the method expects, or scoring failed.
        """
        section = _entry(extra, SECTION, str) or "validate"
        if section not in SECTIONS:
            raise InputError(f"section {section!r}", f"one of {either(SECTIONS)}", "choose one")
        self.cases = self.visit(score_site, data, (section,), counted=False)
        return ExchangeObject(metrics=self.metrics_of(self.cases[section]))

    def metrics_of(self, cases: Cases) -> Metrics:
        """Return the metrics of outcomes, including the bundle's own."""
        return summarise(self._ready().told(cases))

    def examine(self, data: ExchangeObject, sections: Sequence[str]) -> dict[str, Tally]:
        """Return the releasable evaluation of a received model on the site's items: section -> tables.

        Raises:
            RunError: as for `visit`.
        """

        def outcome_tables(cases: CasesByName) -> dict[str, Tally]:
            tables = {}
            for section, outcome in cases.items():
                table = tally.of(self._ready().told(outcome))
                tables[section] = tally.released(table, self._guard.min_count)

            return tables

        tables: dict[str, Tally] = self.visit(score_site, data, sections, tables_of=outcome_tables)
        return tables

    def calibrate(self, data: ExchangeObject, scores: int = 0) -> dict[str, Tally]:
        """Return tables for calibrating and evaluating a received model (`conformal.tables_of`).

        "validate" and "test" have a table "sets"; if the site has no validation items, "test" also has "half". A host
        computes thresholds from all sites' tables with `runs.calibrate.Calibration`. `scores` is an index in
        `Kind.set_scores`.

        Raises:
            RunError: as for `visit`.
        """

        def set_tables(cases: CasesByName) -> dict[str, Tally]:
            parts = map_values(Scored.from_cases, cases)
            return conformal.tables_of(parts, self._guard.min_count)

        tables: dict[str, Tally] = self.visit(score_sets, data, _SETS, scores, tables_of=set_tables)
        return tables

    def visit(
        self,
        function: Callable[..., Any],
        data: ExchangeObject,
        *rest: Any,
        part: str = EVALUATION,
        counted: bool = True,
        tables_of: Callable[[CasesByName], dict[str, Tally]] | None = None,
    ) -> Any:
        """Call a function of `step` at this site with its State and the server's message; nothing is kept or sent.

        It is called as (federation, round, name, State, message, *rest). The caller releases metrics of the result and,
        with `counted`, the number of items: if the site has rules for what leaves, these must be permitted, and they
        appear in its audit log. If `tables_of` is given, its tables are released instead of the outcomes.

        Raises:
            RunError: what was received is not what the method expects, the function fails, or the result may not leave.
        """
        view = self._ready()
        with self._busy(FlPhase.EVALUATE, self.states.last) as activity:
            round_, base, received = self._decoded(view, data, activity)
            with during(CHECKPOINT):
                state = self._state(round_, base)

            result = self._call_step(part, function, round_, state, received, *rest)
            if tables_of is not None:
                result = tables_of(result)

            # in the log the round is the server's, not the one counted here
            activity = Activity(activity.kind, round_)
            self._guard.check_scores(activity, function.__name__, result, state, counted, view)
            return result

    def get_data_stats(self, extra: Extra = None) -> ExchangeObject:
        """Return counts and statistics of the training ("train") and validation ("eval") images (`data_stats`).

        With `extra["fingerprint"]` return the site's fingerprint instead (`fingerprint`).

        Args:
            extra: `FlStatistics.HIST_BINS` and `FlStatistics.HIST_RANGE` add histograms. A site with a minimum count
                allows only the bundle's own bins: the difference of two choices could reveal single images.

        Raises:
            InputError: the bins are invalid, or not the site's own.
        """
        if _entry(extra, FINGERPRINT, bool):
            return ExchangeObject(statistics=self.fingerprint().document())

        view = self._ready()
        bins = Bins.of(extra or {})
        with self._busy(FlPhase.GET_DATA_STATS, self.states.last) as activity:
            answer = view.statistics(bins, self._guard.min_count)
            self._guard.check_statistics(activity, answer)
            return ExchangeObject(statistics=answer)

    def fingerprint(self) -> Fingerprint:
        """Return what `medfl site fingerprint` shows of the bundle's data, if `jobs` includes `plan`.

        Raises:
            InputError: the site does not accept such a job, or has too few cases.
            RunError: the fingerprint may not leave.
        """
        view = self._ready()
        with self._busy(FlPhase.GET_DATA_STATS, self.states.last, PLAN) as activity:
            gather = partial(view.fingerprint, max(LEAST, self._guard.min_count))
            return self._guard.fingerprint(activity, view.run.bundle_sha256, gather)

    def abort(self, extra: Extra = None) -> None:
        """Stop the current work from another thread: it ends with `Aborted` before its next batch."""
        if self.phase != FlPhase.IDLE:
            self._stop.set()

    def log_failure(self, kind: str, error: BaseException) -> None:
        """Log a failed request in the audit log, unless it is already there."""
        self._guard.log_failure(Activity(kind, self.states.last), error)

    def finalize(self, extra: Extra = None) -> None:
        """Stop the current work and release everything but a State in a folder; `initialize` starts again."""
        self.abort()
        if self._view is not None:
            self._view.close()

        self._view = None
        self._reply = None
        self.cases = {}
        self.states = States()

    def _ready(self) -> SiteEnd:
        if self._view is None:
            raise RunError(f"site {self.name!r} is not initialized; call initialize first")
        return self._view

    @contextmanager
    def _busy(self, phase: FlPhase, round_: int, kind: str = "") -> Iterator[Activity]:
        """Be in a phase, which `abort` can end, in the round that the site counts itself."""
        # an abort of what went before ends nothing of this
        self._stop.clear()
        self.phase = phase
        activity = Activity(kind or _PHASES[phase][0], round_)
        jobs = self.jobs or UNNAMED_JOBS
        try:
            if activity.kind in JOBS and activity.kind not in jobs:
                raise InputError(
                    f"site {self.name!r}: {activity.kind}",
                    f"{' and '.join(jobs)}, as its policy says",
                    "ask its administrator",
                )
            yield activity
        except Aborted as error:
            aborted = f"site {self.name!r}: {_PHASES[phase][1]} aborted"
            raise Aborted(f"{aborted}; its State is that of the round before") from error
        except Exception as error:
            self._guard.log_failure(activity, error)
            raise
        finally:
            self.phase = FlPhase.IDLE

    def _call_step(self, part: str, function: Callable[..., Any], round_: int, *rest: Any) -> Any:
        """Call a function of `step`; report an exception in one line."""
        view = self._ready()
        try:
            with during(part):
                result = view.call(function, round_, *rest)
        except MedflError:
            raise
        # A message may be well formed and still not be what the method expects.
        except Exception as error:
            doing = f"site {self.name!r}, round {round_}: {_PHASES[self.phase][1]}"
            raise RunError(f"{doing} fails with the server's message: {in_words(error)}") from error

        # told to stop after the last batch, or while the method caught the exception of `abort`
        view.go_on()
        return result

    def _state(self, newest: int, base: int | None) -> State | None:
        """Return the State of round `base`; if the host does not give it, the newest up to a round."""
        try:
            if base is None:
                return self.states.newest(newest)

            return self.states.of(base)
        except RunError as error:
            named_error = RunError(f"site {self.name!r}: {error}")
            named_error.safe_to_send = error.safe_to_send
            raise named_error from error

    def _decoded(
        self, view: SiteEnd, data: ExchangeObject, activity: Activity
    ) -> tuple[int, int | None, Message]:
        """Return the round (counted by the site if the host does not give it), that of its State, and the message."""
        with during(MESSAGES):
            require = view.rules.require
            with errors_safe_to_send():
                require(
                    isinstance(data, ExchangeObject),
                    f"it is a {type(data).__name__}, no ExchangeObject",
                )
                arrived: Any = data.weights
                require(
                    isinstance(arrived, Mapping),
                    f"its weights are {type(arrived).__name__}, no mapping",
                )
                kind: Any = data.weight_type
                require(
                    kind is None or (isinstance(kind, str) and kind == WeightType.WEIGHTS),
                    f"its weight type is {printable(kind, 40)}",
                )
                require(data.optim is None, "it has the state of an optimiser")

                numbers: Any = {} if data.statistics is None else data.statistics
                require(
                    isinstance(numbers, Mapping),
                    f"its statistics are {type(numbers).__name__}, no mapping",
                )
                round_ = numbers.get(ROUND, activity.round)
                base = numbers.get(BASE_ROUND)
                for value in (round_, 0 if base is None else base):
                    # not isinstance: True is an int, too
                    require(
                        type(value) is int and 0 <= value <= _LAST_ROUND,
                        f"its round is {printable(value, 40)!r}, no whole number to {_LAST_ROUND}",
                    )

                if self.host == "averaging":
                    received = view.averaged(arrived)
                else:
                    received = view.received(arrived)

            self._guard.admit_received(
                Activity(activity.kind, round_), partial(self._as_message, arrived)
            )
            return round_, base, received

    def _as_message(self, arrived: Mapping[str, object]) -> Message:
        """Return the received values as the message that they are."""
        tensors: Tensors = {}
        for name, value in arrived.items():
            if not isinstance(value, Tensor):
                value = torch.as_tensor(np.array(value))

            tensors[name] = value

        if self.host == "averaging":
            return Message({"weights": tensors})

        return Message.from_flat(tensors)

    def _reply_of(
        self, view: SiteEnd, round_: int, step: StepResult, received: Message
    ) -> tuple[ExchangeObject, State]:
        """Return what leaves after a step, and the State with the error feedback of compression."""
        seed = view.message_seed(round_)
        activity = Activity("train", round_)
        samples = view.training_items
        reply = step.reply
        if self.host == "averaging":
            reply = Message({"weights": reply["weights"]})

        unsent = step.state.get(UNSENT, {})

        # the residual of earlier rounds is part of the change that is clipped
        if self._guard.clips_or_noises and unsent:
            reply = _added(reply, unsent)
            unsent = {}

        # privacy before compression: whatever that rounds has its noise already
        reply = self._guard.reply(reply, received, samples)
        wire, unsent = view.wire_compression.reply(reply, received, seed, unsent)
        state = dict(step.state)
        state.pop(UNSENT, None)
        if unsent:
            state[UNSENT] = unsent

        numbers = self._guard.allowed_numbers(
            {FlStatistics.NUM_EXECUTED_ITERATIONS: step.steps, LOSS: step.loss}, LOSS
        )
        self._guard.charge_reply(activity, reply, wire, samples)
        return self._outgoing(view, wire, numbers, activity), state

    def _outgoing(
        self, view: SiteEnd, message: Message, numbers: Mapping[str, object], activity: Activity
    ) -> ExchangeObject:
        """Return a message as it leaves; for a plain averaging host only its weights."""
        values = {**numbers, FlStatistics.DATA_COUNT: view.training_items}
        if self.host == "averaging":
            self._guard.admit_sent(activity, message, values, from_images=False)
            return exchange_object(message["weights"], values)

        values |= self._guard.allowed_numbers(view.facts, *view.facts)
        self._guard.admit_sent(activity, message, values, from_images=True)
        return exchange_object(message.flat(), values)


def _entry(extra: object, key: str, *kinds: type) -> Any:
    """Return what a host says under a key beside a question, None if nothing.

    Raises:
        InputError: the host gave no keys and values, or what is under the key is of no such kind.
    """
    value = extra.get(key) if isinstance(extra, Mapping) else extra
    if value is None or (isinstance(extra, Mapping) and isinstance(value, kinds)):
        return value

    raise InputError(
        f"extra {printable(extra, 60)}",
        f"keys and values, {key} of type {either([kind.__name__ for kind in kinds])}",
        "change what the host sends",
    )


def _added(reply: Message, unsent: Weights) -> Message:
    """Return a reply with the error feedback added to its weights."""
    if "weights" not in reply:
        return reply

    totals = dict(reply["weights"])
    for name in totals.keys() & unsent.keys():
        totals[name] = totals[name] + unsent[name].to(totals[name])

    return Message({**reply.tensors, "weights": totals}, reply.scalars)


def exchange_object(tensors: Weights, numbers: Mapping[str, object]) -> ExchangeObject:
    """Return what is sent: tensors copied to the CPU, since a network's own tensors keep changing."""
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return ExchangeObject(weights=weights, weight_type=WeightType.WEIGHTS, statistics=dict(numbers))


def refuse_other_servers(federation: Federation) -> None:
    """Raise an InputError if the run's server does more than average weights."""
    run = federation.run
    if not methods.has_fedavg_server(federation.method):
        raise InputError(
            f"method {run.method!r} with a plain averaging host",
            "such a host does for methods that keep FedAvg's server half (medfl methods)",
            "use one of these, or medfl's own server",
        )

    refused = [
        (
            not federation.compression.lossless,
            f"--messages {run.messages}",
            "it takes lossless ones",
        ),
        (
            run.site_weights != "samples",
            f"--site-weights {run.site_weights}",
            "it weighs by samples",
        ),
        (run.max_share is not None, f"--max-share {run.max_share}", "it has no cap on shares"),
        (
            not federation.aggregation.is_mean,
            f"--aggregation {run.aggregation}",
            "it takes the mean",
        ),
    ]
    for is_set, setting, allowed in refused:
        if is_set:
            raise InputError(f"{setting} with a plain averaging host", allowed, "leave it out")
