"""PartsProfile: seconds of the parts, which add up; results stay as without it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from medfl import datasets
from medfl.cli import verbs as cli
from medfl.methods import load
from medfl.runtimes.profiling import (
    AGGREGATION,
    CHECKPOINT,
    DATA,
    EVALUATION,
    MESSAGES,
    OPTIMISER,
    OTHER,
    TRAINING,
    PartsProfile,
    during,
)
from tests.support.toy import Toy, bits, simulate


def count(profile: PartsProfile, part: str) -> int:
    """How often a part was entered."""
    return sum(average.count for average in profile.key_averages() if average.key == part)


def test_a_part_inside_another_is_counted_once() -> None:
    """Aggregation 0.2 s, of which writing 0.1 s; the round around it is counted as other."""
    with PartsProfile(enabled=True) as profile, during("round 1"):
        time.sleep(0.05)
        with during(AGGREGATION):
            time.sleep(0.1)
            with during(CHECKPOINT):
                time.sleep(0.1)

    seconds = profile.seconds()
    assert 0.1 <= seconds[AGGREGATION] < 0.19
    assert 0.1 <= seconds[CHECKPOINT] < 0.19
    assert 0.05 <= seconds[OTHER] < 0.14
    assert seconds[DATA] == seconds[MESSAGES] == 0


def test_the_table_has_the_parts_that_took_time_and_their_sum() -> None:
    with PartsProfile(enabled=True) as profile, during(MESSAGES):
        time.sleep(0.05)

    lines = [line.split() for line in profile.parts_table().splitlines()]
    assert [line[0] for line in lines if line[0].isalpha()] == ["where", MESSAGES, "wall"]
    assert lines[2][-1] == lines[-1][-1] == "100%"
    assert lines[2][1] == lines[-1][2]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedproto"])
def test_training_is_split_into_its_parts_and_not_changed(classes: Toy, method: str) -> None:
    """a has 9 items in batches of 4: three batches and steps a round, and a fourth look that finds none."""
    plain = simulate(load(method), classes.adapted(load(method)), 1)
    with PartsProfile(enabled=True) as profile, during(TRAINING):
        profiled = simulate(load(method), classes.adapted(load(method)), 1)

    assert bits([profiled.server, profiled.states, profiled.replies]) == bits(
        [plain.server, plain.states, plain.replies]
    )
    assert count(profile, "Optimizer.step#SGD.step") == 3 + 2 + 3
    assert count(profile, DATA) >= 4 + 3 + 4
    seconds = profile.seconds()
    assert min(seconds[part] for part in (DATA, TRAINING, OPTIMISER)) > 0
    assert not any(average.key.startswith("aten::") for average in profile.key_averages())


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    with PartsProfile(enabled=False), during(MESSAGES):
        assert not torch.autograd._profiler_enabled()


def test_run_profile_says_the_table_and_writes_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = datasets.write_phantom("pneumonia", tmp_path / "data", per_class=12, size=28)
    out = tmp_path / "out"
    command = (
        f"run pneumonia --data {data} --sites 2 --partition iid --rounds 1 --local-epochs 1 --batch-size 8 "
        f"--config network=small_cnn --config image_size=28 --jobs 2 --out {out} --json --profile"
    )
    assert cli.main(command.split()) == 0
    stdout, stderr = capsys.readouterr()
    assert json.loads(stdout)["rounds"] == 1
    assert "where the time went" in stderr

    events = json.loads((out / "profile.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"round 1", "site site-1", "site site-2", DATA, TRAINING, EVALUATION} < names
