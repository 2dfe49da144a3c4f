"""medfl: federated training of MONAI bundles across sites that may not share data.

`run` trains, `load_run` opens what a run left, `compare` runs several methods; `methods.names()` and `bundles()` say
what there is. A method of one's own is a `Method` with `option` fields; it sees a `Site` or a `Host`, `Message` and
`State`, and trains with `fit`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from medfl.core.importing import without_gc

if TYPE_CHECKING:
    from medfl.bundle.bundle import Bundle as Bundle
    from medfl.cli.api import bundles as bundles
    from medfl.cli.api import compare as compare
    from medfl.cli.api import run as run
    from medfl.core.errors import InputError as InputError
    from medfl.core.errors import RunError as RunError
    from medfl.core.message import Message as Message
    from medfl.core.run import Run as Run
    from medfl.core.storage import State as State
    from medfl.core.task import Task as Task
    from medfl.methods.base import Method as Method
    from medfl.methods.base import option as option
    from medfl.runs.launch import federate as federate
    from medfl.runs.result import Result as Result
    from medfl.runs.result import load_run as load_run
    from medfl.training.loop import fit as fit
    from medfl.training.site import Host as Host
    from medfl.training.site import Site as Site

_PUBLIC = {
    "Bundle": "medfl.bundle.bundle",
    "Host": "medfl.training.site",
    "InputError": "medfl.core.errors",
    "Message": "medfl.core.message",
    "Method": "medfl.methods.base",
    "Result": "medfl.runs.result",
    "Run": "medfl.core.run",
    "RunError": "medfl.core.errors",
    "Site": "medfl.training.site",
    "State": "medfl.core.storage",
    "Task": "medfl.core.task",
    "bundles": "medfl.cli.api",
    "compare": "medfl.cli.api",
    "federate": "medfl.runs.launch",
    "fit": "medfl.training.loop",
    "load_run": "medfl.runs.result",
    "option": "medfl.methods.base",
    "run": "medfl.cli.api",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch and MONAI take seconds, `medfl --help` should not."""
    if name == "methods":
        return importlib.import_module("medfl.methods")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'medfl' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    with without_gc():
        return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__


class _Package(ModuleType):
    """`medfl.compare` is the function, also once the module of that name has been imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "compare" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
