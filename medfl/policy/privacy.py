"""A site's privacy account: the cumulative privacy loss of all its replies about its training images.

A reply is a Gaussian mechanism: a change of the weights with norm at most C, plus noise of standard deviation sigma in
each number. If all training images of the site are replaced by as many others, the change moves by at most 2 C, so
the noise multiplier is z = sigma / 2 C. Replies are composed by the Renyi accountant (Mironov, 2017) of the library
dp_accounting. Every reply counts, also that of a repeated round, since its noise is drawn anew. It is recorded before
the site trains: a round that fails, e.g. because its numbers are not finite, has revealed that it did.

The account belongs to the images, not to a job: all jobs on one data folder share one file (`account_file`), which is
read again, checked and written under a lock, so that two concurrent jobs cannot spend the remainder twice.
Noised fingerprints have an epsilon of another kind, per case; these add up and are reported separately.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from medfl.core import (
    Count,
    Document,
    InputError,
    Refused,
    RunError,
    json_values,
    listed,
    matches_type,
    pick,
    pip_install,
    printable,
)
from medfl.storage import write_json

_NAMED = 4
_KEPT = ("noised", "plain", "uncovered", "answers", "case_epsilon")


def epsilon_of(replies: Mapping[float, int], delta: float) -> float:
    """Return epsilon, at a delta above 0 and below 1, of noise multiplier -> number of Gaussian mechanisms with it.

    Raises:
        InputError: the accountant library is not installed.
    """
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError as error:
        raise InputError(
            "a policy with clip and noise", "dp_accounting computes epsilon", pip_install("privacy")
        ) from error

    if not any(replies.values()):
        return 0.0

    accountant = rdp.RdpAccountant()
    # in one order: the sum of floats depends on it
    for multiplier, count in sorted(replies.items()):
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier), count)

    return float(accountant.get_epsilon(delta))


class BudgetExceeded(Exception):
    """A budget would be exceeded, by the epsilon `after`; nothing was spent."""

    def __init__(self, after: float) -> None:
        super().__init__(f"epsilon would be {after:g}")
        self.after = after


def account_file(folder: Path, data: str) -> Path:
    """Return the account file of a data folder, below the site's folder of States: named by its resolved path."""
    key = hashlib.sha256(os.fsencode(Path(data).expanduser().resolve())).hexdigest()[:16]
    return folder / f"data-{key}.privacy.json"


@dataclass
class Account:
    """Releases of a site so far; a file keeps them over restarts and over all runs on the same images.

    Attributes:
        path: the file; None: in memory.
        delta: of the reported (epsilon, delta).
        noised: noise multiplier -> number of replies with it.
        plain: replies without clipping or without noise.
        uncovered: name of a value released without noise -> how often.
        answers: number of unnoised answers about images that are kept out of training.
        case_epsilon: sum of the per-case epsilons of noised fingerprints.
    """

    path: Path | None = None
    delta: float = 1e-5
    noised: Counter[float] = field(default_factory=Counter)
    plain: int = 0
    uncovered: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    case_epsilon: float = 0.0

    @classmethod
    def open(cls, path: Path | None, delta: float) -> Account:
        """Continue the account in a file, or start one.

        Raises:
            RunError: the file is damaged; nothing may leave before somebody has checked it.
        """
        account = cls(path, delta)
        account.refresh()
        return account

    def refresh(self) -> None:
        """Read the file again, as `open` does: other jobs on the same images spend too."""
        # Whatever stands there is not taken for a new account
        if self.path is not None and os.path.lexists(self.path):
            vars(self).update(_read(self.path))

    def merge_site_account(self, other: Path) -> None:
        """Add the per-site account kept by earlier versions, and move that file aside."""
        if self.path is None:
            return
        with self._locked():
            # Under the lock: another job may have taken it.
            if os.path.lexists(other):
                for name, value in _read(other).items():
                    setattr(self, name, getattr(self, name) + value)
                self._write()
                other.rename(other.with_name(f"{other.name}.taken"))

    @property
    def replies(self) -> int:
        """Number of replies released."""
        return sum(self.noised.values()) + self.plain

    def epsilon(self, more: float | None = None) -> float:
        """Return epsilon so far, infinite if something was not covered; `more` adds a reply with this multiplier."""
        if self.plain or self.uncovered:
            return math.inf
        further = Counter({} if more is None else {more: 1})
        return epsilon_of(self.noised + further, self.delta)

    def spend(self, multiplier: float | None, budget: float | None = None) -> None:
        """Record a reply before it leaves: the multiplier of its noise, None if it was not clipped and noised.

        Raises:
            BudgetExceeded: epsilon would exceed the budget.
            RunError: it cannot be written.
        """
        with self._locked():
            if budget is not None:
                after = math.inf if multiplier is None else self.epsilon(multiplier)
                if after > budget:
                    raise BudgetExceeded(after)

            if multiplier is None:
                self.plain += 1
            else:
                self.noised[multiplier] += 1

            self._write()

    def add(self, uncovered: Mapping[str, int]) -> None:
        """Record what leaves without noise: parts of a reply, an introduction, an evaluation, statistics."""
        with self._locked():
            self.uncovered.update(uncovered)
            self._write()

    def add_answer(self, most: int | None) -> bool:
        """Record an answer about images that are kept out of training; return whether `most` allows it."""
        with self._locked():
            allowed = most is None or self.answers < most
            self.answers += allowed
            self._write()
        return allowed

    def add_fingerprint(self, epsilon: float) -> None:
        """Record a fingerprint before it leaves, by the epsilon of its noise."""
        with self._locked():
            self.case_epsilon += epsilon
            self._write()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file, and read it again."""
        if self.path is None:
            yield
            return

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A separate file: the account itself is replaced, and a lock would stay on the old one.
            lock_file = self.path.with_name(f".{self.path.name}.lock")
            lock = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RunError(
                f"the privacy account {self.path} cannot be locked ({error.strerror})"
            ) from error

        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refresh()
            yield
        finally:
            os.close(lock)

    def _write(self) -> None:
        if self.path is not None:
            write_json(self.path, self.as_dict())

    def words(self) -> str:
        """Return the account in plain words."""
        words = self._of_training()
        if self.answers:
            words += f"; questions about images kept out of training, answered without noise: {self.answers}"
        if self.case_epsilon:
            words += f"; fingerprints with noise: epsilon {self.case_epsilon:.3g} for one case"
        return words

    def _of_training(self) -> str:
        count = f"{self.replies} {'reply' if self.replies == 1 else 'replies'}"
        if self.uncovered:
            names = listed(list(map(printable, sorted(self.uncovered))), _NAMED)
            return f"{count}: no formal privacy, for these left without noise: {names}"

        if self.plain:
            share = "" if self.plain == self.replies else f"{self.plain} of the "
            return f"{count}: no formal privacy, for {share}replies left without clipping and noise"

        return (
            f"{count}: epsilon {self.epsilon():.3g} at delta {self.delta:g} for all training images of this site "
            "replaced by as many others (the number of images is sent exactly)"
        )

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        epsilon = self.epsilon()
        noised = [{"multiplier": z, "replies": n} for z, n in sorted(self.noised.items())]
        of_cases = {"case_epsilon": self.case_epsilon} if self.case_epsilon else {}
        return {
            "replies": self.replies,
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": self.delta,
            "words": self.words(),
            "noised": noised,
            "plain": self.plain,
            "uncovered": dict(sorted(self.uncovered.items())),
            "answers": self.answers,
            **of_cases,
        }


def _read(path: Path) -> Document:
    """Return the contents of an account file, by the names of the attributes."""
    try:
        # earlier versions had no answers and no fingerprints
        account = pick({"answers": 0, "case_epsilon": 0, **json_values(path)}, _KEPT)
        replies = account["noised"]
        noised = {item["multiplier"]: item["replies"] for item in replies}
        uncovered = Counter(account["uncovered"])
        counts = [account["plain"], account["answers"], *noised.values(), *uncovered.values()]
        amounts = [account["case_epsilon"], *noised]

        # Others, as negative ones, would give back what was spent
        if not (
            matches_type(counts, list[Count])
            and len(noised) == len(replies)
            and all(0 <= amount < math.inf for amount in amounts)
        ):
            raise Refused("its numbers are not those of releases")

        return {**account, "noised": Counter(noised), "uncovered": uncovered}
    except (Refused, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"the privacy account {path} cannot be read ({error}); restore it from a copy"
        ) from error
