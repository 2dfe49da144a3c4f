"""Handling of a site's missing or refused reply in a round.

By default the first failure ends the run, which can be resumed. With a minimum number of replies, the round continues
without the sites that failed, and the user is told which and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from medfl.core import Document, InputError, Print, RunError, present
from medfl.runtimes.federation import Federation

_KEPT = "; the last good round is kept"


class FailedReply(NamedTuple):
    """A site's reply that is missing or refused, with the reason in one line for the user."""

    site: str
    why: str


@dataclass(frozen=True)
class Tolerance:
    """Fault tolerance of a run; not part of its hash, since it changes nothing unless a site fails.

    Attributes:
        min_replies: sites of a cohort that have to reply; None: all of them.
        deadline: time limit for the sites' replies in a round, in seconds; None: no limit.
        max_share: largest weight of one of three or more sites if the run has no cap; None: any.

    Raises:
        InputError: the number of replies is below 1, or the deadline not above 0.
    """

    min_replies: int | None = None
    deadline: float | None = None
    max_share: float | None = None

    def __post_init__(self) -> None:
        if self.min_replies is not None and self.min_replies < 1:
            raise InputError(
                f"--min-replies {self.min_replies}",
                "a whole number of at least 1",
                "give 1 or more",
            )
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise InputError(
                f"--deadline {self.deadline:g}",
                "seconds, above 0",
                "give for example --deadline 600",
            )

    def check(self, federation: Federation) -> None:
        """Check against a run's cohorts and aggregation.

        Raises:
            InputError: a cohort has fewer sites, or the aggregation needs more replies.
        """
        if self.min_replies is None:
            return

        flag = f"--min-replies {self.min_replies}"
        size = len(federation.cohort(1))
        aggregation = federation.aggregation
        if self.min_replies > size:
            raise InputError(flag, f"a round's cohort has {size} sites", f"ask for {size} or fewer")

        if self.min_replies < aggregation.least:
            raise InputError(
                f"{flag} with --aggregation {aggregation}",
                f"{aggregation} needs at least {aggregation.least} replies",
                f"give {aggregation.least} or more",
            )

    def record(self) -> Document:
        """Return what run.json tells of it."""
        return present(asdict(self))


@dataclass(frozen=True)
class Attendance:
    """Which of the requested sites have answered.

    Attributes:
        names: the sites.
        least: how many have to answer; None: all of them.
        left_out: site -> why it did not answer; filled here.
        label: the request, e.g. "round 3".
        say: reports a missing site.
    """

    names: Sequence[str]
    least: int | None
    left_out: dict[str, str]
    label: str
    say: Print

    def present(self, answers: Iterable[tuple[int, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield (site, answer) from (index of the site, its answer or failure); RunError if too few can answer."""
        for index, answer in answers:
            if isinstance(answer, FailedReply):
                self.drop({self.names[index]: answer.why})
            else:
                yield self.names[index], answer

    def drop(self, reasons: Mapping[str, str]) -> None:
        """Drop the sites that have a reason, and report it; RunError if too few remain."""
        sender = "site {!r}".format
        if self.least is None and reasons:
            lines = []
            for name, reason in reasons.items():
                # most errors already name the site
                is_named = reason.startswith(sender(name))
                lines.append(reason if is_named else f"{sender(name)}: {reason}")

            raise RunError("; ".join(lines))

        for name, reason in reasons.items():
            self.left_out[name] = reason.replace(_KEPT, "").removeprefix(sender(name)).lstrip(":, ")
            self.say(f"{self.label}: without site {name!r}: {self.left_out[name]}")

        if reasons and len(self.names) - len(self.left_out) < (self.least or 0):
            listed = "; ".join(f"{site}: {why}" for site, why in self.left_out.items())
            raise RunError(
                f"{self.label}: {len(self.left_out)} of {len(self.names)} sites do not answer, and at least "
                f"{self.least} have to ({listed}){_KEPT}: continue with --resume"
            )
