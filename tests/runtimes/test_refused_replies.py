"""What the simulator does with replies that its method's server half can do nothing with, and with MLflow."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from monai.fl.utils.constants import FlStatistics
from monai.fl.utils.exchange_object import ExchangeObject

from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.runtimes.attendance import Tolerance
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.client import LOSS
from medfl.runtimes.monai_fl.exchange import Exchange
from medfl.runtimes.tasks import Train
from medfl.storage.run_folder import RunFolder
from tests.flare.test_server import Payload, executed, federation, near, replace, second

STEPS = FlStatistics.NUM_EXECUTED_ITERATIONS


def lacking(group: str, name: str) -> Any:
    """Site y's second reply lacks a group or a tensor."""

    def change(payload: Payload) -> Payload:
        start = f"message/{group}/{name}"
        return replace(
            payload, tensors={k: v for k, v in payload.tensors.items() if not k.startswith(start)}
        )

    return change


@pytest.mark.parametrize(
    ("method", "group"),
    [
        ("scaffold", "control"),
        ("feddc", "control"),
        ("fednh", "prototypes"),
        ("pfedpm", "counts"),
        ("fedsm", "selector"),
    ],
)
def test_a_round_goes_on_without_a_reply_that_lacks_something(
    tmp_path: Path, method: str, group: str
) -> None:
    bearing = {"tolerance": Tolerance(2)}
    left = executed(
        tmp_path / "a",
        federation(method, rounds=3),
        near(tmp_path / "a", second(lacking(group, ""))),
        **bearing,
    )
    assert [list(e.get("left_out", {})) for e in left["rounds"]] == [[], ["y"], []]
    assert "can do nothing with its reply" in left["rounds"][1]["left_out"]["y"]
    assert "y" not in {n for n, s in left["rounds"][1]["sites"].items() if "train_loss" in s}
    with pytest.raises(RunError, match="^site 'y': the server's half can do nothing"):
        executed(
            tmp_path / "b",
            federation(method, rounds=3),
            near(tmp_path / "b", second(lacking(group, ""))),
        )


class Lacking(Workers):
    """The simulator's, whose site y replies without its control variates in round 2, with its State saved."""

    def run(self, tasks, sizes=None):
        made = [make() for make in tasks]
        for index, answer in super().run(
            [partial(lambda task: task, task) for task in made], sizes
        ):
            if isinstance(made[index], Train) and (made[index].round, made[index].site) == (2, "y"):
                result, saved = answer
                answer = (
                    replace(
                        result,
                        reply=Message({"weights": result.reply["weights"]}, result.reply.scalars),
                    ),
                    saved,
                )
            yield index, answer


def test_the_state_of_such_a_reply_does_not_count(tmp_path: Path) -> None:
    bearing = {"tolerance": Tolerance(2)}
    sim = executed(tmp_path / "s", federation("scaffold", rounds=4), Lacking, **bearing)
    out = tmp_path / "f"
    assert (
        executed(
            out,
            federation("scaffold", rounds=4),
            near(out, second(lacking("control", ""))),
            **bearing,
        )
        == sim
    )
    assert [list(e.get("left_out", {})) for e in sim["rounds"]] == [[], ["y"], [], []]


def test_a_tracked_run_goes_on_in_mlflow_and_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    out = tmp_path / "run"
    executed(out, federation("fedavg", rounds=2), Workers, track=f"mlflow:{uri}")
    # elsewhere than the default place: only if it is named again
    executed(out, federation("fedavg", rounds=4), Workers, track=f"mlflow:{uri}")
    from mlflow.tracking import MlflowClient

    c = MlflowClient(uri)
    (run,) = c.search_runs([c.get_experiment_by_name("medfl").experiment_id])
    got = {m.step: m.value for m in c.get_metric_history(run.info.run_id, "train/loss")}
    assert got == {e["round"]: e["train_loss"] for e in RunFolder(out).rounds()}
    plain = executed(tmp_path / "plain", federation("fedavg", rounds=4), Workers)
    again = executed(
        tmp_path / "plain2", federation("fedavg", rounds=4), Workers, track=f"mlflow:{uri}"
    )
    assert plain == again


class Untrue(Exchange):
    """MONAI FL's, whose site y changes the answer to its second training."""

    answer: Any = None

    def __init__(self, made, jobs=1) -> None:
        super().__init__(made, jobs)
        site = self.sites["y"]
        honest, trained = site.get_weights, []

        def get_weights(extra=None):
            answer = honest(extra)
            trained.extend([LOSS] if LOSS in (answer.statistics or {}) else [])
            return type(self).answer(answer) if len(trained) == 2 else answer

        site.get_weights = get_weights


def of(statistics: Any) -> Any:
    return lambda answer: ExchangeObject(
        weights=answer.weights,
        statistics=statistics and {**answer.statistics, **statistics},
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda _: None, "its answer is a NoneType"),
        (of(None), "its loss is None, in -1 steps"),
        (of({LOSS: "x"}), "its loss is 'x'"),
        (of({LOSS: 10**400}), "its loss is 1000"),
        (of({STEPS: -3}), "in -3 steps"),
        (
            lambda answer: ExchangeObject(
                weights=answer.weights | {f"scalars/{i}": np.float64(i) for i in range(2000)}
            ),
            "it has 200[0-9] numbers; at most 1024",
        ),
    ],
    ids=["nothing", "no numbers", "text", "huge", "negative", "many"],
)
def test_a_round_of_monai_fl_goes_on_without_a_site_that_answers_untruly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, text: str
) -> None:
    monkeypatch.setattr(Untrue, "answer", staticmethod(answer))
    left = executed(tmp_path, federation("fedavg", rounds=3), Untrue, tolerance=Tolerance(2))
    assert [list(e.get("left_out", {})) for e in left["rounds"]] == [[], ["y"], []]
    assert re.search(text, left["rounds"][1]["left_out"]["y"])
