"""Where files lie for which nobody named a place."""

from __future__ import annotations

import os
from pathlib import Path

from medfl.core.errors import InputError
from medfl.core.names import check_name

PRIVATE = "MEDFL_PRIVATE_CACHE"
"""Variable of a process in a sandbox: its folder for what is pickled, as other processes would run what it writes."""


def cache_folder(kind: str) -> Path:
    """Return the user's cache folder of one kind ($XDG_CACHE_HOME/medfl/<kind>); it may not exist yet."""
    if kind == "prepared" and os.environ.get(PRIVATE):
        return Path(os.environ[PRIVATE]) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medfl" / kind


def default_run_folder(bundle: str, method: str, seed: int) -> Path:
    """Return the run folder where --out names none; InputError if the bundle's folder has no name for one."""
    return Path("runs") / f"{check_name(bundle, 'bundle')}-{method.rpartition('.')[2]}-{seed}"


def is_run(folder: Path) -> bool:
    """Tell whether a model's folder is a run's; else it is a bundle's.

    Raises:
        InputError: it is neither.
    """
    if (folder / "run.json").is_file():
        return True
    if (folder / "configs").is_dir():
        return False
    raise InputError(
        f"{folder} is neither a run (no run.json) nor a bundle (no configs/)",
        "a folder that medfl run or medfl export wrote, or any MONAI bundle with weights in models/",
        "name one, as runs/NAME",
    )
