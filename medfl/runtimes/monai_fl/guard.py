"""A site's guard: its optional rules for what leaves (`policy.gate`) and its audit log (`policy.audit`).

Without rules every message passes unchanged, without a log nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medfl.core import Document, MedflError, Message, Print, RunError, error_id
from medfl.data.fingerprint import Fingerprint, read
from medfl.evaluation import Cases, summarise
from medfl.policy.audit import Audit, describe_document, describe_message, numbers
from medfl.policy.gate import Gate
from medfl.policy.policy import Outbound
from medfl.policy.privacy import Account, account_file
from medfl.runtimes.monai_fl.view import SiteEnd
from medfl.runtimes.step import UNSENT, StepResult
from medfl.storage import State, safe_file_name, write_json


@dataclass(frozen=True)
class Activity:
    """A site's current activity: kind (train, evaluate, introduce, statistics, plan) and round."""

    kind: str
    round: int


def in_words(error: BaseException) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, MedflError):
        return text

    return f"{type(error).__name__}: {text}"


class Guard:
    """Checks and logs everything that enters or leaves a site.

    Without a folder the site's privacy account is in memory; the site may be "" until `open_account`.

    Attributes:
        min_count: for statistics; smaller counts are suppressed.

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
        """Set the site and its data folder, whose account all jobs are charged to.

        Raises:
            InputError: epsilon is to be reported, but its library is not installed.
            RunError: the site's privacy account cannot be read.
        """
        if self._log is not None:
            self._log.site = site
        # once for all visits: privacy loss adds up
        if self._rules != Outbound() and self._gate is None:
            file = None
            site_file = None
            if self._folder is not None:
                site_file = self._folder / f"{safe_file_name(site)}.privacy.json"
                file = account_file(self._folder, data) if data else site_file

            account = Account.open(file, self._rules.delta)
            # older accounts belonged to a site instead of data that several jobs use
            if site_file is not None and site_file != file:
                account.merge_site_account(site_file)

            self._gate = Gate(self._rules, account, site)

    @property
    def privacy(self) -> Document | None:
        """The site's release so far, None without rules."""
        if self._gate is None:
            return None

        return self._gate.account.as_dict()

    @property
    def clips_or_noises(self) -> bool:
        """Whether changes of the weights are clipped or get noise."""
        return self._rules.clip is not None or self._rules.noise is not None

    @property
    def noises(self) -> bool:
        """Whether noise is added to what leaves."""
        return self._rules.noise is not None

    # What comes

    def admit_received(self, activity: Activity, message: Callable[[], Message]) -> None:
        """Log what was received; before a training, charge its reply to the account.

        Raises:
            RunError: it exceeds the budget.
        """
        if self._log is not None:
            self._add(activity, "came", describe_message(message()))
        if self._gate is not None and activity.kind == "train":
            self._gate.charge_noised_reply()

    def log_failure(self, activity: Activity, why: BaseException) -> None:
        """Log a failure once, with the id that may be reported to the server."""
        # an error passes here at each level through which it propagates
        if self._log is not None and why is not self._written:
            self._written = why
            self._add(activity, "refused", {"reason": in_words(why), "failure": error_id(why)})

    # What leaves

    def reply(self, message: Message, received: Message, samples: int) -> Message:
        """Return a reply as it may leave, before compression."""
        if self._gate is None:
            return message

        return self._gate.reply(message, received, samples)

    def allowed_numbers(self, numbers: Mapping[str, object], *optional: str) -> Document:
        """Return the numbers beside a message that may leave (`Gate.allowed_numbers`)."""
        if self._gate is None:
            return dict(numbers)

        return self._gate.allowed_numbers(numbers, *optional)

    def charge_reply(self, activity: Activity, reply: Message, wire: Message, samples: int) -> None:
        """Charge a reply to the account before it leaves, and report it; `wire` is the compressed reply.

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
        """Check an introduction before it leaves; log any message.

        `from_images`: the introduction depends on the site's images; `numbers` are those beside the message.

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
        view: SiteEnd,
    ) -> None:
        """Check and log what the caller of a visit may release: metrics, tables, or in a simulation what it shows.

        `counted`: the number of each section's items is released with its metrics. `view` returns what is released
        about outcomes, and whether a section is shown to share no image with the training images.

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
                numbers_of_section: Mapping[str, object] = outcome
                if isinstance(outcome, Cases):
                    numbers_of_section = summarise(view.told(outcome))
                    if counted and len(outcome):
                        values[f"{section}/cases"] = len(outcome)

                for name, value in numbers_of_section.items():
                    values[f"{section}/{name}"] = _plain(value)

            # noise protects the training images: metrics of a model on images it never saw need none
            trained_before = bool(set(state or {}) - {UNSENT})
            from_images = (
                trained or trained_before or (self.noises and not all(map(view.is_held_out, cases)))
            )
            self._numbers(activity, "metrics", values, from_images=from_images)

    def fingerprint(
        self, activity: Activity, bundle: str, gather: Callable[[float], Fingerprint]
    ) -> Fingerprint:
        """Return a site's fingerprint, checked and logged; noise is drawn once per bundle hash.

        Raises:
            RunError: it may not leave.
        """
        epsilon = self._rules.fingerprint_epsilon
        if epsilon is None:
            answer = gather(0.0)
            self._numbers(activity, "fingerprint", answer.document(), from_images=True)
            return answer

        assert self._gate is not None
        account = self._gate.account.path
        file = None if account is None else account.with_suffix(f".{bundle[:16]}.fingerprint.json")
        # drawn again and again, noise would average out
        if file is not None and file.is_file():
            answer = read(file)
            epsilon = 0.0
        else:
            answer = gather(epsilon)

        self._gate.charge_fingerprint(answer.document(), epsilon)
        if file is not None:
            write_json(file, answer.document())

        self._log_numbers(activity, answer.document())
        return answer

    def check_statistics(self, activity: Activity, numbers: Mapping[str, object]) -> None:
        """Check and log statistics of the site's images.

        Raises:
            RunError: they may not leave.
        """
        self._numbers(activity, "data_stats", numbers, from_images=True)

    def _numbers(
        self, activity: Activity, group: str, values: Mapping[str, object], *, from_images: bool
    ) -> None:
        if self._gate is not None:
            self._gate.charge_numbers(group, values, from_images=from_images)
        self._log_numbers(activity, values)

    def _log_numbers(self, activity: Activity, values: Mapping[str, object]) -> None:
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
    """Return a number or a table as JSON, a table with one number as that number."""
    if not isinstance(value, np.ndarray):
        return value
    if value.size == 1:
        return value.item()

    return value.tolist()
