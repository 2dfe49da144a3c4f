"""A partition as a text table for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from medfl.core.tables import WIDTH, label_row, wrap
from medfl.data.partition.draw import Sections
from medfl.data.partition.rules import Partition

TITLES = {"train": "training", "validate": "validation", "test": "test"}


def table(partition: Partition, sections: Sections, classes: Sequence[str] | None) -> str:
    """Return a text table of at most 100 columns: training images per site and class, size of each section."""
    names = list(classes or ())
    shown = shown_sections(partition)
    counts = partition.counts(sections, len(names))
    numbers = []
    rows = []
    for site, held in partition.sites.items():
        numbers.append([*(len(held[name]) for name in shown), *counts[site]])
        rows.append([shorten(site, 24), *map(_cell, numbers[-1])])

    rows.append(["all sites", *(_cell(sum(column)) for column in zip(*numbers, strict=True))])
    head = ["site", *(TITLES[name] for name in shown), *names]
    legend = ""

    if sum(_widths([head, *rows])) > WIDTH:
        head[1 + len(shown) :] = list(map(str, range(len(names))))
        legend = _wrap(f"{c} = {shorten(name, WIDTH - 8)}" for c, name in enumerate(names))

    lines = [head, *rows]
    blocks = []
    for columns in _columns(_widths(lines)):
        blocks.append(_block([[row[i] for i in columns] for row in lines]))

    content = "images of each section" + (" and training images of each class" if names else "")
    title = f"partition {shorten(partition.spec, 40)}, seed {partition.seed}: {content}"
    notes = "\n".join(
        textwrap.fill(f"note: {note}", WIDTH, subsequent_indent="  ") for note in partition.notes
    )

    return "\n\n".join(filter(None, [title, *blocks, legend, notes]))


def shorten(text: str, width: int) -> str:
    """Shorten a text longer than `width` by removing its middle."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


def _cell(count: int) -> str:
    return str(count) if count else "-"


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Column widths including the two spaces that separate a column from the previous one."""
    return [max(map(len, column)) + 2 * (i > 0) for i, column in enumerate(zip(*rows, strict=True))]


def _columns(widths: Sequence[int]) -> list[list[int]]:
    """Divide the columns into blocks that fit; each block starts with the site's name."""
    blocks = [[0]]
    for i, width in enumerate(widths[1:], start=1):
        if sum(widths[k] for k in blocks[-1]) + width > WIDTH:
            blocks.append([0])

        blocks[-1].append(i)

    return blocks


def _block(rows: Sequence[Sequence[str]]) -> str:
    """Align one block: names left, numbers right, a line below the header and above the last row."""
    widths = _widths(rows)
    lines = [label_row(row, widths) for row in rows]
    rule = "-" * sum(widths)
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _wrap(entries: Iterable[str]) -> str:
    """Fill lines with entries without breaking one."""
    # a line may break between entries alone, so blanks within one are made unbreakable
    text = "\0".join(entries).replace(" ", "\xa0").replace("\0", "   ")
    return "\n".join(wrap(text, WIDTH)).replace("\xa0", " ")


def shown_sections(partition: Partition) -> tuple[str, ...]:
    """Return the sections that contain items; always including the training section."""
    sites = partition.sites.values()
    return tuple(n for n in TITLES if n == "train" or any(held[n] for held in sites))
