"""A partition as a text table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from medfl.core import screen_width, text_table, wrap
from medfl.data.partition import targets
from medfl.data.partition.draw import Sections
from medfl.data.partition.rules import Partition

TITLES = {"train": "training", "validate": "validation", "test": "test"}


def table(partition: Partition, sections: Sections, classes: Sequence[str] | None) -> str:
    """Return a text table as wide as the screen at most: training images per class or finding, sizes of sections."""
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

    if sum(_widths([head, *rows])) > screen_width():
        head[1 + len(shown) :] = list(map(str, range(len(names))))
        entries = (f"{c} = {shorten(name, 60)}" for c, name in enumerate(names))
        legend = "\n".join(wrap(", ".join(entries)))

    lines = [head, *rows]
    blocks = []
    for columns in _columns(_widths(lines)):
        head, *rows = ([row[i] for i in columns] for row in lines)
        blocks.append("\n".join(text_table(head, rows)))

    noun = "finding" if targets.has_targets(sections) else "class"
    content = "images per section" + f", training images per {noun}" * bool(names)
    title = f"partition {shorten(partition.spec, 40)}, seed {partition.seed}: {content}"
    notes = []
    for note in partition.notes:
        notes += wrap(f"note: {note}", others="  ")

    return "\n\n".join(filter(None, [title, *blocks, legend, "\n".join(notes)]))


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
        if sum(widths[k] for k in blocks[-1]) + width > screen_width():
            blocks.append([0])

        blocks[-1].append(i)

    return blocks


def shown_sections(partition: Partition) -> tuple[str, ...]:
    """Return the sections that contain items; always including the training section."""
    sites = partition.sites.values()
    return tuple(n for n in TITLES if n == "train" or any(held[n] for held in sites))
