"""A run's numbers in MLflow: `--track mlflow[:URI]`, one MLflow run for each run folder; and what `--track` may say.

The numbers are those of TensorBoard, the parameters those of `run.json` but for where things lie and which items a site
has. Without a URI it is that of MLflow's own variable MLFLOW_TRACKING_URI, else an SQLite file in the run folder.
`mlflow.json` there has the URI and MLflow's id of the run, with which a resumed run goes on: rounds that MLflow has are
not written again, those that it lacks are, from rounds.jsonl.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from medfl.core.errors import InputError
from medfl.core.release import pip_install
from medfl.core.terminal import Print
from medfl.runtimes.output.tracker import Tracker, settings_of
from medfl.storage.run_folder import RunFolder

# A run's numbers in Weights & Biases: `--track wandb[:PROJECT]`, one of its runs for each run folder.
#
# The numbers are those of TensorBoard, the configuration that of `run.json` but for where things lie and which items a
# site has. Account and server are what its own variables say (WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE=offline).
# `wandb.json` in the run folder has the project and the id, with which a resumed run goes on.


PROJECT = "medfl"


class Wandb(Tracker):
    """One run of Weights & Biases, in `project`; without one in that which the folder names, else in "medfl"."""

    title = "Weights & Biases"
    file = "wandb.json"

    def __init__(self, folder: RunFolder, project: str | None, say: Print) -> None:
        super().__init__(folder, say)
        self.project = project or self.known.get("project") or PROJECT
        self.shown = f"project {self.project}"
        self.id = ""
        if self.known.get("project") == self.project:
            self.id = self.known.get("run_id", "")

    def _open(self) -> None:
        import wandb

        # before `init`, which may fail: a resumed run then tries the same project
        self.note(project=self.project, run_id=self.id)
        run, document = self.folder.read_run()
        config = {
            **settings_of(run.to_dict()),
            "sites": len(run.partition.sites),
            "run_hash": run.run_hash,
        }
        self._run: Any = wandb.init(
            project=self.project, id=self.id or None, resume="allow", name=self.folder.path.resolve().name,
            dir=str(self.folder.path), config={**config, "runtime": document.get("runtime", "")},
        )  # fmt: skip
        self.id = str(self._run.id)
        self.note(project=self.project, run_id=self.id)
        self.say(f"{self.title}: run {self.id} of {self.shown}")
        self._there = int(self._run.step or 0)  # it takes no numbers of earlier rounds than this

    def _log(self, round_: int, numbers: Mapping[str, float]) -> None:
        if round_ >= self._there:
            self._run.log(dict(numbers), step=round_)

    def _close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


FILE = "mlflow.json"
STORE = "mlflow.db"
"""In a run folder: which MLflow run it is, and the SQLite file where MLflow has no other place."""
EXPERIMENT = "medfl"
"""Name of the experiment, where MLFLOW_EXPERIMENT_NAME says no other."""
# a metric of every round
_MARK = "cost/seconds"
# MLflow itself would try for minutes before it says that its server is down
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
# parameters that MLflow takes at once, and the length of one that every version of it takes
_BATCH = 100
_LONGEST = 500


class Tracking(Tracker):
    """One MLflow run.

    Its store is `uri`; without one that which the folder names, else MLFLOW_TRACKING_URI, else in the folder.
    """

    title = "MLflow"
    file = FILE

    def __init__(self, folder: RunFolder, uri: str | None, say: Print) -> None:
        super().__init__(folder, say)
        in_folder = f"sqlite:///{(folder.path / STORE).resolve()}"
        self.uri = (
            uri or self.known.get("uri") or os.environ.get("MLFLOW_TRACKING_URI") or in_folder
        )
        self.shown = _without_password(self.uri)
        self.secret = self.uri
        self.id = ""
        if self.known.get("uri") == self.shown:
            self.id = self.known.get("run_id", "")

        self._there: set[int] = set()

    def _open(self) -> None:
        from mlflow.tracking import MlflowClient  # imports for seconds

        # else it tells of each table that it makes
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)

        self.note(uri=self.shown, run_id=self.id)
        self._client = MlflowClient(self.uri)
        if self.id:
            history = self._client.get_metric_history(self.id, _MARK)
            self._there = {metric.step for metric in history}
            # a resumed run: MLflow would show it as ended while its rounds come
            self._client.set_terminated(self.id, "RUNNING")
        else:
            self._begin()

        self.say(f"MLflow: run {self.id} at {self.shown}")

    def _log(self, round_: int, numbers: Mapping[str, float]) -> None:
        if round_ in self._there:
            return

        from mlflow.entities import Metric

        # MLflow's times are milliseconds
        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, round_) for name, value in numbers.items()]
        self._client.log_batch(self.id, metrics=metrics)
        self._there.add(round_)

    def _close(self, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")

    def _begin(self) -> None:
        from mlflow.entities import Param

        client = self._client
        run, document = self.folder.read_run()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        existing = client.get_experiment_by_name(name)

        if existing:
            experiment = existing.experiment_id
        else:
            experiment = client.create_experiment(name)

        tags = {"run_hash": run.run_hash, "data": run.data.source}
        mlflow_run = client.create_run(
            experiment, tags=tags, run_name=self.folder.path.resolve().name
        )
        self.id = mlflow_run.info.run_id
        self.note(uri=self.shown, run_id=self.id)
        settings = settings_of(run.to_dict())
        settings["sites"] = len(run.partition.sites)
        settings["runtime"] = document.get("runtime", "")
        params = [Param(key, str(value)[:_LONGEST]) for key, value in settings.items()]

        for start in range(0, len(params), _BATCH):
            client.log_batch(self.id, params=params[start : start + _BATCH])


# what `--track` names: its class, the module that it needs, and that in words
_KINDS: Mapping[str, tuple[type[Tracking | Wandb], str, str]] = {
    "mlflow": (Tracking, "mlflow.tracking", "MLflow"),
    "wandb": (Wandb, "wandb", "Weights & Biases"),
}


def parse(text: str) -> tuple[type[Tracking | Wandb], str | None]:
    """Return what `--track` names, and its place, None for the default one.

    Raises:
        InputError: it is something else, or what it needs is not installed.
    """
    kind, colon, target = text.partition(":")
    if kind not in _KINDS or (colon and not target):
        allowed = "mlflow or mlflow:URI, wandb or wandb:PROJECT"
        raise InputError(f"--track {text}", allowed, "for example mlflow:http://localhost:5000")

    tracker, module, words = _KINDS[kind]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"--track {text}", f"it needs {words}", pip_install(kind)) from error

    return tracker, target or None


def tracked(folder: RunFolder, track: str | None, say: Print) -> list[Tracker]:
    """Return where a run's numbers go besides its folder.

    `track` None goes on with what the folder says, if it was tracked before.

    Raises:
        InputError: as `parse`.
    """
    if track is not None:
        tracker, target = parse(track)
        return [tracker(folder, target, say)]

    trackers: list[Tracker] = []
    for tracker, *_ in _KINDS.values():
        if (folder.path / tracker.file).is_file():
            trackers.append(tracker(folder, None, say))

    return trackers


def _without_password(uri: str) -> str:
    """Return a URI without a user and password: they belong into MLFLOW_TRACKING_USERNAME and _PASSWORD."""
    scheme, colon, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{colon}{host.rpartition('@')[2]}{slash}{path}"
