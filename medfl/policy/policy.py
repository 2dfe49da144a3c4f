"""A site's policy: which files a bundle consists of, and what it may do beyond what every bundle may.

    bundle: hippocampus          # the folder's name
    allow: [scripts]             # words, see `WORDS`
    limits: {config_bytes: 200000}
    files:                       # sha256 of each; with it, a bundle has these files and no others
      configs/train.yaml: 3f5a...
    outbound: {clip: 1.0}        # what may leave the site, see `medfl.policy.outbound`

Every key may be left out. The site keeps the file, outside of the bundle; nothing of it comes over a wire.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from medfl.core.errors import InputError
from medfl.core.untrusted import Refused, decode_text, read_bytes, read_plain
from medfl.policy.outbound import Outbound, check_known

WORDS = {
    "scripts": "the bundle's own Python is imported and runs with your rights",
    "pickle": "pickled or TorchScript weights may lie in the bundle, and torch.load may be called",
    "open": "files may be opened for writing",
    "setattr": "attributes of any object may be set",
    "sys.path": "the places that Python imports from may be changed",
    "distributed": "torch.distributed may open connections",
    "paths": "absolute paths may be named",
    "logging": "configs/logging.conf may lie in the bundle; medfl does not read it",
    "files": "files of unknown kinds may lie in the bundle; compiled code never",
}
"""What a policy can allow, and what each word means."""

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_BYTES = 4_000_000


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

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy file.

        Raises:
            InputError: it cannot be read, or says something that no policy can say.
        """
        try:
            given = read_plain(decode_text(read_bytes(path, _BYTES)), is_json=False, nodes=100_000, depth=4)
        except Refused as error:
            raise InputError(f"policy {path}: {error}", "a policy is plain YAML", "see docs/deploy.md") from error
        return cls._from(given, path)

    @classmethod
    def _from(cls, given: Any, path: Path) -> Policy:
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise InputError(f"policy {path} is a {type(given).__name__}", "keys and values", "see docs/deploy.md")
        check_known(given, ("bundle", "allow", "limits", "files", "outbound"), f"policy {path}: key")
        allow, limits, files = given.get("allow") or [], given.get("limits") or {}, given.get("files")
        if not isinstance(allow, list) or not all(isinstance(word, str) for word in allow):
            raise InputError(f"policy {path}: allow", "a list of words", f"choose from {', '.join(WORDS)}")
        check_known(allow, WORDS, f"policy {path}: the word")
        if not isinstance(limits, dict):
            raise InputError(f"policy {path}: limits", "names with whole numbers", "write them as NAME: NUMBER")
        check_known(limits, [f.name for f in fields(Limits)], f"policy {path}: the limit")
        for name, value in limits.items():
            if type(value) is not int or value < 1:
                raise InputError(f"policy {path}: limit {name}", "whole numbers of at least 1", f"write {name}: 1000")
        if files is not None and not (
            isinstance(files, dict)
            and all(isinstance(p, str) and isinstance(h, str) and _SHA256.fullmatch(h) for p, h in files.items())
        ):
            raise InputError(
                f"policy {path}: files",
                "paths below the bundle's folder with 64 hexadecimal digits each",
                "let medfl site inspect --write-policy write it",
            )
        bundle = given.get("bundle", "")
        if not isinstance(bundle, str):
            raise InputError(f"policy {path}: bundle", "the name of the bundle's folder", "write bundle: FOLDER")
        outbound = Outbound.read(given.get("outbound") or {}, f"policy {path}")
        return cls(bundle, frozenset(allow), Limits(**limits), files, outbound)

    def text(self) -> str:
        """Return the policy as the file's content."""
        limits = {name: value for name, value in asdict(self.limits).items() if value != getattr(Limits(), name)}
        parts: dict[str, Any] = {"bundle": self.bundle, "allow": sorted(self.allow)}
        parts |= {"limits": limits} if limits else {}
        parts |= {"outbound": self.outbound.as_dict()} if self.outbound != Outbound() else {}
        parts |= {} if self.files is None else {"files": dict(sorted(self.files.items()))}
        comments = "".join(f"# {word}: {WORDS[word]}\n" for word in sorted(self.allow))
        head = "# What this site has inspected and allows; see docs/deploy.md.\n"
        return head + comments + yaml.safe_dump(parts, sort_keys=False, width=1000, allow_unicode=False)
