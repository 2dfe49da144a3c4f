"""The verb `medfl report`: pages and pictures of run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medfl.cli import arguments
from medfl.cli.parser import add_verb, show

_EXAMPLES = """\
examples
  medfl report runs/ham10000-fedavg-0
      write its report.html again
  medfl report runs/ham10000-* --out ham10000.html
      one page of several runs, side by side"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = "write report.html of one or several run folders"
    report = add_verb(verbs, "report", text, _report, _EXAMPLES)
    report.add_argument(
        "folders", nargs="+", type=arguments.existing, metavar="DIR", help="a folder that medfl run wrote"
    )
    report.add_argument(
        "--out", type=Path, metavar="FILE.html",
        help="one page of all of them side by side, and nothing in their folders; of runs of one bundle",
    )  # fmt: skip
    report.add_argument(
        "--curves", type=Path, metavar="FILE.png", help="draw the metric of all of them against bytes and seconds"
    )
    report.add_argument(
        "--gains", type=Path, metavar="FILE.png", help="who gains: draw and list each site against its Local and FedAvg"
    )


def _report(options: Any) -> int:
    if options.out is not None:
        from medfl.compare.side_by_side import write_page

        written = [str(write_page(options.folders, options.out))]
    else:
        from medfl.report import write_report

        written = [str(write_report(folder)) for folder in options.folders]
    if options.curves is not None:
        from medfl.compare.cost_curves import write_cost_curves

        written.append(str(write_cost_curves(options.folders, options.curves)))
    if options.gains is None:
        return show(options, {"reports": written}, lambda: "\n".join(written))
    from medfl.compare.gains import write_gains

    gains, file = write_gains(options.folders, options.gains)
    written.append(str(file))
    document = {
        "reports": written, "gains": gains.gains, "values": gains.values, "small": sorted(gains.small),
        "notes": gains.notes,
    }  # fmt: skip
    return show(options, document, lambda: "\n".join([gains.table(), "", *gains.summary(), *written]))
