"""The plain-text table that ends a run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medfl.core import terminal
from medfl.core.tables import label_row
from medfl.evaluation import metrics
from medfl.report import formatting
from medfl.report.differences import Differences
from medfl.report.run_files import MODEL_KINDS, RunFiles
from medfl.storage.run_reader import SUMMARY_KINDS

_TABLE_SITES = 24
_TABLE_STRUCTURES = 12
_WIDE = 21


def result_table(run_folder: Path) -> str:
    """Return the plain-text table that ends a run, at most 100 columns wide.

    Of more than 24 sites only the worst are listed. The last line says whether the data are real or phantom.

    Raises:
        InputError: as for `write_report`.
    """
    run = RunFiles(Path(run_folder))
    names = [run.key] + (
        ["accuracy"] if run.key != "accuracy" and "accuracy" in run.metric_names() else []
    )
    columns = [
        (name, kind, run.site_values(kind, name)) for name in names for kind, _ in MODEL_KINDS
    ]
    columns = [column for column in columns if column[2]]

    if 45 + 9 * len(columns) > terminal.width():  # a narrow terminal: the key metric alone
        columns = [column for column in columns if column[0] == run.key]

    model = "global last" if run.judged == "received" else f"{run.judged} last"
    lines = [
        *_site_lines(run, columns),
        *_pooled_lines(run),
        *structure_lines(run, run.structures, model),
    ]
    diffs = Differences(run)
    sentences = {
        "personal": run.personal_model, "everybody's test images": diffs.everybody(), "against Local": diffs.sentence()
    }  # fmt: skip

    for name, text in sentences.items():
        lines += [*textwrap.wrap(f"{name}: {text}", terminal.width()), ""] if text else []

    summary = run.summary or {}
    if not run.finished:
        lines.append(f"unfinished: {len(run.rounds)} of {run.record['rounds']} rounds")

    sent = [
        f"{way} {formatting.size(summary[f'bytes_{way}'])}"
        for way in ("up", "down")
        if f"bytes_{way}" in summary
    ]
    if "seconds" in summary:
        sent.append(f"time {formatting.duration(summary['seconds'])}")

    if sent:
        lines.append("total     " + ", ".join(sent))

    lines.append(_data_line(run))
    return "\n".join(lines)


def _site_lines(
    run: RunFiles, columns: Sequence[tuple[str, str, Mapping[str, float]]]
) -> list[str]:
    """Return two heading lines, the sites, then mean, sd and worst of each column."""
    shown = list(run.site_names)
    if len(shown) > _TABLE_SITES:
        sign = 1 if metrics.higher_is_better(run.key) else -1
        judged = run.site_values(run.judged, run.key)
        shown = sorted(shown, key=lambda site: sign * judged.get(site, math.inf * sign))[
            : _TABLE_SITES - 4
        ]

    widths = [24, 8, 8]
    title_widths = dict[str, int]()
    for name, _, _ in columns:
        gap = 0 if name in title_widths else 2  # which opens each metric's group of columns
        widths.append(gap + 9)
        title_widths[name] = title_widths.get(name, 0) + 9

    head = label_row(["site", "train", "test", *(kind for _, kind, _ in columns)], widths)
    rule = "─" * len(head)
    titles = "".join(
        f"  {run.title(name)[:width]:>{width}}" for name, width in title_widths.items()
    )
    lines = [" " * 40 + titles, head, rule]

    for site in shown:
        sizes = [str(run.size(site, section)) for section in ("train", "test")]
        cells = [formatting.number(values.get(site)) for _, _, values in columns]
        lines.append(label_row([formatting.plain(site), *sizes, *cells], widths))

    if len(shown) < len(run.site_names):
        lines.append(f"… {len(run.site_names) - len(shown)} better sites are in sites.csv")

    spreads = [
        metrics.spread(values, metrics.higher_is_better(name)) for name, _, values in columns
    ]
    if not columns:
        return [text.rstrip() for text in lines]

    lines += [
        rule,
        label_row(
            ["mean", "", "", *(formatting.number(spread["mean"]) for spread in spreads)], widths
        ),
        label_row(["sd", "", "", *map(formatting.sd, spreads)], widths),
        label_row(
            ["worst", "", "", *(formatting.number(spread["worst"]) for spread in spreads)], widths
        ),
    ]

    return lines


def _pooled_lines(run: RunFiles) -> list[str]:
    """Return a line for each model's last and best round, with as many metrics as fit."""
    pooled = run.pooled()
    if not pooled:
        return []

    widths = [22, 6]
    lines = ["", label_row(["pooled test set", "round"], widths)]
    for kind, when, values in pooled:
        label = f"{SUMMARY_KINDS[kind][1].lower()} {when}"
        lines.append(label_row([label, str(values.get("round", "–"))], widths))

    for name in run.metric_names():
        unit = run.title(name).removeprefix(metrics.title(name))
        cells = [
            formatting.plain(f"{name}{unit}"),
            *(formatting.number(values.get(name)) for _, _, values in pooled),
        ]
        width = max(map(len, cells)) + 2
        if len(lines[1]) + width <= terminal.width():
            lines[1:] = [
                f"{line}{cell:>{width}}" for line, cell in zip(lines[1:], cells, strict=True)
            ]

    return [*lines, ""]


def structure_lines(
    run: RunFiles, structures: Mapping[str, Mapping[str, Any]], model: str
) -> list[str]:
    """Return a line for each structure (name -> metrics and cases), of more than 12 for those with the lowest Dice.

    The run gives titles and units; `model` is whose metrics they are, as the heading says it.
    """
    kinds = run.structure_metrics
    shown = dict(structures)
    if len(shown) > _TABLE_STRUCTURES:
        by_dice = sorted(
            shown, key=lambda name: math.inf if (dice := shown[name].get("dice")) is None else dice
        )
        shown = {name: shown[name] for name in by_dice[:_TABLE_STRUCTURES]}

    widths = [24, 8, *[_WIDE] * len(kinds)]
    lines = [label_row([f"structure, {model}", "cases", *map(run.title, kinds)], widths)]
    for name, scores in shown.items():
        label = [formatting.plain(name), str(scores.get("cases", "–"))]
        if scores.get("cases"):
            cells = [formatting.number(scores.get(kind)) for kind in kinds]
            lines.append(label_row([*label, *cells], widths))
        else:
            lines.append(label_row(label, widths[:2]) + "  no test case has it")

    if len(shown) < len(structures):
        lines.append(f"… {len(structures) - len(shown)} more structures are in summary.json")

    return [*lines, ""] if shown else []


def _data_line(run: RunFiles) -> str:
    shared = ""
    if public := run.public:
        source = "PHANTOM" if public["data"]["source"] == "phantom" else "real"
        shared = f"; {source} public data: {formatting.plain(str(public['bundle']), 40)}"
        if public["teachers"]:
            shared += f", teachers: {formatting.plain(', '.join(str(name) for name, _ in public['teachers']), 60)}"

    if run.phantom:
        return f"PHANTOM data: images drawn by a program; these numbers say nothing about patients{shared}"

    checksum = str(run.record["data"].get("checksum") or "")
    bundle = formatting.plain(str(run.record["bundle"]), 40)
    return f"real data: {bundle}" + (f", checksum {checksum[:16]}" if checksum else "") + shared
