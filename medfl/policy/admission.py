"""Admission: every opened bundle passes here, whoever names it: the user, a method's options, a teacher, a job.

A bundle that does not ship with medfl is inspected under the policy in force, and refused as a whole if anything in it
is refused. The user may trust bundles for the life of this process (`--trust`); this is reported once for each, with
what was refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from medfl.core import PRIVATE_CACHE, InputError, outside_walls, trusting_any_module
from medfl.policy.inspection import inspect
from medfl.policy.policy import Policy

_in_force: ContextVar[Policy] = ContextVar("policy")
inspected: dict[Path, str] = {}
"""File of an inspected bundle -> its SHA-256 then: whoever reads it again refuses another content."""
_warned: set[Path] = set()
"""Trusted bundles whose refusals were printed: a command opens a bundle many times, and reports them once."""


def in_force() -> Policy:
    """Return the policy of this process, which forked processes inherit."""
    return _in_force.get(Policy())


@contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """Let bundles run code, and files name it, inside the block, if the user has allowed it."""
    policy = in_force()
    token = _in_force.set(replace(policy, trusted=policy.trusted or trust))
    try:
        with trusting_any_module(trust):
            yield
    finally:
        _in_force.reset(token)


def admit(folder: Path, policy: Policy, reads: Collection[str]) -> None:
    """Inspect a bundle before any of it is evaluated; `reads` are the configurations that will be read.

    Raises:
        InputError: something is refused, and the user does not trust the bundle; names the first refusal.
    """
    # Also for a trusted bundle: the user sees what is being trusted.
    inspection = inspect(folder, policy)
    inspected.update((inspection.folder / file.path, file.sha256) for file in inspection.files)
    # Whoever named it, and whatever was here when the command was read
    if outside_walls.get() is not None:
        raise InputError(
            f"bundle {folder}, which is not shipped, or changed since, without walls",
            "a bundle that the command line names as such",
            "add --sandbox, or --no-sandbox: it then runs with your rights",
        )
    if not policy.trusted:
        inspection.require(reads)
    elif (refusals := inspection.refused(reads)) and folder not in _warned:
        _warned.add(folder)
        rights = "with your rights: it may read, change and send any file that you may"
        if PRIVATE_CACHE in os.environ:
            rights = "behind the walls"

        sys.stderr.write(
            f"--trust: bundle {inspection.bundle} runs code {rights}; "
            f"inspection refuses {len(refusals)} of its lines, the first {refusals[0]}\n"
        )
