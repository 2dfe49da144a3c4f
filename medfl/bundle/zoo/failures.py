"""Why something of a bundle's configuration cannot be made, in one line that says what to do."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from medfl.core.errors import InputError, as_text, missing_package, root_cause, without_package
from medfl.core.untrusted import Refused
from medfl.policy.evaluate import ElsewhereRefused
from medfl.policy.findings import NOT_LISTED

_NAME_DATA = (
    "a bundle looks into its own folder and those that you name",
    "give the folder of the images with --data",
)
_OTHER_VERSION = re.compile(
    r"unexpected keyword argument|has no attribute|Cannot locate class|cannot import name"
)
"""What Python and MONAI say where a name or an argument is gone."""
_PATH = re.compile(r"(?<![\w.])/[^\s'\"`,;]+")
_NAME = re.compile(
    r"Key `(\w+)` of transform|Data list (\w+) not specified|^'?key (\w+) is not|^the attribute \.(\w+) of table"
)


def explained(
    error: Exception, key: str, file: Path, content: Mapping[str, Any], resolved: Mapping[str, Any]
) -> InputError:
    """Return an error that names the innermost id that failed, the root cause and what helps.

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
        other = missing[1].replace("::", "#")
        return InputError(
            f"{file} has no id {other!r}, which {key!r} refers to", "every id exists", "add it"
        )

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


def _reader(key: str, content: Any) -> str:
    """Return the id by which a component's reader of images is chosen, "" if it has none."""
    node, parts = content, key.split("#")
    for number, part in enumerate(parts, 1):
        if isinstance(node, list):
            node = node[int(part)]
        elif isinstance(node, Mapping):
            node = node.get(part)
        else:
            node = None

        if isinstance(node, str) and node[:1] in (
            "@",
            "%",
        ):  # what is written elsewhere is changed there
            return _reader("#".join([node[1:].replace("::", "#"), *parts[number:]]), content)

    reader = node.get("reader") if isinstance(node, Mapping) else None
    return str(reader)[1:] if str(reader).startswith("@") else f"{key}#reader" if reader else ""


def _missing_file(cause: BaseException) -> str:
    if isinstance(cause, FileNotFoundError) and cause.filename:
        return str(cause.filename)
    match = re.search(r"[Ff]ile (\S+) does not exist", str(cause))  # MONAI of data lists
    return match[1] if match else ""


def _without_file(where: str, path: str, file: Path, resolved: Mapping[str, Any]) -> InputError:
    ids = [
        key
        for key, value in resolved.items()
        if isinstance(value, str | Path) and str(value) == path
    ]
    root = file.parents[1]
    name = Path(path).name
    lists = [
        some.name
        for some in root.glob("large_files.y*ml")
        if name in some.read_text(encoding="utf-8")
    ]
    advice = [f"{file_list} says where it is downloaded" for file_list in lists[:1]]
    advice += [f"--config {key.replace('::', '#')}=FILE names yours" for key in ids[:1]]

    return InputError(
        f"{where} needs the file {path}, which is not there",
        "a file that a bundle reads lies where its configuration says, or as a data list in the folder of --data",
        ", or ".join(advice) or "give the folder of the data with --data",
    )


def _of_other_version(
    where: str, cause: BaseException, key: str, metadata: Mapping[str, Any]
) -> InputError:
    package = "numpy" if "numpy" in str(cause) else "monai"
    recorded = metadata.get(f"{package}_version")
    return InputError(
        f"{where} fails with {as_text(cause)}",
        f"it is written for {package} {version(package)}, which is installed; metadata.json names {recorded}",
        f"give another value with --config {key}=..., or install {package}=={recorded} where this bundle is run",
    )


# What an error says is missing


def deepest(error: BaseException) -> BaseException:
    """Return the error that others were raised from."""
    passed: list[BaseException] = []
    while (
        error.__cause__ is not None and error not in passed
    ):  # one that was raised again is its own cause's cause
        passed.append(error)
        error = error.__cause__
    return error


def missing_path(why: BaseException) -> str:
    """Return the first path in an error's text that is not there, "" where there is none."""
    if isinstance(why, ElsewhereRefused):
        return str(why).removeprefix("the path ").partition(", which")[0]
    paths = (path.rstrip(".:)]>") for path in _PATH.findall(str(why)))
    return next((path for path in paths if not os.path.exists(path)), "")


def missing_names(why: BaseException) -> list[str]:
    """Return the names that an error says are missing: keys of a dict or an archive, columns of a table."""
    text = str(why)
    if isinstance(why, AttributeError) and type(getattr(why, "obj", None)).__name__ == "DataFrame":
        return [str(why.name)]
    if match := _NAME.search(text):
        return [name for name in match.groups() if name]
    if not isinstance(why, KeyError) or not why.args or not isinstance(why.args[0], str):
        return []

    several = "[columns]" in text or "in index" in text
    if several:
        return re.findall(r"'([^']+)'", text)

    return [why.args[0].removesuffix(" is not a file in the archive")]
