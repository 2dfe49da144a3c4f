"""Workers: tasks of a federation, run in this process or in forked ones; the results do not depend on which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from medfl.core.documents import Document
from medfl.core.errors import InputError
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.pool import Pool, TaskGroup
from medfl.runtimes.tasks import MakeTask, Results, result_or_failure


class Workers(AbstractContextManager["Workers"]):
    """`jobs` forked processes that inherited the federation with its data; with one job, this process itself.

    Attributes:
        introduced_counts: site -> number of training items, where only the site knows it; the run's record keeps it.
        facts: site -> kind -> names: what else it told of its data there; kept in the same way.
    """

    def __init__(self, federation: Federation, jobs: int) -> None:
        """Fork the workers; do so before threads are started here."""
        self._federation = federation
        self.introduced_counts: dict[str, int] = {}
        self.facts: dict[str, dict[str, list[str]]] = {}
        self._pool = Pool(federation, jobs) if jobs > 1 else None

    def set_deadline(self, seconds: float | None) -> None:
        """Limit how long the sites may take for a round; None: as long as they need.

        Raises:
            InputError: there is a limit, and these workers wait for each site's answer.
        """
        if seconds is not None:
            raise InputError(
                f"--deadline {seconds:g}",
                "a runtime whose sites run by themselves",
                "use --runtime flare",
            )

    def keep_statements(self, record: Document) -> None:
        """Keep what the sites tell of their data in the run's record, from which a resumed run goes on."""
        self.introduced_counts = record.setdefault("told", {})
        self.facts = record.setdefault("facts", {})

    @property
    def overlaps(self) -> bool:
        """Whether tasks that were started go on while others are run."""
        return self._pool is not None

    def run(self, tasks: Sequence[MakeTask], sizes: Sequence[float] | None = None) -> Results:
        """Run tasks and yield (position, result) as they are ready; a `FailedReply` where a site fails.

        `sizes` say how long each may take: the longest start first, so that none starts when all others are about to
        end.

        Raises:
            MedflError: raised by a task of the server; RunError if a worker died.
        """
        if self._pool is not None:
            yield from self._pool.start(TaskGroup(tasks, sizes))
            return

        # in their order: with one worker nothing is gained by taking the longest first
        for index, make in enumerate(tasks):
            task = make()
            yield index, result_or_failure(task, partial(task.run, self._federation))

    def item_count(self, name: str) -> int:
        """Return how many training items a participant has."""
        return len(self._federation.participant_shard(name, "train"))

    def all(
        self, tasks: Sequence[MakeTask], shown: Callable[[Results], Results] = iter
    ) -> list[Any]:
        """Run tasks and return their results in order; `shown` is put around them as they come."""
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
        """Start tasks, and return at once an iterator that yields their results as `run` does.

        What is run meanwhile waits until each of these tasks has a worker, and then fills the gaps. Where nothing
        overlaps, the tasks start when the first result is asked for. `on_result` is called whenever a result has come,
        whether or not it has been asked for; in `folder` results wait past what may stay in memory.
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
