"""A run's numbers in MLflow: the same as TensorBoard's, each once, and never a reason for a run to fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow")

from medfl.core.errors import InputError
from medfl.runtimes.output.events import Events, scalars
from medfl.runtimes.output.tracking import FILE, STORE, Tracking, parse, tracked
from medfl.storage.run_folder import RunFolder
from tests.support.toy import run_record


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of plain files, which is quickly made."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return (tmp_path / "store").as_uri()


def entry(round_: int) -> dict[str, Any]:
    return {
        "round": round_, "train_loss": 1 / round_, "val_global": {"accuracy": round_ / 10}, "val_personal": None,
        "observed": {"own class": 0.5}, "bytes_up": 10 * round_, "bytes_down": 7, "seconds": 0.25, "seconds_eval": 0.1,
    }  # fmt: skip


def folder(path: Path, **changes: Any) -> RunFolder:
    made = RunFolder.create(path)
    made.write_run(run_record(**changes), {"runtime": "simulator"})
    return made


def play(folder: RunFolder, uri: str | None, rounds: range, commit: bool = True) -> list[str]:
    """Run some rounds as the simulator does; without `commit` a kill comes before the last one is committed."""
    said: list[str] = []
    done = rounds.start - 1
    folder.truncate_rounds(done)
    with Events(folder.path / "events", done, Tracking(folder, uri, said.append)) as events:
        for round_ in rounds:
            folder.append_round(entry(round_))
            events.log(entry(round_))
    if not commit:
        folder.truncate_rounds(rounds.stop - 2)
    return said


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


def runs(uri: str, experiment: str = "medfl") -> list[Any]:
    found = client(uri).get_experiment_by_name(experiment)
    return client(uri).search_runs([found.experiment_id])


def history(uri: str, name: str) -> list[tuple[int, float]]:
    (run,) = runs(uri)
    return [(m.step, m.value) for m in client(uri).get_metric_history(run.info.run_id, name)]


def test_mlflow_has_the_numbers_of_tensorboard(tmp_path: Path, store: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play(folder(tmp_path / "run"), store, range(1, 4))
    written = EventAccumulator(str(tmp_path / "run" / "events")).Reload()
    names = written.Tags()["scalars"]
    assert set(names) == set(scalars(entry(1)))
    assert "observed/own class" in names
    for name in names:
        theirs = {e.step: e.value for e in written.Scalars(name)}
        assert dict(history(store, name)) == pytest.approx(theirs, rel=1e-6)


def test_mlflow_has_the_settings_but_no_places_and_no_items(tmp_path: Path, store: str) -> None:
    play(folder(tmp_path / "a-run", method="fedprox", options={"mu": 0.1}), store, range(1, 2))
    (run,) = runs(store)
    assert (run.info.run_name, run.info.status) == ("a-run", "FINISHED")
    params = run.data.params
    assert (params["method"], params["options.mu"], params["rounds"], params["sites"]) == (
        "fedprox",
        "0.1",
        "3",
        "3",
    )
    assert (params["data.source"], params["runtime"]) == ("phantom", "simulator")
    assert run.data.tags["run_hash"] == run_record(method="fedprox", options={"mu": 0.1}).run_hash
    assert not any(
        "/data/toy" in value or "/bundles" in value or "train0" in value
        for value in params.values()
    )


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(tmp_path: Path, store: str) -> None:
    run = folder(tmp_path / "run")
    play(run, store, range(1, 3))
    said = play(run, None, range(3, 5))
    assert said == [f"MLflow: run {json.loads((run.path / FILE).read_text())['run_id']} at {store}"]
    assert [step for step, _ in history(store, "train/loss")] == [1, 2, 3, 4]


def test_a_round_that_a_kill_repeats_is_there_once(tmp_path: Path, store: str) -> None:
    run = folder(tmp_path / "run")
    play(run, store, range(1, 4), commit=False)
    play(run, store, range(3, 5))
    assert [step for step, _ in history(store, "cost/seconds")] == [1, 2, 3, 4]
    assert [step for step, _ in history(store, "train/loss")] == [1, 2, 3, 4]


def test_what_is_cut_short_is_said_to_mlflow(tmp_path: Path, store: str) -> None:
    run = folder(tmp_path / "run")

    def stopped() -> None:
        with Events(run.path / "events", 0, Tracking(run, store, str)) as events:
            events.log(entry(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert runs(store)[0].info.status == "KILLED"


def test_a_server_that_is_down_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    said = play(run, "http://127.0.0.1:9", range(1, 4))
    assert len(said) == 1
    assert said[0].startswith("MLflow at http://127.0.0.1:9: ")
    assert "the run goes on without it" in said[0]
    assert "\n" not in said[0]
    assert len(run.rounds()) == 3
    place = Tracking(run, None, str)
    assert (place.uri, place.id) == ("http://127.0.0.1:9", "")


def test_a_password_in_the_uri_is_neither_said_nor_kept(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    said = play(run, "http://me:secret@127.0.0.1:9/path", range(1, 2))
    assert said[0].startswith("MLflow at http://127.0.0.1:9/path: ")
    assert "secret" not in said[0] + (run.path / FILE).read_text()
    assert (
        Tracking(run, "http://me:secret@127.0.0.1:9/path", str).uri
        == "http://me:secret@127.0.0.1:9/path"
    )


def test_what_mlflow_lacks_is_written_when_the_run_is_resumed(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    run, inner = folder(tmp_path / "run"), MlflowClient.log_batch

    def failing(self: Any, *given: Any, **named: Any) -> None:
        if named.get("metrics") and named["metrics"][0].step > 1:
            raise ConnectionError("the network is gone")
        inner(self, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_batch", failing)
        said = play(run, store, range(1, 4))
    assert len(said) == 2
    assert "ConnectionError: the network is gone" in said[1]
    assert [step for step, _ in history(store, "train/loss")] == [1]
    play(run, None, range(4, 5))
    assert history(store, "train/loss") == [(r, 1 / r) for r in (1, 2, 3, 4)]
    assert runs(store)[0].info.status == "FINISHED"


def test_where_it_goes(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder(tmp_path / "run")
    assert Tracking(run, None, str).uri == f"sqlite:///{run.path / STORE}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://example.org")
    assert Tracking(run, None, str).uri == "http://example.org"
    assert Tracking(run, store, str).uri == store
    play(run, store, range(1, 2))
    again, elsewhere = Tracking(run, None, str), Tracking(run, "http://other", str)
    assert (again.uri, bool(again.id)) == (store, True)
    assert (elsewhere.uri, elsewhere.id) == ("http://other", "")


def test_a_run_that_was_tracked_goes_on_at_a_place_that_the_user_has_named(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of somebody else's may name any machine or file."""
    run = folder(tmp_path / "run")
    assert tracked(run, None, str) == []
    play(run, store, range(1, 2))
    said: list[str] = []
    assert tracked(run, None, said.append) == []
    assert said[0].endswith(f"to go on in MLflow, add --track mlflow:{store}")
    (place,) = tracked(run, "mlflow:http://other:5000", str)
    assert place.uri == "http://other:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    (place,) = tracked(run, None, str)
    assert (place.uri, bool(place.id)) == (store, True)


def test_the_experiment_is_called_as_mlflow_s_variable_says(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "lungs")
    play(folder(tmp_path / "run"), store, range(1, 2))
    assert len(runs(store, "lungs")) == 1


@pytest.mark.parametrize("text", ["wandb", "mlflow:", "MLflow", "", "http://localhost"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=rf"^--track ?{text}; mlflow or mlflow:URI"):
        parse(text)


def test_without_mlflow_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "mlflow" or name.startswith("mlflow.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(
        InputError, match=r"--track mlflow; it needs MLflow; pip install 'medfl-monai\[mlflow\]'"
    ):
        parse("mlflow")


@pytest.mark.slow
def test_by_default_it_is_a_file_in_the_run_folder(tmp_path: Path) -> None:
    """SQLite; making its tables takes MLflow seconds."""
    run = folder(tmp_path / "run")
    play(run, None, range(1, 3))
    play(run, None, range(3, 4))
    uri = f"sqlite:///{run.path / STORE}"
    assert [step for step, _ in history(uri, "train/loss")] == [1, 2, 3]
    assert runs(uri)[0].info.status == "FINISHED"
