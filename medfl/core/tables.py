"""Tables as text: for a terminal, in Markdown, LaTeX and HTML. All columns that medfl prints are made here."""

from __future__ import annotations

import csv
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from html import unescape
from itertools import groupby, zip_longest
from types import SimpleNamespace

from medfl.core.names import as_cell
from medfl.core.untrusted import visible

WIDTH = 100
_FORMATS = {"md": "github", "tex": "latex_booktabs", "html": "html"}
_BOLD = re.compile(r"\*\*(.+?)\*\*")
_MARKDOWN = str.maketrans({"\\": "\\\\", "&": "&amp;", "<": "&lt;", "|": "\\|"})
_LINK = re.compile(r"(?<=\])(?=[(\[:])")


def screen_width() -> int:
    """Return the width of output in columns: the terminal's, at most 100; 100 if stdout is a file or a pipe."""
    if sys.stdout.isatty():
        return min(WIDTH, shutil.get_terminal_size().columns)

    return WIDTH


def text_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    spare: Sequence[str] = (),
) -> list[str]:
    """Return the lines of a table, with columns of numbers aligned to the right.

    If lines are too long, the widest columns wrap; if that is not enough, `spare` columns are omitted.
    """
    width = screen_width()
    columns = [*zip(head, *rows, strict=True)]
    for name in [*spare, None]:
        widths = [max(map(len, column)) for column in columns]
        floors = list(map(_longest_word, columns))
        gaps = 2 * (len(columns) - 1)
        if sum(floors) + gaps <= width:
            break

        columns = [column for column in columns if column[0] != name]

    # The widest column that can still wrap loses one character at a time.
    while sum(widths) + gaps > width:
        loose = [i for i in range(len(widths)) if widths[i] > floors[i]]
        if not loose:
            break
        widths[max(loose, key=lambda i: widths[i])] -= 1

    numeric = [all(cell.isdecimal() or cell == "-" for cell in column[1:]) for column in columns]

    top, *body = zip(*columns, strict=True)
    lines = _wrapped_row(top, widths, numeric)
    lines.append("  ".join("-" * size for size in widths))

    for row in body:
        lines += _wrapped_row(row, widths, numeric)

    return lines


def on_screen(text: str) -> str:
    """Return a text for a terminal: its Markdown tables as `text_table` makes them.

    A table that does not fit, as one of few methods and many metrics, is turned on its side.
    """
    lines: list[str] = []
    for is_table, block in groupby(text.splitlines(), lambda line: line[:1] == "|"):
        if not is_table:
            lines += block
            continue

        head, _, *rows = ([*map(_unescaped, re.split(r"(?<!\\)\|", line)[1:-1])] for line in block)
        table = text_table(head, rows)
        if max(map(len, table)) > screen_width():
            head, *rows = map(list, zip(head, *rows, strict=True))
            table = text_table(head, rows)

        lines += table

    return "\n".join(lines)


def _unescaped(cell: str) -> str:
    return unescape(re.sub(r"\\(.)", r"\1", cell.strip()))


def _longest_word(column: Sequence[str]) -> int:
    return max(max(map(len, cell.split()), default=0) for cell in column)


def _wrapped_row(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> list[str]:
    wrapped = [wrap(cell, width=size) for cell, size in zip(row, widths, strict=True)]
    lines = []
    for parts in zip_longest(*wrapped, fillvalue=""):
        cells = []
        for part, size, right in zip(parts, widths, numeric, strict=True):
            cells.append(part.rjust(size) if right else part.ljust(size))

        lines.append("  ".join(cells).rstrip())

    return lines


def wrap(text: str, first: str = "", others: str = "", width: int = 0) -> list[str]:
    """Wrap a text between words only, to a width in columns (0: the screen's).

    `first` and `others` start its first and further lines.
    """
    return textwrap.wrap(
        text,
        width or screen_width(),
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
        break_long_words=False,
    )


def label_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line with a label and numbers: the first cell aligned to the left, the others to the right."""
    label, *numbers = cells
    first, *sizes = widths
    return label.ljust(first) + "".join(map(str.rjust, numbers, sizes))


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, is_markup: bool = False
) -> str:
    """Return an unpadded Markdown table; with `is_markup` cells may contain links and HTML."""
    lines = []
    for cells in (head, *rows):
        shown = [cell.replace("|", "\\|") if is_markup else markdown_text(cell) for cell in cells]
        lines.append(f"| {' | '.join(shown)} |")

    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def formatted_table(head: Sequence[str], rows: Sequence[Sequence[object]], format_: str) -> str:
    """Return a padded table as "md", "tex" (booktabs) or "html"; **bold** cells are bold in each."""
    from tabulate import tabulate  # imported here: only comparisons print these formats

    as_text = markdown_text
    align = None
    if format_ != "md":
        as_text = _plain_line
        align = ["left", *["right"] * (len(head) - 1)]

    head, *rows = [list(map(as_text, row)) for row in (head, *rows)]

    table = str(
        tabulate(rows, head, tablefmt=_FORMATS[format_], disable_numparse=True, colalign=align)
    )
    if format_ == "md":
        return table
    if format_ == "html":
        return _BOLD.sub(r"<b>\1</b>", table)

    return _BOLD.sub(r"\\textbf{\1}", table).replace("±", r"$\pm$").replace("–", "--")


def markdown_text(text: object) -> str:
    """Return a value in one line, escaping what Markdown would read as HTML, a link or the end of a cell."""
    return _LINK.sub(r"\\", _plain_line(text).translate(_MARKDOWN))


def latex_text(text: str) -> str:
    """Return a text in one line, with LaTeX commands escaped."""
    from tabulate import LATEX_ESCAPE_RULES

    return (
        _plain_line(text)
        .translate(str.maketrans(LATEX_ESCAPE_RULES))  # type: ignore[arg-type]
        .replace("–", "--")
    )


def _plain_line(text: object) -> str:
    return visible(" ".join(str(text).splitlines()))


def csv_text(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as CSV; no cell is a formula (`as_cell`)."""
    lines: list[str] = []

    # Python before 3.13 quotes a line break in a cell only if it ends lines too
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    writer.writerows(map(as_cell, row) for row in (head, *rows))
    return "".join(f"{line[:-2]}\n" for line in lines)
