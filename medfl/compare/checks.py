"""What a comparison refuses: a folder in use, unknown methods, runs that cannot be compared."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from medfl.compare.labels import labels
from medfl.core import Config, InputError, Refused, Run, did_you_mean, json_values, printable
from medfl.core.setting_values import float_or_nan
from medfl.report import RunFiles
from medfl.report.formatting import setting
from medfl.storage import GRID, require_unused

_WIDTH = 40  # letters of a value in an error
_PARTS = {"requested": "", "options": "--set ", "config": "--config "}
_NO_SETTINGS = re.compile(r"bundle_path|((public\.)?data|partition)\.(folder|counts|notes)(\..*)?")
"""Names in a record that are not settings: paths, counts and notes."""
MUST_AGREE: Mapping[str, Callable[[RunFiles], str]] = {
    "bundles": lambda run: str(run.record["bundle"]),
    "tasks": lambda run: str(run.record["task"]),
    "key metrics": lambda run: run.key,
    "kinds of images": lambda run: str(run.record["data"]["source"]),
}
"""What must be equal for runs to be compared."""


def require_same(
    runs: Sequence[RunFiles],
    allowed: str,
    advice: str,
    kinds: Mapping[str, Callable[[RunFiles], str]] = MUST_AGREE,
) -> None:
    """Raise an InputError that names the first kind in which the runs differ."""
    for kind, read in kinds.items():
        values = sorted(set(map(read, runs)))
        if len(values) > 1:
            raise InputError(f"runs of different {kind}: {' and '.join(values)}", allowed, advice)


def differing_names(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or that only one of them has."""
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def check_places(out: Path, paths: Sequence[Path]) -> None:
    """Raise an InputError if a file below a comparison's folder would be written elsewhere."""
    for path in paths:
        # a third-party folder may contain a link to another place
        for place in (path, *path.parents):
            if place == out:
                break
            plain = place.is_dir() or place.is_file() or not place.exists()
            if place.is_symlink() or not plain:
                raise InputError(
                    f"{printable(place)} is a link or a pipe",
                    "a comparison's folder has plain files and folders",
                    "remove it, or give --out another folder",
                )


def check_folder(settings: Config, out: Path) -> None:
    """Raise an InputError unless a folder is new, or of a comparison with these settings (`Grid.settings`)."""
    allowed = "a new folder, or one of an earlier comparison"
    advice = "give --out a path that does not exist yet"
    if not out.is_dir() or not any(out.iterdir()):
        require_unused(out, advice=advice)
        return

    try:
        before = json_values(out / GRID)
        if not isinstance(before, dict):
            raise Refused("no settings")

        for part in _PARTS:
            if not isinstance(before.get(part) or {}, dict):
                raise Refused("no settings")
    except Refused as error:
        raise InputError(f"--out {out}, which holds no comparison", allowed, advice) from error

    new = _flat(settings)
    present = _flat(before)
    differing = differing_names(present, new)
    if differing:
        raise InputError(
            f"--out {out} with {_listed(new, differing)}",
            f"the comparison there has {_listed(present, differing)}",
            "repeat its settings (methods, partitions and seeds may differ), or give --out another folder",
        )


def _listed(values: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {values.get(name, 'not set')}" for name in names)


def _flat(settings: Config) -> dict[str, str]:
    """Return the settings of a grid by name, as text."""
    flat = {"bundle": setting(settings.get("bundle"))}
    for part, prefix in _PARTS.items():
        for name, value in (settings.get(part) or {}).items():
            flat[f"{prefix}{name}"] = setting(value)

    return flat


def check_names(runs: Sequence[Run], against: str | None, target: str | None) -> None:
    """Raise an InputError if `against` is not a method of the planned runs, or `target` neither method nor number."""
    folders = [RunFiles.from_record(run.to_dict()) for run in runs]
    names = list(dict.fromkeys(labels(folders)))
    methods = ", ".join(names)
    if against is not None and against not in names:
        raise InputError(
            f"--against {against}",
            f"methods are {methods}",
            did_you_mean(against, names, "choose one of them"),
        )

    if target is not None and target not in names and not math.isfinite(float_or_nan(target)):
        advice = did_you_mean(target, names, "give --target one of these")
        raise InputError(f"--target {target}", f"a number, or one of {methods}", advice)


def differing_settings(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    """Name the settings in which the records of two runs (run.json) differ, each with both values.

    Paths are not settings, and entries missing in older records count as their defaults.
    """
    left = _record_settings(first)
    right = _record_settings(second)
    names = differing_names(left, right)
    return [f"{name} ({_short(left.get(name))} and {_short(right.get(name))})" for name in names]


def _record_settings(document: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a record by name, in groups as group.name, missing ones at their defaults."""
    flat = {}
    for field in dataclasses.fields(Run):
        default = None if field.default is dataclasses.MISSING else field.default
        for name, value in _leaves(field.name, document.get(field.name, default)).items():
            if not _NO_SETTINGS.fullmatch(name):
                flat[name] = value

    return flat


def _leaves(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        return {name: value}
    # how many, not which: the items of each site are not a setting
    if name == "partition.sites":
        return {"sites": len(value)}

    leaves: dict[str, object] = {}
    for key, part in value.items():
        leaves |= _leaves(f"{name}.{key}", part)

    return leaves


def _short(value: object) -> str:
    text = "not set" if value is None else setting(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def check_same_source_and_bundle(planned: Run, finished: Sequence[Path]) -> None:
    """Raise an InputError if a finished run has other images (real or phantom) or another bundle than planned."""
    for path in finished:
        record = RunFiles(path).record
        checksum = record.get("bundle_sha256") or planned.bundle_sha256  # old records have none
        for kind, now, before in (
            ("images", planned.data.source, record["data"]["source"]),
            ("bundle", planned.bundle_sha256[:16], str(checksum)[:16]),
        ):
            if now != before:
                raise InputError(
                    f"{kind} {now}, and {before} in {path}",
                    "one comparison has one kind of images and one version of the bundle",
                    "give --out another folder, or remove the runs there",
                )
