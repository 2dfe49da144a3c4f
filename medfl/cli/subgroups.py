"""The verb `medfl subgroups`: a run's test metrics by centre, age, sex or localisation."""

from __future__ import annotations

from argparse import Namespace
from itertools import chain
from typing import TYPE_CHECKING, Any

from medfl.cli import arguments
from medfl.cli.parser import add_verb, show
from medfl.cli.walls import Use, hold
from medfl.core import tables, terminal

if TYPE_CHECKING:
    from medfl.evaluation import Area
    from medfl.runs.subgroups import Estimate, Subgroups

_EXAMPLES = """\
examples
  medfl subgroups runs/ham10000-fedavg-0
      by the centre where the image was taken
  medfl subgroups runs/ham10000-fedavg-0 --by age --min-count 20
      by bands of 20 years; groups of fewer than 20 cases are hidden"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = (
        "test metrics of a run by centre, site, sex, age or lesion site, with confidence intervals"
    )
    subgroups = add_verb(verbs, "subgroups", text, _subgroups, _EXAMPLES)
    subgroups.add_path(
        "run", "RUN", "a run folder; its images must be available", arguments.run_folder
    )
    subgroups.add_trust()
    subgroups.add_text(
        "--by",
        "COLUMN",
        "centre (default), site, sex, age (bands of 20 years) or localisation (of a lesion), if "
        "recorded in the data",
        default="centre",
    )
    subgroups.add_number(
        "--min-count",
        "K",
        "hide groups with fewer cases, and metrics based on fewer cases of a class; default: 10",
    )


def _subgroups(args: Namespace) -> int:
    hold(args, Use(runs=[args.run]))
    from medfl.runs.result import load_run
    from medfl.runs.subgroups import MIN_COUNT

    run = load_run(args.run)
    subgroups = run.subgroups(args.by, MIN_COUNT if args.min_count is None else args.min_count)
    source = run.run.data.source
    document = {
        "run": str(run.path),
        "run_hash": run.run.run_hash,
        "data_source": source,
        "by": subgroups.by,
        "min_count": subgroups.min_count,
        "groups": subgroups.records(),
        "notes": subgroups.notes(),
        "areas": {
            group.name: {
                name: {
                    "auroc": area.value,
                    "low": area.low,
                    "high": area.high,
                    "cases": area.positives,
                }
                for name, area in group.areas.items()
            }
            for group in subgroups.rows
            if group.areas
        },
    }

    if source == "phantom":
        last = "PHANTOM data: images drawn by a program"
    else:
        last = f"real data: {run.run.bundle}"

    return show(args, document, [*text(subgroups), last])


def text(subgroups: Subgroups) -> list[str]:
    """Return the groups as a table with 95 % intervals, and notes for the reader."""
    from medfl.evaluation import title, without_repeats

    names = [name for name in subgroups.metrics if name != "loss"]
    names = without_repeats(names, (group.metrics for group in subgroups.rows))
    rows = []
    for group in subgroups.rows:
        count = "not told" if group.count is None else str(group.count)
        rows.append([group.name, count, *(_cell(group.metrics.get(name)) for name in names)])

    spare = list(map(title, reversed(names[2:])))
    lines = tables.text_table([subgroups.by, "cases", *map(title, names)], rows, spare=spare)
    groups = [group for group in subgroups.rows if group.areas]
    areas = []
    # a line a class: there may be many
    for name in dict.fromkeys(chain.from_iterable(group.areas for group in groups)):
        areas.append([name, *(_cell(group.areas.get(name)) for group in groups)])

    if areas:
        head = ["AUROC", *(group.name for group in groups)]
        lines += ["", *tables.text_table(head, areas), ""]

    for note in subgroups.notes():
        lines += terminal.hanging_indent("note: ", note)

    return lines


def _cell(estimate: Estimate | Area | None) -> str:
    if estimate is None:
        return "-"
    from medfl.report.formatting import interval

    count = getattr(estimate, "cases", 0)
    cases = f", {count} cases" if count else ""
    ends = "too few for an interval"
    if estimate.low is not None and estimate.high is not None:
        ends = interval((estimate.low, estimate.high))

    return f"{estimate.value:.3f} ({ends}{cases})"
