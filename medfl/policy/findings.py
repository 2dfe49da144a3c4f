"""What an inspection of a bundle found: its files, what it would use, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from medfl.core.errors import InputError
from medfl.core.untrusted import printable
from medfl.policy.policy import PERMISSIONS, Policy

NOT_LISTED = (
    "a bundle names components of MONAI and PyTorch, and what computes",
    "have it changed; if its author may run code here with your rights, give --trust; a site's policy can allow single "
    "words (docs/security.md)",
)
"""The last two parts of an error about something that a bundle may not do."""
READ = ("train", "evaluate", "inference", "metadata", "federated")
"""The configurations that medfl reads, by their names in configs/; all others are pinned, and never evaluated."""
TWICE = ("train", "evaluate", "inference")
"""Those of them that an export has for MONAI alone, too."""
TRAINING = ("train", "evaluate", "metadata", "federated")
"""Those of them that a training reads."""
INFERENCE = ("inference", "metadata")
"""Those that a prediction with a bundle's own weights reads."""
UNREADABLE = "where a configuration is keys and values"
LEAVES = (
    "tensors and numbers that the method sends: the network's weights and, with some methods, class counts, class "
    "means or answers to public images (medfl methods NAME)",
    "their names and sizes are known once the network is built; a run prints how many leave and how many stay",
    "with each reply the numbers of training images and of steps, whether a State was kept, and the mean training "
    "loss, which the policy may keep back (told/train_loss)",
    "where the server asks for scores, metrics of a section's items and how many these are "
    "(metrics/validate/accuracy, metrics/validate/cases)",
    "no image, file name, path, text or expression",
)
"""What leaves a site, as far as it can be said without running anything."""


@dataclass(frozen=True)
class File:
    """A file of a bundle."""

    path: str
    kind: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Refusal:
    """What is refused, where and why."""

    file: str
    id: str
    why: str

    def __str__(self) -> str:
        where = f"{self.file}: {self.id}" if self.id else self.file
        return f"{printable(where)}: {self.why}"


@dataclass
class Inspection:
    """The result of an inspection."""

    bundle: str
    folder: Path
    pinned: bool
    files: list[File] = field(default_factory=list)
    targets: Counter[str] = field(default_factory=Counter)
    uses: Counter[str] = field(default_factory=Counter)
    """parts of expressions"""
    expressions: int = 0
    statements: list[str] = field(default_factory=list)
    """those that medfl never evaluates, with file and id"""
    allowed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(permission of the policy, what it allowed)"""
    data: dict[str, str] = field(default_factory=dict)
    """file -> what it says of `dataset_dir`"""
    refusals: list[Refusal] = field(default_factory=list)
    pin_refusals: list[Refusal] = field(default_factory=list)
    """those of them that are about a file's pin"""

    @property
    def accepted(self) -> bool:
        """Whether nothing is refused."""
        return not self.refusals

    def refused(self, reads: Collection[str]) -> list[Refusal]:
        """Return what is refused for who reads these configurations, by their names in configs/.

        What is refused in others does not count, but a file that is not as it was pinned does.
        """
        unread = {f"configs/{name}" for name in set(READ).difference(reads)}
        refusals = []
        for refusal in self.refusals:
            name = refusal.file.replace("configs/medfl/", "configs/").rpartition(".")[0]
            if name not in unread or refusal in self.pin_refusals:
                refusals.append(refusal)

        return refusals

    def require(self, reads: Collection[str] = READ) -> None:
        """Raise if something is refused for who reads these configurations.

        Raises:
            InputError: names the first refusal, and how many there are.
        """
        refusals = self.refused(reads)
        if not refusals:
            return

        # A file that cannot be read is damaged rather than hostile: it is said in other words.
        first = refusals[0]
        count = len(refusals)
        if first.why.endswith(UNREADABLE) or first.why.startswith("not valid"):
            problem = f"{self.folder / first.file} cannot be read: {first.why}"
            raise InputError(
                problem.replace(";", ","),
                "it is JSON or YAML with keys and values",
                "repair the file",
            )

        more = "" if count == 1 else f" (and {count - 1} more)"
        if not self.refused(TRAINING):
            more += ", in what medfl predict and teachers read, and medfl run does not"
        problem = f"bundle {printable(self.bundle)!r} is refused: {first}{more}".replace(";", ",")
        if len(self.pin_refusals) == count:  # nothing else is wrong with it
            command = f"medfl site inspect {self.folder} --policy FILE --write-policy NEWFILE"
            advice = f"{command} shows them and pins them anew"
            raise InputError(problem, "the files that the site's policy has pinned", advice)

        raise InputError(problem, *NOT_LISTED)

    def refuse(self, file: str, id_: str, why: object) -> None:
        """Note that something is refused, and where."""
        self.refusals.append(Refusal(file, id_, str(why)))

    def unpin(self) -> list[str]:
        """Judge the bundle without the policy's pins; return in which files it is not as these say, and why."""
        pin_refusals = self.pin_refusals
        self.pin_refusals = []
        self.refusals = [refusal for refusal in self.refusals if refusal not in pin_refusals]
        return list(map(str, pin_refusals))

    def policy(self, policy: Policy) -> Policy:
        """Return the policy that pins the files of this bundle, with all else of another."""
        files = {file.path: file.sha256 for file in self.files}
        return replace(policy, bundle=self.bundle, files=files)

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        allowed = []
        for (word, use), times in sorted(self.allowed.items()):
            entry = {"word": word, "meaning": PERMISSIONS[word], "what": use, "times": times}
            allowed.append(entry)

        return {
            "bundle": self.bundle,
            "folder": str(self.folder),
            "accepted": self.accepted,
            "pinned": self.pinned,
            "files": list(map(vars, self.files)),
            "targets": dict(sorted(self.targets.items())),
            "expressions": self.expressions,
            "uses": dict(sorted(self.uses.items())),
            "statements": self.statements,
            "allowed_by_policy": allowed,
            "data": self.data,
            "leaves": list(LEAVES),
            "refused": list(map(vars, self.refusals)),
        }
