"""Numbers and names as text for a report and its table."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence

from medfl.core import Config


def number(value: float | None) -> str:
    """Return a metric with three decimals, a dash if missing."""
    if value is None or math.isnan(value):
        return "–"

    return f"{value:.3f}".replace("-", "−")  # a minus as wide as the plus


def signed(value: float) -> str:
    """Return a difference with its sign."""
    return f"{value:+.3f}".replace("-", "−")


def interval(ends: tuple[float, float] | None) -> str:
    """Return the bounds of an interval, "" if there is none, a dash if all draws are equal."""
    if ends is None:
        return ""
    if math.isclose(*ends, rel_tol=1e-9):
        return "–"

    return f"{number(ends[0])} to {number(ends[1])}"


def each(values: Sequence[float]) -> str:
    """Return a few values in place of an interval."""
    return "each: " + " · ".join(map(number, values))


def sd(spread: Config) -> str:
    """Return the standard deviation from `metrics.spread`, a dash for a single site or none."""
    return number(spread["sd"]) if spread and spread["count"] > 1 else "–"


def count(value: float) -> str:
    """Return an integer with thousands separators."""
    return f"{int(value):,}".replace(",", "\u202f")  # a narrow no-break space


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


def time_left(seconds: float) -> str:
    """Format a time estimate in whole seconds."""
    return f"about {duration(math.ceil(seconds))} left"


def plain(text: str, width: int = 24) -> str:
    """Return a name that is safe for a terminal, cut to a width."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    if len(text) <= width:
        return text

    return text[: width - 1] + "…"


def command(text: str) -> str:
    """Return a `medfl` command for readers elsewhere: an absolute path is reduced to its last part."""
    if not text.startswith("medfl "):
        return text
    try:
        words = shlex.split(text)
    except ValueError:
        return text

    # paths may also follow "name=" and "name:"
    return shlex.join(re.sub(r"(^|[=:])/(?:[^/]+/)*([^/]+)/?$", r"\1\2", word) for word in words)


def setting(value: object) -> str:
    """Return a setting's value as text."""
    if isinstance(value, str):
        return value

    return json.dumps(value)
