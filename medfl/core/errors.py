"""The errors a user may meet, and their exit codes."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class MedflError(Exception):
    """Base of all errors that are told to the user in one line; `exit_code` is the command line's.

    `tellable`: the text is about what another machine sent and says nothing else, so that it may be told to that one.
    """

    exit_code = 1
    tellable = False


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


def meant(given: str, known: Iterable[str], advice: str) -> str:
    """Return the advice about an unknown name; where a known one is near to it, that comes first."""
    near = difflib.get_close_matches(given, list(known), 1)
    return f"did you mean {near[0]}? else {advice}" if near else advice


@contextmanager
def about_what_came() -> Iterator[None]:
    """Mark what is raised within as being about what another machine sent."""
    try:
        yield
    except MedflError as error:
        error.tellable = True
        raise


def identity(error: BaseException) -> str:
    """Return the random id of an error, the same each time: told in the place of its text, and beside it in a log."""
    known: str | None = getattr(error, "_medfl_identity", None)
    if known is None:
        known = secrets.token_hex(4)
        error._medfl_identity = known  # type: ignore[attr-defined]  # on the error itself: whoever tells it asks anew
    return known
