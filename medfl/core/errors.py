"""The errors a user may meet, and their exit codes."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


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
        super().__init__("; ".join(" ".join(part.split()) for part in self._parts))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        """Let a worker process hand the error to its parent."""
        return type(self), self._parts


class RunError(MedflError):
    """A run failed while running (exit code 1); what was saved before stays and the run can be resumed."""


def did_you_mean(given: str, known: Iterable[str], advice: str) -> str:
    """Return the advice about an unknown name; where a known one is near to it, that comes first."""
    near = difflib.get_close_matches(given, list(known), 1)
    return f"did you mean {near[0]}? else {advice}" if near else advice


@contextmanager
def errors_safe_to_send() -> Iterator[None]:
    """Mark what is raised within as being about what another machine sent."""
    try:
        yield
    except MedflError as error:
        error.safe_to_send = True
        raise


def error_id(error: BaseException) -> str:
    """Return the random id of an error, the same each time: told in the place of its text, and beside it in a log."""
    known: str | None = getattr(error, "_medfl_identity", None)
    if known is None:
        known = secrets.token_hex(4)
        error._medfl_identity = known  # type: ignore[attr-defined]  # on the error itself: whoever tells it asks anew
    return known
