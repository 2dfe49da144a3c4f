"""The errors a user may meet, and their exit codes."""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_PART = 1500  # characters of each part of an InputError


class MedflError(Exception):
    """Base of the errors that the user reads as one line.

    Attributes:
        exit_code: of the command line.
        safe_to_send: the text is only about what another machine sent, so that machine may see it.
    """

    exit_code = 1
    safe_to_send = False


class InputError(MedflError):
    """Bad input: what was given, what is allowed, what to do (exit code 2)."""

    exit_code = 2

    def __init__(self, given: str, allowed: str, advice: str) -> None:
        """Join the three parts into the one line that the command line prints."""
        self._parts = (given, allowed, advice)
        super().__init__("; ".join(_in_one_line(part, _PART) for part in self._parts))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        """Let a worker process hand the error to its parent."""
        return type(self), self._parts


def _in_one_line(text: str, length: int) -> str:
    """Return a text without line breaks; what a file says may be long."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[:length]}…"


class RunError(MedflError):
    """A run failed while running (exit code 1); what was saved before stays and the run can be resumed."""


def root_cause(error: BaseException) -> BaseException:
    """Return the error that an error comes from; MONAI wraps errors several times."""
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
    """Return the Python package whose absence an error comes from, "" if it comes from something else."""
    while error is not None:
        if match := re.search(r"(?:No module named '|required package `)(\w+)", str(error)):
            return match[1]
        error = error.__cause__
    return ""


def without_package(where: str, package: str, reader: str = "") -> InputError:
    """Return the error that says where a Python package is needed; `reader` is the id that names what reads images."""
    advice = "install it"
    if reader:
        advice += f", or name another reader that is, with --config {reader}=NAME"

    return InputError(
        f"{where} needs the Python package {package!r}, which is not installed",
        "what a bundle uses is installed",
        advice,
    )


def refuse_folder(error: OSError) -> None:
    """Raise an InputError for a folder that is there but cannot be read, which `os.walk` would pass over."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise InputError(
            f"folder {error.filename} ({error.strerror})",
            "folders that may be read",
            "check its rights",
        )


def did_you_mean(given: str, known: Iterable[str], advice: str) -> str:
    """Return advice on an unknown name: the most similar known name, if there is one, then `advice`."""
    near = difflib.get_close_matches(given, list(known), 1)
    if near:
        return f"did you mean {near[0]}? else {advice}"

    return advice


@contextmanager
def refusing(subject: str, allowed: str, advice: str) -> Iterator[None]:
    """Turn whatever libraries raise in the block into an InputError: `subject (the reason)`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise InputError(f"{subject} ({reason})", allowed, advice) from error


@contextmanager
def errors_safe_to_send() -> Iterator[None]:
    """Mark errors raised in the block as safe to send: they are only about data from the other machine."""
    try:
        yield
    except MedflError as error:
        error.safe_to_send = True
        raise


def error_id(error: BaseException) -> str:
    """Return the random id of an error, the same at each call: sent in place of its text, which the log has."""
    # Kept on the error itself: the log and the message to the other machine name the same id.
    if not hasattr(error, "_medfl_id"):
        error._medfl_id = secrets.token_hex(4)  # type: ignore[attr-defined]
    return str(error._medfl_id)  # type: ignore[attr-defined]
