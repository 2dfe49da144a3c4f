"""Tasks for the sites and for the server's model, made for one run and handed to its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.core.terminal import Print, bar
from medfl.runtimes.attendance import Attendance, FailedReply, Tolerance
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.profiling import MESSAGES, during
from medfl.runtimes.server.claims import check_counts
from medfl.runtimes.step import StepResult
from medfl.runtimes.tasks import Introduce, MakeTask, Results, RoundTask, Train
from medfl.storage.files import State
from medfl.storage.run_folder import RunFolder


@dataclass
class Dispatcher:
    """Makes the tasks of one run, each when its turn comes, and yields (site, result) as the results come."""

    federation: Federation
    folder: RunFolder
    workers: Workers
    tolerance: Tolerance
    say: Print
    # whether scores show a bar on stderr as they come
    progress: bool = False

    def introductions(self, missing: dict[str, str]) -> Iterator[tuple[str, Message]]:
        """Yield the introductions; `missing` takes the reason of each site without one.

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

        Training goes on while other tasks are run, if the workers can do both. The trained models are scored on
        `sections`; `left_out` takes the reason of each site without a reply, `on_result` is called whenever a site's
        result has come.

        Raises:
            RunError: too few sites replied.
        """

        def task(**fields: Any) -> Train:
            path = self.folder.state_path(round_, fields["site"])
            return Train(**fields, new_state=path, sections=tuple(sections))

        # longest site first: it has the most training items, for the local epochs are the same everywhere
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
    ) -> Iterator[tuple[str, Any]]:
        """Yield (site, result) of those whose result passes the checks, as `Attendance.present`."""
        checked = ((index, self._checked(names[index], result)) for index, result in results)
        attendance = Attendance(names, self.tolerance.min_replies, left_out, label, self.say)
        return attendance.present(checked)

    def _checked(self, name: str, result: Any) -> Any:
        """Return an introduction or a training's result, or `FailedReply` if it lacks or claims what it should not."""
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
    ) -> Iterator[tuple[str, Any]]:
        """Yield the result of a task at each site; where some sites may be missing, one is enough.

        `task` makes it, called with the fields of `RoundTask`; it goes through items of `sections`, by which the
        longest site is known.
        """
        tasks = [partial(self._make, task, round_, server, name) for name in names]
        sizes = self._sizes(names, *sections) if sections else None
        results = self._shown(len(tasks), self.workers.run(tasks, sizes))
        # scores change no weights, so one site is enough where failures are tolerated at all
        least = None if self.tolerance.min_replies is None else 1
        return Attendance(names, least, {}, "scores", self.say).present(results)

    def at_server(self, tasks: Sequence[MakeTask]) -> list[Any]:
        """Return the results of tasks with the server's model, in order."""
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
