"""Numbers and names as text for a report and its table."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence

from medfl.core.documents import Config


def number(value: float | None) -> str:
    """Return a metric with three decimals, a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"

    return f"{value:.3f}"


def signed(value: float) -> str:
    """Return a difference with its sign."""
    return f"{value:+.3f}".replace("-", "−")  # a minus as wide as the plus


def interval(ends: tuple[float, float] | None) -> str:
    """Return the ends of an interval, "" where there is none, a dash where all draws are equal."""
    if ends is None:
        return ""
    if math.isclose(*ends, rel_tol=1e-9):
        return "–"

    return f"{number(ends[0])} to {number(ends[1])}"


def each(values: Sequence[float]) -> str:
    """Return a few values in place of an interval."""
    return "each: " + " · ".join(map(number, values))


def sd(spread: Config) -> str:
    """Return the standard deviation of `metrics.spread`, a dash for a single site or none."""
    return number(spread["sd"]) if spread and spread["count"] > 1 else "–"


def count(value: float) -> str:
    """Return a whole number with thousands separators."""
    return f"{int(value):,}".replace(",", "\u202f")  # a narrow space that does not break


def size(value: float) -> str:
    """Return a number of bytes."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"

    return f"{int(value)} B"


def duration(value: float) -> str:
    """Return a number of seconds, from two minutes on as minutes or hours."""
    if value < 120:
        return f"{value:.3g} s"

    minutes = round(value / 60)
    if minutes < 120:
        return f"{minutes} min"

    return f"{minutes // 60} h {minutes % 60:02d} min"


def plain(text: str, width: int = 24) -> str:
    """Return a name that is safe for a terminal, cut to a width."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    if len(text) <= width:
        return text

    return text[: width - 1] + "…"


def command(text: str) -> str:
    """Return a command of `medfl` as a reader elsewhere may see it: of an absolute path its last name alone."""
    if not text.startswith("medfl "):
        return text
    try:
        words = shlex.split(text)
    except ValueError:
        return text

    # paths also stand behind "name=" and "name:"
    return shlex.join(re.sub(r"(^|[=:])/(?:[^/]+/)*([^/]+)/?$", r"\1\2", word) for word in words)


def setting(value: object) -> str:
    """Return a setting's value as text."""
    if isinstance(value, str):
        return value

    return json.dumps(value)
