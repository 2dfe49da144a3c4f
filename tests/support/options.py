"""A method's options as the card of its paper has them."""

from __future__ import annotations

from typing import Any

from medfl.methods import load, options_of


def numbers(name: str) -> dict[str, tuple[Any, ...]]:
    """Return each number and switch: (default, least, most) without limits that it has not."""
    numeric = (
        one for one in options_of(type(load(name))) if isinstance(one["default"], int | float)
    )
    limits = {one["name"]: (one["default"], one["minimum"], one["maximum"]) for one in numeric}
    return {
        name: tuple(part for part in found if part is not None) for name, found in limits.items()
    }
