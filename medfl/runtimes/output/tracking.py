"""A run's numbers in another place besides its folder: `--track mlflow[:URI]` or `--track wandb[:PROJECT]`.

Each run folder is one run of MLflow or of Weights & Biases. The numbers are those of TensorBoard, the settings those of
`run.json` but for where things lie and which items a site has. A tracker opens, takes each round's numbers and closes;
a file in the run folder (`mlflow.json`, `wandb.json`) has the place and the id of the run there, with which a resumed
run goes on (at another place than the default one only if that is named again): rounds that are there are not written
again, those that are lacking are, from rounds.jsonl. Whatever fails there, the run goes on: it is said once, and
nothing more is tried until the run is resumed.

MLflow's default place is its own variable MLFLOW_TRACKING_URI, else an SQLite file in the run folder. Account and
server of Weights & Biases come from its own variables (WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE=offline).
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from medfl.core.documents import Document, Metrics
from medfl.core.errors import InputError
from medfl.core.mappings import map_values
from medfl.core.release import pip_install
from medfl.core.terminal import Print
from medfl.core.untrusted import Refused, json_values
from medfl.storage.files import write_atomic
from medfl.storage.run_folder import RunFolder

FILE = "mlflow.json"
STORE = "mlflow.db"
"""In a run folder: the id of the MLflow run, and the SQLite file used if MLflow has no other place."""
EXPERIMENT = "medfl"
"""Name of MLflow's experiment unless MLFLOW_EXPERIMENT_NAME gives another."""
PROJECT = "medfl"
# parts of a record that are not settings: paths, and each site's items
_APART = (
    "bundle_path",
    "data.folder",
    "data.counts",
    "data.notes",
    "partition.notes",
    "partition.sites",
)
# a metric of every round
_MARK = "cost/seconds"
# MLflow itself would retry for minutes before reporting that its server is down
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
# parameters that MLflow takes at once, and the length of one that all its versions accept
_BATCH = 100
_LONGEST = 500


class Tracker(ABC):
    """One run in another place, to which `Events` also writes; nothing that happens there ends a run.

    The place is given by `--track KIND:PLACE`, else by the file in the run folder, else by the default of its kind.

    Attributes:
        title: its name in lines for the user.
        file: in a run folder, which run elsewhere it is.
        key: under which this file has the place.
        noun, preposition: before the place in lines for the user.
        recorded: the place without secrets, as the file has it.
        id: of the run there, "" before it is begun.
        is_users: the user has named the place, in the command or by a variable, or it lies in the folder: who made the
            folder may have written any other machine or file in it.
    """

    title = ""
    file = ""
    key = ""
    noun = ""
    preposition = "at"
    is_of_account = False

    def __init__(self, folder: RunFolder, place: str | None, say: Print) -> None:
        """Store the settings; no connection is made yet."""
        self.folder = folder
        self.say = say
        self._on = False
        document = self._known()
        default = self._default()
        self.place = place or document.get(self.key) or default
        self.is_users = self.is_of_account or bool(place) or self.place == default
        self.recorded = _without_password(self.place)
        self.shown = self.noun + self.recorded
        self.id = ""
        if document.get(self.key) == self.recorded:
            self.id = document.get("run_id", "")

    @abstractmethod
    def _default(self) -> str:
        """Return the place if neither the user nor the folder gives one."""

    @abstractmethod
    def _open(self) -> None:
        """Start or continue the run there."""

    @abstractmethod
    def _log(self, round_: int, numbers: Mapping[str, float]) -> None:
        """Write a round's numbers, unless they are there."""

    @abstractmethod
    def _close(self, finished: bool) -> None:
        """Report that the run has finished or was interrupted."""

    def open(self, done: int) -> None:
        """Start tracking a run with `done` completed rounds, and write those that are missing there."""
        with self._kept_going():
            # before anything is there: a resumed run then tries the same place again
            self._note()
            self._open()
            self._note()
            self.say(f"{self.title}: run {self.id} {self.preposition} {self.shown}")
            for entry in self.folder.rounds():
                if entry["round"] <= done:
                    self._log(entry["round"], scalars(entry))
            self._on = True

    def log(self, round_: int, numbers: Mapping[str, float]) -> None:
        """Write a round's numbers."""
        if self._on:
            with self._kept_going():
                self._log(round_, numbers)

    def close(self, finished: bool) -> None:
        """Report that the run has finished or was interrupted."""
        if self._on:
            with self._kept_going():
                self._close(finished)

    def _note(self) -> None:
        document = {self.key: self.recorded, "run_id": self.id}
        write_atomic(self.folder.path / self.file, json.dumps(document).encode())

    def _known(self) -> dict[str, str]:
        """Return the contents of the file in the run folder, {} if it cannot be read."""
        try:
            document = json_values(self.folder.path / self.file, 2**16)
        except Refused:
            return {}

        if isinstance(document, dict):
            return map_values(str, document)

        return {}

    def _settings(self) -> Document:
        """Return the settings of the run under dotted names."""
        run, document = self.folder.read_run()
        settings = settings_of(run.to_dict())
        settings["sites"] = len(run.partition.sites)
        settings["runtime"] = document.get("runtime", "")
        return settings

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        """Report any failure here, and stop using this place."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of their libraries, about each other
                yield
        except Exception as error:  # from a library, its database or the network: of any type
            self._on = False
            text = " ".join(f"{type(error).__name__}: {error}".split())
            text = text.replace(self.place, self.recorded)
            self.say(
                f"{self.title} at {self.shown}: {text[:200]}; the run goes on without it, and what it lacks is "
                "written when the run is resumed"
            )


class Wandb(Tracker):
    """One run of Weights & Biases; its place is a project of the user's account, whatever the folder calls it."""

    title = "Weights & Biases"
    file = "wandb.json"
    key = "project"
    noun = "project "
    preposition = "of"

    is_of_account = True

    def _default(self) -> str:
        return PROJECT

    def _open(self) -> None:
        import wandb

        run_hash = self.folder.read_run()[0].run_hash
        self._run: Any = wandb.init(
            project=self.place,
            id=self.id or None,
            resume="allow",
            name=self.folder.path.resolve().name,
            dir=str(self.folder.path),
            config={**self._settings(), "run_hash": run_hash},
        )
        self.id = str(self._run.id)
        self._there = int(self._run.step or 0)  # it accepts no numbers for rounds before this

    def _log(self, round_: int, numbers: Mapping[str, float]) -> None:
        if round_ >= self._there:
            self._run.log(dict(numbers), step=round_)

    def _close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class Tracking(Tracker):
    """One run of MLflow; its place is the URI of a store."""

    title = "MLflow"
    file = FILE
    key = "uri"

    def _default(self) -> str:
        in_folder = f"sqlite:///{(self.folder.path / STORE).resolve()}"
        return os.environ.get("MLFLOW_TRACKING_URI") or in_folder

    def _open(self) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient  # imported here because it takes seconds

        # otherwise it reports each table that it creates
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)

        self._client = client = MlflowClient(self.place)
        self._there: set[int] = set()
        if self.id:
            history = client.get_metric_history(self.id, _MARK)
            self._there = {metric.step for metric in history}
            # a resumed run: MLflow would otherwise show it as ended while its rounds arrive
            client.set_terminated(self.id, "RUNNING")
            return

        run, _ = self.folder.read_run()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        existing = client.get_experiment_by_name(experiment)
        mlflow_run = client.create_run(
            existing.experiment_id if existing else client.create_experiment(experiment),
            tags={"run_hash": run.run_hash, "data": run.data.source},
            run_name=self.folder.path.resolve().name,
        )
        self.id = mlflow_run.info.run_id
        # immediately: later failures occur in a run that exists there
        self._note()
        params = []
        for key, value in self._settings().items():
            params.append(Param(key, str(value)[:_LONGEST]))

        for start in range(0, len(params), _BATCH):
            client.log_batch(self.id, params=params[start : start + _BATCH])

    def _log(self, round_: int, numbers: Mapping[str, float]) -> None:
        if round_ in self._there:
            return

        from mlflow.entities import Metric

        # MLflow's times are milliseconds
        now = int(time.time() * 1000)
        metrics = []
        for name, value in numbers.items():
            metrics.append(Metric(name, float(value), now, round_))

        self._client.log_batch(self.id, metrics=metrics)
        self._there.add(round_)

    def _close(self, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


# values of `--track`: its class, and the module that it needs
_KINDS: Mapping[str, tuple[type[Tracker], str]] = {
    "mlflow": (Tracking, "mlflow.tracking"),
    "wandb": (Wandb, "wandb"),
}


def parse(text: str) -> tuple[type[Tracker], str | None]:
    """Return the tracker that `--track` names, and its place, None for the default.

    Raises:
        InputError: there is no such tracker, or what it needs is not installed.
    """
    kind, colon, target = text.partition(":")
    if kind not in _KINDS or (colon and not target):
        raise InputError(
            f"--track {text}",
            "mlflow or mlflow:URI, wandb or wandb:PROJECT",
            "for example mlflow:http://localhost:5000",
        )

    tracker, module = _KINDS[kind]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"--track {text}", f"it needs {tracker.title}", pip_install(kind)
        ) from error

    return tracker, target or None


def tracked(folder: RunFolder, track: str | None, say: Print) -> list[Tracker]:
    """Return where a run's numbers are written besides its folder.

    `track` None goes on with what the folder says, if it was tracked before at a place of the user's (`is_users`).

    Raises:
        InputError: as for `parse`.
    """
    if track is not None:
        tracker, target = parse(track)
        return [tracker(folder, target, say)]

    trackers = []
    for kind, (tracker, _) in _KINDS.items():
        if (folder.path / tracker.file).is_file():
            before = tracker(folder, None, say)
            if before.is_users:
                trackers.append(before)
            else:
                say(f"note: to go on in {before.title}, add --track {kind}:{before.recorded}")

    return trackers


def settings_of(document: Mapping[str, object], above: str = "") -> Document:
    """Return the settings of a record under dotted names."""
    settings: Document = {}
    for key, value in document.items():
        name = above + key
        if name.endswith(_APART):
            continue
        if isinstance(value, Mapping):
            settings |= settings_of(value, f"{name}.")
        else:
            settings[name] = value

    return settings


def scalars(entry: Document) -> Metrics:
    """Return the numbers of a line of rounds.jsonl that are plotted as curves."""
    numbers = {"train/loss": entry["train_loss"]}
    for group in ("val_global", "val_personal", "observed"):
        # None for a round that was not evaluated
        for name, value in (entry.get(group) or {}).items():
            numbers[f"{group}/{name}"] = value

    for name in ("bytes_up", "bytes_down", "seconds"):
        numbers[f"cost/{name}"] = entry[name]

    return numbers


def _without_password(place: str) -> str:
    """Return a URI without user and password: they belong in MLFLOW_TRACKING_USERNAME and _PASSWORD."""
    scheme, colon, rest = place.partition("://")
    if not colon:
        return place

    host, slash, path = rest.partition("/")
    return f"{scheme}{colon}{host.rpartition('@')[2]}{slash}{path}"
