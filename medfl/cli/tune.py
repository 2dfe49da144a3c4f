"""The verb `medfl tune`: search for the settings of a method."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from medfl.cli import arguments
from medfl.cli.method_pages import check_options
from medfl.cli.parser import add_verb, show, telling
from medfl.cli.walls import Use, hold
from medfl.core import tables
from medfl.core.importing import without_gc
from medfl.runtimes import Launch

_EXAMPLES = """\
examples
  medfl tune mednist --data phantom --method fedprox --grid mu=0.001,0.01,0.1 --rounds 3 --out tuned/fedprox
      three trials; the best by the validation metric is run again and tested
  medfl tune mednist --data phantom --method moon --grid mu=0.1,1,5 --grid lr=0.001,0.01 --trials 4 --out tuned/moon
      four of the six combinations, drawn by the seed; repeat the command to run only what is missing
  medfl compare mednist --data phantom --tuned tuned --out grids/tuned
      both methods, with the settings found"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    tune = add_verb(verbs, "tune", "search for the best settings of a method", _tune, _EXAMPLES)
    tune.add_bundle()
    group = tune.add_argument_group("what")
    group.add_text("--method", "NAME", "a method, or the dotted path of your own", required=True)
    group.add_text(
        "--grid",
        "OPTION=A,B,C",
        "values to try for an option of the method, or for lr, lr_decay, local_epochs, batch_size, "
        "rounds or cohort; may be repeated to try all combinations",
        action="append",
        default=[],
    )
    group.add_number("--trials", "N", "try this many randomly drawn combinations; default: all")
    group.add_text(
        "--seeds",
        "0,1,2",
        "comma-separated seeds for each trial, which is scored by their mean; default: 0",
        default="0",
    )
    group.add_what("set an option of the method in all trials; may be repeated")
    tune.add_sites().add_partition()
    tune.add_training(seed=False)
    tune.add_machine_and_output("the trials and best.json").add_quiet()


def _tune(args: Namespace) -> int:
    from medfl.compare import search
    from medfl.runs.request_checks import check_driver, check_places

    requested = arguments.given_settings(args, "presets", "data", "sites")
    values = search.parse_grid(args.grid)
    fixed = arguments.parse_pairs("--set", args.options)
    seeds = arguments.parse_seeds(args.seeds)

    for trial in search.trials(args.method, values, args.trials, seeds[0]):
        check_options(args.method, {**fixed, **trial.options})

    check_places(args.bundle, requested)
    check_driver(args.device or "")
    hold(args, Use(bundles=[args.bundle], folder=args.out))
    with without_gc():
        from medfl.compare.tables import write_tables
        from medfl.compare.tune import searched, tune

    config = arguments.parse_pairs("--config", args.config)
    grid = searched(
        args.bundle,
        args.method,
        values,
        args.trials,
        seeds,
        args.partition,
        fixed,
        config,
        requested,
    )
    document, comparison, failed = tune(grid, Launch(out=args.out, jobs=args.jobs, **telling(args)))
    if comparison is not None:
        document["tables"] = str(write_tables(comparison, args.out / "best")["md"])

    show(args, document, _lines(document, comparison, failed, args.out))
    return int(bool(failed) or comparison is None)


def _lines(document: Any, comparison: Any, failed: Any, out: Path) -> list[str]:
    from medfl.report import formatting

    rows = []
    for trial in document["tried"]:
        value = formatting.number(trial["validation"])
        rows.append([trial["trial"], value, f"{trial['validated']} of {len(document['seeds'])}"])

    heads = ["trial", f"validation {document['metric']}", "seeds"]
    lines = [f"trials: {document['trials']}", *tables.text_table(heads, rows)]
    lines += document["undefined"]
    failures = [f"FAILED: {title}: {text}" for title, text in failed.items()]
    if "settings" not in document:
        return [*lines, *failures, "no settings are chosen, and nothing is tested"]

    settings = []
    for part in document["settings"].values():
        settings += [f"{name}={value}" for name, value in part.items()]

    lines += [f"best: {' '.join([document['method'], *settings])}"]
    lines += [f"validation {document['metric']}: {document['validation']:.4f}"]
    if comparison is not None:
        lines += ["", Path(document["tables"]).read_text("utf-8")]

    lines += failures
    lines += [f"settings: {out / 'best.json'}", f"next: medfl compare ... --tuned {out}"]
    if comparison is not None:
        lines.append(comparison.describe())

    return lines
