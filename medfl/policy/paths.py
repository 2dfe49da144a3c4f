"""Texts of a configuration that could name a file, and ids that references name."""

from __future__ import annotations

import re

from medfl.core.untrusted import Refused

_SYSTEM = re.compile(r"/+(etc|proc|sys|dev|root|boot|home|var)(/|$)")
_PARENT = re.compile(r"(^|[/\\])\.\.([/\\]|$)")


def check_path(text: str, *, absolute: bool = False) -> None:
    """Check a text of a configuration that may be used as a path.

    With `absolute` it may begin with a slash, as a continuation; where the zoo keeps its data it always may.

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


def check_id(text: str) -> None:
    """Check the id that a reference or macro names.

    Raises:
        Refused: it is the whole configuration, or an import.
    """
    parts = [part for part in text.replace("#", "::").split("::") if part]
    if not parts:
        raise Refused("a reference to the whole configuration")
    if "imports" in parts:
        raise Refused("a reference to an import")
