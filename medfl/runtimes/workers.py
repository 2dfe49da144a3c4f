"""Workers: tasks of a federation, run in this process or in forked ones; the results do not depend on which."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch

from medfl.errors import MedflError, RunError
from medfl.packing import pack, unpack
from medfl.runtimes.federation import Federation

Task = tuple[Callable[..., Any], tuple[Any, ...]]
"""(function, arguments after the federation)"""


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

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """Run tasks and yield (position, result) as they are ready.

        Raises:
            MedflError: what a task raised; RunError if a worker died.
        """
        if not self._links:
            for index, (function, arguments) in enumerate(tasks):
                yield index, function(self._federation, *arguments)
            return
        pending = list(reversed(list(enumerate(tasks))))
        busy: dict[Any, tuple[Any, int]] = {}
        for process, link in self._links:
            if pending:
                self._give(process, link, pending, busy)
        while busy:
            for ready in wait([*busy]):
                link = cast(Connection, ready)
                process, index = busy.pop(link)
                kind, value = self._take(process, link)
                if kind == "error":
                    raise value
                if pending:
                    self._give(process, link, pending, busy)
                yield index, value

    def all(self, tasks: Sequence[Task]) -> list[Any]:
        """Run tasks and return their results in order."""
        results = dict(self.run(tasks))
        return [results[index] for index in range(len(tasks))]

    def _give(
        self, process: Any, link: Connection, pending: list[tuple[int, Task]], busy: dict[Any, tuple[Any, int]]
    ) -> None:
        index, task = pending.pop()
        with suppress(BrokenPipeError):  # a dead worker is told by the reading end
            link.send_bytes(pack(task))
        busy[link] = (process, index)

    def _take(self, process: Any, link: Connection) -> tuple[str, Any]:
        try:
            kind, value = unpack(link.recv_bytes())
        except (EOFError, OSError) as error:
            process.join(5)
            raise RunError(
                f"a worker process ended unexpectedly (exit code {process.exitcode}; out of memory?); "
                "the last round is kept: continue with --resume, perhaps with fewer --jobs"
            ) from error
        return kind, value

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
    while True:
        try:
            function, arguments = unpack(link.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = ("ok", function(federation, *arguments))
        except MedflError as error:
            answer = ("error", RunError(str(error)) if error.exit_code == 1 else error)
        except Exception:  # told to the parent with its traceback
            answer = ("error", _Failed(traceback.format_exc()))
        try:
            link.send_bytes(pack(answer))
        except (BrokenPipeError, OSError):
            os._exit(0)


class _Failed(Exception):
    """A task failed with something that is not the user's fault."""
