"""Workers: the same results however many there are, and no hanging when one of them, or the parent, dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.methods import load
from medfl.runtimes import spilled_replies, tasks
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.step import introduce, site_step
from medfl.runtimes.tasks import MakeTask, WorkerTask
from tests.support import forked
from tests.support.sweeps import mostly_slow
from tests.support.toy import CLASSIFYING, WITHOUT_IMAGES, ToyBundle, bits, public_blobs, run_record

STAND_IN = SimpleNamespace(
    run=SimpleNamespace(threads=1), number=7, networks=SimpleNamespace(initial={})
)


@dataclass(frozen=True)
class Call(WorkerTask):
    """A task that calls a function with the federation."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self, federation: Any) -> Any:
        return self.function(federation, *self.arguments)


def call(function: Callable[..., Any], *arguments: Any) -> MakeTask:
    return partial(Call, function, arguments)


def add(federation: Any, x: float, wait: float = 0.0) -> float:
    time.sleep(wait)
    return federation.number + x


def echo(federation: Any, value: Any) -> Any:
    return value


def whoami(federation: Any, wait: float = 0.05) -> int:
    time.sleep(wait)
    return os.getpid()


def when(federation: Any, wait: float) -> float:
    """Tell when it began, and take a while."""
    started = time.perf_counter()
    time.sleep(wait)
    return started


def fail(federation: Any, kind: str) -> None:
    if kind == "input":
        raise InputError("given", "allowed", "advice")
    if kind == "run":
        raise RunError("site 'a': the loss is nan")
    raise LookupError("an odd bug")


def die(federation: Any, how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


def gone(pid: int) -> bool:
    """Tell whether a process has ended (a zombie that nobody reaps has)."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def wait_until_gone(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(map(gone, pids)):
        time.sleep(0.02)
    return all(map(gone, pids))


def test_every_task_is_a_frozen_dataclass() -> None:
    kinds = [
        kind
        for kind in vars(tasks).values()
        if isinstance(kind, type) and issubclass(kind, WorkerTask)
    ]
    work = [kind for kind in kinds if kind is not WorkerTask]
    assert len(work) > 8
    assert all(is_dataclass(kind) and kind.__dataclass_params__.frozen for kind in work)


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_results_come_in_the_order_of_the_tasks(jobs: int) -> None:
    with Workers(STAND_IN, jobs) as workers:
        for tasks in (7, 0, 1, 7):
            given = [call(add, i, 0.02 * (i % 2)) for i in range(tasks)]
            assert workers.all(given) == [7 + i for i in range(tasks)]
            assert dict(workers.run(given)) == {i: 7 + i for i in range(tasks)}


def test_the_longest_task_begins_first_where_there_are_several_workers() -> None:
    """Sizes 1, 4, 2, 3 with two workers: 4 and 3 begin, then 2, then 1; equal ones keep their order."""
    tasks, sizes = [call(when, 0.04 * size) for size in (1, 4, 2, 3)], [1, 4, 2, 3]
    with Workers(STAND_IN, 2) as workers:
        begun = dict(workers.run(tasks, sizes))
        assert max(begun[1], begun[3]) < begun[2] < begun[0]
        assert dict(workers.run([call(add, i) for i in range(4)], [1] * 4)) == {
            i: 7 + i for i in range(4)
        }
    with Workers(STAND_IN, 1) as workers:
        assert [index for index, _ in workers.run(tasks, sizes)] == [0, 1, 2, 3]


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_task_is_made_when_it_is_its_turn(jobs: int) -> None:
    made: list[int] = []
    done = 0

    def task(i: int) -> WorkerTask:
        made.append(i)
        assert (
            len(made) - done <= jobs + 1
        )  # the one whose result is about to be handed over has ended
        return Call(add, (i, 0.01))

    with Workers(STAND_IN, jobs) as workers:
        for index, value in workers.run([partial(task, i) for i in range(12)]):
            done += 1
            assert value == 7 + index
    assert sorted(made) == list(range(12))


# Tasks that are begun and go on while others are run


def start(
    workers: Workers, tasks: list[MakeTask], folder: Path, on_result: Any = None, **rest: Any
) -> Any:
    return workers.start(tasks, on_result=on_result or (lambda: None), folder=folder, **rest)


def test_what_is_begun_first_is_given_out_first_and_the_rest_fills_the_gaps(tmp_path: Path) -> None:
    """Four tasks on two workers, the longest first; of two that are run meanwhile one gets the first free worker."""
    came, given = [], []

    def task(name: Any) -> WorkerTask:
        given.append(name)
        return Call(add, (0, 0.02))

    with Workers(STAND_IN, 2) as workers:
        assert workers.overlaps
        tasks: Any = [partial(task, i) for i in range(4)]
        answers = start(
            workers, tasks, tmp_path, lambda: came.append(len(given)), sizes=[1, 4, 2, 3]
        )
        assert given == [1, 3]
        assert workers.all([partial(task, "a"), partial(task, "b")]) == [7, 7]
        assert given == [1, 3, 2, 0, "a", "b"]
        assert came[:3] == [2, 3, 4], (
            "four were given when the third came, and 'a' then, beside the last of them"
        )
        assert dict(answers) == dict.fromkeys(range(4), 7)
        assert len(came) == 4


@pytest.mark.parametrize("budget", [0, None])
def test_answers_that_wait_are_those_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: Any
) -> None:
    monkeypatch.setattr(spilled_replies, "BUDGET", budget)
    with Workers(STAND_IN, 2) as workers:
        answers = start(workers, [call(echo, value) for value in VALUES.values()], tmp_path)
        assert workers.all([call(add, i) for i in range(4)]) == [7, 8, 9, 10]
        again = start(workers, [call(echo, value) for value in VALUES.values()], tmp_path)
        found = dict(again), dict(answers)
        assert bits(list(found)) == bits([dict(enumerate(VALUES.values()))] * 2)
        assert list(start(workers, [], tmp_path)) == []


def test_one_job_begins_when_it_is_asked(tmp_path: Path) -> None:
    came: list[None] = []
    with Workers(STAND_IN, 1) as workers:
        assert not workers.overlaps
        answers = start(workers, [call(when, 0.0)] * 2, tmp_path, lambda: came.append(None))
        between = workers.all([call(when, 0.0)])
        assert not came
        assert min(value for _, value in answers) > between[0]
        assert len(came) == 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_begun_task_fails_when_it_is_asked_for(tmp_path: Path, jobs: int) -> None:
    with Workers(STAND_IN, jobs) as workers:
        answers = start(workers, [call(add, 1), call(fail, "run"), call(add, 2)], tmp_path)
        assert workers.all([call(add, i) for i in range(4)]) == [7, 8, 9, 10]
        with pytest.raises(RunError, match="^site 'a': the loss is nan$"):
            list(answers)


def test_a_worker_that_dies_at_a_begun_task_is_reported_to_whoever_waits(tmp_path: Path) -> None:
    with Workers(STAND_IN, 2) as workers:
        start(workers, [call(die, "kill"), call(add, 1)], tmp_path)
        with pytest.raises(RunError, match=r"exit code -9.*--resume"):
            workers.all([call(add, i, 0.1) for i in range(4)])


def test_one_job_is_this_process_and_more_are_others() -> None:
    with Workers(STAND_IN, 1) as workers:
        assert set(workers.all([call(whoami)] * 3)) == {os.getpid()}
    with Workers(STAND_IN, 3) as workers:
        pids = set(workers.all([call(whoami)] * 9))
        assert len(pids) == 3
        assert os.getpid() not in pids
    assert wait_until_gone(list(pids))


VALUES = {
    "float": torch.randn(3, 4),
    "scalar": torch.tensor(2.5),
    "counter": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "bfloat16": torch.randn(2, 3).bfloat16(),
    "bfloat16 scalar": torch.tensor(1.5).bfloat16(),
    "half": torch.randn(3).half(),
    "bool": torch.tensor([True, False]),
    "strided": torch.randn(4, 6).T[1:],
    "expanded": torch.ones(1).expand(5),
    "parameter": nn.Parameter(torch.randn(3)),
    "message": Message({"weights": {"w": torch.randn(3)}, "empty": {}}, {"samples": 3}),
    "state": {"a": {"b": [torch.randn(2), 1, None, "x", float("inf")]}},
    "many": {str(i): torch.randn(2) for i in range(3000)},
}


def test_values_travel_bit_for_bit() -> None:
    with Workers(STAND_IN, 2) as workers:
        for _ in range(2):
            received = dict(
                zip(VALUES, workers.all([call(echo, v) for v in VALUES.values()]), strict=True)
            )
            for name, value in VALUES.items():
                assert bits(received[name]) == bits(value), name
                if isinstance(received[name], torch.Tensor):
                    received[name].fill_(0)  # writable, and not the sender's memory


BUILDING = {"fedhelp"}
"""Methods with networks that need a bundle; tests/cli/test_public_data.py compares their workers."""
MIXED = ("ditto", "fedavg", "fedbm", "fedmd", "fedproto", "scaffold")
"""What travels: two models, one, a generator, answers on public data, prototypes, control variates."""


@pytest.mark.parametrize("name", mostly_slow(sorted(set(CLASSIFYING) - BUILDING), MIXED))
def test_training_does_not_depend_on_the_number_of_workers(name: str) -> None:
    method = load(name, WITHOUT_IMAGES.get(name))
    federation = Federation(ToyBundle(), method, run_record(local_epochs=2), public=public_blobs())
    host = federation.host(0)
    introductions = {name: introduce(federation, name) for name in federation.participants}
    server = method.init_server(host, federation.networks.initial, introductions)
    tasks = [
        call(site_step, 1, n, None, method.broadcast(host, server, n), ())
        for n in federation.participants * 2
    ]
    results = []
    for jobs in (1, 2):
        with Workers(federation, jobs) as workers:
            found = workers.all(tasks)
        results.append([bits([r.state, r.reply, r.loss, r.steps]) for r in found])
    assert results[0] == results[1]
    half = len(federation.participants)
    assert results[0][:half] == results[0][half:], "a step run twice gives the same"


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failed_run_keeps_its_type_and_text(jobs: int) -> None:
    with (
        Workers(STAND_IN, jobs) as workers,
        pytest.raises(RunError, match="^site 'a': the loss is nan$"),
    ):
        workers.all([call(fail, "run"), call(add, 1)])


@pytest.mark.parametrize("jobs", [1, 2])
def test_bad_input_keeps_its_type_and_text(jobs: int) -> None:
    with (
        Workers(STAND_IN, jobs) as workers,
        pytest.raises(InputError, match="^given; allowed; advice$"),
    ):
        workers.all([call(fail, "input"), call(add, 1)])


def test_another_error_brings_its_traceback() -> None:
    text = "(?s)Traceback.*in fail.*LookupError: an odd bug"
    with Workers(STAND_IN, 2) as workers, pytest.raises(Exception, match=text):
        workers.all([call(fail, "bug")])


@pytest.mark.parametrize(("how", "code"), [("kill", -9), ("exit", 3)])
def test_a_worker_that_dies_at_work_is_reported_at_once(how: str, code: int) -> None:
    started = time.monotonic()
    text = rf"worker process .*exit code {code}.*--resume"
    with Workers(STAND_IN, 2) as workers, pytest.raises(RunError, match=text):
        workers.all([call(add, 1), call(die, how), *[call(add, 2, 0.1)] * 4])
    assert time.monotonic() - started < 5


def test_a_worker_that_was_killed_while_idle_is_reported_at_once() -> None:
    with Workers(STAND_IN, 2) as workers:
        victim = workers.all([call(whoami)] * 2)[1]
        os.kill(victim, signal.SIGKILL)
        assert wait_until_gone([victim])
        started = time.monotonic()
        with pytest.raises(RunError, match="exit code -9"):
            workers.all([call(add, 1, 0.1)] * 4)
        assert time.monotonic() - started < 5


def test_workers_do_not_hear_the_interrupt_meant_for_their_parent() -> None:
    with Workers(STAND_IN, 2) as workers:
        for pid in set(workers.all([call(whoami)] * 4)):
            os.kill(pid, signal.SIGINT)
        assert workers.all([call(add, i) for i in range(4)]) == [7, 8, 9, 10]


def test_leaving_ends_workers_also_busy_ones() -> None:
    with Workers(STAND_IN, 2) as workers:
        pids = list(set(workers.all([call(whoami)] * 4)))
        started = time.monotonic()
        next(workers.run([call(add, 1), call(add, 1, 60.0)]))
    assert time.monotonic() - started < 5
    assert wait_until_gone(pids)


def end_without_a_word(told: Path) -> None:
    """Begin three workers, write down which they are, and die of a signal that cannot be handled."""
    workers = Workers(STAND_IN, 3)
    told.write_text(" ".join(map(str, set(workers.all([call(whoami, 0.1)] * 9)))))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    parent = forked.start(end_without_a_word, tmp_path / "pids", output=tmp_path / "printed")
    parent.join(60)
    assert parent.exitcode == -signal.SIGKILL, (tmp_path / "printed").read_text()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert wait_until_gone(pids)
