"""The controllers and executors that FLARE makes, on an engine of the test's own."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("nvflare")

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.decomposers import TensorDecomposer

from medfl import datasets
from medfl.core.errors import InputError, RunError
from medfl.core.run import without_round_limit
from medfl.flare import offer as flare_offer, parts as flare_parts, wire
from medfl.flare.files import allow_classes, error_document, raise_error, read_run
from medfl.flare.job import recipe
from medfl.flare.parts import (
    MedflController,
    MedflExecutor,
    RemoteController,
    RemoteExecutor,
)
from medfl.flare.server import ERROR_FILE, FLARE_FOLDER, LINES_FILE
from medfl.flare.wire import Payload, from_model, to_model
from medfl.storage.run_folder import RunFolder

CONFIG = {"network": "small_cnn", "image_size": 16}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("jobs") / "out"
    asked = {
        "config": CONFIG,
        "requested": {"rounds": 1, "local_epochs": 1, "batch_size": 8},
        "rehearsal": True,
    }
    return Path(flare_offer.export("mednist", ["north", "south"], out, **asked)["job"])


class Workspace:
    """Where a participant's files are."""

    def __init__(self, job: Path, local: Path) -> None:
        self.job, self.local = job, local

    def get_app_dir(self, job_id: str) -> str:
        return str(self.job / "app")

    def get_site_config_dir(self) -> str:
        return str(self.local)


def context(workspace: Workspace, name: str = "north") -> Any:
    engine = SimpleNamespace(get_workspace=lambda: workspace)
    return SimpleNamespace(
        get_engine=lambda: engine, get_job_id=lambda: "1", get_identity_name=lambda: name
    )


def local(place: Path, **values: Any) -> Path:
    place.mkdir(exist_ok=True)
    (place / "medfl.yaml").write_text(
        yaml.safe_dump({"bundle": "mednist", "folder": str(place / "kept"), **values})
    )
    return place


def controller(made: Any, workspace: Workspace) -> Any:
    """A controller on the test's engine; what it sends, says and panics about is noted."""
    made.fl_ctx, made.engine = context(workspace), SimpleNamespace(get_workspace=lambda: workspace)
    made.panics, made.sent, made.cancelled = [], [], []
    made.info, made.warning = lambda text: None, lambda text: None
    made.panic = made.panics.append
    made.broadcast = lambda task, fl_ctx, targets, min_responses: made.sent.append((task, targets))
    made.cancel_task = lambda task, fl_ctx: made.cancelled.append(task)
    made.abort_signal = Signal()
    return made


# The server


def test_a_server_refuses_a_run_that_it_has_unless_it_is_to_go_on(
    job: Path, tmp_path: Path
) -> None:
    workspace, run = Workspace(job, local(tmp_path / "local")), read_run(str(job / "app"))
    first = controller(RemoteController(), workspace)
    path = first._open_run_folder()
    assert path.parent == tmp_path / "local" / "kept"
    assert path.name == f"mednist-fedavg-{without_round_limit(run).run_hash[:16]}"
    (path / "run.json").write_text("{}")
    with pytest.raises(
        InputError, match="the server has this run in .*; export the job with --resume"
    ):
        controller(RemoteController(), workspace)._open_run_folder()
    assert controller(RemoteController(resume=True), workspace)._open_run_folder() == path


def test_across_machines_a_site_has_at_most_half_of_the_weight(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one machine plays all sites there is no limit; the roster of the server's file reaches the workers."""
    seen: list[Any] = []

    class Seen:
        def __init__(self, execution: Any, workers: Any) -> None:
            seen.append((execution, workers(execution.federation, 1)))

        def execute(self) -> None:
            pass

    monkeypatch.setattr("medfl.flare.parts.Simulator", Seen)
    made = controller(RemoteController(min_replies=2), Workspace(job, tmp_path))
    run = read_run(str(job / "app"))
    federation = SimpleNamespace(participants=list(run.partition.sites))
    for roster, share in ((None, None), ({}, 0.5), ({"north": 7}, 0.5)):
        made._run_rounds(federation, RunFolder(tmp_path), str, roster)
        execution, workers = seen[-1]
        assert (execution.max_share, execution.launch.min_replies) == (share, 2)
        assert (workers._simulated, workers._roster) == (roster is None, roster or {})


def test_what_ends_a_run_is_written_and_told_to_flare(job: Path, tmp_path: Path) -> None:
    made = controller(RemoteController(), Workspace(job, local(tmp_path / "local", data="nowhere")))
    made.run()
    (panic,) = made.panics
    assert "nowhere" in panic
    (path,) = (tmp_path / "local" / "kept").iterdir()
    with pytest.raises(InputError, match="nowhere"):
        raise_error(json.loads((path / FLARE_FOLDER / ERROR_FILE).read_text()))
    assert not (path / FLARE_FOLDER / LINES_FILE).exists()


def test_a_run_that_the_server_refuses_gets_no_folder(job: Path, tmp_path: Path) -> None:
    made = controller(
        RemoteController(), Workspace(job, local(tmp_path / "local", bundle="pneumonia"))
    )
    made.run()
    assert [panic.partition(":")[0] for panic in made.panics] == ["the server refuses the run"]
    assert not list((tmp_path / "local" / "kept").glob("*"))


def test_a_server_without_a_file_of_its_own_says_so(job: Path, tmp_path: Path) -> None:
    made = controller(RemoteController(), Workspace(job, tmp_path))
    made.run()
    assert len(made.panics) == 1
    assert "medfl.yaml: it cannot be read" in made.panics[0]


def test_an_error_is_the_same_after_it_was_written() -> None:
    for error, kind in (
        (InputError("a", "b", "c"), InputError),
        (RunError("d"), RunError),
        (OSError("e"), RunError),
    ):
        document = json.loads(json.dumps(error_document(error)))
        with pytest.raises(kind) as caught:
            raise_error(document)
        assert str(caught.value) == (
            f"OSError: {error}" if isinstance(error, OSError) else str(error)
        )


def test_one_task_goes_to_all_and_its_answers_are_put_where_they_are_waited_for(
    job: Path, tmp_path: Path
) -> None:
    made = controller(MedflController(str(tmp_path), str(tmp_path)), Workspace(job, tmp_path))
    made._flare_names = {"St. A": "participant-1", "b": "participant-2"}
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    number = made.ask(
        wire.TRAIN,
        ["St. A", "b"],
        Payload({"message/weights/a": torch.ones(2)}, {"round": 1}),
        answers,
    )
    ((task, targets),) = made.sent
    assert (task.name, targets) == (wire.TRAIN, ["participant-1", "participant-2"])
    assert from_model(FLModelUtils.from_shareable(task.data), "x").whole_number(wire.ROUND) == 1
    good = FLModelUtils.to_shareable(to_model(Payload({}, {"steps": 2})))
    for called, result, text in (
        ("participant-1", good, ""),
        (
            "participant-2",
            make_reply(ReturnCode.EXECUTION_EXCEPTION),
            "FLARE says EXECUTION_EXCEPTION",
        ),
    ):
        client_task = SimpleNamespace(client=SimpleNamespace(name=called), result=result)
        task.result_received_cb(client_task, None)
        answer = answers.get_nowait()
        assert (answer.question, made._flare_names[answer.site], answer.payload.failure_reason) == (
            number,
            called,
            text,
        )
        assert client_task.result is None
    made.drop(number)
    assert made.cancelled == []


def test_a_task_that_somebody_still_works_on_is_cancelled(job: Path, tmp_path: Path) -> None:
    made = controller(MedflController(str(tmp_path), str(tmp_path)), Workspace(job, tmp_path))
    made._flare_names = {"a": "a"}
    number = made.ask(wire.TRAIN, ["a"], Payload({}, {"round": 1}), queue.SimpleQueue())
    made.drop(number)
    assert made.cancelled == [made.sent[0][0]]


def test_sites_that_went_away_and_a_job_that_is_aborted_are_known(
    job: Path, tmp_path: Path
) -> None:
    made = controller(MedflController(str(tmp_path), str(tmp_path)), Workspace(job, tmp_path))
    made._flare_names = {"a": "participant-1", "b": "participant-2"}
    made.handle_event("_client_disconnected", SimpleNamespace(get_prop=lambda key: "participant-2"))
    assert (made.why_lost("a"), made.why_lost("b")) == ("", "it has vanished")
    assert not made.is_aborted()
    made.abort_signal.trigger(True)
    assert made.is_aborted()


# A site


def asked(
    part: Any, word: str, payload: Payload, workspace: Workspace, name: str = "north"
) -> Payload:
    question = FLModelUtils.to_shareable(to_model(payload))
    return from_model(
        FLModelUtils.from_shareable(
            part.execute(word, question, context(workspace, name), Signal())
        ),
        name,
    )


def test_a_site_with_images_of_its_own_answers_from_its_file(job: Path, tmp_path: Path) -> None:
    data = datasets.write_phantom("mednist", tmp_path / "data", per_class=10, size=16)
    place = local(
        tmp_path / "local", data=str(data), permits=["network", "image_size"], audit="audit.jsonl"
    )
    told = asked(RemoteExecutor(), wire.INTRODUCE, Payload({}, {"round": 0}), Workspace(job, place))
    assert (told.failure_reason, told.whole_number(wire.SAMPLES)) == ("", 42)
    assert (place / "audit.jsonl").is_file()
    strict = local(tmp_path / "strict", data=str(data))
    refused = asked(
        RemoteExecutor(), wire.INTRODUCE, Payload({}, {"round": 0}), Workspace(job, strict)
    )
    assert refused.failure_reason.startswith("site 'north' refuses the run: config ")
    other = asked(
        RemoteExecutor(), wire.INTRODUCE, Payload({}, {"round": 0}), Workspace(job, place), "east"
    )
    assert other.failure_reason.startswith(
        "site 'east' refuses the run: it is not one of its sites"
    )


def test_a_site_without_its_file_answers_instead_of_dying(job: Path, tmp_path: Path) -> None:
    for part in (RemoteExecutor(), MedflExecutor(str(tmp_path), str(tmp_path))):
        told = asked(part, wire.TRAIN, Payload({}, {"round": 1}), Workspace(tmp_path, tmp_path))
        assert told.failure_reason
        assert "\n" not in told.failure_reason


# Jobs


def test_a_list_of_classes_is_added_to_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "local" / "resources.json"
    allow_classes(path, ["a.B"])
    listed = json.loads(path.read_text())["class_allow_list"]
    assert listed[-1] == "a.B"
    assert len(listed) > 20
    path.write_text(json.dumps({"class_allow_list": ["x.Y"], "other": 1}))
    allow_classes(path, ["a.B", "x.Y"])
    assert json.loads(path.read_text()) == {"class_allow_list": ["x.Y", "a.B"], "other": 1}


def test_the_recipe_registers_nothing_and_ships_nothing(job: Path, tmp_path: Path) -> None:
    run = read_run(str(job / "app"))
    made = recipe(
        run, [job / "app" / "config" / "run.json"], RemoteController(), RemoteExecutor(), 1
    )
    made.export(str(tmp_path / "out"))
    assert not list((tmp_path / "out").rglob("custom"))
    assert not list((tmp_path / "out").rglob("*.py"))


def test_a_tensor_that_cannot_be_read_is_refused_by_its_name_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = flare_parts.Tensors().native_decompose(torch.ones(3))
    assert torch.equal(flare_parts.Tensors().native_recompose(whole), torch.ones(3))
    read = flare_parts.Tensors().native_recompose(whole[:20])
    with pytest.raises(
        RunError, match="site 'x': 'message/a' is a Unreadable; expected a dense tensor"
    ):
        from_model(FLModel(params={"message/a": read}), "site 'x'")
    for fails in (True, False):

        def download(*_: object, fails: bool = fails) -> tuple[str, None]:
            if fails:
                raise ValueError("no header")
            return "no answer", None

        monkeypatch.setattr(TensorDecomposer, "download", download)
        error, items = flare_parts.Tensors().download("there", "1")
        assert error == ""
        assert "message/a" in items
        assert isinstance(items.get("message/a"), flare_parts.Unreadable)
