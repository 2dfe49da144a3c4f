"""A run's numbers in MLflow, besides its folder: `--track mlflow[:URI]`.

Each run folder is one run of MLflow. The numbers are those of TensorBoard, the settings those of `run.json` but for
where things lie and which items a site has. `mlflow.json` in the run folder has the store and the id of the run there,
with which a resumed run goes on (in another store than the default one only if that is named again): rounds that are
there are not written again, those that are lacking are, from rounds.jsonl. Whatever fails there, the run goes on: it is
said once, and nothing more is tried until the run is resumed.

The default store is that of MLflow's own variable MLFLOW_TRACKING_URI, else an SQLite file in the run folder.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from medfl.core import (
    Document,
    InputError,
    Metrics,
    Print,
    Refused,
    json_values,
    map_values,
    pip_install,
)
from medfl.storage import RunFolder, write_json

FILE = "mlflow.json"
STORE = "mlflow.db"
"""In a run folder: the id of the MLflow run, and the SQLite file used if MLflow has no other place."""
EXPERIMENT = "medfl"
"""Name of MLflow's experiment unless MLFLOW_EXPERIMENT_NAME gives another."""
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


class Tracking:
    """One run of MLflow, to which `Events` also writes; nothing that happens there ends a run.

    The store is given by `--track mlflow:URI`, else by the file in the run folder, else it is MLflow's default.

    Attributes:
        recorded: the store's URI without secrets, as the file has it.
        id: of the run there, "" before it is begun.
        is_users: the user has named the store, in the command or by a variable, or it lies in the folder: who made the
            folder may have written any other machine or file in it.
    """

    def __init__(self, folder: RunFolder, uri: str | None, say: Print) -> None:
        """Store the settings; no connection is made yet."""
        self.folder = folder
        self.say = say
        self._on = False
        document = self._known()
        in_folder = f"sqlite:///{(folder.path / STORE).resolve()}"
        default = os.environ.get("MLFLOW_TRACKING_URI") or in_folder
        self.uri = uri or document.get("uri") or default
        self.is_users = bool(uri) or self.uri == default
        self.recorded = _without_password(self.uri)
        self.id = ""
        if document.get("uri") == self.recorded:
            self.id = document.get("run_id", "")

    def open(self, done: int) -> None:
        """Start tracking a run with `done` completed rounds, and write those that are missing there."""
        with self._kept_going():
            # before anything is there: a resumed run then tries the same store again
            self._note()
            self._open()
            self._note()
            self.say(f"MLflow: run {self.id} at {self.recorded}")
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
                self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")

    def _note(self) -> None:
        document = {"uri": self.recorded, "run_id": self.id}
        write_json(self.folder.path / FILE, document)

    def _known(self) -> dict[str, str]:
        """Return the contents of the file in the run folder, {} if it cannot be read."""
        try:
            document = json_values(self.folder.path / FILE, 2**16)
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
        """Report any failure here, and stop using this store."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of its libraries, about each other
                yield
        except Exception as error:  # from a library, its database or the network: of any type
            self._on = False
            text = " ".join(f"{type(error).__name__}: {error}".split())
            text = text.replace(self.uri, self.recorded)
            self.say(
                f"MLflow at {self.recorded}: {text[:200]}; the run goes on without it, and what it lacks is "
                "written when the run is resumed"
            )

    def _open(self) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient  # imported here because it takes seconds

        # otherwise it reports each table that it creates
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)

        self._client = client = MlflowClient(self.uri)
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
        params = [Param(key, str(value)[:_LONGEST]) for key, value in self._settings().items()]

        for start in range(0, len(params), _BATCH):
            client.log_batch(self.id, params=params[start : start + _BATCH])

    def _log(self, round_: int, numbers: Mapping[str, float]) -> None:
        if round_ in self._there:
            return

        from mlflow.entities import Metric

        # MLflow's times are milliseconds
        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, round_) for name, value in numbers.items()]
        self._client.log_batch(self.id, metrics=metrics)
        self._there.add(round_)


def parse(text: str) -> str | None:
    """Return the store that `--track` names, None for MLflow's default.

    Raises:
        InputError: it is not MLflow, or that is not installed.
    """
    kind, colon, uri = text.partition(":")
    if kind != "mlflow" or (colon and not uri):
        raise InputError(
            f"--track {text}", "mlflow or mlflow:URI", "for example mlflow:http://localhost:5000"
        )

    try:
        importlib.import_module("mlflow.tracking")
    except ImportError as error:
        raise InputError(f"--track {text}", "it needs MLflow", pip_install(kind)) from error

    return uri or None


def tracked(folder: RunFolder, track: str | None, say: Print) -> list[Tracking]:
    """Return where a run's numbers are written besides its folder: nowhere or in one store.

    `track` None goes on with what the folder says, if it was tracked before in a store of the user's (`is_users`).

    Raises:
        InputError: as for `parse`.
    """
    if track is not None:
        return [Tracking(folder, parse(track), say)]
    if not (folder.path / FILE).is_file():
        return []

    before = Tracking(folder, None, say)
    if before.is_users:
        return [before]

    say(f"note: to go on in MLflow, add --track mlflow:{before.recorded}")
    return []


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


def _without_password(uri: str) -> str:
    """Return a URI without user and password: they belong in MLFLOW_TRACKING_USERNAME and _PASSWORD."""
    scheme, colon, rest = uri.partition("://")
    if not colon:
        return uri

    host, slash, path = rest.partition("/")
    return f"{scheme}{colon}{host.rpartition('@')[2]}{slash}{path}"
