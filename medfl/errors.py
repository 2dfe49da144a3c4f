"""The errors a user may meet, and their exit codes."""

from __future__ import annotations


class MedflError(Exception):
    """Base of all errors that are told to the user in one line; `exit_code` is the command line's."""

    exit_code = 1


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
