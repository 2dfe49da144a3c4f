"""Recorder: parts and idle time add up; nothing is hooked in while nothing is recorded."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medfl import datasets
from medfl.cli import verbs as cli
from medfl.data.prepared import Shard
from medfl.evaluation.evaluators import ClassEvaluator
from medfl.methods import load
from medfl.runtimes import profiling
from medfl.runtimes.profiling import (
    AGGREGATION,
    CHECKPOINT,
    DATA,
    EVALUATION,
    IDLE,
    MESSAGES,
    OPTIMISER,
    PARTS,
    PASSES,
    REST,
    Recorder,
    Segment,
    Span,
)
from tests.support.toy import Toy, bits, simulate

optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim forgets the name


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(profiling.time, "perf_counter", lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def filled(clock: Clock) -> Recorder:
    """One round of 20 s: a site 8 s (checkpoint 1, step 3 around data 2, idle 2), aggregation 4, of which writing 1."""
    recorder = Recorder()
    with recorder.during(EVALUATION):
        clock.wait(50)  # before the rounds
    with recorder.in_round(1):
        with recorder.visit("a"):
            with recorder.during(CHECKPOINT):
                clock.wait(1)
            with recorder.during(REST):
                clock.wait(1)
                recorder.switch(DATA)
                clock.wait(2)
                recorder.switch(REST)
                clock.wait(2)
            clock.wait(2)
        with recorder.during(AGGREGATION):
            clock.wait(1.5)
            with recorder.during(CHECKPOINT):
                clock.wait(1)
            clock.wait(1.5)
        clock.wait(8)
    return recorder


def test_a_part_inside_another_is_counted_once(clock: Clock) -> None:
    """Checkpoint 1 + 1, data 2, the rest of the step 3, aggregation 1.5 + 1.5, idle 20 - 10."""
    row = filled(clock).rows()["server"]
    shown = {part: seconds for part, seconds in row.items() if seconds}
    assert shown == {CHECKPOINT: 2, DATA: 2, REST: 3, AGGREGATION: 3, IDLE: 10}
    assert sum(row.values()) == 20


def test_the_table_adds_up_to_the_wall_clock(clock: Clock) -> None:
    recorder = filled(clock)
    lines = recorder.table().splitlines()
    assert lines[0].split() == ["where", "1", "round", "spent", "the", "time", "seconds"]
    cells = {line[:34].strip(): line[34:].split() for line in lines if line[:1] != "─"}
    assert cells["aggregation"] == ["3.000", "15%"]
    assert cells["idle"] == ["10.000", "50%"]
    assert cells["wall clock"] == ["20.000", "100%"]
    assert EVALUATION not in cells  # there was none in the round
    parts = [float(cells[part][0]) for part in (*PARTS, IDLE) if part in cells]
    assert sum(parts) == 20
    assert max(map(len, lines)) <= 100


def test_workers_are_told_by_their_mean(clock: Clock) -> None:
    """Workers of 6 s and 10 s in data, of the round's 20 s: the mean is 8, and 12 idle."""
    recorder = filled(clock)
    for worker, seconds in ((1, 6.0), (2, 10.0)):
        recorder.gather(worker, Segment([], {(1, "a", DATA): seconds, (0, "", DATA): 99.0}))
    lines = recorder.table().splitlines()
    cells = {line[:34].strip(): line[34:].split() for line in lines if line[:1] != "─"}
    assert cells[DATA] == ["2.000", "10%", "8.000", "40%"]
    assert cells[IDLE] == ["10.000", "50%", "12.000", "60%"]
    assert cells["wall clock"] == ["20.000", "100%"] * 2
    assert "mean of 2 workers" in lines[0]
    assert [sum(row.values()) for row in recorder.rows().values()] == [20, 20, 20]


def test_the_trace_is_what_viewers_read(clock: Clock) -> None:
    """Complete events ("X") in microseconds from the first, on a named row a process; the parts lie in their visit."""
    recorder = filled(clock)
    recorder.gather(1, Segment([Span(DATA, 152.0, 153.0, 1, "b")], {(1, "b", DATA): 1.0}))
    document = json.loads(json.dumps(recorder.trace()))
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {0: "server", 1: "worker 1"}
    drawn = [event for event in events if event["ph"] == "X"]
    assert all(
        event.keys() >= {"name", "cat", "ts", "dur", "pid", "tid", "args"} for event in drawn
    )
    assert min(event["ts"] for event in drawn) == 0
    (visit,) = [event for event in drawn if event["cat"] == "visit"]
    assert (visit["name"], visit["ts"], visit["dur"], visit["args"]) == (
        "a",
        50e6,
        8e6,
        {"round": 1, "site": "a"},
    )
    own = [event for event in drawn if event["args"].get("site") == "a" and event["cat"] == "part"]
    assert [event["name"] for event in own] == [CHECKPOINT, REST, DATA, REST]
    assert all(50e6 <= event["ts"] <= event["ts"] + event["dur"] <= 58e6 for event in own)
    (data,) = [event for event in drawn if event["tid"] == 1]
    assert (data["ts"], data["dur"]) == (52e6, 1e6)
    told = document["otherData"]
    assert told["sites"] == {"a": {CHECKPOINT: 1, REST: 3, DATA: 2}, "b": {DATA: 1}}
    assert told["rounds"][0]["seconds"] == 20
    assert told["rounds"][0][DATA] == 3


def test_a_long_run_is_counted_whole_though_not_drawn_whole(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_DRAWN", 5)
    recorder = Recorder()
    with recorder.in_round(1), recorder.visit("a"):
        for _ in range(10):
            with recorder.during(DATA):
                clock.wait(1)
    assert recorder.rows()["server"][DATA] == 10
    drawn = [event for event in recorder.trace()["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in drawn] == [DATA] * 5 + ["a"]
    recorder.gather(
        1,
        Segment([Span(DATA, 1.0, 2.0, 1, "b"), Span("b", 1.0, 3.0, 1, "b")], {(1, "b", DATA): 1.0}),
    )
    names = [e["name"] for e in recorder.trace()["traceEvents"] if e["ph"] == "X" and e["tid"] == 1]
    assert names == ["b"]
    assert recorder.rows()["worker 1"][DATA] == 1


# What is watched


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedproto"])
def test_training_is_split_into_its_parts_and_not_changed(classes: Toy, method: str) -> None:
    """a has 9 items in batches of 4: three batches and steps a round, and a fourth look that finds none."""
    made = load(method)
    plain = simulate(made, classes.adapted(made), 1)
    recorder = Recorder()
    with profiling.recording(recorder), recorder.during(REST):
        watched = simulate(made, classes.adapted(made), 1)
    assert bits([watched.server, watched.states, watched.replies]) == bits(
        [plain.server, plain.states, plain.replies]
    )
    counts = Counter(span.name for span in recorder.take_segment().spans)
    assert counts[OPTIMISER] == 3 + 2 + 3
    assert counts[DATA] >= 4 + 3 + 4
    assert counts[PASSES] >= 2 * counts[OPTIMISER]  # before and after each step


def test_an_evaluation_is_one_part_with_its_batches(classes: Toy) -> None:
    recorder = Recorder()
    site = classes.site("a")
    with profiling.recording(recorder):
        with recorder.during(REST):
            ClassEvaluator()(site.model(site.initial_weights), site.train, torch.device("cpu"))
        assert [span.name for span in recorder.take_segment().spans] == [REST, EVALUATION, REST]
        ClassEvaluator()(site.model(site.initial_weights), site.train, torch.device("cpu"))
        assert [span.name for span in recorder.take_segment().spans] == [EVALUATION]


def test_outside_a_local_update_batches_and_steps_are_nobodys(classes: Toy) -> None:
    recorder = Recorder()
    with profiling.recording(recorder), recorder.during(AGGREGATION):
        simulate(load("fedavg"), classes, 1)
    assert [span.name for span in recorder.take_segment().spans] == [AGGREGATION]


def test_nothing_is_hooked_in_while_nothing_is_recorded() -> None:
    def hooked() -> list[Any]:
        hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
        return [Shard.batches, ClassEvaluator.__call__, *map(len, hooks)]

    before = hooked()
    with profiling.recording(None):
        assert hooked() == before
        assert profiling.running() is None
        with profiling.during(MESSAGES), profiling.visit("a"), profiling.in_round(1):
            pass
    with suppress(LookupError), profiling.recording(Recorder()):
        during = hooked()
        raise LookupError
    assert all(now != was for now, was in zip(during, before, strict=True))
    assert hooked() == before
    assert profiling.running() is None


def test_a_batch_that_nobody_finishes_leaves_no_trouble(classes: Toy) -> None:
    recorder = Recorder()
    shard = classes.site("a").train
    with profiling.recording(recorder), recorder.during(REST):
        first, _ = next(shard.batches(2))
        pairs = zip(shard.batches(4), shard.batches(4), strict=True)
        assert [len(x) for (x, _), _ in pairs] == [4, 4, 1]
    assert len(first) == 2
    assert recorder.switch(None) is None


def test_optimiser_steps_without_a_recorder_running_are_not_counted() -> None:
    recorder = Recorder()
    parameter = nn.Parameter(torch.ones(1))
    with profiling.recording(recorder):
        torch.optim.SGD([parameter], 0.1).step()
    assert recorder.take_segment().spans == []


# The command line


def test_run_profile_says_the_table_and_writes_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = datasets.write_phantom("pneumonia", tmp_path / "data", per_class=12, size=28)
    out = tmp_path / "out"
    given = [
        "--sites",
        "2",
        "--partition",
        "iid",
        "--rounds",
        "1",
        "--local-epochs",
        "1",
        "--batch-size",
        "8",
    ]
    config = ["--config", "network=small_cnn", "--config", "image_size=28"]
    run = [
        "run",
        "pneumonia",
        "--data",
        str(data),
        *given,
        *config,
        "--jobs",
        "2",
        "--out",
        str(out),
        "--json",
    ]
    assert cli.main([*run, "--profile"]) == 0
    stdout, stderr = capsys.readouterr()
    assert json.loads(stdout)["rounds"] == 1
    assert "where 1 round spent the time" in stderr
    assert "mean of 2 workers" in stderr
    assert json.loads((out / "profile.json").read_text())["traceEvents"]
