"""What a comparison refuses before any of its runs: another's folder, runs on other images, names of no method."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medfl.compare import curves
from medfl.core.errors import InputError, did_you_mean
from medfl.core.run import Run
from medfl.core.run_folder import RunFolder as OwnFolder
from medfl.report import RunFolder

GRID = "compare.json"
"""What all runs of a comparison's folder share."""
_PLACES = re.compile(r"bundle_path|((public\.)?data|partition)\.(folder|counts|notes)(\..*)?")
"""Names in a record that are no settings: where things lie, and what was said about them."""


def folder(settings: Mapping[str, Any], out: Path) -> None:
    """Raise an InputError unless a folder is new, or one of a comparison with these settings (`Grid.settings`)."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file", "a new folder, or one of an earlier comparison", "give a new folder")
    if not out.exists():
        OwnFolder.require_unused(out)  # one that cannot be made
        return
    if not any(out.iterdir()):
        return
    try:
        before = json.loads((out / GRID).read_text())
        if not isinstance(before, dict):
            raise ValueError("no settings")
    except (OSError, ValueError) as error:
        raise InputError(f"--out {out}", "a new folder, or one of an earlier comparison", "give a new one") from error
    now, there = _flat(settings), _flat(before)
    differing = [name for name in {**there, **now} if now.get(name) != there.get(name)]
    if differing:
        told = [", ".join(f"{name} {known.get(name, 'not set')}" for name in differing) for known in (now, there)]
        raise InputError(
            f"--out {out} with {told[0]}",
            f"the comparison there has {told[1]}",
            "repeat its settings (methods, partitions and seeds may differ), or choose another folder",
        )


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a grid by their own names, short enough for a line."""
    flat = {"bundle": settings.get("bundle")}
    for part, prefix in (("requested", ""), ("options", "--set "), ("config", "--config ")):
        flat |= {f"{prefix}{name}": value for name, value in (settings.get(part) or {}).items()}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in flat.items()}


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return the labels that a comparison of these runs has."""
    folders = [RunFolder(Path(), run.to_dict(), (), (), None, None) for run in runs]
    return list(dict.fromkeys(curves.labels(folders)))


def named(runs: Sequence[Run], against: str | None, target: str | None) -> None:
    """Raise an InputError if what the tables are to be made against is no method of the grid, the target no value."""
    known = _labels(runs)
    told = ", ".join(known)
    if against is not None and against not in known:
        raise InputError(
            f"--against {against}", f"methods are {told}", did_you_mean(against, known, "choose one of them")
        )
    if target is not None and target not in known and not _is_finite(target):
        raise InputError(f"--target {target}", f"a number, or one of {told}", did_you_mean(target, known, "choose one"))


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name the settings in which the records of two runs (run.json) differ, each with both values.

    Where things lie is no setting. What neither record says, as those of older versions may not, does not differ.
    """
    left, right = _known(one), _known(other)
    names = [name for name in {**left, **right} if left.get(name) != right.get(name)]
    return [f"{name} ({_short(left.get(name))} and {_short(right.get(name))})" for name in names]


def _known(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a record by name, those of a group as group.name, what came later as it was before."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(Run):
        neutral = None if field.default is dataclasses.MISSING else field.default
        flat |= _leaves(field.name, document.get(field.name, neutral))
    return {name: value for name, value in flat.items() if not _PLACES.fullmatch(name)}


def _leaves(name: str, value: Any) -> dict[str, Any]:
    if name == "partition.sites":
        return {"sites": len(value)}
    if not isinstance(value, Mapping):
        return {name: value}
    return {leaf: v for inner, part in value.items() for leaf, v in _leaves(f"{name}.{inner}", part).items()}


def _short(value: Any, width: int = 40) -> str:
    text = "not set" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= width else f"{text[:width]}…"


def runs(planned: Run, there: Sequence[Path]) -> None:
    """Refuse to go on beside runs on other data or with another version of the bundle than those to come have."""
    for path in there:
        run = RunFolder.read(path).run
        for what, now, before in (
            ("images", planned.data.source, run["data"]["source"]),
            ("bundle", planned.bundle_sha256[:16], str(run.get("bundle_sha256") or planned.bundle_sha256)[:16]),
        ):
            if now != before:
                raise InputError(
                    f"{what} {now}, and {before} in {path}",
                    "one comparison has the same images and bundle throughout",
                    "choose another folder, or remove the runs there",
                )
