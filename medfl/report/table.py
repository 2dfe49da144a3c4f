"""The plain-text table that ends a run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from medfl.core import Config, label_row, pick, screen_width
from medfl.evaluation import metrics
from medfl.evaluation.bootstrap import LEAST
from medfl.report import formatting
from medfl.report.differences import Differences
from medfl.report.formatting import duration, plain
from medfl.report.run_files import MODEL_KINDS, RunFiles
from medfl.storage.run_reader import SUMMARY_KINDS

PHANTOM_NOTE = "PHANTOM data: drawn by a program; these numbers say nothing about patients"
_TABLE_SITES = 24  # rows that fit on a screen beside the rest
LEFT_OUT = f"* left out of the means: fewer than {LEAST} test cases have it, or lack it"
_TABLE_STRUCTURES = 12
_WIDE = 21  # letters of a structure metric's column, whose title has a unit


def result_table(run_folder: Path) -> str:
    """Return the plain-text table that ends a run, at most 100 columns wide.

    Of more than 24 sites only the worst are listed. The last line says whether the data are real or phantom.

    Raises:
        InputError: as for `write_report`.
    """
    run = RunFiles(Path(run_folder))
    names = [run.key]
    if run.key != "accuracy" and "accuracy" in run.metric_names():
        names.append("accuracy")

    columns = []
    for name in names:
        for kind, _ in MODEL_KINDS:
            values = run.site_values(kind, name)
            # the deciding metric has a column even if undefined
            if values or (run.finished and (name, kind) == (run.key, run.judged)):
                columns.append((name, kind, values))

    if 45 + 9 * len(columns) > screen_width():  # a narrow terminal: only the key metric
        columns = [column for column in columns if column[0] == run.key]

    lines = [
        *_site_lines(run, columns),
        *_pooled_lines(run),
        *structure_lines(
            run,
            {} if _has_one(run) else run.structures,
            "global last" if run.judged == "received" else f"{run.judged} last",
        ),
    ]
    summary = run.summary
    answers = {
        "only the largest component is kept of": ", ".join(run.largest_components),
        "personal": run.personal_model,
        "received, without training images": str(summary.get("newcomers") or ""),
        **Differences(run).answers(),
    }
    for name, text in answers.items():
        if text:
            lines += [*textwrap.wrap(f"{name}: {text}", screen_width()), ""]

    if not run.finished:
        lines.append(f"unfinished: {len(run.rounds)} of {run.record['rounds']} rounds")

    totals = []
    for way in ("up", "down"):
        if f"bytes_{way}" in summary:
            totals.append(f"{way} {formatting.size(summary[f'bytes_{way}'])}")

    if "seconds" in summary:
        totals.append(f"time {duration(summary['seconds'])}")

    if totals:
        lines.append("total     " + ", ".join(totals))

    lines.append(_data_line(run))
    return "\n".join(lines)


def _has_one(run: RunFiles) -> bool:
    """Tell whether there is a single structure that every test case has: its results are then already shown."""
    tested = sum(run.size(site, "test") for site in run.site_names)
    cases = [scores.get("cases") for scores in run.structures.values()]
    return run.kind.noun == "structure" and cases == [tested]


def _site_lines(
    run: RunFiles, columns: Sequence[tuple[str, str, Mapping[str, float]]]
) -> list[str]:
    """Return two heading lines, the sites, then mean, sd and worst of each column."""
    shown = list(run.site_names)
    if len(shown) > _TABLE_SITES:
        # the worst first, sites with fewer classes and those without a value last; the line about the others needs
        # space too
        sign = metrics.direction(run.key)
        judged = run.site_values(run.judged, run.key)
        shown.sort(
            key=lambda site: (bool(run.classes_of(site)), sign * judged.get(site, math.inf * sign))
        )
        shown = shown[: _TABLE_SITES - 4]

    widths = [24, 8, 8]
    title_widths = dict[str, int]()
    for name, _, _ in columns:
        gap = 0 if name in title_widths else 2  # which opens each metric's group of columns
        widths.append(gap + 9)
        title_widths[name] = title_widths.get(name, 0) + 9

    head = label_row(["site", "train", "test", *(kind for _, kind, _ in columns)], widths)
    rule = "─" * len(head)
    titles = ""
    end = 40
    for name, width in title_widths.items():
        end += 2 + width
        room = end - len(titles)  # of the first also what is free above the sites
        titles += f"{run.title(name)[: room - 2]:>{room}}"

    lines = [titles, head, rule]

    for site in shown:
        sizes = [str(run.size(site, section)) for section in ("train", "test")]
        cells = [formatting.number(values.get(site)) for _, _, values in columns]
        lines.append(label_row([plain(site), *sizes, *cells], widths))

    if len(shown) < len(run.site_names):
        remaining = "more" if run.unequal_classes else "better"
        lines.append(f"… {len(run.site_names) - len(shown)} {remaining} sites are in sites.csv")

    if not columns:
        return [text.rstrip() for text in lines]

    summary: dict[str, list[str]] = {"mean": [], "sd": [], "worst": []}
    if any(len(values) < len(run.site_names) for _, _, values in columns):
        summary["sites with it"] = [str(len(values)) for _, _, values in columns]

    for name, kind, _ in columns:
        spread = run.spread(kind, name)
        summary["mean"].append(formatting.number(spread.get("mean")))
        summary["sd"].append(formatting.sd(spread))
        summary["worst"].append(formatting.number(spread.get("worst")))

    lines.append(rule)
    for label, cells in summary.items():
        lines.append(label_row([label, "", "", *cells], widths))

    return lines + textwrap.wrap(run.unequal_classes, screen_width())


def _pooled_lines(run: RunFiles) -> list[str]:
    """Return a line for each model's best and last round, with as many metrics as fit."""
    kinds = [*SUMMARY_KINDS]
    pooled = sorted(run.pooled(), key=lambda entry: (kinds.index(entry[0]), entry[1] != "best"))
    if not pooled:
        return []

    widths = [22, 6]
    lines = ["", label_row(["pooled test set", "round"], widths)]
    for kind, when, values in pooled:
        label = f"{SUMMARY_KINDS[kind][1].lower()} {when}"
        lines.append(label_row([label, str(values.get("round", "–"))], widths))

    # the loss of locally trained models on other sites' images is unbounded and uninformative
    names = [name for name in run.metric_names() if name != "loss" or run.key == "loss"]
    for name in names:
        unit = run.title(name).removeprefix(metrics.title(name))
        cells = [
            plain(f"{name}{unit}"),
            *(formatting.number(values.get(name)) for _, _, values in pooled),
        ]
        width = max(map(len, cells)) + 2
        if len(lines[1]) + width <= screen_width():
            for row, cell in enumerate(cells, 1):  # line 0 is blank, line 1 the head
                lines[row] += f"{cell:>{width}}"

    return [*lines, ""]


def structure_lines(run: RunFiles, structures: Mapping[str, Config], model: str) -> list[str]:
    """Return a line for each structure, finding or number (name -> metrics and cases), of more than 12 the worst.

    The run gives titles and units; `model` is whose metrics they are, for the heading.
    """
    kinds = run.structure_metrics
    if not structures or not kinds:
        return []

    first = run.key if run.key in kinds else kinds[0]
    sign = metrics.direction(first)
    shown = dict(structures)
    if len(shown) > _TABLE_STRUCTURES:

        def place(name: str) -> float:
            value = structures[name].get(first)
            return math.inf if value is None else sign * value

        shown = pick(structures, sorted(shown, key=place)[:_TABLE_STRUCTURES])

    noun = run.kind.noun
    titles = list(map(run.title, kinds))
    width = _WIDE if noun == "structure" else max(map(len, titles)) + 2
    # the first two columns take 32
    count = max(1, (screen_width() - 32) // width)
    counted = "with it" if noun == "structure" else "cases"
    widths = [24, 8, *[width] * len(kinds[:count])]
    lines = [label_row([f"{noun}, {model}", counted, *titles[:count]], widths)]
    left_out = False
    for name, scores in shown.items():
        out = scores.get("scored") == 0
        left_out |= out
        label = [plain(name, 23) + "*" * out, f"{scores.get('cases', 0):.0f}"]
        if scores.get("cases"):
            cells = [formatting.number(scores.get(kind)) for kind in kinds[:count]]
            lines.append(label_row([*label, *cells], widths))
        else:
            lines.append(label_row(label, widths[:2]) + "  no test case has it")

    if len(shown) < len(structures):
        lines.append(f"… {len(structures) - len(shown)} more {noun}s are in summary.json")
    if left_out:
        lines.append(LEFT_OUT)

    if noun == "structure":
        lines.append("each structure's figures are of the cases whose reference has it")

    return [*lines, ""]


def _data_line(run: RunFiles) -> str:
    if run.phantom:
        text = PHANTOM_NOTE
    else:
        text = f"real data: {plain(str(run.record['bundle']), 40)}"
        if checksum := run.record["data"].get("checksum"):
            text += f", checksum {str(checksum)[:16]}"

    if public := run.public:
        source = "PHANTOM" if public["data"]["source"] == "phantom" else "real"
        text += f"; {source} public data: {plain(str(public['bundle']), 40)}"
        if teachers := ", ".join(str(name) for name, _ in public["teachers"]):
            text += f", teachers: {plain(teachers, 60)}"

    return text
