"""Visits abreast: several tasks in turn, each up to where it needs what can be done for all of them at once.

A training step of one site leaves most of a GPU idle; the same step of several sites at once does not. For that their
visits must reach the step together. Each visit is a thread, and only one of them runs at any moment: it hands on when
it `meet`s the others or has ended, in an order that only the tasks decide. So nothing has to be made safe for threads,
and each finds the random generators as it left them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

from medfl.core.seeding import snapshot_rng

T = TypeVar("T")
Task = Callable[[], T]
Together = Callable[[Sequence[Any]], None]
"""Does what the visits ask for that wait for each other: one request of each, in their order."""


class Abandoned(BaseException):
    """A visit is to end, for nobody waits for its result; no error, so that no handler of errors takes it for one."""


class Visit(Generic[T]):
    """A task in a thread that runs only when it is its turn."""

    def __init__(self, task: Task[T]) -> None:
        """Be about to begin."""
        self.request: Any = None
        self.ended = False
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._abandoned = False
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._task, self._back = task, snapshot_rng()
        context = copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Let the visit run until it meets the others or ends."""
        ours, self.request = snapshot_rng(), None
        self._back()
        self._mine.release()
        self._theirs.acquire()
        self._back = snapshot_rng()
        ours()

    def meet(self, request: Any) -> None:
        """Wait until something has been done for this visit and for others that ask for the like; of its own thread."""
        if not self._abandoned:
            self.request = request
            self._theirs.release()
            self._mine.acquire()
        if self._abandoned:
            raise Abandoned

    def result(self) -> T:
        """Return what the task gave, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def abandon(self) -> None:
        """Let it end where it is."""
        self._abandoned = True
        while not self.ended:
            self.go_on()
        self._thread.join()

    def _run(self) -> None:
        self._mine.acquire()
        token = _VISIT.set(self)
        try:
            if not self._abandoned:
                self._result.append(self._task())
        except BaseException as error:  # it is raised again where the result is asked for
            self._error = error
        finally:
            _VISIT.reset(token)
            self.ended = True
            self._theirs.release()


_VISIT: ContextVar[Visit[Any] | None] = ContextVar("visit", default=None)


def current() -> Visit[Any] | None:
    """Return the visit that this code is part of, None outside."""
    return _VISIT.get()


def abreast(tasks: Iterator[Task[T]], count: int, together: Together) -> Iterator[T]:
    """Do tasks, up to `count` at a time, and yield their results as they are ready.

    Args:
        tasks: are taken when there is room for one.
        count: how many may have begun and not ended.
        together: is called when each of these waits for the others.

    Raises:
        BaseException: what a task raised; all others are abandoned.
    """
    visits: list[Visit[T]] = []
    try:
        while True:
            while len(visits) < count and (task := next(tasks, None)) is not None:
                visits.append(Visit(task))
            if not visits:
                return
            for visit in visits:
                if visit.request is None:
                    visit.go_on()
            over = [visit for visit in visits if visit.ended]
            visits = [visit for visit in visits if not visit.ended]
            for visit in over:
                yield visit.result()
            if not over:
                together([visit.request for visit in visits])
                for visit in visits:
                    visit.request = None
    finally:
        for visit in visits:
            visit.abandon()
