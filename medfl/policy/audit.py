"""A site's audit log: what was received, sent and refused, in lines that cannot be changed unnoticed.

A line is a JSON object whose key `before` is the sha256 of the previous line, so changing, removing or inserting a
line breaks the chain there. Cutting lines off the end does not: note the sha256 of the last line somewhere else from
time to time, and give it to `medfl site audit`. A line cut short by a crash is kept as it is, and the next one has
`after_torn`.

    {"time", "site", "round", "direction": "came" | "left" | "refused", "kind": "train" | "evaluate" | "introduce" |
     "statistics" | "plan" | ..., "sha256", "bytes", "tensors",
     "groups": {name: {"tensors", "numbers", "names", "norm"}}, "numbers": {name: value}, "reason", "failure",
     "privacy", "before"}
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from medfl.core import Document, InputError, Print, RunError, listed, open_plain, printable

if TYPE_CHECKING:
    from medfl.core import Message

_NOTED = re.compile(r"[0-9a-fA-F]{8,64}", re.ASCII)
_MOST_LINES = 10_000  # that are kept
_LINE_BYTES = 1 << 20  # maximum for a reader
_MOST_BYTES = 1 << 18  # maximum for a writer
_NAMES = 3  # of tensors that represent a group
_NAME_LENGTH = 200
_TEXT_LENGTH = 4000


class Audit:
    """A log that one or several processes append to."""

    def __init__(self, path: Path | str, site: str = "", say: Print = str) -> None:
        """Set the file, which is created with its first line. The site is in each line; `say` reports a torn line.

        Raises:
            InputError: there is no such folder, or the file cannot be written.
        """
        self.path = Path(path)
        self.site = site
        with self._open(InputError) as handle:
            if _tail(handle)[1]:
                say(
                    f"note: the last line of {self.path} was cut short, by a crash perhaps; it stays, the log goes on"
                )

    def add(self, entry: Mapping[str, object]) -> None:
        """Append a line, and return when it is on the disk.

        Raises:
            RunError: it cannot be written. Nothing may be received or sent without being logged.
        """
        with self._open(RunError) as handle:
            before, torn = _tail(handle)
            line = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "site": self.site,
                **entry,
            }
            data = b""
            if torn:
                line["after_torn"] = True
                data = b"\n"  # ends the torn line, which stays

            data += _encoded({**line, "before": before})
            written = os.write(handle, data)
            os.fsync(handle)  # on the disk before the message leaves, so that a crash hides nothing

            if written != len(data):
                raise OSError(f"{written} of {len(data)} bytes were written")

    @contextmanager
    def _open(self, kind: type[InputError] | type[RunError]) -> Iterator[int]:
        """Open the file, locked against other writers."""
        try:
            # Readable by its owner only: it reveals what the site sends.
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                yield handle
            finally:
                os.close(handle)
        except OSError as error:
            reason = error.strerror or str(error)
            if kind is InputError:
                raise InputError(
                    f"audit log {printable(self.path)} ({reason})",
                    "a file that can be written, in a folder that exists",
                    "make the folder, or check the file's rights",
                ) from error

            raise RunError(
                f"the audit log {self.path} cannot be written ({reason}); nothing leaves that is not in it"
            ) from error


def _encoded(line: Mapping[str, object]) -> bytes:
    """Return a line; if it is too long, keep what identifies its message."""
    cut = {}
    short = {}
    for key, value in line.items():
        cut[key] = value[:_TEXT_LENGTH] if isinstance(value, str) else value
        if value is None or isinstance(value, str | int | float):
            short[key] = cut[key]

    data = json.dumps(cut, default=str).encode() + b"\n"
    if len(data) > _MOST_BYTES:
        data = json.dumps({**short, "cut": len(data)}).encode() + b"\n"
    return data


def describe_message(message: Message, *, norms: bool = False) -> Document:
    """Describe a message as it is encoded; with `norms` also the L2 norm of each group.

    The sender chooses the names, which are shortened; how many there may be `MessageLimits` says.
    """
    # The hash is of the output of `Message.encode`, which the other side can compute too.
    encoded = message.encode()
    groups = {}
    for group, tensors in sorted(message.tensors.items()):
        about = {
            "tensors": len(tensors),
            "numbers": sum(tensor.numel() for tensor in tensors.values()),
            "names": _names([printable(name, _NAME_LENGTH) for name in sorted(tensors)]),
        }

        if norms:
            square = sum(float(tensor.double().square().sum()) for tensor in tensors.values())
            about["norm"] = float(f"{square**0.5:.6g}")

        groups[printable(group, _NAME_LENGTH)] = about

    return {
        "sha256": _sha256(encoded),
        "bytes": len(encoded),
        "tensors": sum(map(len, message.tensors.values())),
        "groups": groups,
        "numbers": numbers(message.scalars),
    }


def numbers(named: Mapping[str, float]) -> dict[str, float]:
    """Return numbers with their names truncated."""
    return {printable(name, _NAME_LENGTH): value for name, value in sorted(named.items())}


def describe_document(content: object) -> dict[str, object]:
    """Describe a purely numerical message: its sha256 and bytes as JSON."""
    encoded = json.dumps(content, sort_keys=True, default=str).encode()
    return {"sha256": _sha256(encoded), "bytes": len(encoded), "tensors": 0}


def _names(names: Sequence[str]) -> str:
    if len(names) <= _NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_NAMES])}, ... {names[-1]} ({len(names)})"


def _tail(handle: int) -> tuple[str | None, bool]:
    """Return the sha256 of a file's last line, None for an empty file, and whether that line is incomplete."""
    size = os.fstat(handle).st_size
    if not size:
        return None, False

    # The last byte may be the line's own end.
    end = os.pread(handle, _LINE_BYTES, max(0, size - _LINE_BYTES))
    if len(end) < size and b"\n" not in end[:-1]:
        raise OSError(f"its last line has more than {_LINE_BYTES} bytes")

    return _sha256(end.removesuffix(b"\n").rpartition(b"\n")[2]), not end.endswith(b"\n")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Verification


@dataclass(frozen=True)
class VerifiedLog:
    """Contents of a log file.

    Attributes:
        entries: its last 10,000 lines, without torn ones.
        lines: how many there are.
        problems: one line each, in the file's order: where the log differs from the one that was written.
        notes: torn lines.
        last: sha256 of the last line, "" for an empty log; to be noted somewhere else.
    """

    path: Path
    entries: tuple[Mapping[str, object], ...]
    lines: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    last: str

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "file": str(self.path),
            "intact": not self.problems,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "last": self.last,
            "lines": self.lines,
            "entries": list(self.entries),
        }

    def require(self) -> None:
        """Raise an error if the chain is broken.

        Raises:
            InputError: names the first break.
        """
        if self.problems:
            # The parts of an InputError are joined by semicolons.
            raise InputError(
                f"audit log {printable(self.path)}: {listed(self.problems, 1)}".replace(";", ","),
                "each line names the sha256 of the one before",
                "compare it with a copy; find out who changed it",
            )


def verify(path: Path, noted: str | None = None) -> VerifiedLog:
    """Read a log and verify its chain; the line whose (abbreviated) sha256 was noted must still be there.

    Raises:
        InputError: the file cannot be read, or the noted text does not identify a line.
    """
    if noted is not None and not _NOTED.fullmatch(noted):
        raise InputError(
            f"--noted {printable(noted)!r}",
            "8 to 64 hexadecimal digits of a line's sha256",
            "give those",
        )

    entries: deque[Mapping[str, object]] = deque(maxlen=_MOST_LINES)
    problems = []
    notes = []
    number = 0
    last = ""
    is_found = torn = False

    try:
        with open_plain(path) as file:
            # Bounded: a file without line breaks would fill the memory.
            for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES), b""), start=1):
                body = line.removesuffix(b"\n")
                # Without its line break even a complete entry is torn: the next one counts it as such.
                entry = _entry(body) if body != line else None
                if entry is not None:
                    entries.append(entry)
                    if entry.get("before") != (last or None):
                        problems.append(f"line {number} does not follow the one before it")
                    if torn and not entry.get("after_torn"):
                        problems.append(f"line {number} follows a damaged line and does not say so")
                else:
                    if torn:
                        problems.append(f"line {number} is the second one in a row that is no JSON")
                    notes.append(f"line {number} was cut short, by a crash perhaps")

                torn = entry is None
                last = _sha256(body)
                is_found |= last.startswith((noted or "").lower())
                if len(problems) + len(notes) > _MOST_LINES:
                    problems.append("what follows is not read: too much of it is damaged")
                    break
    except OSError as error:
        raise InputError(
            f"audit log {printable(path)} ({error.strerror or error})",
            "a file that can be read",
            "check the path",
        ) from error

    if noted and not is_found:
        problems.append(f"no line has the sha256 {printable(noted)}: lines are missing at the end")

    return VerifiedLog(path, tuple(entries), number, tuple(problems), tuple(notes), last)


def _entry(line: bytes) -> Mapping[str, object] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
