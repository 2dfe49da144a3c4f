"""Tasks for the sites and for the server's model, created for one run and given to its workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from medfl.core import Message, Print, RunError, bar
from medfl.runtimes.attendance import Attendance, FailedReply, Tolerance
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.profiling import MESSAGES, during
from medfl.runtimes.server.claims import check_counts
from medfl.runtimes.step import StepResult
from medfl.runtimes.tasks import Answer, Introduce, MakeTask, Results, RoundTask, Train
from medfl.storage import RunFolder, State


@dataclass
class Dispatcher:
    """Creates the tasks of one run, each when its turn comes, and yields (site, result) as the results arrive."""

    federation: Federation
    folder: RunFolder
    workers: Workers
    tolerance: Tolerance
    say: Print
    # whether scoring shows a progress bar on stderr
    progress: bool = False

    def introductions(self, missing: dict[str, str]) -> Iterator[tuple[str, Message]]:
        """Yield the introductions; `missing` receives the reason for each site without one.

        Raises:
            RunError: too few sites have one.
        """
        names = self.federation.participants
        results = self.workers.run([partial(Introduce, name) for name in names])
        return self._present(names, results, missing, "introductions")

    def train(
        self,
        round_: int,
        server: State,
        names: Sequence[str],
        sections: Sequence[str],
        left_out: dict[str, str],
        on_result: Callable[[], object],
    ) -> Iterator[tuple[str, tuple[StepResult, bool]]]:
        """Start the training of a round; yield the result of each site, and whether it has a new State.

        Training continues while other tasks are run, if the workers support both. The trained models are scored on
        `sections`; `left_out` receives the reason for each site without a reply; `on_result` is called whenever a
        site's result arrives.

        Raises:
            RunError: too few sites replied.
        """

        def task(**fields: Answer) -> Train:
            path = self.folder.state_path(round_, fields["site"])
            return Train(**fields, new_state=path, sections=tuple(sections))

        # longest site first: it has the most training items, since all sites train the same number of local epochs
        results = self.workers.start(
            [partial(self._make, task, round_, server, name) for name in names],
            self._sizes(names, "train"),
            on_result=on_result,
            folder=self.folder.path,
        )

        return self._present(names, results, left_out, f"round {round_}")

    def _present(
        self,
        names: Sequence[str],
        results: Results,
        left_out: dict[str, str],
        label: str,
    ) -> Iterator[tuple[str, Answer]]:
        """Yield (site, result) for results that pass the checks, as `Attendance.present`."""
        checked = ((index, self._checked(names[index], result)) for index, result in results)
        attendance = Attendance(names, self.tolerance.min_replies, left_out, label, self.say)
        return attendance.present(checked)

    def _checked(self, name: str, result: Answer) -> Answer:
        """Return an introduction or a training result, or `FailedReply` if it is incomplete or makes invalid claims."""
        if isinstance(result, FailedReply):
            return result

        message = result if isinstance(result, Message) else result[0].reply
        try:
            # an introduction has no weights yet
            if message is not result:
                self.federation.message_rules(name).check_complete(message)
            check_counts(self.federation, name, message, self.workers.item_count(name))
        except RunError as error:
            return FailedReply(name, str(error))

        return result

    def at_sites(
        self,
        task: Callable[..., RoundTask],
        round_: int,
        server: State,
        names: Sequence[str],
        sections: Sequence[str] = (),
    ) -> Iterator[tuple[str, Answer]]:
        """Yield the result of a task at each site; if sites may be missing, one is enough.

        `task` creates it, called with the fields of `RoundTask`; it processes items of `sections`, whose numbers
        determine the longest site.
        """
        tasks = [partial(self._make, task, round_, server, name) for name in names]
        sizes = self._sizes(names, *sections) if sections else None
        results = self._shown(len(tasks), self.workers.run(tasks, sizes))
        # scores change no weights, so one site is enough if failures are tolerated at all
        least = None if self.tolerance.min_replies is None else 1
        return Attendance(names, least, {}, "scores", self.say).present(results)

    def at_server(self, tasks: Sequence[MakeTask]) -> list[Answer]:
        """Return the results of tasks on the server's model, in order."""
        return self.workers.all(tasks, partial(self._shown, len(tasks)))

    def _shown(self, count: int, results: Results) -> Results:
        yield from bar(results, count, desc="scoring", unit="part", shown=self.progress)

    def _make(
        self, task: Callable[..., RoundTask], round_: int, server: State, name: str
    ) -> RoundTask:
        # in a scope: a method may lease a network to make the message
        with during(MESSAGES), self.federation.networks.scope():
            broadcast = self.federation.method.broadcast(self.federation.host(round_), server, name)
        return task(
            site=name, round=round_, state=self.folder.newest_state(name), broadcast=broadcast
        )

    def _sizes(self, names: Sequence[str], *sections: str) -> list[int]:
        sizes = []
        for name in names:
            shards = [self.federation.participant_shard(name, section) for section in sections]
            sizes.append(sum(map(len, shards)))

        return sizes


# The training of a round, which may start before the previous round has been evaluated, and how its time counts.


class RoundTraining:
    """The training of one round, from its start.

    Attributes:
        results: the result of each site, and whether it has a new State.
        left_out: the reason for each site without a reply.
        started: start time, in seconds of `time.perf_counter`.
        overlap: seconds of it during which the previous round was still being evaluated; 0 if that had ended before.
    """

    results: Iterator[tuple[str, tuple[StepResult, bool]]]

    def __init__(self, round_: int, cohort: list[str], on_result: Callable[[], object]) -> None:
        self.round = round_
        self.cohort = cohort
        self.left_out: dict[str, str] = {}
        self.started = time.perf_counter()
        self.overlap = 0.0
        self._on_result = on_result
        self._open = len(cohort)
        self._last = 0.0

    def count_result(self) -> None:
        """Note that a site's result has arrived."""
        self._open -= 1
        self._last = time.perf_counter()
        self._on_result()

    def evaluation_seconds(self, ended: float) -> float:
        """Return how long the previous round's evaluation, which has `ended`, continued after the last result.

        The time before that counts for this training (`overlap`), so that none counts twice.
        """
        # results are still open: this training continues, so all of the evaluation falls within it
        self.overlap = (ended if self._open else self._last) - self.started
        return ended - self.started - self.overlap
