"""What an error of a bundle's configuration says is missing."""

from __future__ import annotations

import os
import re

from medfl.policy.components import ElsewhereRefused

_PATH = re.compile(r"(?<![\w.])/[^\s'\"`,;]+")
_NAME = re.compile(
    r"Key `(\w+)` of transform|Data list (\w+) not specified|^'?key (\w+) is not|^the attribute \.(\w+) of table"
)


def deepest(error: BaseException) -> BaseException:
    """Return the error that others were raised from."""
    passed: list[BaseException] = []
    # an error that was raised again is its own cause's cause
    while error.__cause__ is not None and error not in passed:
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
