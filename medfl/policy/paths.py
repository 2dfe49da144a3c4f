"""Texts of a configuration that could name a file, and where images may be read from."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from medfl.core.untrusted import Refused, printable

_SYSTEM = re.compile(r"/+(etc|proc|sys|dev|root|boot|home|var)(/|$)")
_PARENT = re.compile(r"(^|[/\\])\.\.([/\\]|$)")


class ElsewhereRefused(Refused):
    """A look at a place that neither the bundle nor the user opens."""


def check_path(text: str, *, absolute: bool = False) -> None:
    """Check a text of a configuration that may be used as a path.

    With `absolute` it may begin with a slash, as in an expression; where the zoo keeps its data it always may.

    Raises:
        Refused: it is a URL, leads upwards, to a home or to a system folder, or is absolute.
    """
    if "://" in text:
        raise Refused("a URL: nothing is fetched")
    if _PARENT.search(text):
        raise Refused("a path that leads upwards ('..')")
    if text.startswith("~") or text.startswith("\\\\") or re.match(r"[A-Za-z]:[\\/]", text):
        raise Refused("a path outside of bundle and data folder")
    if _SYSTEM.match(text):
        raise Refused("a path into a folder of the system")
    if text.startswith("/") and not absolute and not text.startswith("/workspace/"):
        raise Refused("an absolute path")


def check_place(path: str | Path, roots: Collection[Path]) -> None:
    """Check that a file or folder is one that the bundle or the user opens; links in these are followed.

    Raises:
        ElsewhereRefused: it is not below one of `roots`.
    """
    place = Path(os.path.abspath(path))
    if not any(part in roots for part in (place, *place.parents)):
        raise ElsewhereRefused(
            f"the path {printable(path)}, which is neither below the bundle nor below its data"
        )
