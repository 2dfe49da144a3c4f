"""What a site's policy says of what may leave: the key `outbound` of the policy file (`medfl.policy.policy`).

    outbound:
      keys: [weights, scalars/samples]   # patterns of group/name, or a group; anything else refuses the round
      max_bytes: 50000000                # of one reply as it is encoded
      clip: 1.0                          # largest L2 norm of a reply's change of the weights
      noise: 5.0                         # standard deviation of Gaussian noise in each number of that change
      epsilon: 8                         # a budget: rounds that would go beyond it are refused
      delta: 1.0e-5                      # the chance that epsilon leaves out
      answers: 500                       # with noise, the most answers about images that are kept out of training
      min_count: 10                      # of statistics and tables, counts below it are not told

Every key may be left out; without any of them nothing changes. Names that leave: `weights/...` and other groups of a
reply, `scalars/...`, `metrics/...` of an evaluation (over FLARE with the number of a section's items, as
`metrics/validate/cases`; of a job that only examines the tables of `medfl.evaluation.tally`, as
`metrics/test/confusion`), `data_stats`, and `told/train_loss`, `told/labels` and `told/channels` (which structures the
masks show and which channels the images have, where job or site say so), which are left out rather than refused. The
number of steps and of training images, and whether the site kept a State, come with every reply. How it is done:
`medfl.policy.gate`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from medfl.core.errors import InputError, did_you_mean
from medfl.core.untrusted import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Outbound:
    """Rules for what leaves, as the keys above; the default lets leave what the method sends."""

    keys: tuple[str, ...] | None = None
    max_bytes: int | None = None
    clip: float | None = None
    noise: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    answers: int | None = None
    min_count: int = 0

    @classmethod
    def read(cls, values: object, where: str) -> Outbound:
        """Read the values of the key `outbound` as YAML gives them; `where` names the file in errors.

        Raises:
            InputError: they say something that no policy can say.
        """
        if not isinstance(values, dict):
            raise InputError(
                f"{where}: outbound is a {type(values).__name__}",
                "keys and values",
                "see docs/deploy.md",
            )

        check_known(values, cls.__dataclass_fields__, f"{where}: outbound: key")
        rules = cls(**{name: _value(name, value, where) for name, value in values.items()})
        if rules.epsilon is not None and not rules.has_formal_privacy:
            raise InputError(
                f"{where}: outbound has epsilon without {'clip' if rules.clip is None else 'noise'}",
                "a budget is kept by clipping and noise",
                "add clip and noise, or take epsilon out",
            )

        return rules

    @property
    def has_formal_privacy(self) -> bool:
        """Whether changes are limited and noised, so that (epsilon, delta) can be told of them."""
        return self.clip is not None and self.noise is not None

    @property
    def multiplier(self) -> float:
        """Noise per sensitivity: two changes whose norms are at most C differ by at most 2 C."""
        assert self.clip is not None
        assert self.noise is not None
        return self.noise / (2 * self.clip)

    def refused(self, names: Iterable[str]) -> list[str]:
        """Return those of some names that may not leave."""
        return [name for name in names if not self.permits(name)]

    def permits(self, name: str) -> bool:
        """Tell whether something of this name may leave."""
        if self.keys is None:
            return True
        group = name.partition("/")[0]
        return any(fnmatchcase(name, key) or key == group for key in self.keys)

    def as_dict(self) -> dict[str, object]:
        """Return what differs from the default, as the policy file has it."""
        changed = changes(self)
        if self.keys is not None:
            changed["keys"] = list(self.keys)
        return changed

    def lines(self) -> list[str]:
        """Say the rules, a line each."""
        if self.keys is None:
            keys = "everything that the method sends"
        else:
            keys = ", ".join(self.keys) or "nothing"

        lines = [f"may leave: {printable(keys, 300)}"]
        if self.max_bytes is not None:
            lines.append(f"a reply has at most {self.max_bytes:,} bytes")

        if self.clip is not None:
            lines.append(f"the change of the weights is clipped to an L2 norm of {self.clip:g}")

        if self.noise is not None:
            lines.append(
                f"Gaussian noise with a standard deviation of {self.noise:g} is added to each number of it"
            )

        if not self.has_formal_privacy:
            reason = "nothing is clipped" if self.clip is None else "no noise is added"
            lines.append(f"no formal privacy: {reason}")

        if self.epsilon is not None:
            lines.append(f"the budget is epsilon {self.epsilon:g} at delta {self.delta:g}")

        if self.answers is not None:
            lines.append(
                f"at most {self.answers} questions about images kept out of training are answered"
            )

        if self.min_count:
            lines.append(f"of statistics, counts below {self.min_count} are not told")

        return lines


def changes(rules: DataclassInstance) -> dict[str, object]:
    """Return what differs from the default, by name, in plain values."""
    defaults = type(rules)()
    return {k: v for k, v in asdict(rules).items() if v != getattr(defaults, k)}


def check_known(names: Iterable[object], known: Collection[str], what: str) -> None:
    """Raise an InputError if a name in a policy is not known; `what` says where it stands and what it is."""
    for name in names:
        if name not in known:
            advice = did_you_mean(str(name), known, "take it out")
            raise InputError(f"{what} {printable(name)!r}", f"known are {', '.join(known)}", advice)


_ALLOWED: Mapping[str, str] = {
    "keys": "a list of patterns as weights/* or scalars/samples",
    "max_bytes": "a whole number of at least 1",
    "clip": "a number above 0",
    "noise": "a number above 0",
    "epsilon": "a number above 0",
    "delta": "a number above 0 and below 1",
    "answers": "a whole number of at least 1",
    "min_count": "a whole number of at least 0",
}


def _value(name: str, value: Any, where: str) -> Any:
    if name == "keys":
        good = isinstance(value, list) and all(isinstance(key, str) and key for key in value)
        value = tuple(value) if good else value
    elif name in ("max_bytes", "answers", "min_count"):
        # isinstance would take True for a number.
        good = type(value) is int and value >= (name != "min_count")
    else:
        value = _number(value)
        good = 0 < value < (1 if name == "delta" else math.inf)

    if not good:
        raise InputError(
            f"{where}: outbound: {name} is {printable(value)}",
            _ALLOWED[name],
            "change it in this file",
        )
    return value


def _number(value: Any) -> float:
    """Return a number, also one like 1e-5, which YAML takes for text."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
