"""The training of a round beside the evaluation of the one before: nobody sees it but the clock."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from medfl.core.errors import RunError
from medfl.methods import load
from medfl.runtimes import spilled_replies
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.local.workers import Pool, Workers
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.runtimes.tasks import MakeTask, ScoreGlobal, ScoreSite, Train, WorkerTask
from medfl.storage import files as storage, run_folder as folders
from medfl.storage.files import load_weights
from medfl.storage.run_folder import RunFolder
from tests.support.toy import ToyBundle, bits, run_record

ROUNDS = 5


@dataclasses.dataclass
class Left:
    """What a run has left, without what its clock said.

    Attributes:
        said: all lines for the user.
        rounds: the lines of rounds.jsonl.
        files: tables, weights and States.
        summary: summary.json.
        error: what ended it.
    """

    said: list[str]
    rounds: list[dict[str, Any]]
    files: dict[str, Any]
    summary: dict[str, Any]
    error: str


def simulate(
    out: Path, method: Any = "fedavg", jobs: int = 2, workers: Any = Workers, **changes: Any
) -> Left:
    """Run, or continue, five rounds at three sites; a run that fails is looked at too."""
    min_replies = changes.pop("min_replies", None)
    made_by = load(method) if isinstance(method, str) else method
    record = run_record(**{"method": str(method), "rounds": ROUNDS, **changes})
    resume, said, error = (out / "run.json").is_file(), [], ""
    folder = RunFolder.existing(out) if resume else RunFolder.create(out)
    folder.write_run(record, {})
    federation = Federation(ToyBundle(), made_by, record)
    launch = Launch(resume=resume, jobs=jobs, min_replies=min_replies, say=said.append)
    try:
        Simulator(Execution(federation, folder, launch), workers).execute()
    except RunError as failed:
        error = str(failed)
    return left(out, said, error)


def left(out: Path, said: list[str] | None = None, error: str = "") -> Left:
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in entry.items() if not k.startswith("seconds")} for entry in rounds]
    manifest = json.loads((out / "state" / "manifest.json").read_text())
    states = {
        name: storage.load_state(out / "state" / file) for name, file in manifest["sites"].items()
    }
    files: dict[str, Any] = {
        "server": storage.load_state(out / "state" / manifest["server"]),
        **states,
    }
    files |= {path.name: load_weights(path) for path in out.glob("*.safetensors")}
    files |= {path.name: path.read_text() for path in out.glob("*.csv")}
    written = {path.name for path in (out / "state").iterdir()}
    summary = (
        json.loads((out / "summary.json").read_text()) if (out / "summary.json").is_file() else {}
    )
    untimed = {
        k: v for k, v in summary.items() if not k.startswith("seconds") and k != "peak_memory_bytes"
    }
    lines = [re.sub(r"\d+\.\d s(, about .* left)?$", "", line) for line in said or []]
    return Left(lines, timeless, {**bits(files), "state": written}, untimed, error)


class Recording(Workers):
    """Workers that note which task is given to one of them: "t3" is a training of round 3, "e3" an evaluation."""

    def __init__(self, federation: Federation, jobs: int) -> None:
        super().__init__(federation, jobs)
        self.given: list[str] = []

    def noted(self, make: MakeTask) -> WorkerTask:
        task = make()
        if isinstance(task, Train):
            self.given.append(f"t{task.round}")
        if (isinstance(task, ScoreGlobal) and task.section == "validate") or (
            isinstance(task, ScoreSite) and task.sections == ("validate",)
        ):
            self.given.append(f"e{task.round}")
        return task

    def run(self, tasks, sizes=None):
        return super().run([partial(self.noted, task) for task in tasks], sizes)

    def start(self, tasks, sizes=None, **rest):
        return super().start([partial(self.noted, task) for task in tasks], sizes, **rest)


def order(out: Path, method: str, jobs: int, **changes: Any) -> list[str]:
    """The order in which tasks are given, each kind once for as many as follow each other."""
    made: list[Recording] = []

    def recording(federation: Federation, jobs: int) -> Recording:
        made.append(Recording(federation, jobs))
        return made[0]

    simulate(out, method, jobs, recording, rounds=4, **changes)
    return [kind for kind, _ in itertools.groupby(made[0].given)]


# The order of the work


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_the_next_training_is_given_out_and_then_the_evaluation(
    tmp_path: Path, method: str
) -> None:
    """Not so in the first round of a process, whose commit clears away what a kill may have left."""
    assert order(tmp_path / "one", method, 1) == ["t1", "e1", "t2", "e2", "t3", "e3", "t4", "e4"]
    assert order(tmp_path / "two", method, 2) == ["t1", "e1", "t2", "t3", "e2", "t4", "e3", "e4"]
    assert order(tmp_path / "every 2nd", method, 2, eval_every=2) == [
        "t1",
        "t2",
        "t3",
        "e2",
        "t4",
        "e4",
    ]


def test_workers_that_do_not_overlap_keep_the_order(tmp_path: Path) -> None:
    class Sequential(Recording):
        overlaps = False

    made: list[Recording] = []
    simulate(
        tmp_path, "fedavg", 2, lambda *given: made.append(Sequential(*given)) or made[0], rounds=3
    )
    assert [kind for kind, _ in itertools.groupby(made[0].given)] == [
        "t1",
        "e1",
        "t2",
        "e2",
        "t3",
        "e3",
    ]


# What a run leaves


@pytest.mark.parametrize(
    ("method", "every"),
    [("scaffold", 1), ("ditto", 2), ("local", 0)]
    + [
        pytest.param(*given, marks=pytest.mark.slow)
        for given in (
            ("scaffold", 0),
            ("scaffold", 2),
            ("ditto", 0),
            ("ditto", 1),
            ("local", 1),
            ("local", 2),
        )
    ],
)
def test_nothing_else_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, every: int
) -> None:
    """SCAFFOLD is judged globally, the others personally; Local has no weights at the server."""
    alone = simulate(tmp_path / "alone", method, 1, eval_every=every)
    assert len(alone.rounds) == ROUNDS
    assert sum("best" in line for line in alone.said) >= 1
    assert simulate(tmp_path / "two", method, 2, eval_every=every) == alone
    monkeypatch.setattr(spilled_replies, "BUDGET", 0)
    assert simulate(tmp_path / "filed", method, 3, eval_every=every) == alone


def test_the_seconds_of_a_round_add_up(tmp_path: Path) -> None:
    started = time.perf_counter()
    simulate(tmp_path / "run")
    wall = time.perf_counter() - started
    rounds = [
        json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    ]
    for entry in rounds:
        parts = [entry[f"seconds_{part}"] for part in ("train", "server", "eval")]
        assert min(parts) >= 0
        assert parts[0] > 0
        assert sum(parts) == pytest.approx(entry["seconds"])
    assert 0 < sum(entry["seconds"] for entry in rounds) < wall


# Sites and workers that fail


@dataclasses.dataclass(frozen=True)
class Failing(type(load("fedper"))):
    """FedPer, one of whose sites fails in some rounds."""

    rounds: tuple[int, ...] = ()
    how: str = "says so"

    def local_update(self, site, state, down):
        if site.name == "y" and site.round in self.rounds:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RunError(f"site 'y', round {site.round}: no images can be read")
        return super().local_update(site, state, down)

    def __str__(self) -> str:
        return "fedper"


def test_a_failing_training_ends_the_run_when_the_round_before_is_kept(tmp_path: Path) -> None:
    whole = simulate(tmp_path / "whole", Failing())
    alone, two = (simulate(tmp_path / str(jobs), Failing(rounds=(4,)), jobs) for jobs in (1, 2))
    assert two.error == "site 'y', round 4: no images can be read"
    assert two.rounds == whole.rounds[:3]
    assert (two.said, two.rounds, two.error) == (alone.said, alone.rounds, alone.error)
    assert manifest(tmp_path / "2") == manifest(tmp_path / "1")
    again = simulate(tmp_path / "2", Failing())
    assert (again.rounds, again.files, again.summary) == (whole.rounds, whole.files, whole.summary)


def test_a_worker_that_dies_at_the_next_training_loses_no_committed_round(tmp_path: Path) -> None:
    whole = simulate(tmp_path / "whole", Failing())
    two = simulate(tmp_path / "run", Failing(rounds=(4,), how="dies"))
    assert "a worker process ended unexpectedly (exit code -9" in two.error
    assert manifest(tmp_path / "run")["round"] in (2, 3)
    again = simulate(tmp_path / "run", Failing())
    assert (again.rounds, again.files, again.summary) == (whole.rounds, whole.files, whole.summary)


def test_a_site_that_is_left_out_is_said_in_its_turn(tmp_path: Path) -> None:
    method = Failing(rounds=(2, 4))
    alone, two = (simulate(tmp_path / str(jobs), method, jobs, min_replies=2) for jobs in (1, 2))
    assert two == alone
    lines = [line.split(":")[0] for line in two.said if line.startswith("round ")]
    assert lines == [
        "round 1/5",
        "round 2",
        "round 2/5",
        "round 3/5",
        "round 4",
        "round 4/5",
        "round 5/5",
    ]


def test_a_failing_evaluation_ends_the_run(tmp_path: Path) -> None:
    class Unscored(type(load("fedper"))):
        def predictor(self, site, state, down):
            if site.round == 3:
                raise RunError(f"site {site.name!r}: no images can be read")
            return super().predictor(site, state, down)

        def __str__(self) -> str:
            return "fedper"

    alone, two = (simulate(tmp_path / str(jobs), Unscored(), jobs) for jobs in (1, 2))
    assert re.fullmatch("site '[xyz]': no images can be read", two.error)
    assert (two.said, two.rounds) == (alone.said, alone.rounds)
    assert manifest(tmp_path / "2") == manifest(tmp_path / "1")


# Kills


def killed(out: Path, method: str, at: int, **changes: Any) -> bool:
    """Kill a run, and with it its workers, before the server's process takes an answer, or writes, for the n-th time.

    Returns:
        False if the run came to its end before.
    """

    def run() -> None:
        os.setpgid(0, 0)
        parent, count = os.getpid(), 0

        def moment(function: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal count
            count += os.getpid() == parent
            if count == at:
                os.killpg(0, signal.SIGKILL)
            return function(*arguments)

        storage.write_atomic = folders.write_atomic = partial(moment, storage.write_atomic)
        append, received = RunFolder.append_round, Pool._received
        RunFolder.append_round = lambda *arguments: moment(append, *arguments)
        Pool._received = lambda *arguments: moment(received, *arguments)
        simulate(out, method, **changes)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def manifest(out: Path) -> dict[str, Any]:
    """What was committed last, but for how long it took."""
    told = json.loads((out / "state" / "manifest.json").read_text())
    record = {key: value for key, value in told["record"].items() if not key.startswith("seconds")}
    return {**told, "record": record}


@pytest.mark.parametrize(
    ("method", "moments"),
    [
        ("fedavg", range(15, 40, 8)),
        pytest.param("ditto", range(23, 60, 10), marks=pytest.mark.slow),
    ],
)
def test_a_run_is_killed_within_rounds_that_overlap_and_resumed(
    tmp_path: Path, method: str, moments: range
) -> None:
    whole, done = simulate(tmp_path / "whole", method), []
    for at in moments:
        out = tmp_path / str(at)
        assert killed(out, method, at)
        done.append(manifest(out)["round"])
        again = simulate(out, method)
        assert (again.rounds, again.files, again.summary) == (
            whole.rounds,
            whole.files,
            whole.summary,
        )
    assert {2, 3} <= set(done)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rounds", "step"), [("fedavg", 3, 2), ("ditto", 4, 3)])
def test_a_run_is_killed_at_any_answer_and_write_and_resumed(
    tmp_path: Path, method: str, rounds: int, step: int
) -> None:
    """The third round is the first that overlaps with the one before, the fourth overlaps with one that does."""
    whole = simulate(tmp_path / "whole", method, rounds=rounds)
    for at in itertools.count(
        3, step
    ):  # the first writes run.json, and before the second there is nothing to be resumed
        out = tmp_path / str(at)
        if not killed(out, method, at, rounds=rounds):
            break
        again = simulate(out, method, rounds=rounds)
        assert (again.rounds, again.files, again.summary) == (
            whole.rounds,
            whole.files,
            whole.summary,
        )
    assert at > 8 * rounds
