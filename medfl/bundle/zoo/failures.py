"""Why a part of a bundle's configuration cannot be created, in one line that says what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from medfl.core import (
    Config,
    InputError,
    Refused,
    as_text,
    missing_package,
    root_cause,
    without_package,
)
from medfl.policy.components import ElsewhereRefused
from medfl.policy.inspection import NOT_LISTED

_NAME_DATA = (
    "a bundle looks into its own folder and those that you name",
    "give the folder of the images with --data",
)
_OTHER_VERSION = re.compile(
    r"unexpected keyword argument|has no attribute|Cannot locate class|cannot import name"
)
"""Messages of Python and MONAI about a removed name or argument."""


def explained(
    error: Exception, key: str, file: Path, content: Config, resolved: Config
) -> InputError:
    """Return an error that names the innermost id that failed, the root cause and the remedy.

    `content` is the unevaluated configuration, with metadata.json under `_meta_`; `resolved` was evaluated before.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_resolve_one_item":
            key = frame.f_locals["id"]

    cause = root_cause(error)
    if isinstance(cause, InputError):
        return cause

    key = key.replace("::", "#")
    where = f"{file}: id {key!r}"
    if isinstance(cause, Refused):
        elsewhere = isinstance(cause, ElsewhereRefused)
        return InputError(f"{where}: {cause}", *(_NAME_DATA if elsewhere else NOT_LISTED))

    if missing := re.search(r"referring item `@([\w:]+)`", str(cause)):
        reference = missing[1].replace("::", "#")
        problem = f"{file} has no id {reference!r}, which {key!r} refers to"
        line = re.compile(rf'^ {{0,4}}"?{reference.partition("#")[0]}"?:', re.MULTILINE)
        for neighbour in sorted({*file.parent.glob("*.[jy]*")} - {file}):
            if line.search(neighbour.read_text(encoding="utf-8", errors="ignore")):
                return InputError(
                    problem,
                    "every id exists",
                    f"add it: {neighbour.name}, which is not read with {file.name}, has one",
                )

        return InputError(problem, "every id exists", "add it")

    if package := missing_package(error):
        return without_package(where, package, _reader(key, content))
    if path := _missing_file(cause):
        return _without_file(where, path, file, resolved)
    if _OTHER_VERSION.search(str(cause)):
        return _of_other_version(where, cause, key, content.get("_meta_", {}))

    return InputError(
        f"{where} fails with {as_text(cause)}",
        "every id that the trainer needs can be evaluated",
        "change it so that it can be evaluated; if the data lie elsewhere, give their folder with --data",
    )


def _reader(key: str, content: object) -> str:
    """Return the id that selects a component's image reader, "" if it has none."""
    node = content
    parts = key.split("#")
    for number, part in enumerate(parts, 1):
        if isinstance(node, list):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, Mapping) else None

        # a reference: change the value where it is defined
        if isinstance(node, str) and node[:1] in ("@", "%"):
            return _reader("#".join([node[1:].replace("::", "#"), *parts[number:]]), content)

    reader = node.get("reader") if isinstance(node, Mapping) else None
    if isinstance(reader, str) and reader.startswith("@"):
        return reader[1:]

    return f"{key}#reader" if reader else ""


def _missing_file(cause: BaseException) -> str:
    if isinstance(cause, FileNotFoundError) and cause.filename:
        return str(cause.filename)
    match = re.search(r"[Ff]ile (\S+) does not exist", str(cause))  # MONAI's message for data lists
    return match[1] if match else ""


def _without_file(where: str, path: str, file: Path, resolved: Config) -> InputError:
    advice = []
    for file_list in file.parents[1].glob("large_files.y*ml"):
        if Path(path).name in file_list.read_text(encoding="utf-8"):
            advice.append(f"{file_list.name} says where it is downloaded")
            break

    for key, value in resolved.items():
        if isinstance(value, str | Path) and str(value) == path:
            advice.append(f"--config {key.replace('::', '#')}=FILE names yours")
            break

    return InputError(
        f"{where} needs the file {path}, which is not there",
        "a file that a bundle reads lies where its configuration says, or as a data list in the folder of --data",
        ", or ".join(advice) or "give the folder of the data with --data",
    )


def _of_other_version(where: str, cause: BaseException, key: str, metadata: Config) -> InputError:
    package = "numpy" if "numpy" in str(cause) else "monai"
    recorded = metadata.get(f"{package}_version")
    return InputError(
        f"{where} fails with {as_text(cause)}",
        f"{package} {version(package)} is installed, metadata.json names {recorded}",
        f"give another value with --config {key}=..., or install {package}=={recorded} where this bundle is run",
    )
