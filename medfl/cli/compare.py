"""The verb `medfl compare`: a grid of methods, partitions and seeds, or the grid of a published table."""

from __future__ import annotations

from argparse import SUPPRESS
from pathlib import Path
from typing import Any

from medfl.cli import arguments
from medfl.cli.method_pages import check_options
from medfl.cli.parser import add_verb, show, telling
from medfl.compare import papers
from medfl.core.errors import InputError
from medfl.core.importing import without_gc

_EXAMPLES = """\
examples
  medfl compare pneumonia --data phantom --methods fedavg,fedprox --rounds 3 --out grids/first
      two methods, three seeds, on drawn images
  medfl compare ham10000 --methods fedavg,fedbm --method 'fedcb classifier=random_frozen' \\
    --partition dirichlet:0.05 --partition dirichlet:0.1 --seeds 0,1,2 --out grids/ham
      a variant besides, on two partitions; called again it runs only what is missing"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = "run a grid of methods, partitions and seeds, and compare them"
    compare = add_verb(verbs, "compare", text, _compare, _EXAMPLES)
    text = "name of a shipped bundle, or the folder of any; of --paper, all its own"
    compare.add_argument("bundle", nargs="?", type=arguments.bundle, metavar="BUNDLE", help=text)
    what = compare.add_argument_group("what")
    what.add_argument("--methods", default="", metavar="A,B,...", help="methods with their defaults")
    what.add_argument(
        "--paper", metavar="PAPER/TABLE",
        help="the grid of a published table, as fedbm/table3, and its figures beside ours; --methods picks some",
    )  # fmt: skip
    text = "with --paper: only this part of its rounds, said in the tables"
    arguments.number(what, "--scale", "FACTOR", text, float)
    what.add_argument(
        "--method", dest="entries", action="append", default=[], metavar="'NAME OPTION=VALUE ...'",
        help="one more method with options of its own; may be repeated, also with the same name",
    )  # fmt: skip
    what.add_argument(
        "--tuned", type=Path, metavar="DIR",
        help="folder of medfl tune, or of several: each method with the settings found there; all of them, or those "
        "of --methods",
    )  # fmt: skip
    text = "seeds, which also draw the partitions; default 0,1,2, or the published table's"
    what.add_argument("--seeds", metavar="0,1,2", help=text)
    arguments.what(what, "option of every method that has it; may be repeated")
    arguments.partition(arguments.sites(compare), "append")
    arguments.training(compare, seed=False)
    compare.add_argument("--folds", type=_no_folds, help=SUPPRESS)
    output = arguments.grid_of_runs(compare, "the runs and tables")
    output.add_argument("--against", metavar="METHOD", help="the others are tested against it; default: the first")
    output.add_argument(
        "--target", metavar="VALUE|METHOD",
        help="rounds, bytes and seconds to this validation metric, or to a method's best; default: that of --against",
    )  # fmt: skip
    text = "also print what the papers' tables say of these methods"
    output.add_argument("--published", action="store_true", help=text)
    arguments.quiet(output)


def _compare(options: Any) -> int:
    if options.paper:
        return _paper(options)
    if options.scale is not None:
        raise InputError(f"--scale {options.scale:g} without --paper", "it reduces a published table", "use --rounds")
    if options.bundle is None:
        raise InputError("no bundle", "a shipped bundle's name or a folder", "see medfl bundles")
    shared, seeds = _shared(options), arguments.seeds(options.seeds or "0,1,2")
    from medfl.compare.entry import Entry
    from medfl.compare.search import chosen

    tuned = chosen(options.tuned) if options.tuned else {}
    named = list(dict.fromkeys(arguments.names(options.methods))) or ([] if options.entries else [*tuned])
    entries = [tuned[name] if name in tuned else Entry.read(name) for name in named]
    entries += [Entry.read(text) for text in dict.fromkeys(options.entries)]
    if not entries:
        raise InputError("no methods", "--methods A,B,... or --method 'NAME OPTION=VALUE ...'", "add one of these")
    for entry in entries:
        check_options(entry.method, entry.options)
    with without_gc():
        from medfl.compare.grid import Grid, compare
        from medfl.compare.tables import write_tables

    grid = Grid(options.bundle, tuple(entries), tuple(options.partition or (None,)), seeds, **shared)
    tests = {"against": options.against, "target": options.target}
    comparison, failed = compare(grid, options.out, at_once=options.jobs, **telling(options), **tests)
    document: dict[str, Any] = {"folder": str(options.out), "failed": failed}
    if tuned:
        document["trials"] = {one.label: one.trials or 0 for one in entries}
    if comparison is None:
        show(options, document, lambda: "no run finished")
        return 1
    written = write_tables(comparison, options.out, **tests)
    document |= {"tables": {form: str(path) for form, path in written.items()}, "ranks": comparison.ranks()}
    lines = [written["md"].read_text(), *(f"written: {path}" for path in written.values())]
    if options.published:
        from medfl.compare.papers.runs import published

        document["published"] = published(comparison)
        lines += ["", "## Beside the papers' figures", *document["published"]]
    counts = (f"{label}: {count}" for label, count in document.get("trials", {}).items())
    lines += [f"trials of the settings: {', '.join(counts)}"] if tuned else []
    lines += [f"FAILED: {title}: {text}" for title, text in failed.items()]
    show(options, document, lambda: "\n".join([*lines, comparison.describe()]))
    return 1 if failed else 0


def _paper(options: Any) -> int:
    papers.check_name(options.paper)
    clashes = {"against": options.against, "target": options.target, "method": options.entries, "tuned": options.tuned}
    if flag := next((flag for flag, value in clashes.items() if value), None):
        raise InputError(f"--{flag} with --paper", "a published table has its own rows and tests", "leave it out")
    with without_gc():
        from medfl.compare.papers import runs as paper_runs
        from medfl.compare.papers import tables as paper_tables
    lines, code, document = paper_runs.run(
        paper_tables.load(options.paper), options.out, bundle=options.bundle,
        methods=arguments.names(options.methods), partitions=options.partition,
        seeds=None if options.seeds is None else arguments.seeds(options.seeds),
        scale=1.0 if options.scale is None else options.scale,
        at_once=options.jobs, **_shared(options), **telling(options),
    )  # fmt: skip
    show(options, document, lambda: "\n".join(lines))
    return code


def _shared(options: Any) -> dict[str, Any]:
    """Return what all runs of the grid share."""
    return {
        "options": arguments.pairs("--set", options.options),
        "config": arguments.pairs("--config", options.config),
        "requested": arguments.requested(options, "presets", "data", "sites"),
    }


def _no_folds(text: str) -> None:
    advice = "cross-validate each method: medfl run BUNDLE --method NAME --folds K"
    raise InputError(f"--folds {text}", "runs of a comparison differ by their seeds", advice)
