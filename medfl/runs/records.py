"""Lists of records, as `Result` hands them out: plain dicts with the same keys and typed values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

Record = dict[str, Any]


def even(rows: list[Record]) -> list[Record]:
    """Give all records the same keys, None where one has no value."""
    names: Iterable[str] = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows] if rows else []


def typed(row: Mapping[str, str]) -> Record:
    """Return a line of a table with its numbers as such; names stay text, be they of digits ("007")."""
    return {name: cell if name in ("id", "site") else _value(cell) for name, cell in row.items()}


def _value(cell: str) -> Any:
    """Return a cell as a number where it is one, None where it is blank."""
    if cell == "":
        return None
    for number in (int, float):
        with suppress(ValueError):
            return number(cell)
    return cell
