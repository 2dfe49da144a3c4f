"""A site's policy: which files a bundle consists of, and what it may do beyond what every bundle may.

    bundle: hippocampus          # the folder's name
    allow: [scripts]             # words, see `PERMISSIONS`
    limits: {config_bytes: 200000}
    files:                       # sha256 of each; with it, a bundle has these files and no others
      configs/train.yaml: 3f5a...
    outbound: {clip: 1.0}        # what may leave the site, see `medfl.policy.outbound`
    jobs: [train, evaluate]      # what a job may do; evaluate: examine a model that the site does not train
    methods: [fedavg, scaffold]  # that a job may ask for
    settings: {rounds: 100}      # the most that a job may ask for, see `MOST`

Every key may be left out, for no rule. The site keeps the file, outside of the bundle; nothing of it comes over a wire.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from medfl.core.errors import InputError
from medfl.core.names import check_name
from medfl.core.run import Run, examines
from medfl.core.untrusted import Plain, Refused, decode_text, printable, read_bytes, read_plain
from medfl.policy.outbound import Outbound, changes, check_known

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

JOBS = ("train", "evaluate")
"""What a job does: train a model, or only examine one."""
_KEYS = ("bundle", "allow", "limits", "files", "outbound", "jobs", "methods", "settings")
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
    """the user's own word for this process (`--trust`), which no file can say: bundles run uninspected"""
    methods: tuple[str, ...] = ()
    """that a job may ask for; none named: any"""
    settings: Mapping[str, int] = field(default_factory=dict)
    """the most that a job may ask for, of `MOST`; none named: any"""
    jobs: tuple[str, ...] = ()
    """of `JOBS`; none named: any"""

    @property
    def runs_scripts(self) -> bool:
        """Whether a bundle's own Python runs."""
        return self.trusted or "scripts" in self.allow

    def restricted_to(self, run: Run) -> Policy:
        """Return the policy that agrees to a run and no more of its kind, where this one says nothing of it."""
        settings = self.settings or {name: max(1, int(getattr(run, name))) for name in MOST}
        return replace(
            self,
            methods=self.methods or (run.method,),
            settings=settings,
            jobs=self.jobs or (job_of(run),),
        )

    def disagreement(self, run: Run) -> tuple[str, str] | None:
        """Return what of a run is not agreed to, and what is; None where all is."""
        if self.jobs and job_of(run) not in self.jobs:
            return f"a job to {job_of(run)}", f"{' and '.join(self.jobs)}, as its policy says"
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
        """Say which jobs are taken."""
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
            InputError: it cannot be read, or says something that no policy can say.
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
        # No files at all are a pin too, other than no key.
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
    return "evaluate" if examines(run) else "train"


def _are_pins(files: object) -> bool:
    if files is None:
        return True
    if not isinstance(files, dict):
        return False

    for path, digest in files.items():
        if not isinstance(path, str) or not isinstance(digest, str):
            return False
        if not _SHA256.fullmatch(digest):
            return False

    return True


def _words(document: Mapping[str, Plain], key: str, path: Path) -> list[str]:
    """Return a list of words in a policy."""
    words = document.get(key) or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(f"policy {path}: {key}", "a list of words", f"write {key}: [WORD, WORD]")
    return words


def _numbers(
    document: Mapping[str, Plain], key: str, known: Collection[str], path: Path
) -> dict[str, int]:
    """Return names with whole numbers in a policy."""
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
