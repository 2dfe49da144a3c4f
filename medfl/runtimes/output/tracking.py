"""A run's numbers in MLflow: `--track mlflow[:URI]`, one MLflow run for each run folder.

The numbers are those of TensorBoard, the parameters those of `run.json` but for where things lie and which items a site
has. Without a URI it is that of MLflow's own variable MLFLOW_TRACKING_URI, else an SQLite file in the run folder.
`mlflow.json` there has the URI and MLflow's id of the run, with which a resumed run goes on: rounds that MLflow has are
not written again, those that it lacks are, from rounds.jsonl.

Whatever happens to MLflow, the run goes on: it is said once, and nothing more is tried until the run is resumed.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from medfl.core.errors import InputError
from medfl.core.run_folder import RunFolder
from medfl.core.storage import write_atomic
from medfl.core.terminal import Print
from medfl.core.untrusted import Refused, json_values
from medfl.runtimes.output.events import scalars

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE, STORE = "mlflow.json", "mlflow.db"
"""In a run folder: which MLflow run it is, and the SQLite file where MLflow has no other place."""
EXPERIMENT = "medfl"
"""Name of the experiment, where MLFLOW_EXPERIMENT_NAME says no other."""
_MARK = "cost/seconds"
"""A metric of every round."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow itself would try for minutes before it says that its server is down."""
_BATCH, _LONGEST = 100, 500
"""Parameters that MLflow takes at once, and the length of one that every version of it takes."""
_APART = ("bundle_path", "data.folder", "data.counts", "data.notes", "partition.notes", "partition.sites")
"""Parts of a record that are no settings: where things lie, and which items each site has."""


def parse(text: str) -> str | None:
    """Return the URI that `--track` names, None for the default one.

    Raises:
        InputError: it is something else, or MLflow is not installed.
    """
    kind, colon, uri = text.partition(":")
    if kind != "mlflow" or (colon and not uri):
        raise InputError(f"--track {text}", "mlflow or mlflow:URI", "for example mlflow:http://localhost:5000")
    try:
        import mlflow.tracking  # noqa: F401
    except ImportError as error:
        raise InputError(f"--track {text}", "it needs MLflow", "pip install 'medfl[mlflow]'") from error
    return uri or None


def tracked(folder: RunFolder, track: str | None, say: Print) -> list[Tracking]:
    """Return where a run's numbers go besides its folder.

    Args:
        folder: of the run.
        track: what `--track` says; None goes on with what the folder says, if it was tracked before.
        say: where lines for the user go.

    Raises:
        InputError: as `parse`.
    """
    uri = None if track is None else parse(track)
    return [Tracking(folder, uri, say)] if track is not None or (folder.path / FILE).is_file() else []


class Tracking:
    """One MLflow run, which `Events` writes to besides; nothing that happens there ends a run.

    Args:
        folder: of the run, with its `run.json`.
        uri: of MLflow's store; None: the one that the folder names, else MLFLOW_TRACKING_URI, else in the folder.
        say: where lines for the user go.
    """

    def __init__(self, folder: RunFolder, uri: str | None, say: Print) -> None:
        """Connect to nothing yet."""
        self._folder, self._say = folder, say
        known = self._known()
        own = f"sqlite:///{(folder.path / STORE).resolve()}"
        self.uri = uri or known.get("uri") or os.environ.get("MLFLOW_TRACKING_URI") or own
        self.shown = _without_password(self.uri)
        self.id = known.get("run_id", "") if known.get("uri") == self.shown else ""
        self._client: Any = None
        self._there: set[int] = set()

    def open(self, done: int) -> None:
        """Begin the MLflow run, or go on with it and write the rounds up to `done` that it lacks."""
        with self._kept_going():
            from mlflow.tracking import MlflowClient  # imports for seconds

            logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of each table that it makes
            for name, value in _PATIENCE.items():
                os.environ.setdefault(name, value)
            self._note()
            client = MlflowClient(self.uri)
            if self.id:
                self._there = {metric.step for metric in client.get_metric_history(self.id, _MARK)}
                client.set_terminated(self.id, "RUNNING")
            else:
                self._begin(client)
            self._client = client
            self._say(f"MLflow: run {self.id} at {self.shown}")
            for entry in self._folder.rounds():
                if entry["round"] <= done:
                    self.log(entry["round"], scalars(entry))

    def log(self, round_: int, numbers: Mapping[str, float]) -> None:
        """Write a round's numbers, unless MLflow has them."""
        if self._client is None or round_ in self._there:
            return
        with self._kept_going():
            from mlflow.entities import Metric

            now = int(time.time() * 1000)
            metrics = [Metric(name, float(value), now, round_) for name, value in numbers.items()]
            self._client.log_batch(self.id, metrics=metrics)
            self._there.add(round_)

    def close(self, finished: bool) -> None:
        """Say that the run is over, or was cut short."""
        if self._client is not None:
            with self._kept_going():
                self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")

    def _begin(self, client: Any) -> None:
        from mlflow.entities import Param

        run, document = self._folder.read_run()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        there = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if there is None else there.experiment_id
        tags = {"run_hash": run.run_hash, "data": run.data.source}
        made = client.create_run(experiment, tags=tags, run_name=self._folder.path.resolve().name)
        self.id = made.info.run_id
        self._note()
        sites = {"sites": len(run.partition.sites), "runtime": document.get("runtime", "")}
        params = [Param(key, str(value)[:_LONGEST]) for key, value in {**_flat(run.to_dict()), **sites}.items()]
        for start in range(0, len(params), _BATCH):
            client.log_batch(self.id, params=params[start : start + _BATCH])

    def _note(self) -> None:
        """Write down where the run is tracked, also before anything is there: a resumed run then tries again."""
        write_atomic(self._folder.path / FILE, json.dumps({"uri": self.shown, "run_id": self.id}).encode())

    def _known(self) -> dict[str, str]:
        try:
            known = json_values(self._folder.path / FILE, 2**16)
        except Refused:
            return {}
        return {key: str(value) for key, value in known.items()} if isinstance(known, dict) else {}

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        """Whatever fails here, say it, and have nothing more to do with MLflow."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # MLflow's own, about its libraries
                yield
        except Exception as error:  # of MLflow, of its database, of the network: of any kind
            self._client = None
            text = " ".join(f"{type(error).__name__}: {error}".split())
            why = text.replace(self.uri, self.shown)[:200]
            self._say(
                f"MLflow at {self.shown}: {why}; the run goes on without it, and what it lacks is written when the run "
                "is resumed"
            )


def _without_password(uri: str) -> str:
    """Return a URI without a user and password: they belong into MLFLOW_TRACKING_USERNAME and _PASSWORD."""
    scheme, colon, rest = uri.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{colon}{place.rpartition('@')[2]}{slash}{path}"


def _flat(document: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the settings of a record under dotted names."""
    settings: dict[str, Any] = {}
    for key, value in document.items():
        name = above + key
        if name.endswith(_APART):
            continue
        if isinstance(value, Mapping):
            settings |= _flat(value, f"{name}.")
        else:
            settings[name] = value
    return settings
