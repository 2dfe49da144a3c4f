"""Differences between a bundle and the version that a site accepted earlier."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from medfl.core import printable, words_of
from medfl.policy.inspection import File, Inspection

_TEXT = words_of(".py .json .yaml .yml .md .txt .cfg .conf .sh")
_LARGEST = 1_000_000


def differences(before: Inspection, now: Inspection) -> Iterator[str]:
    """Yield what was added, removed and changed since a version; text files line by line, escaped for a terminal."""
    old_files = {file.path: file for file in before.files}
    new_files = {file.path: file for file in now.files}
    for path in sorted(old_files.keys() | new_files.keys()):
        old = old_files.get(path)
        new = new_files.get(path)
        if old is None:
            change = "added"
        elif new is None:
            change = "removed"
        elif old.sha256 != new.sha256:
            change = "changed"
        else:
            continue

        yield f"{change}: {printable(path)}"
        if path.lower().endswith(_TEXT):
            old_lines = _lines(before.folder, old)
            new_lines = _lines(now.folder, new)
            changes = difflib.unified_diff(old_lines, new_lines, lineterm="", n=1)
            for line in islice(changes, 2, None):  # skip the names of the two versions
                yield f"  {printable(line, 200)}"


def _lines(folder: Path, file: File | None) -> list[str]:
    if file is None or file.bytes > _LARGEST:
        return []
    return (folder / file.path).read_text("utf-8", "replace").splitlines()
