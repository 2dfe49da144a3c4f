"""MONAI FL: a site as a `ClientAlgo` of MONAI, for any bundle and any method, and a simulation with such sites.

What crosses is an `ExchangeObject`. With medfl's own server its `weights` are a flat message (`Message.flat`: names
`group/name`, numbers as `scalars/name`), made smaller as the run says, and its `statistics` have the round. With a
plain averaging host, which knows of nothing but weights, `weights` is part of a state dict under its own names. That is
right for the methods that keep FedAvg's server half (`Method.plain_host`), and no other is taken.

What MONAI's own `MonaiAlgo` leaves open is settled so:
    What leaves: the tensors that the method agreed to and none that is personal, as copies on the CPU. The number of
        training items always comes with them.
    What is received: tensors and arrays, checked for names, shapes, types and finite values before use. No path and no
        configuration: the bundle is the site's own; the host's app root and logging file are not looked at.
    Optimiser: a new one each round; what is to last, a method keeps in the site's State. None crosses.
    `abort` ends an evaluation as well as a training; the State stays that of the round before.
    `evaluate` scores the network that the site is judged by, which may be personal.
    One pool of networks and one set of prepared images serve training, evaluation and statistics.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from monai.fl.client import ClientAlgo, ClientAlgoStats
from monai.fl.utils.constants import ExtraItems, FlPhase, FlStatistics, WeightType
from monai.fl.utils.exchange_object import ExchangeObject

from medfl import profiling
from medfl.errors import InputError, MedflError, RunError
from medfl.folder import safe
from medfl.message import Message, Weights
from medfl.metrics import Cases, summarise
from medfl.runtimes import visits
from medfl.runtimes.at_site import Aborted, AtSite, moved_message
from medfl.runtimes.data_stats import Bins, statistics
from medfl.runtimes.federation import Federation
from medfl.runtimes.states import InFolder, InMemory, States
from medfl.runtimes.step import UNSENT, StepResult, introduce, site_judge, site_step
from medfl.runtimes.workers import Later, Task, Workers
from medfl.sections import SECTIONS
from medfl.seeding import derive
from medfl.storage import State, load_state, moved, save_state

HOSTS = ("medfl", "averaging")
ROUND, LOSS = "round", "train_loss"
"""Names in `statistics`: of the round that a broadcast belongs to, and of a reply's mean training loss."""
JUDGE, SECTION = "judge", "section"
"""Names in `extra`: of the sections on which `train` scores the trained model, and of the one that `evaluate` uses."""
_PARTS = {"train": "train", "eval": "validate"}
_DOING = {
    FlPhase.TRAIN: "training",
    FlPhase.EVALUATE: "evaluation",
    FlPhase.GET_WEIGHTS: "introduction",
    FlPhase.GET_DATA_STATS: "statistics",
}


class MedflClientAlgo(ClientAlgo, ClientAlgoStats):
    """One site, driven by any host that drives a `ClientAlgo`.

    `get_weights` gives the newest that the site has to say: before its first training what the method introduces it
    with, or with a plain averaging host the run's initial weights; then the reply of its last training.

    Args:
        federation: the run with this site's images in it, or what makes it when the site is initialized.
        name: the site's name in it; "" takes the host's `ExtraItems.CLIENT_NAME`.
        folder: where the State lasts; without one, in memory.
        host: "medfl", or "averaging" for a host that averages weights and knows of no method.

    Attributes:
        states: where the State is.
        cases: section -> outcomes of the trained model, for the sections that `train` was asked to score; they stay
            here.
    """

    def __init__(
        self,
        federation: Federation | Callable[[], Federation],
        name: str = "",
        *,
        folder: Path | str | None = None,
        host: str = "medfl",
    ) -> None:
        """Take the parts; nothing is prepared yet.

        Raises:
            InputError: there is no such kind of host.
        """
        if host not in HOSTS:
            raise InputError(f"host {host!r}", f"one of {', '.join(HOSTS)}", "choose one")
        self.name, self.host, self.folder = name, host, folder
        self.phase = FlPhase.IDLE
        self.states: States = InMemory()
        self.cases: dict[str, Cases] = {}
        self._made = federation
        self._stop = threading.Event()
        self._own: AtSite | None = None
        self._reply: ExchangeObject | None = None
        self._trained = False

    def initialize(self, extra: dict[str, Any] | None = None) -> None:
        """Prepare the site; of `extra` only `ExtraItems.CLIENT_NAME` is read.

        Raises:
            InputError: there is no such site in the run, or a plain averaging host lacks the method's server half.
        """
        federation = self._made if isinstance(self._made, Federation) else self._made()
        called = str((extra or {}).get(ExtraItems.CLIENT_NAME) or self.name)
        if called not in federation.participants or called != (self.name or called):
            allowed = self.name or ", ".join(federation.participants)
            raise InputError(f"site {called!r}", f"its name here is {allowed}", "correct the name")
        if self.host == "averaging":
            _refuse_plain(federation)
        self.name, self._trained = called, False
        self._own = AtSite(federation, called, self._stop)
        if self.folder is not None:
            run = replace(federation.run, rounds=0)  # a run may go on for more rounds than were asked for
            own = Path(self.folder) / run.run_hash[:16] / safe(called)
            self.states = InFolder(own, federation.networks.device)

    def train(self, data: ExchangeObject, extra: dict[str, Any] | None = None) -> None:
        """Train for one round; `get_weights` then has the reply.

        Args:
            data: what the server says.
            extra: "judge" names sections on which the trained model is scored.

        Raises:
            RunError: what was received is not what the method expects, or training failed; nothing has changed.
        """
        own, judge = self._ready(), tuple((extra or {}).get(JUDGE, ()))
        self._reply, self._trained, self.cases = None, True, {}
        with self._busy(FlPhase.TRAIN):
            round_, received = self._received(own, data, self.states.last + 1)
            with profiling.during(profiling.CHECKPOINT):
                before = self.states.newest(round_ - 1)
            result = self._called(profiling.STEP, site_step, round_, before, received, judge)
            with profiling.during(profiling.MESSAGES):
                reply, state = self._replied(own, round_, result, received)
            with profiling.during(profiling.CHECKPOINT):
                self.states.keep(round_, state)
            self._reply, self.cases = reply, result.cases

    def get_weights(self, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """Return the newest that the site has to say, with the number of its training items in `statistics`.

        Raises:
            InputError: a best or final model is asked for.
            RunError: the last training failed or was aborted.
        """
        own, kind = self._ready(), (extra or {}).get(ExtraItems.MODEL_TYPE)
        if kind is not None:
            raise InputError(f"site {self.name!r}: model type {kind}", "a site keeps no such model", "ask the server")
        if self._reply is None:
            if self._trained:
                raise RunError(f"site {self.name!r} has nothing to send: its last training did not end")
            with self._busy(FlPhase.GET_WEIGHTS):
                self._reply = self._exchanged(own, self._introduction(own), {})
        return self._reply

    def evaluate(self, data: ExchangeObject, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """Return the metrics of the network that the site is judged by, on its own items.

        Args:
            data: what the server says.
            extra: "section" may be train, validate (default) or test.

        Raises:
            RunError: what was received is not what the method expects, or scoring failed.
        """
        section = (extra or {}).get(SECTION, "validate")
        if section not in SECTIONS:
            raise InputError(f"section {section!r}", f"one of {', '.join(SECTIONS)}", "choose one")
        cases = self.visit(site_judge, data, (section,))[section]
        return ExchangeObject(metrics=summarise(cases))

    def visit(
        self, function: Callable[..., Any], data: ExchangeObject, *rest: Any, part: str = profiling.EVALUATION
    ) -> Any:
        """Call a function of `step` at this site with its State and what the server says; nothing is kept or sent.

        Args:
            function: (federation, round, name, State, message, *rest).
            data: what the server says.
            rest: further arguments.
            part: what its time is counted as.
        """
        own = self._ready()
        with self._busy(FlPhase.EVALUATE):
            round_, received = self._received(own, data, self.states.last)
            with profiling.during(profiling.CHECKPOINT):
                state = self.states.newest(round_)
            return self._called(part, function, round_, state, received, *rest)

    def get_data_stats(self, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """Return counts and statistics of the training ("train") and validation ("eval") images (`data_stats`).

        Args:
            extra: with `FlStatistics.HIST_BINS` and `FlStatistics.HIST_RANGE` there are histograms too.
        """
        own, bins = self._ready(), Bins.of(extra or {})
        with self._busy(FlPhase.GET_DATA_STATS):
            parts = {part: own.shard(self.name, section) for part, section in _PARTS.items()}
            return ExchangeObject(statistics=statistics(parts, own.task, bins))

    def abort(self, extra: dict[str, Any] | None = None) -> None:
        """Stop, from another thread, what is going on: it ends with `Aborted` before its next batch."""
        if self.phase != FlPhase.IDLE:
            self._stop.set()

    def finalize(self, extra: dict[str, Any] | None = None) -> None:
        """Stop what is going on and let go of everything but a State in a folder; `initialize` begins anew."""
        self.abort()
        self._own, self._reply, self.cases, self.states = None, None, {}, InMemory()

    def _ready(self) -> AtSite:
        if self._own is None:
            raise RunError(f"site {self.name!r} is not initialized; call initialize first")
        return self._own

    @contextmanager
    def _busy(self, phase: FlPhase) -> Iterator[None]:
        """Be in a phase, which `abort` can end."""
        self._stop.clear()
        self.phase = phase
        try:
            yield
        except Aborted as error:
            raise Aborted(
                f"site {self.name!r}: {_DOING[phase]} aborted; its State is that of the round before"
            ) from error
        finally:
            self.phase = FlPhase.IDLE

    def _called(self, part: str, function: Callable[..., Any], round_: int, *rest: Any) -> Any:
        """Call a function of `step`; what it raises is told in one line."""
        own = self._ready()
        try:
            with profiling.during(part):
                found = function(own, round_, self.name, *rest)
        except MedflError:
            raise
        except Exception as error:  # a message may have all the right forms, and yet not be what the method expects
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise RunError(
                f"site {self.name!r}, round {round_}: {_DOING[self.phase]} fails with the server's message: {what}"
            ) from error
        own.go_on()
        return found

    def _received(self, own: AtSite, data: ExchangeObject, default: int) -> tuple[int, Message]:
        """Return the round, which the site counts itself where the host does not, and the message."""
        with profiling.during(profiling.MESSAGES):
            own.require(isinstance(data, ExchangeObject), f"it is a {type(data).__name__}, no ExchangeObject")
            named: Any = data.weights
            own.require(isinstance(named, Mapping), f"its weights are {type(named).__name__}, no mapping")
            own.require(data.weight_type in (None, WeightType.WEIGHTS), f"its weight type is {data.weight_type}")
            own.require(data.optim is None, "it has the state of an optimiser")
            round_ = (data.statistics or {}).get(ROUND, default)
            own.require(type(round_) is int and round_ >= 0, f"its round is {str(round_)[:40]!r}, no whole number")
            return round_, own.averaged(named) if self.host == "averaging" else own.received(named)

    def _replied(self, own: AtSite, round_: int, result: StepResult, received: Message) -> tuple[ExchangeObject, State]:
        """Return what leaves after a step, and the State with what was left out of it."""
        seed = derive(own.site(self.name, round_).seed, "messages")
        wire, unsent = own.wire.reply(result.reply, received, seed, result.state.get(UNSENT, {}))
        state = {key: value for key, value in result.state.items() if key != UNSENT}
        told = {FlStatistics.NUM_EXECUTED_ITERATIONS: result.steps, LOSS: result.loss}
        return self._exchanged(own, wire, told), {**state, UNSENT: unsent} if unsent else state

    def _introduction(self, own: AtSite) -> Message:
        if self.host == "averaging":
            return Message({"weights": {name: own.networks.initial[name] for name in own.leaves}})
        return introduce(own, self.name)

    def _exchanged(self, own: AtSite, message: Message, told: Mapping[str, Any]) -> ExchangeObject:
        """Return a message as it leaves; for a plain averaging host its weights alone."""
        named = message["weights"] if self.host == "averaging" else message.flat()
        told = {**told, FlStatistics.DATA_COUNT: len(own.work(self.name, "train"))}
        return _exchange_object(named, told)


def _refuse_plain(federation: Federation) -> None:
    """Raise an InputError if averaging weights is not all that the run's server does."""
    run = federation.run
    if not federation.method.plain_host():
        raise InputError(
            f"method {run.method!r} with a plain averaging host",
            "such a host does for methods that keep FedAvg's server half (medfl methods)",
            "use one of these, or medfl's own server",
        )
    if not federation.messages.lossless:
        raise InputError(
            f"--messages {run.messages} with a plain averaging host", "it takes lossless ones", "leave it out"
        )


def _exchange_object(named: Weights, told: Mapping[str, Any]) -> ExchangeObject:
    """Return what crosses: tensors as copies on the CPU, since a network's own go on changing."""
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
    return ExchangeObject(weights=weights, weight_type=WeightType.WEIGHTS, statistics=dict(told))


# The simulation


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
                yield index, at_sites[function](*arguments)
            else:
                yield index, function(self._federation, *arguments)

    def _introduced(self, name: str) -> Message:
        with self._at(name, InMemory()) as site:
            return self._arrived(site.get_weights())

    def _trained(
        self, round_: int, name: str, kept: str | None, fresh: str, down: Message, judge: Sequence[str]
    ) -> tuple[StepResult, bool]:
        federation, files = self._federation, _RunFiles(kept, fresh, self._federation.networks.device)
        data, bytes_down = self._sent(round_, name, down)
        with self._at(name, files) as site:
            site.train(data, {JUDGE: judge})
            told, cases = site.get_weights(), site.cases
        with profiling.during(profiling.MESSAGES):
            wire = self._arrived(told)
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
            return _exchange_object(wire.flat(), {ROUND: round_}), wire.num_bytes

    def _arrived(self, told: ExchangeObject) -> Message:
        return moved_message(Message.from_flat(told.weights or {}), self._federation.networks.device)


class _RunFiles:
    """A site's State in the run folder, where the simulator has said.

    Attributes:
        written: whether there is a new State.
    """

    last = 0

    def __init__(self, kept: str | None, fresh: str | None, device: torch.device) -> None:
        self._kept, self._fresh, self._device, self.written = kept, fresh, device, False

    def newest(self, round_: int) -> State | None:
        return None if self._kept is None else moved(load_state(Path(self._kept)), self._device)

    def keep(self, round_: int, state: State) -> None:
        if state and self._fresh is not None:
            save_state(Path(self._fresh), state)
            self.written = True
