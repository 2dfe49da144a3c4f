"""Steps a round: fitted where a protocol leaves them open, said, and warned of where they are few."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

import medfl
from medfl.core.errors import InputError
from medfl.datasets import write_phantom
from medfl.runs.launch import federate
from medfl.runs.pace import AUTO, FEW, fit_schedule, standstill, steps_note
from medfl.starter import starter
from medfl.storage.run_documents import read_run
from tests.problem.test_task_kinds import parts_of

OPEN = {"batch_size": AUTO, "local_epochs": AUTO, "rounds": 10}
TASK = "segmentation"


@pytest.mark.parametrize(
    ("smallest", "most", "batch", "epochs"),
    [
        (7, 8, 2, 5),
        (1, 8, 2, 10),
        (0, 8, 8, 1),  # it only tests
        (40, 8, 8, 4),
        (210, 8, 8, 1),
        (5000, 8, 8, 1),
        (9, 2, 2, 4),
    ],
)
def test_batch_and_epochs_give_the_smallest_site_steps(
    smallest: int, most: int, batch: int, epochs: int
) -> None:
    values = fit_schedule(OPEN, [smallest, 5000], most, TASK)
    assert values == {"batch_size": batch, "local_epochs": epochs, "rounds": 10}
    if smallest >= 4:
        assert epochs * math.ceil(smallest / batch) >= FEW


def test_what_is_given_stays() -> None:
    given = {"batch_size": 8, "local_epochs": 1, "rounds": 3}
    assert fit_schedule(given, [7], 8, TASK) == given
    assert fit_schedule({**given, "local_epochs": AUTO}, [7], 8, TASK) == {
        **given,
        "local_epochs": 10,
    }
    assert fit_schedule({**OPEN, "rounds": AUTO, "local_epochs": 1}, [7], 8, TASK)["rounds"] == 30


@pytest.mark.parametrize(
    ("sizes", "task", "rounds"),
    [
        ([7, 7, 7], "segmentation", 12),  # 20 steps a round
        ([180, 180, 180], "classification", 28),  # 23
        ([0, 8], "classification", 30),
        ([5000, 9000], "classification", 5),  # 625
        ([10] * 100, "segmentation", 5),  # 4000 images a round
    ],
)
def test_rounds_give_the_smallest_site_steps_within_limits(
    sizes: list[int], task: str, rounds: int
) -> None:
    assert fit_schedule({**OPEN, "rounds": AUTO}, sizes, 8, task)["rounds"] == rounds


def a_run(
    counts: dict[str, int], batch: int, epochs: int, method: str = "fedavg"
) -> SimpleNamespace:
    sites = {name: {"train": range(count)} for name, count in counts.items()}
    return SimpleNamespace(
        rounds=3,
        batch_size=batch,
        local_epochs=epochs,
        method=method,
        partition=SimpleNamespace(sites=sites),
    )


def test_few_steps_are_warned_of_with_what_gives_more() -> None:
    line = steps_note(a_run({"a": 7, "b": 80}, 8, 1))
    assert line.startswith(
        "steps a round: 1 to 10 (batch 8, local epochs 1); few at a, which has 7 training images"
    )
    assert line.endswith("--batch-size 2 --local-epochs 5")
    assert (
        steps_note(a_run({"a": 7, "b": 8}, 2, 5)) == "steps a round: 20 (batch 2, local epochs 5)"
    )


def test_no_more_is_offered_than_there_is() -> None:
    line = steps_note(a_run({"a": 1, "b": 80}, 2, 10))
    assert "few at" not in line or "for more" not in line
    assert steps_note(a_run({"a": 1}, 2, 1)).endswith("for more use --local-epochs 10")
    assert steps_note(a_run({"a": 3, "b": 9}, 2, 3)).endswith("for more use --local-epochs 10")


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.2, 0.5, *[1.0] * 18], (3, 8)),
        ([0.2, 0.5, *[1.0] * 5], None),  # spares nothing
        ([0.2, 0.1, 0.1, 0.1, 0.1, 0.1, *[0.9] * 20], None),  # it would have ended too early
        ([0.2, 0.3, 0.4, 0.5], None),
        ([0.2, None, *[0.1] * 20], None),
        ([], None),
    ],
)
def test_a_run_that_stood_still_is_told(
    scores: list[float | None], expected: tuple[int, int] | None
) -> None:
    by_round = dict(enumerate(scores, 1))
    assert standstill(by_round, True, 5) == expected
    falling = {number: None if score is None else -score for number, score in by_round.items()}
    assert standstill(falling, False, 5) == expected


def test_each_round_says_how_long_all_that_is_left_takes(tmp_path: Path) -> None:
    """Also the second phase, which is announced; the last round of all says nothing."""
    said: list[str] = []
    parts = parts_of("multilabel")
    medfl.run(parts, "fedavg", rounds=2, out=tmp_path / "run", with_local=True, say=said.append)
    phases = [line for line in said if "of two phases" in line]
    assert phases == [
        "first of two phases: 2 rounds of Local, each site alone",
        "second of two phases: 2 rounds of fedavg",
    ]
    rounds = [line for line in said if line.startswith("round ")]
    assert len(rounds) == 4
    assert [" left" in line for line in rounds] == [True, True, True, False]
    assert all(line.endswith(" s left with 1 more run") for line in rounds[:2])
    assert rounds[2].endswith(" s left")


def test_a_bundle_s_own_patience_gives_way_to_no_evaluations(tmp_path: Path) -> None:
    parts = parts_of("multilabel")
    medfl.run(parts, "fedavg", rounds=1, eval_every=0, out=tmp_path / "run")
    with pytest.raises(InputError, match="eval_every 0"):
        medfl.run(parts, "fedavg", rounds=1, eval_every=0, patience=3, out=tmp_path / "other")


@pytest.mark.slow
def test_a_new_bundle_s_run_says_and_records_its_steps(tmp_path: Path) -> None:
    """The batch and epochs of the record are numbers, so that it repeats."""
    images = write_phantom("lung_cxr", tmp_path / "data", per_class=10, size=32)
    pictures, masks = sorted(
        path for path in images.rglob("*") if path.is_dir() and any(path.glob("*.png"))
    )[:2]
    bundle = starter.write(tmp_path / "mine", starter.survey(pictures, masks), size=32)
    said: list[str] = []
    asked = {"data": str(pictures.parent), "sites": 2, "rounds": 3}
    federate(str(bundle), requested=asked, out=tmp_path / "out", jobs=1, say=said.append)
    assert read_run(tmp_path / "out/run.json")[0].patience == 10
    assert any(
        line.startswith("steps a round: ") and "(batch 2, local epochs " in line for line in said
    )
