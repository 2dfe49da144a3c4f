"""Workers: tasks of a federation, run in this process or in forked ones; the results do not depend on which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from medfl.runtimes.federation import Federation
from medfl.runtimes.local.pool import Begun, Pool, made
from medfl.runtimes.local.pool import Later as Later
from medfl.runtimes.local.pool import Task as Task
from medfl.runtimes.local.visits import answered
from medfl.training.accelerate.interleave import abreast
from medfl.training.accelerate.pack_sites import Together


class Workers:
    """`jobs` forked processes that inherited the federation with its data; with one job, this process itself."""

    def __init__(self, federation: Federation, jobs: int) -> None:
        """Fork the workers; do so before threads are started here."""
        self._federation = federation
        self.together: Together | None = None
        self._pool = Pool(federation, jobs) if jobs > 1 else None

    @property
    def overlaps(self) -> bool:
        """Whether tasks that are begun go on while others are run."""
        return self._pool is not None

    def run(self, tasks: Sequence[Task | Later], sizes: Sequence[float] | None = None) -> Iterator[tuple[int, Any]]:
        """Run tasks and yield (position, result) as they are ready; `Absent` in the place of what a site fails to do.

        Args:
            tasks: what to do.
            sizes: how long each may take, in any unit: with several workers the longest begin first, so that none of
                them starts when all others are about to end.

        Raises:
            MedflError: what a task of the server's raised; RunError if a worker died.
        """
        if self._pool is not None:
            yield from self._pool.begin(Begun(tasks, sizes))
            return
        if self.together is not None:
            yield from abreast(self._each(tasks), self.together.size, self.together)
            return
        for done in self._each(tasks):
            yield done()

    def _each(self, tasks: Sequence[Task | Later]) -> Iterator[Callable[[], tuple[int, Any]]]:
        """Return the tasks as calls, each made when it is about to be done."""
        for index, task in enumerate(tasks):
            function, arguments = made(task)
            done = partial(function, self._federation)
            yield partial(_answer, index, function, arguments, done)

    def all(self, tasks: Sequence[Task | Later], sizes: Sequence[float] | None = None) -> list[Any]:
        """Run tasks and return their results in order."""
        results = dict(self.run(tasks, sizes))
        return [results[index] for index in range(len(tasks))]

    def begin(
        self,
        tasks: Sequence[Task | Later],
        sizes: Sequence[float] | None = None,
        *,
        round_: int,
        came: Callable[[], object],
        folder: Path,
    ) -> Iterator[tuple[int, Any]]:
        """Begin with tasks, and return at once what yields their results as `run` does.

        What is run meanwhile waits until each of these tasks has a worker, and then fills the gaps. Where nothing
        overlaps, the tasks begin when the first result is asked for.

        Args:
            tasks: what to do.
            sizes: how long each may take.
            round_: what their time is recorded for.
            came: called whenever an answer has come, whether or not it has been asked for.
            folder: where answers wait past what may stay in memory.
        """
        if self._pool is not None:
            return self._pool.begin(Begun(tasks, sizes, round_, came, folder))
        return _telling(self.run(tasks, sizes), came)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Workers:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        self.close()


def _answer(
    index: int, function: Callable[..., Any], arguments: tuple[Any, ...], done: Callable[..., Any]
) -> tuple[int, Any]:
    return index, answered(function, arguments, done)


def _telling(answers: Iterator[tuple[int, Any]], came: Callable[[], object]) -> Iterator[tuple[int, Any]]:
    for answer in answers:
        came()
        yield answer
