"""Operations of expressions whose result could be large beyond bounds, and their bounds.

All raise `Refused` beyond them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from medfl.core.untrusted import Refused
from medfl.policy.expressions import check_format, check_width

_LARGEST = 10**8
"""Items of a text, list or array that one operation may make."""


def _power(base: Any, exponent: Any) -> Any:
    # Of integers only: floats overflow by themselves.
    large = (
        isinstance(base, int)
        and isinstance(exponent, int)
        and abs(exponent) * max(base.bit_length(), 1) > 1000
    )
    if large:
        raise Refused("a power of more than 1000 binary digits")
    return base**exponent


def _times(left: Any, right: Any) -> Any:
    for sequence, count in ((left, right), (right, left)):
        if (
            isinstance(sequence, str | list | tuple)
            and isinstance(count, int)
            and len(sequence) * count > _LARGEST
        ):
            raise Refused(f"a repetition to more than {_LARGEST} items")
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() + right.bit_length() > 1000
    ):
        raise Refused("a number of more than 1000 binary digits")
    return left * right


def _remainder(left: Any, right: Any) -> Any:
    # Of texts `%` is formatting, and `%*d` takes its width from a value.
    if isinstance(left, str) and re.search(r"\d{4}|\*", left):
        raise Refused("a text with a format of more than 999 places")
    return left % right


GROWING: dict[str, Callable[[Any, Any], Any]] = {"Mult": _times, "Pow": _power, "Mod": _remainder}


def operate(operator: str, left: Any, right: Any) -> Any:
    """Return what an operation gives; refuse it where that would be too large."""
    return GROWING[operator](left, right)


def bounded_range(*bounds: Any) -> range:
    """Return a range whose bounds are not too large."""
    span = range(*bounds)
    if max(abs(span.start), abs(span.stop)) > _LARGEST:
        raise Refused(f"a range beyond {_LARGEST}")
    return span


def formatted(value: Any, spec: str = "") -> str:
    """Return a value as text, as wide as is permitted."""
    check_width(spec)
    return format(value, spec) if spec else str(value)


def format_text(text: str, *values: Any, **named: Any) -> str:
    """Return a text with values in it, of a permitted form."""
    check_format(text)
    return text.format(*values, **named)
