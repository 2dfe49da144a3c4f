"""Interleaved visits: several tasks in turn, each up to where it needs what can be done for all of them at once.

A training step of one site leaves most of a GPU idle; the same step of several sites at once does not. For that their
visits must reach the step at the same time. Each visit is a thread, and only one of them runs at any moment: it hands
on when it waits for a request to be served or has ended, in an order that only the tasks decide. So nothing has to be
made safe for threads, and each finds the random generators as it left them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

from medfl.core.seeding import snapshot_rng

T = TypeVar("T")
Work = Callable[[], T]
ServeAll = Callable[[Sequence[Any]], None]
"""Serves the requests of all waiting visits: one of each, in their order."""


class Cancelled(BaseException):
    """A visit is to end, for nobody waits for its result; no Exception, so that no handler of errors catches it."""


class Visit(Generic[T]):
    """A task in a thread that runs only when it is its turn; `request` is what it waits for, None if for nothing."""

    def __init__(self, task: Work[T]) -> None:
        """Start the thread, which waits for its first turn."""
        self.request: Any = None
        self._outcome: Future[T] = Future()
        self._cancelled = False
        self._own_turn, self._main_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._task, self._restore_rng = task, snapshot_rng()
        context = copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Let the visit run until it waits or ends."""
        restore_main, self.request = snapshot_rng(), None
        self._restore_rng()
        self._own_turn.release()
        self._main_turn.acquire()
        self._restore_rng = snapshot_rng()
        restore_main()

    def wait_for(self, request: Any) -> None:
        """Wait until a request has been served, with those of the other visits; to be called in the visit's thread."""
        if not self._cancelled:
            self.request = request
            self._main_turn.release()
            self._own_turn.acquire()
        if self._cancelled:
            raise Cancelled

    @property
    def ended(self) -> bool:
        """Whether the task is over."""
        return self._outcome.done()

    def result(self) -> T:
        """Return what the task returned, or raise what it raised."""
        return self._outcome.result()

    def cancel(self) -> None:
        """End the visit where it is."""
        self._cancelled = True
        while not self.ended:
            self.resume()
        self._thread.join()

    def _run(self) -> None:
        self._own_turn.acquire()
        _VISIT.set(self)  # of the thread's own context
        try:
            if self._cancelled:
                raise Cancelled
            self._outcome.set_result(self._task())
        except BaseException as error:  # it is raised again where the result is asked for
            self._outcome.set_exception(error)
        finally:
            self._main_turn.release()


_VISIT: ContextVar[Visit[Any] | None] = ContextVar("visit", default=None)


def current_visit() -> Visit[Any] | None:
    """Return the visit that this code is part of, None outside."""
    return _VISIT.get()


def interleave(tasks: Iterator[Work[T]], count: int, serve_all: ServeAll) -> Iterator[T]:
    """Do tasks, up to `count` at a time, and yield their results as they are ready.

    `serve_all` is called when each of those under way waits for a request.

    Raises:
        BaseException: what a task raised; all others are cancelled.
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
                    visit.resume()
            ended = [visit for visit in visits if visit.ended]
            visits = [visit for visit in visits if not visit.ended]
            for visit in ended:
                yield visit.result()
            if not ended:
                serve_all([visit.request for visit in visits])
                for visit in visits:
                    visit.request = None
    finally:
        for visit in visits:
            visit.cancel()
