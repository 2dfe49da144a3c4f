"""A site's guard: its rules for what leaves (`policy.gate`) and its audit log (`policy.audit`), where it has any.

Without rules every message passes as it is, without a log nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medfl.core.documents import Document
from medfl.core.errors import MedflError, RunError, error_id
from medfl.core.message import Message
from medfl.core.terminal import Print
from medfl.evaluation.metrics import Cases, summarise
from medfl.policy.audit import Audit, describe_document, describe_message, numbers
from medfl.policy.gate import Gate
from medfl.policy.policy import Outbound
from medfl.policy.privacy import Account, account_file
from medfl.runtimes.step import UNSENT, StepResult
from medfl.storage.files import State
from medfl.storage.run_folder import safe_file_name


@dataclass(frozen=True)
class Activity:
    """What a site is doing: kind (train, evaluate, introduce, statistics) and round."""

    kind: str
    round: int


def in_words(error: BaseException) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, MedflError):
        return text

    return f"{type(error).__name__}: {text}"


class Guard:
    """Checks and logs whatever enters or leaves a site.

    Without a folder the account of the site's privacy lasts in memory; the site may be "" until `open_account`.

    Attributes:
        min_count: of statistics, counts below it are not told.

    Raises:
        InputError: the log cannot be written.
    """

    def __init__(
        self,
        rules: Outbound | None,
        audit: Path | str | None,
        folder: Path | None,
        say: Print,
        site: str,
    ) -> None:
        self._rules = rules or Outbound()
        self._folder = folder
        self._say = say
        self._log = None if audit is None else Audit(audit, site, say)
        self._gate: Gate | None = None
        self._written: BaseException | None = None
        self.min_count = self._rules.min_count

    def open_account(self, site: str, data: str) -> None:
        """Say which site it is, and of which data folder, on whose account all jobs spend.

        Raises:
            InputError: epsilon is to be told, but its library is not installed.
            RunError: the account of the site's privacy cannot be read.
        """
        if self._log is not None:
            self._log.site = site
        # once for all visits: what a site tells adds up
        if self._rules != Outbound() and self._gate is None:
            file = None
            site_file = None
            if self._folder is not None:
                site_file = self._folder / f"{safe_file_name(site)}.privacy.json"
                file = account_file(self._folder, data) if data else site_file

            account = Account.open(file, self._rules.delta)
            # accounts were of a site before they were of the data that several jobs use
            if site_file is not None and site_file != file:
                account.merge_site_account(site_file)

            self._gate = Gate(self._rules, account, site)

    @property
    def privacy(self) -> Document | None:
        """What the site has told so far, None without rules."""
        if self._gate is None:
            return None

        return self._gate.account.as_dict()

    @property
    def clips_or_noises(self) -> bool:
        """Whether changes of the weights are clipped or noised."""
        return self._rules.clip is not None or self._rules.noise is not None

    @property
    def noises(self) -> bool:
        """Whether noise is added to what leaves."""
        return self._rules.noise is not None

    # What comes

    def admit_received(self, activity: Activity, message: Callable[[], Message]) -> None:
        """Write down what came; before a training, charge its reply to the account.

        Raises:
            RunError: it is beyond the budget.
        """
        if self._log is not None:
            self._add(activity, "came", describe_message(message()))
        if self._gate is not None and activity.kind == "train":
            self._gate.charge_noised_reply()

    def log_failure(self, activity: Activity, why: BaseException) -> None:
        """Write down what went wrong, once, with the id that the server may be told of it."""
        # an error passes here at each level that it is raised through
        if self._log is not None and why is not self._written:
            self._written = why
            self._add(activity, "refused", {"reason": in_words(why), "failure": error_id(why)})

    # What leaves

    def reply(self, message: Message, received: Message, samples: int) -> Message:
        """Return a reply as it may leave, before it is made smaller."""
        if self._gate is None:
            return message

        return self._gate.reply(message, received, samples)

    def allowed_numbers(self, numbers: Mapping[str, object], *optional: str) -> Document:
        """Return the numbers beside a message that may leave (`Gate.allowed_numbers`)."""
        if self._gate is None:
            return dict(numbers)

        return self._gate.allowed_numbers(numbers, *optional)

    def charge_reply(self, activity: Activity, reply: Message, wire: Message, samples: int) -> None:
        """Charge a reply that is about to leave to the account, and say so; `wire` is the reply compressed.

        Raises:
            RunError: it is too large.
        """
        if self._gate is not None:
            self._gate.check_size(wire)
            self._gate.charge_without_noise(reply, samples)
            self._say(
                f"site {self._gate.site!r}, round {activity.round}: {self._gate.account.words()}"
            )

    def admit_sent(
        self, activity: Activity, wire: Message, numbers: Mapping[str, object], *, from_images: bool
    ) -> None:
        """Check an introduction that is about to leave; write down any message.

        `from_images`: an introduction depends on the site's images; `numbers` are those beside the message.

        Raises:
            RunError: it may not leave; names what.
        """
        if self._gate is not None and activity.kind == "introduce":
            self._gate.check_size(wire)
            self._gate.charge_introduction(wire, from_images=from_images)

        if self._log is not None:
            about = describe_message(wire, norms=True)
            beside = {str(name): value for name, value in numbers.items()}
            self._add(activity, "left", {**about, "numbers": {**about["numbers"], **beside}})

    def check_scores(
        self,
        activity: Activity,
        function: str,
        metrics: object,
        state: State | None,
        counted: bool,
        is_held_out: Callable[[str], bool],
    ) -> None:
        """Check and write down what the caller of a visit may tell: metrics, tables, or in a simulation what it shows.

        `counted` says whether the number of each section's items is told beside its metrics, `is_held_out` of a section
        whether it is shown to have none of the training images.

        Raises:
            RunError: it may not leave.
        """
        trained = isinstance(metrics, StepResult)
        cases = metrics.cases if isinstance(metrics, StepResult) else metrics
        if not (
            isinstance(cases, Mapping)
            and all(isinstance(outcome, Cases | dict) for outcome in cases.values())
        ):
            if self._gate is not None:
                raise RunError(
                    f"site {self._gate.site!r}: its outbound policy refuses: {function}, which shows cases"
                )
            if self._log is not None:
                self._add(activity, "left", {"reason": f"{function}, shown in a simulation"})
            return

        if self._gate is not None or self._log is not None:
            values: dict[str, object] = {}
            for section, outcome in cases.items():
                numbers_of_section: Mapping[str, object] = {}
                if isinstance(outcome, Cases):
                    numbers_of_section = summarise(outcome)
                    if counted and len(outcome):
                        values[f"{section}/cases"] = len(outcome)
                else:
                    numbers_of_section = outcome

                for name, value in numbers_of_section.items():
                    values[f"{section}/{name}"] = _plain(value)

            # noise protects the training images: metrics of a model that never saw them need none
            trained_before = bool(set(state or {}) - {UNSENT})
            from_images = (
                trained or trained_before or (self.noises and not all(map(is_held_out, cases)))
            )
            self._numbers(activity, "metrics", values, from_images=from_images)

    def check_statistics(self, activity: Activity, numbers: Mapping[str, object]) -> None:
        """Check and write down statistics of the site's images.

        Raises:
            RunError: they may not leave.
        """
        self._numbers(activity, "data_stats", numbers, from_images=True)

    def _numbers(
        self, activity: Activity, group: str, values: Mapping[str, object], *, from_images: bool
    ) -> None:
        if self._gate is not None:
            self._gate.charge_numbers(group, values, from_images=from_images)
        if self._log is not None:
            plain = {}
            for name, value in values.items():
                if isinstance(value, int | float):
                    plain[name] = value

            entry = {**describe_document(values), "numbers": numbers(plain)}
            self._add(activity, "left", entry)

    def _add(self, activity: Activity, direction: str, entry: Mapping[str, object]) -> None:
        assert self._log is not None
        line = {"round": activity.round, "direction": direction, "kind": activity.kind, **entry}
        if self._gate is not None and direction == "left":
            line["privacy"] = self._gate.account.words()

        self._log.add(line)


def _plain(value: object) -> object:
    """Return a number or a table as JSON has it, a table of a single number as that."""
    if not isinstance(value, np.ndarray):
        return value
    if value.size == 1:
        return value.item()

    return value.tolist()
