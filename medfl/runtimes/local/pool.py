"""Forked processes that inherited a federation, and do tasks in the order in which these were begun."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch

from medfl.core.errors import MedflError, RunError
from medfl.core.message import Weights
from medfl.core.shared_memory import SharedBuffer, pack, unpack
from medfl.runtimes import profiling
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.visits import answered
from medfl.runtimes.spilled_replies import Stock

Task = tuple[Callable[..., Any], tuple[Any, ...]]
"""(function, arguments after the federation)"""

Later = Callable[[], Task]
"""Makes a task when it is about to be done, so that the messages of thousands of sites need not lie ready."""


_ROOM, _MORE = 4, 2**25
"""Copies of the network, and bytes besides, that a message may have to go through shared memory as a whole."""


class Begun:
    """Tasks that are begun together, and the answers to them that nobody has asked for yet.

    Args:
        tasks: what to do.
        sizes: how long each may take, in any unit: the longest is given to a worker first.
        round_: what their time is recorded for; None: the round that goes on when a worker gets one.
        came: called whenever an answer has come.
        folder: where answers wait past what may stay in memory; None: all stay there.

    Attributes:
        pending: (position, task) of those that no worker has, the next one last.
        given: how many the workers are at.
        waiting: position, worker, and the answer as bytes in a stock.
    """

    def __init__(
        self,
        tasks: Sequence[Task | Later],
        sizes: Sequence[float] | None = None,
        round_: int | None = None,
        came: Callable[[], object] = lambda: None,
        folder: Path | None = None,
    ) -> None:
        """Put the tasks in order."""
        self.round, self.came = round_, came
        self.pending = list(enumerate(tasks))
        if sizes is not None:
            self.pending.sort(key=lambda entry: -sizes[entry[0]])
        self.pending.reverse()
        self.given = 0
        self.waiting: deque[tuple[int, Connection, Weights]] = deque()
        self._stock = None if folder is None else Stock(folder)

    def keep(self, index: int, link: Connection, data: bytes) -> None:
        """Have an answer wait."""
        held: Weights = {"": torch.frombuffer(bytearray(data), dtype=torch.uint8)}
        self.waiting.append((index, link, held if self._stock is None else self._stock.keep(held)))

    def oldest(self) -> tuple[int, Connection, bytes]:
        """Return the answer that has waited longest: position, worker, bytes."""
        index, link, held = self.waiting.popleft()
        return index, link, held[""].numpy().tobytes()


class Pool:
    """Forked processes, which end when this one does.

    Only bytes travel between them (large tensors in memory that a worker shares with this process, others as NumPy
    buffers), never file handles, so thousands of tensors need no limits raised.
    """

    def __init__(self, federation: Federation, jobs: int) -> None:
        """Fork the workers; do so before threads are started here."""
        self._links: list[tuple[Any, Connection]] = []
        self._shared: dict[Connection, tuple[SharedBuffer, SharedBuffer]] = {}  # for tasks, and for answers
        self._queue: deque[Begun] = deque()  # those with tasks that no worker has, the first begun first
        self._busy: dict[Connection, tuple[Begun, int]] = {}
        self._due: deque[Connection] = deque()  # workers whose answers lie ready
        context = multiprocessing.get_context("fork")
        room = _ROOM * sum(tensor.nbytes for tensor in federation.networks.initial.values()) + _MORE
        for _ in range(jobs):
            here, there = context.Pipe()
            others = [here, *(link for _, link in self._links)]
            self._shared[here] = SharedBuffer(room), SharedBuffer(room)
            process = context.Process(target=_serve, args=(federation, there, others, *self._shared[here]), daemon=True)
            process.start()
            there.close()
            self._links.append((process, here))
            self._record(here, profiling.Lap([], {}))

    def begin(self, begun: Begun) -> Iterator[tuple[int, Any]]:
        """Queue tasks, give idle workers the first of them, and return what yields (position, result) as they come.

        All tasks that are begun later wait until each of these has a worker, and then fill the gaps.
        """
        if begun.pending:
            self._queue.append(begun)
        for _, link in self._links:
            if link not in self._busy:
                self._give(link)
        return self._results(begun)

    def _results(self, begun: Begun) -> Iterator[tuple[int, Any]]:
        while begun.pending or begun.given or begun.waiting:
            if begun.waiting:
                index, link, data = begun.oldest()
                yield index, self._opened(link, unpack(data))
            else:
                index, link, answer = self._next(begun)
                yield index, self._opened(link, answer)

    def _next(self, wanted: Begun) -> tuple[int, Connection, Any]:
        """Return the next answer to some tasks: position, worker, answer; have those to others wait."""
        while True:
            if not self._due:
                with profiling.during(None):
                    self._due.extend(cast(list[Connection], wait([*self._busy])))
            link = self._due.popleft()
            begun, index = self._busy.pop(link)
            answer = self._received(link)  # copied out of the shared memory before the worker gets its next task
            begun.given -= 1
            begun.came()
            self._give(link)
            if begun is wanted:
                return index, link, answer
            begun.keep(index, link, pack(answer))

    def _give(self, link: Connection) -> None:
        """Give an idle worker the next task, if there is any."""
        if not self._queue:
            return
        begun = self._queue[0]
        index, task = begun.pending.pop()
        begun.given += 1
        if not begun.pending:
            self._queue.popleft()
        recorder = profiling.running()
        round_ = begun.round if begun.round is not None else recorder.round if recorder else 0
        with (
            profiling.during(profiling.MESSAGES),
            suppress(BrokenPipeError),
        ):  # a dead worker is told by the reading end
            link.send_bytes(pack((*made(task), round_), self._shared[link][0]))
        self._busy[link] = (begun, index)

    def _received(self, link: Connection) -> Any:
        try:
            with profiling.during(profiling.MESSAGES):
                return unpack(link.recv_bytes(), self._shared[link][1])
        except (EOFError, OSError) as error:
            process = next(process for process, own in self._links if own is link)
            process.join(5)
            raise RunError(
                f"a worker process ended unexpectedly (exit code {process.exitcode}; out of memory?); "
                "the last round is kept: continue with --resume, perhaps with fewer --jobs"
            ) from error

    def _opened(self, link: Connection, answer: Any) -> Any:
        """Return the result in an answer, or raise the error."""
        kind, value, lap = answer
        self._record(link, lap)
        if kind == "error":
            raise value
        return value

    def _record(self, link: Connection, lap: profiling.Lap | None) -> None:
        recorder = profiling.running()
        if recorder is not None and lap is not None:
            recorder.gather(1 + [link for _, link in self._links].index(link), lap)

    def close(self) -> None:
        """End the workers."""
        for process, link in self._links:
            link.close()
            process.terminate()
        for process, _ in self._links:
            process.join(5)
        self._links = []


def _serve(
    federation: Federation, link: Connection, inherited: list[Connection], tasks: SharedBuffer, answers: SharedBuffer
) -> None:
    """Answer tasks until the parent closes its end or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:  # else this process would keep its siblings' pipes, and its own, open
        other.close()
    torch.set_num_threads(federation.run.threads)
    recorder = profiling.restart()
    while True:
        try:
            data = link.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        started = time.perf_counter()
        function, arguments, round_ = unpack(data, tasks, copy=False)  # the next task comes after the answer
        if recorder is not None:
            recorder.round = round_
            recorder.add(profiling.MESSAGES, started, time.perf_counter())
        answer: tuple[str, Any]
        try:
            answer = ("ok", answered(function, arguments, partial(function, federation)))
        except MedflError as error:
            answer = ("error", RunError(str(error)) if error.exit_code == 1 else error)
        except Exception:  # told to the parent with its traceback
            answer = ("error", _Failed(traceback.format_exc()))
        lap = recorder.lap() if recorder is not None else None
        with profiling.during(profiling.MESSAGES):  # told with the next answer
            packed = pack((*answer, lap), answers)
        try:
            link.send_bytes(packed)
        except (BrokenPipeError, OSError):
            os._exit(0)


def made(task: Task | Later) -> Task:
    """Return a task, made now if it is to be made when it is its turn."""
    return task() if callable(task) else task


class _Failed(Exception):
    """A task failed with something that is not the user's fault."""
