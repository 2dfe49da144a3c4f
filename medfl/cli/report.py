"""The verb `medfl report`: pages and pictures of run folders."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from medfl.cli import arguments
from medfl.cli.parser import add_verb, log, show
from medfl.core.errors import InputError

_EXAMPLES = """\
examples
  medfl report runs/ham10000-fedavg-0
      write its report.html again
  medfl report runs/ham10000-* --out ham10000.html
      one page of several runs, side by side
  medfl report grids/first
      the page of a comparison: tables, curves and costs"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = "write an HTML report on one or several runs"
    report = add_verb(verbs, "report", text, _report, _EXAMPLES)
    report.add_path(
        "folders", "DIR", "a folder that medfl run wrote", arguments.existing, nargs="+"
    )
    report.add_path(
        "--out",
        "FILE.html",
        "write one page that compares the runs, which must share a bundle, instead of one in each folder",
    )
    report.add_path(
        "--curves", "FILE.png", "plot the metric of all runs against bytes sent and seconds"
    )
    report.add_path(
        "--gains",
        "FILE.png",
        "plot and list each site's gain over its local training and over FedAvg",
    )


def _report(args: Namespace) -> int:
    from medfl.compare import side_by_side
    from medfl.report import write_report

    grids = list(filter(side_by_side.is_grid, args.folders))
    if grids and (len(args.folders) > 1 or args.out):
        raise InputError(
            f"{grids[0]}, which medfl compare wrote, beside other folders or --out",
            "a comparison has a page of its own, in its folder",
            f"medfl report {grids[0]}",
        )

    if args.out:
        written = [str(side_by_side.write_page(args.folders, args.out))]
    elif grids:
        written = [str(side_by_side.write_grid_page(grids[0]))]
    else:
        written = [*map(str, map(write_report, args.folders))]

    if grids:
        args.folders = [run.path for run in side_by_side.runs_of(grids[0]) if run.summary]

    if args.curves:
        from medfl.compare.cost_curves import write_cost_curves

        curves = write_cost_curves(args.folders, args.curves)
        if curves is None:
            log(f"{args.curves} is not drawn: no round has the key metric on its validation images")
        else:
            written.append(str(curves))

    if args.gains is None:
        return show(args, {"reports": written}, written)

    from medfl.compare.gains import write_gains

    gains, file = write_gains(args.folders, args.gains)
    written.append(str(file))
    document = {
        "reports": written,
        "gains": gains.gains,
        "values": gains.values,
        "small": sorted(gains.small),
        "notes": gains.notes,
    }

    return show(args, document, [gains.table(), "", *gains.summary(), *written])
