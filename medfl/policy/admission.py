"""Admission: every bundle that is opened passes here, whoever names it: the user, a method's options, a teacher, a job.

A bundle that does not ship is inspected under the policy in force, and refused as a whole where anything in it is. The
user may trust bundles for the life of this process (`--trust`); that is said, once for each, with what was refused.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from medfl.core.names import trusting_any_module
from medfl.policy.inspection import inspect
from medfl.policy.policy import Policy

_in_force: ContextVar[Policy] = ContextVar("policy")
_warned: set[Path] = set()
"""Trusted bundles whose refusals were printed: a command opens a bundle many times, and says so once."""


def in_force() -> Policy:
    """Return the policy of this process, which the processes that it forks inherit."""
    return _in_force.get(Policy())


@contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """Let bundles run code, and files name it, inside the block, if the user has said so."""
    policy = in_force()
    token = _in_force.set(replace(policy, trusted=policy.trusted or trust))
    try:
        with trusting_any_module(trust):
            yield
    finally:
        _in_force.reset(token)


def admit(folder: Path, policy: Policy, reads: Collection[str]) -> None:
    """Inspect a bundle before anything of it is evaluated; `reads` are the configurations that are going to be read.

    Raises:
        InputError: something in it is refused, and the user does not trust it; names the first refusal.
    """
    # Also of a trusted bundle: the user reads what the trust is given to.
    inspection = inspect(folder, policy)
    if not policy.trusted:
        inspection.require(reads)
    elif (refusals := inspection.refused(reads)) and folder not in _warned:
        _warned.add(folder)
        sys.stderr.write(
            f"--trust: bundle {inspection.bundle} runs code with your rights: it may read, change and send any file "
            f"that you may; inspection refuses {len(refusals)} of its lines, the first {refusals[0]}\n"
        )
