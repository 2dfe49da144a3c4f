"""medfl: federated training of MONAI bundles across sites that may not share data.

`run` trains, `load_run` opens what a run left, `compare` runs several methods, `tune` searches for settings;
`methods.names()` and `bundles()` say what there is. A method of one's own is a `Method` with `option` fields; it sees
a `Site` or a `Host`, `Message` and `State`, and trains with `fit`.
"""

from __future__ import annotations

import getpass
import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from medfl.core.importing import lazy_names
from medfl.core.release import VERSION

if TYPE_CHECKING:
    from medfl.bundle.bundle import Bundle as Bundle
    from medfl.cli.api import bundles as bundles, compare as compare, run as run, tune as tune
    from medfl.core.errors import InputError as InputError, RunError as RunError
    from medfl.core.message import Message as Message
    from medfl.core.run import Run as Run
    from medfl.core.task import Task as Task
    from medfl.methods.base import Method as Method, option as option
    from medfl.problem.parts import Parts as Parts
    from medfl.runs.launch import federate as federate
    from medfl.runs.result import Result as Result, load_run as load_run
    from medfl.runtimes.callbacks import (
        BestCheckpoint as BestCheckpoint,
        EarlyStopping as EarlyStopping,
        RoundEnd as RoundEnd,
    )
    from medfl.storage.files import State as State
    from medfl.training.site import Host as Host, Site as Site, fit as fit

try:
    getpass.getuser()
except (
    KeyError,
    OSError,
    ImportError,
):  # a container's user without a name, which MONAI and PyTorch ask for
    os.environ["LOGNAME"] = "nameless"

__version__ = VERSION
__all__, _load = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "methods":
        return importlib.import_module("medfl.methods")

    return _load(name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__


class _Package(ModuleType):
    """`medfl.compare` is the function, also once the module of that name has been imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "compare" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
