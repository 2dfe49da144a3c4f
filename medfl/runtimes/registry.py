"""Runtimes by name: they run the sites of a federation. `load` also takes a dotted path to a runtime of your own.

A runtime is a `Runtime` in a module; its dotted path, `mypackage.mymodule:RUNTIME`, is also its name on the command
line (`:RUNTIME` may be omitted). medfl's own have short names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from medfl.core import Document as Document, InputError, did_you_mean
from medfl.runtimes.launch import Launch

if TYPE_CHECKING:
    from medfl.runtimes.federation import Federation
    from medfl.storage import RunFolder

SHIPPED = {
    "simulator": "medfl.runtimes.simulator:RUNTIME",
    "monai-fl": "medfl.runtimes.monai_fl.exchange:RUNTIME",
    "flare": "medfl.flare.job",
}
# the last one is started by a command of its own, and named in the records of its runs
_MODULES = {**SHIPPED, "flare-poc": "medfl.flare.poc"}


@dataclass(frozen=True)
class Execution:
    """A runtime's task: a run in its folder.

    Attributes:
        federation: sites and server.
        folder: where the run is written; `run.json` is already there.
        launch: options; `resume` says here whether the folder holds rounds to continue, `jobs` is a number (None: 1).
        max_share: largest weight of one of three or more sites if the run has no cap; None: any.
    """

    federation: Federation
    folder: RunFolder
    launch: Launch = field(default_factory=Launch)
    max_share: float | None = None


@dataclass(frozen=True)
class Runtime:
    """Runs the sites.

    Attributes:
        execute: runs all remaining rounds and returns the summary.
        no_jobs: why the number of worker processes cannot be chosen, "" if it can.
        remote: whether the sites are processes that keep their own States and images; only they can have a deadline,
            and only here can they be resumed.
        require: raises an InputError if a dependency is not installed.
    """

    execute: Callable[[Execution], Document]
    no_jobs: str = ""
    remote: bool = False
    require: Callable[[], object] = lambda: None

    def check(self, launch: Launch) -> None:
        """Raise an InputError if it cannot execute a launch."""
        jobs = launch.jobs
        deadline = launch.deadline
        name = launch.runtime
        if jobs is not None and jobs < 1:
            raise InputError(
                f"--jobs {jobs}",
                "a whole number of at least 1, or None for the cores",
                "give 1 or more",
            )
        # 1 is its only value anyway
        if self.no_jobs and jobs not in (None, 1):
            raise InputError(
                f"--jobs {jobs} with --runtime {name}", self.no_jobs, "leave --jobs out"
            )
        if deadline is not None and not self.remote:
            raise InputError(
                f"--deadline {deadline:g} with --runtime {name}",
                "it waits for one site after the other; sites that run by themselves can be held to a deadline",
                "leave it out, or use --runtime flare",
            )

        self.require()
        if launch.profile and self.remote:
            raise InputError(
                f"--profile with --runtime {name}",
                "it times the work of one process",
                "leave one out",
            )


def check_name(name: str) -> None:
    """Raise an InputError if this is neither a shipped runtime nor a dotted path."""
    if name not in _MODULES and "." not in name and ":" not in name:
        raise InputError(
            f"--runtime {name}",
            f"runtimes here are: {', '.join(SHIPPED)}, or a dotted path",
            did_you_mean(name, tuple(SHIPPED), "choose one"),
        )


def load(name: str) -> Runtime:
    """Return a runtime by its name or dotted path.

    Raises:
        InputError: there is none.
    """
    check_name(name)
    module, _, attribute = _MODULES.get(name, name).partition(":")
    try:
        runtime = getattr(importlib.import_module(module), attribute or "RUNTIME", None)
    except ModuleNotFoundError as error:
        raise InputError(
            f"--runtime {name} ({error})", "a module that Python finds", "check PYTHONPATH"
        ) from error

    if not isinstance(runtime, Runtime):
        raise InputError(
            f"--runtime {name}",
            f"module {module} has a Runtime called {attribute or 'RUNTIME'}",
            "add it there",
        )

    return runtime
