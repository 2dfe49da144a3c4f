"""What the server asks of the sites, and whose answers it goes on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.core.run_folder import RunFolder
from medfl.core.storage import State
from medfl.core.terminal import Print
from medfl.evaluation.metrics import Cases
from medfl.runtimes import profiling
from medfl.runtimes.absent import Absent, Tolerance, present
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.visits import scored, served, train, tried
from medfl.runtimes.local.workers import Later, Task, Workers
from medfl.runtimes.step import StepResult, introduce


class Asking:
    """Makes the tasks of one run's sites, each when it is its turn, and yields (site, answer) as the answers come.

    Args:
        federation: sites and server.
        folder: of the run, where the sites' States are.
        workers: what runs tasks.
        tolerance: how many may fail to answer.
        say: where lines for the user go.
    """

    def __init__(
        self, federation: Federation, folder: RunFolder, workers: Workers, tolerance: Tolerance, say: Print
    ) -> None:
        """Take the parts."""
        self.federation, self.folder, self.workers = federation, folder, workers
        self.tolerance, self.say = tolerance, say

    def introduced(self, missing: dict[str, str]) -> Iterator[tuple[str, Message]]:
        """Yield the introductions.

        Args:
            missing: takes the reason of each site without one.

        Raises:
            RunError: too few sites have one.
        """
        names = self.federation.participants
        answers = self.workers.run([(introduce, (name,)) for name in names])
        return present(names, answers, self.tolerance.min_replies, missing, "introductions", self.say)

    def trained(
        self,
        round_: int,
        server: State,
        names: Sequence[str],
        judge: Sequence[str],
        left_out: dict[str, str],
        came: Callable[[], object],
    ) -> Iterator[tuple[str, tuple[StepResult, bool]]]:
        """Begin with the training of a round; yield what it gave at each site, and whether there is a new State.

        It goes on while something else is asked, if the workers can do both.

        Args:
            round_: in which round.
            server: the server's State.
            names: the cohort.
            judge: sections that the trained models are scored on.
            left_out: takes the reason of each site without a reply.
            came: called whenever a site's answer has come.

        Raises:
            RunError: too few sites replied.
        """

        def task(name: str) -> Task:
            fresh = str(self.folder.state_path(round_, name))
            return train, (round_, name, self._kept(name), fresh, self._broadcast(round_, server, name), tuple(judge))

        # longest site first: it has the most training items, for the local epochs are the same everywhere
        answers = self.workers.begin(
            [partial(task, name) for name in names],
            self._sizes(names, "train"),
            round_=round_,
            came=came,
            folder=self.folder.path,
        )
        whole = ((index, self._whole(names[index], answer)) for index, answer in answers)
        return present(names, whole, self.tolerance.min_replies, left_out, f"round {round_}", self.say)

    def _whole(self, name: str, answer: Absent | tuple[StepResult, bool]) -> Absent | tuple[StepResult, bool]:
        """Return a site's answer, or `Absent` if the server could do nothing with it."""
        if isinstance(answer, Absent):
            return answer
        try:
            self.federation.check_whole(name, answer[0].reply)
        except RunError as error:
            return Absent(name, str(error))
        return answer

    def tried(
        self, round_: int, server: State, names: Sequence[str], judge: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Cases]]]:
        """Yield the outcomes by section of what training would give at each site; nothing is kept."""

        def task(name: str) -> Task:
            return tried, (round_, name, self._kept(name), self._broadcast(round_, server, name), tuple(judge))

        return self._scores(names, [partial(task, name) for name in names], self._sizes(names, "train"))

    def scored(
        self,
        function: Callable[..., Any],
        round_: int,
        server: State,
        names: Sequence[str],
        rest: Callable[[str], tuple[Any, ...]] = lambda name: (),
        sections: Sequence[str] = (),
    ) -> Iterator[tuple[str, Any]]:
        """Yield what a function of `step` that trains nothing gives at each site.

        Args:
            function: (federation, round, site, State, message, *rest).
            round_: in which round.
            server: the server's State.
            names: the sites.
            rest: further arguments for a site.
            sections: those whose items it goes through, by which the longest site is known.
        """

        def task(name: str) -> Task:
            down = self._broadcast(round_, server, name)
            return scored, (function, round_, name, self._kept(name), down, *rest(name))

        sizes = self._sizes(names, *sections) if sections else None
        return self._scores(names, [partial(task, name) for name in names], sizes)

    def served(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function of `step` about the server's model, once with each of the arguments."""
        return self.workers.all([(served, (function, *some)) for some in arguments])

    def _scores(
        self, names: Sequence[str], tasks: Sequence[Later], sizes: Sequence[float] | None
    ) -> Iterator[tuple[str, Any]]:
        """Yield the answers; where some may be missing, one is enough."""
        least = None if self.tolerance.min_replies is None else 1
        return present(names, self.workers.run(tasks, sizes), least, {}, "scores", self.say)

    def _broadcast(self, round_: int, server: State, name: str) -> Message:
        with profiling.during(profiling.MESSAGES), self.federation.networks.scope():
            return self.federation.method.broadcast(self.federation.host(round_), server, name)

    def _kept(self, name: str) -> str | None:
        path = self.folder.newest_state(name)
        return None if path is None else str(path)

    def _sizes(self, names: Sequence[str], *sections: str) -> list[int]:
        return [sum(len(self.federation.work(name, section)) for section in sections) for name in names]
