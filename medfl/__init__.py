"""medfl: federated training of MONAI bundles across sites that may not share data."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Bundle": "medfl.bundle",
    "Host": "medfl.site",
    "InputError": "medfl.errors",
    "Message": "medfl.message",
    "Method": "medfl.methods.base",
    "Run": "medfl.settings",
    "RunError": "medfl.errors",
    "Site": "medfl.site",
    "State": "medfl.storage",
    "Task": "medfl.task",
    "federate": "medfl.launch",
    "fit": "medfl.training",
    "option": "medfl.methods.base",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch and MONAI take seconds, `medfl --help` should not."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'medfl' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
