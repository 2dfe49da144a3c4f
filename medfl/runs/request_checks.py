"""Checks of a request that are made before importing PyTorch and MONAI, which takes seconds."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path

from medfl import datasets
from medfl.bundle.files import read_protocol, shipped
from medfl.bundle.protocol import resolved
from medfl.core import (
    Config,
    InputError,
    Run,
    check_limits,
    portable,
    trust_module,
    version_of,
)
from medfl.data.partition.draw import check_centre
from medfl.data.partition.rules import parse
from medfl.datasets.base import read_table
from medfl.runtimes import Launch, registry
from medfl.storage import (
    LOCAL_REFERENCE,
    PHANTOM,
    read_run,
    record_of,
    require_unused,
    weights_file,
)
from medfl.storage.places import require_run


def check_rounds(rounds: int, init: str) -> None:
    """Raise an InputError for zero rounds without weights to evaluate."""
    if rounds or init:
        return

    raise InputError(
        f"--rounds {rounds}",
        "at least 1, or 0 to examine the weights of --init FILE|run:DIR|bundle:DIR",
        "see medfl evaluate",
    )


def check_places(bundle: str, requested: Config) -> None:
    """Raise an InputError if there is no folder of images, or a shipped bundle lacks the preset, layout or centre."""
    data = requested.get("data") or PHANTOM
    is_folder = data != PHANTOM
    if bundle not in shipped():
        if is_folder and not Path(data).expanduser().exists():
            raise InputError(f"--data {data}", "a folder that is there", "check the path")
        return

    resolved(bundle, read_protocol(bundle), requested.get("presets", ()))
    if is_folder:
        datasets.locate(bundle, data)

    spec = requested.get("partition") or ""
    if not spec.startswith("centre:"):
        return

    centres = {*datasets.get(bundle).centres}
    if is_folder:
        centres = {record.centre for record in read_table(bundle, data).records}

    # With one centre all limits are unknown, which is reported later.
    for limit in parse(spec)[1] if len(centres) > 1 else ():
        check_centre(limit, centres)


def check_driver(device: str) -> None:
    """Raise an InputError for a CUDA device if no driver is installed; PyTorch counts the devices later."""
    # ROCm's devices are called cuda too, and need no libcuda
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
            "a run is resumed with its own settings; only --rounds may grow, unless --decay-per is poly",
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
    """Refuse, by an InputError, what can be refused without data or a bundle's content; nothing was written."""
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

        # only numbers: texts may have several spellings, and are compared when the plan is made
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
