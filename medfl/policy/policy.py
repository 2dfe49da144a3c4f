"""A site's policy: which files a bundle consists of, and what it may do beyond the default.

    bundle: hippocampus          # the folder's name
    allow: [scripts]             # words, see `PERMISSIONS`
    limits: {config_bytes: 200000}
    files:                       # sha256 of each; with it, a bundle has these files and no others
      configs/train.yaml: 3f5a...
    outbound: {clip: 1.0}        # what may leave the site, see `Outbound`
    jobs: [train, evaluate]      # what a job may do; evaluate: examine or calibrate a finished model; plan: ask for
                                 # the site's fingerprint (medfl plan), only where it is named
    methods: [fedavg, scaffold]  # that a job may ask for
    settings: {rounds: 100}      # the most that a job may ask for, see `MOST`

Every key may be left out, for no rule. The site keeps the file, outside of the bundle; nothing of it comes over a wire.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from medfl.core import (
    InputError,
    Plain,
    Refused,
    Run,
    check_name,
    decode_text,
    did_you_mean,
    examines,
    matches_type,
    printable,
    read_bytes,
    read_plain,
    words_of,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# A site's policy on what may leave: the key `outbound` of the policy file.
#
#     outbound:
#       keys: [weights, scalars/samples]   # patterns of group/name, or a group; anything else refuses the round
#       max_bytes: 50000000                # of one reply as it is encoded
#       clip: 1.0                          # largest L2 norm of a reply's change of the weights
#       noise: 5.0                         # standard deviation of Gaussian noise in each number of that change
#       epsilon: 8                         # a budget: rounds that would exceed it are refused
#       delta: 1.0e-5                      # probability with which the epsilon guarantee may fail
#       answers: 500                       # with noise, the most answers about images that are kept out of training
#       fingerprint_epsilon: 2             # noise of a fingerprint: epsilon per case
#       min_count: 10                      # for statistics and tables, counts below it are suppressed
#
# Every key is optional; without any of them nothing changes. Names that leave: `weights/...` and other groups of a
# reply, `scalars/...`, `metrics/...` of an evaluation (over FLARE with the number of a section's items, as
# `metrics/validate/cases`; for an evaluation-only job the tables of `medfl.evaluation.tally`, as
# `metrics/test/confusion`, and calibration tables, as `metrics/test/sets`), `data_stats`, `fingerprint`, and
# `told/train_loss`, `told/labels` and `told/channels` (which structures the masks annotate and which channels the
# images have, if the job or the site says so), which are omitted instead of refused.
# The number of steps and of training images, and whether the site kept a State, are part of every reply. For the
# mechanism see `medfl.policy.gate`.


@dataclass(frozen=True)
class Outbound:
    """Rules for what leaves, with the keys above; by default everything that the method sends may leave."""

    keys: tuple[str, ...] | None = None
    max_bytes: int | None = None
    clip: float | None = None
    noise: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    answers: int | None = None
    min_count: int = 0
    fingerprint_epsilon: float | None = None

    @classmethod
    def read(cls, values: object, where: str) -> Outbound:
        """Read the values of the key `outbound` as YAML gives them; `where` names the file in errors.

        Raises:
            InputError: they are not valid in a policy.
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
        """Whether changes are clipped and noised, so that (epsilon, delta) can be computed for them."""
        return self.clip is not None and self.noise is not None

    @property
    def multiplier(self) -> float:
        """Noise per sensitivity: two changes with norms of at most C differ by at most 2 C."""
        assert self.clip is not None
        assert self.noise is not None
        return self.noise / (2 * self.clip)

    def refused(self, names: Iterable[str]) -> list[str]:
        """Return the names that may not leave."""
        return [name for name in names if not self.permits(name)]

    def permits(self, name: str) -> bool:
        """Tell whether something with this name may leave."""
        if self.keys is None:
            return True
        group = name.partition("/")[0]
        return any(fnmatchcase(name, key) or key == group for key in self.keys)

    def as_dict(self) -> dict[str, object]:
        """Return the values that differ from the default, as in the policy file."""
        changed = changes(self)
        if self.keys is not None:
            changed["keys"] = list(self.keys)
        return changed

    def lines(self) -> list[str]:
        """Describe the rules, one line each."""
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

        if self.fingerprint_epsilon is not None:
            lines.append(
                f"a fingerprint has noise of epsilon {self.fingerprint_epsilon:g} for one case"
            )

        if self.min_count:
            lines.append(f"of statistics, counts below {self.min_count} are not told")

        return lines


def changes(rules: DataclassInstance) -> dict[str, object]:
    """Return the values that differ from the default, by name, as plain values."""
    defaults = type(rules)()
    changed = {}
    for k, v in asdict(rules).items():
        if v != getattr(defaults, k):
            changed[k] = v
    return changed


def check_known(names: Iterable[object], known: Collection[str], what: str) -> None:
    """Raise an InputError if a name in a policy is unknown; `what` says where it is and what it is."""
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
    "fingerprint_epsilon": "a number above 0",
}


def _value(name: str, value: Any, where: str) -> Any:
    if name == "keys":
        good = isinstance(value, list) and all(isinstance(key, str) and key for key in value)
        value = tuple(value) if good else value
    elif name in ("max_bytes", "answers", "min_count"):
        # isinstance would accept True as a number.
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
    """Return a number, also in forms like 1e-5, which YAML reads as text."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


# The policy

PERMISSIONS = {
    "scripts": "the bundle's own Python is imported and runs with your rights",
    "pickle": "torch.load and TorchScript may be used: they run what a pickled file says",
    "open": "expressions may open files for writing",
    "setattr": "attributes of any object may be set",
    "sys.path": "the places that Python imports from may be changed",
    "distributed": "torch.distributed may open connections",
    "paths": "absolute paths may be named, and images read from any place",
    "logging": "no longer needed: medfl does not read configs/logging.conf",
    "files": "no longer needed: medfl opens no file of an unknown kind",
}
"""What a policy can allow, and what each permission means."""

EVALUATE = "evaluate"
PLAN = "plan"
UNNAMED_JOBS = ("train", EVALUATE)
JOBS = (*UNNAMED_JOBS, PLAN)
"""Purposes of a job: train a model, evaluate one (and calibrate it), or request the input for planning one, which
a policy must name."""
_KEYS = words_of("bundle allow limits files outbound jobs methods settings")
MOST = ("rounds", "batch_size", "local_epochs")
"""Settings of a run that a policy may limit."""
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_BYTES = 4_000_000


@dataclass(frozen=True)
class Limits:
    """Sizes beyond which a bundle is refused unread."""

    config_bytes: int = 1_000_000
    """of one configuration file"""
    nodes: int = 20_000
    """values in one configuration file"""
    depth: int = 40
    """levels in one configuration file"""
    expression: int = 1_000
    """characters in one `$` expression"""
    files: int = 10_000
    """files in the bundle"""


@dataclass(frozen=True)
class Policy:
    """What a site has decided about a bundle; the default allows nothing extra and pins nothing."""

    bundle: str = ""
    allow: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
    files: Mapping[str, str] | None = None
    """path below the bundle's folder -> sha256; None: not pinned"""
    outbound: Outbound = field(default_factory=Outbound)
    trusted: bool = False
    """the user's own decision for this process (`--trust`), which no file can make: bundles run uninspected"""
    methods: tuple[str, ...] = ()
    """methods that a job may request; if none is named: any"""
    settings: Mapping[str, int] = field(default_factory=dict)
    """maximum values that a job may request, of `MOST`; if none is named: any"""
    jobs: tuple[str, ...] = ()
    """of `JOBS`; if none is named: `UNNAMED_JOBS`"""

    @property
    def runs_scripts(self) -> bool:
        """Whether a bundle's own Python runs."""
        return self.trusted or "scripts" in self.allow

    def restricted_to(self, run: Run) -> Policy:
        """Return the policy that permits a run and nothing more of its kind, where this one has no rule for it."""
        settings = self.settings or {name: max(1, int(getattr(run, name))) for name in MOST}
        return replace(
            self,
            methods=self.methods or (run.method,),
            settings=settings,
            jobs=self.jobs or (job_of(run),),
        )

    def disagreement(self, run: Run) -> tuple[str, str] | None:
        """Return what in a run is not permitted, and what is; None if everything is."""
        jobs = self.jobs or UNNAMED_JOBS
        if job_of(run) not in jobs:
            return f"a job to {job_of(run)}", f"{' and '.join(jobs)}, as its policy says"
        if self.methods and run.method not in self.methods:
            return (
                f"method {printable(run.method, 60)}",
                f"{', '.join(self.methods)}, as its policy says",
            )
        for name, most in self.settings.items():
            if getattr(run, name) > most:
                return f"{name} {getattr(run, name)}", f"at most {most}, as its policy says"
        return None

    def job_rules(self) -> str:
        """List the accepted jobs."""
        rules = [f"at most {count} {name}" for name, count in self.settings.items()]
        if self.methods:
            rules.insert(0, f"methods {', '.join(self.methods)}")
        if self.jobs:
            rules.insert(0, " and ".join(self.jobs))
        return "; ".join(rules) or "any"

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy file.

        Raises:
            InputError: it cannot be read, or is not a valid policy.
        """
        try:
            document = read_plain(
                decode_text(read_bytes(path, _MAX_BYTES)), is_json=False, nodes=100_000, depth=4
            )
        except Refused as error:
            raise InputError(
                f"policy {path}: {error}", "a policy is plain YAML", "see docs/deploy.md"
            ) from error

        document = {} if document is None else document
        if not isinstance(document, dict):
            raise InputError(
                f"policy {path} is a {type(document).__name__}",
                "keys and values",
                "see docs/deploy.md",
            )

        check_known(document, _KEYS, f"policy {path}: key")
        allow = _words(document, "allow", path)
        files = document.get("files")
        check_known(allow, PERMISSIONS, f"policy {path}: the permission")
        jobs = _words(document, "jobs", path)
        check_known(jobs, JOBS, f"policy {path}: jobs:")
        methods = tuple(
            check_name(name, f"policy {path}: method") for name in _words(document, "methods", path)
        )
        limits = _numbers(document, "limits", Limits.__dataclass_fields__, path)
        settings = _numbers(document, "settings", MOST, path)

        if not _are_pins(files):
            raise InputError(
                f"policy {path}: files",
                "paths below the bundle's folder with 64 hexadecimal digits each",
                "let medfl site inspect --write-policy write it",
            )

        bundle = document.get("bundle") or ""
        if bundle:
            check_name(bundle, f"policy {path}: the name of the bundle")

        outbound = Outbound.read(document.get("outbound") or {}, f"policy {path}")
        return cls(
            bundle,
            frozenset(allow),
            Limits(**limits),
            files,
            outbound,
            methods=methods,
            settings=settings,
            jobs=tuple(jobs),
        )

    def text(self) -> str:
        """Return the policy as the file's content."""
        parts: dict[str, object] = {"bundle": self.bundle, "allow": sorted(self.allow)}
        optional = {
            "limits": changes(self.limits),
            "outbound": self.outbound.as_dict(),
            "jobs": list(self.jobs),
            "methods": list(self.methods),
            "settings": dict(self.settings),
        }
        parts |= {key: rules for key, rules in optional.items() if rules}
        # An empty list of files is a pin too, unlike a missing key.
        if self.files is not None:
            parts["files"] = dict(sorted(self.files.items()))

        comments = "".join(f"# {word}: {PERMISSIONS[word]}\n" for word in sorted(self.allow))
        head = "# What this site has inspected and allows; see docs/deploy.md.\n"

        return (
            head
            + comments
            + yaml.safe_dump(parts, sort_keys=False, width=1000, allow_unicode=False)
        )


def job_of(run: Run) -> str:
    """Return which of `JOBS` a run is."""
    if not examines(run):
        return "train"

    return EVALUATE if run.init else PLAN


def _are_pins(files: Plain) -> bool:
    is_pinned = matches_type(files, dict[str, str]) and all(map(_SHA256.fullmatch, files.values()))
    return files is None or is_pinned


def _words(document: Mapping[str, Plain], key: str, path: Path) -> list[str]:
    """Return a list of words in a policy."""
    words = document.get(key) or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(f"policy {path}: {key}", "a list of words", f"write {key}: [WORD, WORD]")
    return words


def _numbers(
    document: Mapping[str, Plain], key: str, known: Collection[str], path: Path
) -> dict[str, int]:
    """Return names with integers in a policy."""
    numbers = document.get(key) or {}
    if not isinstance(numbers, dict):
        raise InputError(
            f"policy {path}: {key}", "names with whole numbers", "write them as NAME: NUMBER"
        )

    check_known(numbers, known, f"policy {path}: {key}:")
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise InputError(
                f"policy {path}: {key}: {name}",
                "whole numbers of at least 1",
                f"write {name}: 1000",
            )

    return numbers
