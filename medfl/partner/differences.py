"""What differs between a bundle and the version of it that a site has accepted before."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from medfl.core.untrusted import printable
from medfl.policy.findings import File, Inspection

_TEXT = (".py", ".json", ".yaml", ".yml", ".md", ".txt", ".cfg", ".conf", ".sh")
_LARGEST = 1_000_000


def differences(before: Inspection, now: Inspection) -> Iterator[str]:
    """Yield what was added, removed and changed since a version; of text files line by line, safe for a terminal."""
    old, new = ({file.path: file for file in version.files} for version in (before, now))
    for path in sorted(old.keys() | new.keys()):
        a = old.get(path)
        b = new.get(path)
        if a is not None and b is not None and a.sha256 == b.sha256:
            continue

        yield f"{'added' if a is None else 'removed' if b is None else 'changed'}: {printable(path)}"
        if path.lower().endswith(_TEXT):
            changes = difflib.unified_diff(
                _lines(before.folder, a), _lines(now.folder, b), lineterm="", n=1
            )
            yield from (
                f"  {printable(line, 200)}" for line in list(changes)[2:]
            )  # without the two names


def _lines(folder: Path, file: File | None) -> list[str]:
    if file is None or file.bytes > _LARGEST:
        return []
    return (folder / file.path).read_text("utf-8", "replace").splitlines()
