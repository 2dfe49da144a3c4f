"""Workers: a federation's tasks, run in this process or in forked ones; results do not depend on which."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from medfl.core import Document, InputError, MedflError, RunError, Weights, byte_count
from medfl.evaluation import Tally
from medfl.runtimes.federation import Federation
from medfl.runtimes.spilled_replies import TensorStore
from medfl.runtimes.tasks import MakeTask, Results, result_or_failure
from medfl.storage.shared_memory import SharedBuffer, dump_shared, load_shared


class Workers(AbstractContextManager["Workers"]):
    """`jobs` forked processes that inherit the federation with its data; with one job, this process itself.

    Attributes:
        introduced_counts: site -> number of training items, if only the site knows it; stored in the run's record.
        facts: site -> kind -> names: what else it reported about its data there; stored in the same way.
        tallies: site -> section -> tables of its outcomes, if they replace its cases.
    """

    def __init__(self, federation: Federation, jobs: int) -> None:
        """Fork the workers; do so before threads are started here."""
        self._federation = federation
        self.introduced_counts: dict[str, int] = {}
        self.facts: dict[str, dict[str, list[str]]] = {}
        self.tallies: dict[str, dict[str, Tally]] = {}
        self._pool = Pool(federation, jobs) if jobs > 1 else None

    def set_deadline(self, seconds: float | None) -> None:
        """Limit how long the sites may take for a round; None: no limit.

        Raises:
            InputError: there is a limit, but these workers wait for every site's answer.
        """
        if seconds is not None:
            raise InputError(
                f"--deadline {seconds:g}",
                "a runtime whose sites run by themselves",
                "use --runtime flare",
            )

    def keep_statements(self, record: Document) -> None:
        """Keep the sites' statements about their data in the run's record, from which a resumed run continues."""
        self.introduced_counts = record.setdefault("told", {})
        self.facts = record.setdefault("facts", {})

    @property
    def overlaps(self) -> bool:
        """Whether started tasks continue while others are run."""
        return self._pool is not None

    def run(self, tasks: Sequence[MakeTask], sizes: Sequence[float] | None = None) -> Results:
        """Run tasks and yield (position, result) as they finish; a `FailedReply` if a site fails.

        `sizes` say how long each may take: the longest start first, so that none starts when all others are about to
        finish.

        Raises:
            MedflError: raised by a task of the server; RunError if a worker died.
        """
        if self._pool is not None:
            yield from self._pool.start(TaskGroup(tasks, sizes))
            return

        # in order: with one worker there is no gain in taking the longest first
        for index, make in enumerate(tasks):
            task = make()
            yield index, result_or_failure(task, partial(task.run, self._federation))

    def item_count(self, name: str) -> int:
        """Return how many training items a participant has."""
        return len(self._federation.participant_shard(name, "train"))

    def all(
        self, tasks: Sequence[MakeTask], shown: Callable[[Results], Results] = iter
    ) -> list[Any]:
        """Run tasks and return their results in order; `shown` wraps them as they arrive."""
        results = dict(shown(self.run(tasks)))
        return [results[index] for index in range(len(tasks))]

    def start(
        self,
        tasks: Sequence[MakeTask],
        sizes: Sequence[float] | None = None,
        *,
        on_result: Callable[[], object],
        folder: Path,
    ) -> Results:
        """Start tasks, and immediately return an iterator that yields their results as `run` does.

        Tasks run meanwhile wait until each of these tasks has a worker, and then fill the gaps. If nothing overlaps,
        the tasks start when the first result is requested. `on_result` is called whenever a result arrives, whether or
        not it has been requested; results beyond what may stay in memory wait in `folder`.
        """
        if self._pool is not None:
            return self._pool.start(TaskGroup(tasks, sizes, on_result, folder))
        return _notifying(self.run(tasks, sizes), on_result)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _notifying(results: Results, on_result: Callable[[], object]) -> Results:
    for result in results:
        on_result()
        yield result


# Forked processes that inherited a federation, and run tasks in the order in which they were started.


# a message goes through shared memory if it is at most this many copies of the network plus this many bytes
_ROOM = 4
_MORE = 2**25


class TaskGroup:
    """Tasks that were started together, and their answers that have not been requested yet.

    Args:
        tasks: make the tasks.
        sizes: how long each may take, in any unit: the longest is given to a worker first.
        on_result: called whenever an answer arrives.
        folder: where answers beyond what may stay in memory wait; None: all stay in memory.

    Attributes:
        pending: (position, task) of those without a worker, the next one last.
        running: number of tasks that workers are running.
        unread: position, and the answer as bytes.
    """

    def __init__(
        self,
        tasks: Sequence[MakeTask],
        sizes: Sequence[float] | None = None,
        on_result: Callable[[], object] = lambda: None,
        folder: Path | None = None,
    ) -> None:
        self.on_result = on_result
        self.pending = list(enumerate(tasks))
        if sizes is not None:
            self.pending.sort(key=lambda entry: -sizes[entry[0]])

        self.pending.reverse()  # so that `pop` takes the longest
        self.running = 0
        self.unread: deque[tuple[int, Weights]] = deque()
        self._stock = None if folder is None else TensorStore(folder)

    def put(self, index: int, answer: bytes) -> None:
        """Keep an answer until it is requested."""
        tensors: Weights = {"": torch.frombuffer(bytearray(answer), dtype=torch.uint8)}
        if self._stock is not None:
            tensors = self._stock.keep(tensors)

        self.unread.append((index, tensors))

    def pop(self) -> tuple[int, bytes]:
        """Return the answer that has waited longest: position, bytes."""
        index, tensors = self.unread.popleft()
        return index, tensors[""].numpy().tobytes()


class Pool:
    """Forked processes, which end when this one does.

    Only bytes travel between them (large tensors in memory that a worker shares with this process, others as NumPy
    buffers), never file handles, so thousands of tensors need no higher limits.
    """

    def __init__(self, federation: Federation, jobs: int) -> None:
        """Fork the workers; do so before threads are started here."""
        self._processes: dict[Connection, BaseProcess] = {}
        # for tasks, and for answers
        self._shared: dict[Connection, tuple[SharedBuffer, SharedBuffer]] = {}
        # groups with tasks that no worker has, oldest first
        self._queue: deque[TaskGroup] = deque()
        self._busy: dict[Connection, tuple[TaskGroup, int]] = {}
        # workers whose answers are ready
        self._ready: deque[Connection] = deque()
        # forked, not spawned: the children share the images in memory instead of reading them again
        context = multiprocessing.get_context("fork")
        room = _ROOM * byte_count(federation.networks.initial) + _MORE

        for _ in range(jobs):
            here, there = context.Pipe()
            inherited = [here, *self._processes]
            self._shared[here] = SharedBuffer(room), SharedBuffer(room)
            process = context.Process(
                target=_serve, args=(federation, there, inherited, *self._shared[here]), daemon=True
            )
            process.start()
            there.close()  # so that the pipe ends when the worker does
            self._processes[here] = process

    def start(self, group: TaskGroup) -> Results:
        """Queue tasks, give idle workers the first of them, and return an iterator of (position, result).

        All tasks started later wait until each of these has a worker, and then fill the gaps.
        """
        if group.pending:
            self._queue.append(group)
        for link in self._processes:
            if link not in self._busy:
                self._give(link)
        return self._results(group)

    def _results(self, group: TaskGroup) -> Results:
        while group.pending or group.running or group.unread:
            if group.unread:
                index, data = group.pop()
                yield index, _result(load_shared(data))
            else:
                index, answer = self._next(group)
                yield index, _result(answer)

    def _next(self, awaited: TaskGroup) -> tuple[int, _Answer]:
        """Return the next answer of a group with its position; keep those of other groups for later."""
        while True:
            if not self._ready:
                self._ready.extend(cast(list[Connection], wait([*self._busy])))

            link = self._ready.popleft()
            group, index = self._busy.pop(link)
            # copied out of the shared memory before the worker gets its next task
            answer = self._received(link)
            # the worker continues while this process handles its answer
            group.running -= 1
            group.on_result()
            self._give(link)

            if group is awaited:
                return index, answer

            # as bytes, which may be on disk until the group is requested
            group.put(index, dump_shared(answer))

    def _give(self, link: Connection) -> None:
        """Give an idle worker the next task, if there is any."""
        if not self._queue:
            return

        group = self._queue[0]
        index, make = group.pending.pop()
        group.running += 1
        if not group.pending:
            self._queue.popleft()

        with suppress(BrokenPipeError):  # `_received` reports a dead worker
            link.send_bytes(dump_shared(make(), self._shared[link][0]))

        self._busy[link] = (group, index)

    def _received(self, link: Connection) -> _Answer:
        try:
            answer: _Answer = load_shared(link.recv_bytes(), self._shared[link][1])
            return answer
        except (EOFError, OSError) as error:
            process = self._processes[link]
            process.join(5)  # otherwise it has no exit code yet
            raise RunError(
                f"a worker process ended unexpectedly (exit code {process.exitcode}; out of memory?); "
                "the last round is kept: continue with --resume, perhaps with fewer --jobs"
            ) from error

    def close(self) -> None:
        """End the workers."""
        for link, process in self._processes.items():
            link.close()
            process.terminate()
        for process in self._processes.values():
            process.join(5)
        self._processes = {}


class _Answer(NamedTuple):
    """A worker's answer: the result of a task, or the error."""

    result: object
    error: Exception | None


def _result(answer: _Answer) -> object:
    """Return the result in an answer, or raise the error."""
    if answer.error is not None:
        raise answer.error
    return answer.result


def _serve(
    federation: Federation,
    link: Connection,
    inherited: list[Connection],
    tasks: SharedBuffer,
    answers: SharedBuffer,
) -> None:
    """Run tasks and answer until the parent closes its end or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # otherwise this process would keep its siblings' pipes, and the parent's end of its own, open
    for connection in inherited:
        connection.close()

    torch.set_num_threads(federation.run.threads)
    while True:
        try:
            data = link.recv_bytes()
        except (EOFError, OSError):
            # without clean-up: handlers and buffers are copies of the parent's
            os._exit(0)

        task = load_shared(data, tasks, copy=False)  # the next task comes after the answer
        result: object = None
        failure: Exception | None = None
        try:
            result = result_or_failure(task, partial(task.run, federation))
        except MedflError as error:
            failure = RunError(str(error)) if error.exit_code == 1 else error
        except Exception:
            # as text, since not every exception can be pickled
            failure = _Failed(traceback.format_exc())

        packed = dump_shared(_Answer(result, failure), answers)
        try:
            link.send_bytes(packed)
        except OSError:
            os._exit(0)


class _Failed(Exception):
    """A task failed for a reason that is not the user's fault; holds the traceback."""
