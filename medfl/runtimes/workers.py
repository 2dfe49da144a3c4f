"""Workers: tasks of a federation, run in this process or in forked ones; the results do not depend on which."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch

from medfl import profiling
from medfl.errors import MedflError, RunError
from medfl.packing import pack, unpack
from medfl.runtimes.federation import Federation
from medfl.runtimes.visits import answered

Task = tuple[Callable[..., Any], tuple[Any, ...]]
"""(function, arguments after the federation)"""

Later = Callable[[], Task]
"""Makes a task when it is about to be done, so that the messages of thousands of sites need not lie ready."""


class Workers:
    """A pool of `jobs` forked processes that inherited the federation with its data; with one job, this process itself.

    Only bytes travel between the processes (tensors as NumPy buffers), never file handles, so thousands of tensors
    need no limits raised. Workers end when this process does.
    """

    def __init__(self, federation: Federation, jobs: int) -> None:
        """Fork the workers; do so before threads are started here."""
        self._federation = federation
        self._links: list[tuple[Any, Connection]] = []
        context = multiprocessing.get_context("fork")
        for _ in range(jobs if jobs > 1 else 0):
            here, there = context.Pipe()
            others = [here, *(link for _, link in self._links)]
            process = context.Process(target=_serve, args=(federation, there, others), daemon=True)
            process.start()
            there.close()
            self._links.append((process, here))
            self._record(here, profiling.Lap([], {}))

    def run(self, tasks: Sequence[Task | Later], sizes: Sequence[float] | None = None) -> Iterator[tuple[int, Any]]:
        """Run tasks and yield (position, result) as they are ready; `Absent` in the place of what a site fails to do.

        Args:
            tasks: what to do.
            sizes: how long each may take, in any unit: with several workers the longest begin first, so that none of
                them starts when all others are about to end.

        Raises:
            MedflError: what a task of the server's raised; RunError if a worker died.
        """
        if not self._links:
            for index, task in enumerate(tasks):
                function, arguments = _made(task)
                yield index, answered(function, arguments, partial(function, self._federation))
            return
        pending = list(enumerate(tasks))
        if sizes is not None:
            pending.sort(key=lambda entry: -sizes[entry[0]])
        pending.reverse()
        busy: dict[Any, tuple[Any, int]] = {}
        for process, link in self._links:
            if pending:
                self._give(process, link, pending, busy)
        while busy:
            with profiling.during(None):
                done = wait([*busy])
            for ready in done:
                link = cast(Connection, ready)
                process, index = busy.pop(link)
                kind, value = self._take(process, link)
                if kind == "error":
                    raise value
                if pending:
                    self._give(process, link, pending, busy)
                yield index, value

    def all(self, tasks: Sequence[Task | Later], sizes: Sequence[float] | None = None) -> list[Any]:
        """Run tasks and return their results in order."""
        results = dict(self.run(tasks, sizes))
        return [results[index] for index in range(len(tasks))]

    def _give(
        self, process: Any, link: Connection, pending: list[tuple[int, Task | Later]], busy: dict[Any, tuple[Any, int]]
    ) -> None:
        index, task = pending.pop()
        recorder = profiling.running()
        with (
            profiling.during(profiling.MESSAGES),
            suppress(BrokenPipeError),
        ):  # a dead worker is told by the reading end
            link.send_bytes(pack((*_made(task), recorder.round if recorder else 0)))
        busy[link] = (process, index)

    def _take(self, process: Any, link: Connection) -> tuple[str, Any]:
        try:
            with profiling.during(profiling.MESSAGES):
                kind, value, lap = unpack(link.recv_bytes())
        except (EOFError, OSError) as error:
            process.join(5)
            raise RunError(
                f"a worker process ended unexpectedly (exit code {process.exitcode}; out of memory?); "
                "the last round is kept: continue with --resume, perhaps with fewer --jobs"
            ) from error
        self._record(link, lap)
        return kind, value

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

    def __enter__(self) -> Workers:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        self.close()


def _serve(federation: Federation, link: Connection, inherited: list[Connection]) -> None:
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
        function, arguments, round_ = unpack(data)
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
            packed = pack((*answer, lap))
        try:
            link.send_bytes(packed)
        except (BrokenPipeError, OSError):
            os._exit(0)


def _made(task: Task | Later) -> Task:
    return task() if callable(task) else task


class _Failed(Exception):
    """A task failed with something that is not the user's fault."""
