"""What of a call to run a federation is refused before PyTorch and MONAI are imported, which takes seconds."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path

from medfl import datasets
from medfl.bundle.files import read_protocol, shipped
from medfl.bundle.protocol import resolved
from medfl.core import portable
from medfl.core.documents import Config
from medfl.core.errors import InputError
from medfl.core.names import trust_module
from medfl.core.release import version_of
from medfl.core.run import Run
from medfl.core.settings import check_limits
from medfl.runtimes import registry
from medfl.runtimes.launch import Launch
from medfl.storage.places import (
    LOCAL_REFERENCE,
    PHANTOM,
    record_of,
    require_run,
    require_unused,
    weights_file,
)
from medfl.storage.run_documents import read_run


def check_rounds(rounds: int, init: str) -> None:
    """Raise an InputError for no rounds without weights to examine."""
    if rounds or init:
        return

    raise InputError(
        f"--rounds {rounds}",
        "at least 1, or 0 to examine the weights of --init FILE|run:DIR|bundle:DIR",
        "see medfl evaluate",
    )


def check_places(bundle: str, requested: Config) -> None:
    """Raise an InputError for a preset that a shipped bundle lacks, or a folder without its images."""
    if bundle not in shipped():
        return

    resolved(bundle, read_protocol(bundle), requested.get("presets", ()))
    data = requested.get("data")
    if data not in (None, PHANTOM):
        datasets.locate(bundle, data)


def check_driver(device: str) -> None:
    """Raise an InputError for a CUDA device where no driver is installed; PyTorch counts the devices later."""
    if not device.startswith("cuda") or sys.platform != "linux" or "rocm" in version_of("torch"):
        return

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise InputError(
            f"--device {device}", "this machine has 0 CUDA devices", "choose cpu or auto"
        ) from error


def require_same_settings(planned: Run, recorded: Run) -> None:
    """Raise an InputError that names a difference between the planned run and the one to be continued."""
    different = planned.difference(recorded)
    if different:
        more = f" (and {len(different) - 1} more)" if different[1:] else ""
        raise InputError(
            f"--resume with other settings: {different[0]}{more}",
            "a run is resumed with its own settings; only --rounds may grow",
            "repeat them, or start in another folder",
        )


def check_before_imports(
    bundle: str | None,
    requested: Config,
    *,
    has_overrides: bool,
    source: Path | None,
    launch: Launch,
) -> None:
    """Refuse, by an InputError, what needs neither data nor a bundle's content to be refused; nothing was written."""
    out = launch.out
    registry.check_name(launch.runtime)
    for module in (launch.runtime, requested.get("method")):
        trust_module(module)

    check_limits(requested)
    if requested.get("rounds") == 0 and not launch.resume:
        check_rounds(0, str(requested.get("init") or ""))

    if source is not None and (has_overrides or set(requested) - {"data"}):
        raise InputError(
            "--from together with other settings",
            "--from repeats a recorded run as it was",
            "leave them out",
        )

    if launch.resume and source is None:
        if out is None:
            raise InputError(
                "--resume without --out",
                "--out names the folder of the run to continue",
                "add --out DIR",
            )
        require_run(out)

    folder = source or (out if launch.resume else None)
    recorded = False
    if folder is not None:
        run = read_run(record_of(folder))[0]
        recorded = run.portable
        numbers = {}
        for name, value in requested.items():
            if name != "rounds" and isinstance(getattr(run, name, None), int | float):
                numbers[name] = value

        require_same_settings(replace(run, **numbers), run)
    elif bundle is None:
        raise InputError("no bundle", "a shipped bundle's name or a folder", "see medfl bundles")
    else:
        check_places(bundle, requested)

    check_driver(str(requested.get("device") or ""))
    if requested.get("portable") or recorded:
        portable.enable()

    if requested.get("init"):
        weights_file(requested["init"])

    if out is not None and not launch.resume:
        require_unused(out, LOCAL_REFERENCE)
