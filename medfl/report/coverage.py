"""The tables of `medfl calibrate`: what was promised and what is reached, at each site and of each group."""

from __future__ import annotations

from medfl.core.documents import Config

Table = tuple[list[str], list[list[str]]]
"""Head and rows."""


def tables_of(document: Config) -> list[Table]:
    """Return the tables of a calibration.json: of its sites, and of its groups where it has any."""
    tables = [_table(document, "rows", "site")]
    if document["groups"]:
        tables.append(_table(document, "groups", document["by"]))

    return tables


def _table(document: Config, key: str, first: str) -> Table:
    head = [first, "threshold of", "calibrated on", "threshold", "tested on", "promised", "reached"]
    head += ["95 % interval", f"mean size ({document['size_unit']})", "abstained"]
    body = []
    for row in document[key]:
        ends = "-"
        if row["low"] is not None:
            ends = f"{row['low']:.3f} to {row['high']:.3f}"

        calibrated_on = _cell(row["calibration"], "d")
        if row["source"]:
            calibrated_on += f" ({row['source']})"

        cells = [row["name"], row["way"], calibrated_on, _cell(row["threshold"], ".4g")]
        cells += [
            _cell(row["test"], "d"),
            f"{document['coverage']:g}",
            _cell(row["coverage"], ".3f"),
        ]
        cells += [ends, _cell(row["size"], ".3g"), _cell(row["abstained"], ".1%")]
        body.append(cells)

    return head, body


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
