"""The tables of `medfl calibrate`: guaranteed and observed coverage at each site and for each group."""

from __future__ import annotations

from medfl.core import Config

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""

_COLUMNS = (
    ("threshold of", "way", ""),
    ("calibrated on", "calibration", "d"),
    ("from", "source", ""),
    ("threshold", "threshold", ".4g"),
    ("tested on", "test", "d"),
    ("reached", "coverage", ".3f"),
    ("95 % from", "low", ".3f"),
    ("to", "high", ".3f"),
    ("mean size", "size", ".3g"),
    ("abstained", "abstained", ".1%"),
)
"""Title, entry of a row and its format."""


def tables_of(document: Config) -> list[Table]:
    """Return the tables of a calibration.json: for its sites, and for its groups if it has any."""
    tables = [_table(document, "rows", "site")]
    if document["groups"]:
        tables.append(_table(document, "groups", document["by"]))

    return tables


def _table(document: Config, key: str, first: str) -> Table:
    body = []
    for row in document[key]:
        cells = [row["name"]]
        for _, entry, form in _COLUMNS:
            value = row.get(entry)
            cells.append("–" if value is None else format(value, form))

        body.append(cells)

    return [first, *(title for title, _, _ in _COLUMNS)], body
