"""The plain-text table that ends a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from medfl.core import terminal
from medfl.evaluation import metrics
from medfl.report import words
from medfl.report.run_folder import KINDS, POOLED, RunFolder

_TABLE_SITES = 24


def result_table(run_folder: Path) -> str:
    """Return the plain-text table that ends a run, at most 100 columns wide.

    Of more than 24 sites only the worst are listed. The last line says whether the data are real or phantom.

    Raises:
        InputError: as for `write_report`.
    """
    folder = RunFolder.read(Path(run_folder))
    names = [folder.key] + (["accuracy"] if folder.key != "accuracy" and "accuracy" in folder.metric_names() else [])
    columns = [(name, kind, folder.site_values(kind, name)) for name in names for kind, _ in KINDS]
    columns = [column for column in columns if column[2]]
    if 45 + 9 * len(columns) > terminal.width():  # a narrow terminal: the key metric alone
        columns = [column for column in columns if column[0] == folder.key]
    lines = [*_site_lines(folder, columns), *_pooled_lines(folder)]
    summary = folder.summary or {}
    if not folder.finished:
        lines.append(f"unfinished: {len(folder.rounds)} of {folder.run['rounds']} rounds")
    sent = [f"{way} {words.size(summary[f'bytes_{way}'])}" for way in ("up", "down") if f"bytes_{way}" in summary]
    if "seconds" in summary:
        sent.append(f"time {words.duration(summary['seconds'])}")
    if sent:
        lines.append("total     " + ", ".join(sent))
    lines.append(_data_line(folder))
    return "\n".join(lines)


def _site_lines(folder: RunFolder, columns: Sequence[tuple[str, str, Mapping[str, float]]]) -> list[str]:
    """Two heading lines, the sites, then mean, sd and worst of each column."""
    shown = list(folder.site_names)
    if len(shown) > _TABLE_SITES:
        sign = 1 if metrics.higher_is_better(folder.key) else -1
        judged = folder.site_values(folder.judged, folder.key)
        shown = sorted(shown, key=lambda site: sign * judged.get(site, math.inf * sign))[: _TABLE_SITES - 4]
    # a gap opens each metric's group of columns
    gaps = ["  " if i == 0 or columns[i - 1][0] != name else "" for i, (name, _, _) in enumerate(columns)]

    def line(label: str, train: str, test: str, cells: Sequence[str]) -> str:
        return f"{label:<24} {train:>7} {test:>7}" + "".join(f"{g}{c:>9}" for g, c in zip(gaps, cells, strict=True))

    widths = {name: sum(9 for column in columns if column[0] == name) for name, _, _ in columns}
    head = line("site", "train", "test", [kind for _, kind, _ in columns])
    rule = "─" * len(head)
    lines = [
        " " * 40 + "".join(f"  {folder.title(name)[:width]:>{width}}" for name, width in widths.items()),
        head,
        rule,
    ]
    for site in shown:
        cells = [words.number(values.get(site)) for _, _, values in columns]
        lines.append(line(words.plain(site), str(folder.size(site, "train")), str(folder.size(site, "test")), cells))
    if len(shown) < len(folder.site_names):
        lines.append(f"… {len(folder.site_names) - len(shown)} better sites are in sites.csv")
    spreads = [metrics.spread(values, metrics.higher_is_better(name)) for name, _, values in columns]
    if not columns:
        return [text.rstrip() for text in lines]
    lines += [rule, line("mean", "", "", [words.number(s["mean"]) for s in spreads])]
    lines += [line("sd", "", "", [words.sd(s) for s in spreads])]
    return [*lines, line("worst", "", "", [words.number(s["worst"]) for s in spreads])]


def _pooled_lines(folder: RunFolder) -> list[str]:
    """One line for each model's last and best round, with as many metrics as fit."""
    pooled = folder.pooled()
    if not pooled:
        return []
    lines = ["", f"{'pooled test set':<22} {'round':>5}"]
    lines += [
        f"{POOLED[kind][1].lower()} {what}".ljust(22) + f" {values.get('round', '–'):>5}"
        for kind, what, values in pooled
    ]
    for name in folder.metric_names():
        unit = folder.title(name).removeprefix(metrics.title(name))
        cells = [words.plain(f"{name}{unit}"), *(words.number(values.get(name)) for _, _, values in pooled)]
        width = max(map(len, cells)) + 2
        if len(lines[1]) + width <= terminal.width():
            lines[1:] = [f"{line}{cell:>{width}}" for line, cell in zip(lines[1:], cells, strict=True)]
    return [*lines, ""]


def _data_line(folder: RunFolder) -> str:
    public = folder.public
    shared = ""
    if public:
        drawn = public["data"]["source"] == "phantom"
        shared = f"; {'PHANTOM' if drawn else 'real'} public data: {words.plain(str(public['bundle']), 40)}"
        if public["teachers"]:
            shared += f", teachers: {words.plain(', '.join(str(name) for name, _ in public['teachers']), 60)}"
    if folder.phantom:
        return f"PHANTOM data: images drawn by a program; these numbers say nothing about patients{shared}"
    checksum = str(folder.run["data"].get("checksum") or "")
    own = f"real data: {words.plain(str(folder.run['bundle']), 40)}"
    return own + (f", checksum {checksum[:16]}" if checksum else "") + shared
