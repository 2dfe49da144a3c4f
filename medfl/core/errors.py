"""The errors shown to users, and their exit codes."""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO

_PART = 1500  # characters of each part of an InputError
_KINDS = {
    b"PK": "a zip archive, as is a spreadsheet (.xlsx, .ods)",
    b"\xd0\xcf": "a file of an Office program (.xls)",
    b"\x1f\x8b": "packed by gzip",
}
"""What a file is by its first two bytes."""
_UNSEEN = re.compile("[\xad\u200b-\u200f\u2060\ufeff]")


class MedflError(Exception):
    """Base of the errors that are shown to the user as one line.

    Attributes:
        exit_code: of the command line.
        safe_to_send: the text only concerns what another machine sent, so that machine may see it.
    """

    exit_code = 1
    safe_to_send = False


class InputError(MedflError):
    """Bad input: what was given, what is allowed, what to do (exit code 2)."""

    exit_code = 2

    def __init__(self, given: str, allowed: str, advice: str) -> None:
        """Join the three parts into the line that the command line prints."""
        self._parts = (given, allowed, advice)
        super().__init__("; ".join(_in_one_line(part, _PART) for part in self._parts))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        """Allow a worker process to pass the error to its parent."""
        return type(self), self._parts


def _in_one_line(text: str, length: int) -> str:
    """Return a text without line breaks, of limited length, since it may come from a file."""
    line = _UNSEEN.sub(lambda match: ascii(match[0])[1:-1], " ".join(text.split()))
    return line if len(line) <= length else f"{line[:length]}…"


class RunError(MedflError):
    """A run failed while running (exit code 1); what was saved is kept, and the run can be resumed."""


def root_cause(error: BaseException) -> BaseException:
    """Return the original cause of an error; MONAI wraps errors several times."""
    # MONAI's "referring item" names the id in the configuration, which its cause does not.
    while error.__cause__ is not None and not (
        isinstance(error, InputError) or "referring item" in str(error)
    ):
        error = error.__cause__
    return error


def as_text(error: BaseException) -> str:
    """Return an error's type and text in one line of limited length."""
    return f"{type(error).__name__}: {_in_one_line(str(error), 300)}"


def missing_package(error: BaseException | None) -> str:
    """Return the Python package whose absence caused an error, "" for other causes."""
    while error is not None:
        if match := re.search(r"(?:No module named '|required package `)(\w+)", str(error)):
            return match[1]
        error = error.__cause__
    return ""


def without_package(where: str, package: str, reader: str = "") -> InputError:
    """Return the error that says where a Python package is needed; `reader` is the id of the image reader."""
    advice = "install it"
    if reader:
        advice += f", or name another reader that is, with --config {reader}=NAME"

    return InputError(
        f"{where} needs the Python package {package!r}, which is not installed",
        "what a bundle uses is installed",
        advice,
    )


def refuse_folder(error: OSError) -> None:
    """Raise an InputError for a folder that exists but cannot be read, which `os.walk` would skip."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise InputError(
            f"folder {error.filename} ({error.strerror})",
            "folders that may be read",
            "check its rights",
        )


def either(names: Iterable[object]) -> str:
    """Join alternatives, as "a, b or c"."""
    return " or ".join(", ".join(map(str, names)).rsplit(", ", 1))


def did_you_mean(given: str, known: Iterable[str], advice: str) -> str:
    """Return advice on an unknown name: the most similar known name, if any, then `advice`."""
    bare = {name.lstrip("-"): name for name in known}  # two dashes alike are no similarity
    near = difflib.get_close_matches(given.lstrip("-"), bare, 1)
    if near:
        return f"did you mean {bare[near[0]]}? if not, {advice}"

    return advice


@contextmanager
def refusing(subject: str, allowed: str, advice: str) -> Iterator[None]:
    """Turn any library error in the block into an InputError: `subject (the reason)`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{subject} ({reason(error)})", allowed, advice) from error


def reason(error: BaseException) -> str:
    """Return why something failed; of an error of the system without its number and path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def beginning(file: IO[bytes]) -> str:
    """Describe the start of a file whose contents do not match its name: often a web page, or a Git LFS pointer."""
    file.seek(0)
    start = file.read(40)
    text = " ".join(start.decode("latin1").split())
    if not start:
        return "it is empty"
    if text.isascii() and text.isprintable():
        return f"it begins {text!r}"

    kind = _KINDS.get(start[:2], "")
    return f"it begins with the bytes {start[:4].hex(' ')}" + f": {kind}" * bool(kind)


@contextmanager
def errors_safe_to_send() -> Iterator[None]:
    """Mark errors raised in the block as safe to send: they only concern data from the other machine."""
    try:
        yield
    except MedflError as error:
        error.safe_to_send = True
        raise


def error_id(error: BaseException) -> str:
    """Return the random id of an error, constant over calls: sent instead of its text, which is in the log."""
    # Kept on the error itself, so that the log and the message to the other machine have the same id.
    if not hasattr(error, "_medfl_id"):
        error._medfl_id = secrets.token_hex(4)  # type: ignore[attr-defined]
    return str(error._medfl_id)  # type: ignore[attr-defined]
