"""The verb `medfl compare`: a grid of methods, partitions and seeds, or the grid of a published table."""

from __future__ import annotations

from argparse import SUPPRESS, Namespace
from typing import Any

from medfl.cli import arguments
from medfl.cli.method_pages import check_options
from medfl.cli.parser import add_verb, show, telling
from medfl.cli.walls import Use, hold
from medfl.compare import papers
from medfl.core import Document, InputError, map_values
from medfl.core.importing import without_gc
from medfl.runtimes import Launch

_EXAMPLES = """\
examples
  medfl compare pneumonia --data phantom --methods fedavg,fedprox --rounds 3 --out grids/first
      two methods, three seeds, synthetic images
  medfl compare ham10000 --methods fedavg,fedbm --method 'fedcb classifier=random_frozen' \\
    --partition dirichlet:0.05 --partition dirichlet:0.1 --seeds 0,1,2 --out grids/ham
      with a variant of FedCB, on two partitions; repeat the command to run only what is missing"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = "run a grid of methods, partitions and seeds, and compare them"
    compare = add_verb(verbs, "compare", text, _compare, _EXAMPLES)
    compare.add_text(
        "bundle",
        "BUNDLE",
        "name of a shipped bundle, or the folder of any bundle; with --paper, default: all bundles of that table",
        nargs="?",
        type=arguments.bundle_name,
    )
    group = compare.add_argument_group("what")
    group.add_text(
        "--methods", "A,B,...", "comma-separated methods, with their default options", default=""
    )
    group.add_text(
        "--paper",
        "PAPER/TABLE",
        "run the grid of a published table, e.g. fedbm/table3, and show its figures beside ours; "
        "--methods selects some of its methods",
    )
    group.add_number(
        "--scale",
        "FACTOR",
        "with --paper: run only this fraction of the rounds (stated in the tables)",
        float,
    )
    group.add_text(
        "--method",
        "'NAME OPTION=VALUE ...'",
        "one more method with its own options; may be repeated, also with the same name",
        dest="entries",
        action="append",
        default=[],
    )
    group.add_path(
        "--tuned",
        "DIR",
        "folder that medfl tune wrote, or one holding several: use the settings found there; default:"
        " all methods in it, or those of --methods",
    )
    group.add_text(
        "--seeds",
        "0,1,2",
        "comma-separated seeds, also used for the partitions; default: 0,1,2, or the published table's",
    )
    group.add_what("set an option of every method that has it; may be repeated")
    sites = compare.add_sites()
    sites.add_partition("append")
    sites.add_text(
        "--leave-out",
        "NAME,...|each",
        "train at all centres, and at all but each of these; the table left_out.md says what is reached at a "
        "centre that was left out, beside its own model (method local)",
    )
    compare.add_training(seed=False)
    compare.add_argument("--folds", type=_no_folds, help=SUPPRESS)
    output = compare.add_machine_and_output("the runs and tables")
    output.add_text("--against", "METHOD", "method to test the others against; default: the first")
    output.add_text(
        "--target",
        "VALUE|METHOD",
        "report rounds, bytes and seconds needed to reach this validation metric, or a method's best;"
        " default: the best of --against",
    )
    output.add_switch("--published", "also print the published figures of these methods")
    output.add_examinations()
    output.add_quiet()


def _compare(args: Namespace) -> int:
    if args.paper:
        return _paper(args)
    if args.scale is not None:
        raise InputError(
            f"--scale {args.scale:g} without --paper",
            "it reduces a published table",
            "use --rounds",
        )
    if args.leave_out and args.partition:
        raise InputError(
            "--leave-out with --partition",
            "it makes the partitions: all centres, and all but each",
            "give one of them",
        )
    if args.bundle is None:
        raise InputError("no bundle", "a shipped bundle's name or a folder", "see medfl bundles")

    from medfl.runs.request_checks import check_driver, check_places

    shared = _shared(args)
    # what is wrong with any partition is told before the first run
    for partition in args.partition or [None]:
        check_places(args.bundle, {**shared["requested"], "partition": partition})
    check_driver(args.device or "")
    seeds = arguments.parse_seeds(args.seeds or "0,1,2")
    hold(args, Use(bundles=[args.bundle], folder=args.out))
    from medfl.compare.search import Entry, tuned_entries

    tuned = tuned_entries(args.tuned) if args.tuned else {}
    # without names, all that was tuned
    methods = list(dict.fromkeys(arguments.parse_names(args.methods))) or (
        [] if args.entries else [*tuned]
    )
    entries = [tuned[name] if name in tuned else Entry.read(name) for name in methods]
    entries += list(map(Entry.read, dict.fromkeys(args.entries)))

    if not entries:
        raise InputError(
            "no methods",
            "--methods A,B,... or --method 'NAME OPTION=VALUE ...'",
            "add one of these",
        )

    for entry in entries:
        check_options(entry.method, entry.options)

    with without_gc():
        from medfl.compare import left_out, sites
        from medfl.compare.grid import Grid, compare
        from medfl.compare.tables import write_tables

    partitions = tuple(args.partition or (None,))
    if args.leave_out:
        partitions = left_out.partitions(
            args.bundle, args.leave_out, config=shared["config"], **shared["requested"]
        )

    grid = Grid(args.bundle, tuple(entries), partitions, seeds, **shared)
    tests = {"against": args.against, "target": args.target}
    comparison, failed = compare(
        grid,
        Launch(
            out=args.out,
            jobs=args.jobs,
            cross_site=args.cross_site,
            contribution=args.contribution,
            **telling(args),
        ),
        **tests,
    )
    document: Document = {"folder": str(args.out), "failed": failed}

    if tuned:
        document["trials"] = {entry.label: entry.trials or 0 for entry in entries}

    failures = [f"FAILED: {title}: {text}" for title, text in failed.items()]
    if comparison is None:
        show(args, document, [*failures, "no run finished"])
        return 1

    written = write_tables(comparison, args.out, **tests)
    document |= {
        "tables": map_values(str, written),
        "ranks": comparison.ranks(),
    }
    lines = [
        written["md"].read_text("utf-8"),
        left_out.write(comparison, args.out),
        sites.write_cross_site(comparison, args.out),
        sites.write_contribution(comparison, args.out),
        *(f"written: {path}" for path in written.values()),
    ]
    if args.published:
        from medfl.compare.papers.runs import published

        document["published"] = published(comparison)
        lines += ["", "## Beside the papers' figures", *document["published"]]

    for label, count in document.get("trials", {}).items():
        lines.append(f"{label}: settings chosen in {count} trials")

    show(args, document, [*lines, *failures, comparison.describe()])

    return 1 if failed else 0


def _paper(args: Namespace) -> int:
    papers.check_name(args.paper)
    clashes = {
        "against": args.against,
        "target": args.target,
        "method": args.entries,
        "tuned": args.tuned,
    }
    if flag := next((flag for flag, value in clashes.items() if value), None):
        raise InputError(
            f"--{flag} with --paper", "a published table has its own rows and tests", "leave it out"
        )

    with without_gc():
        from medfl.compare.papers import runs as paper_runs

    lines, code, document = paper_runs.run(
        paper_runs.load(args.paper),
        Launch(out=args.out, jobs=args.jobs, **telling(args)),
        bundle=args.bundle,
        methods=arguments.parse_names(args.methods),
        partitions=args.partition,
        seeds=None if args.seeds is None else arguments.parse_seeds(args.seeds),
        scale=1.0 if args.scale is None else args.scale,
        **_shared(args),
    )
    show(args, document, lines)

    return code


def _shared(args: Namespace) -> Document:
    """Return the common settings of all runs of the grid."""
    return {
        "options": arguments.parse_pairs("--set", args.options),
        "config": arguments.parse_pairs("--config", args.config),
        "requested": arguments.given_settings(args, "presets", "data", "sites"),
    }


def _no_folds(text: str) -> None:
    raise InputError(
        f"--folds {text}",
        "runs of a comparison differ by their seeds",
        "cross-validate each method: medfl run BUNDLE --method NAME --folds K",
    )
