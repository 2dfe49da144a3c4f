"""The command line: `medfl VERB ...`.

Exit codes: 0, 1 (failed while running), 2 (bad input), 130 (Ctrl-C). An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from medfl.cli import arguments, new, subgroups
from medfl.cli import export as export_cli
from medfl.cli import flare as flare_cli
from medfl.cli import report as report_cli
from medfl.cli import site as site_cli
from medfl.core import terminal
from medfl.core.errors import InputError, MedflError, did_you_mean
from medfl.core.importing import without_gc

_EXIT_INTERRUPTED = 130

_EXAMPLES = """\
examples
  medfl run pneumonia --data phantom --rounds 3
      a first run, on drawn images
  medfl bundles
      what can be trained on; medfl methods: and how
  medfl run ham10000 --data DIR --partition centre --method scaffold --rounds 20
      four hospitals, real images"""

_RUN_EXAMPLES = """\
What is not given comes from the bundle's configs/federated.yaml: the protocol
of the paper that used its data.

examples
  medfl run pneumonia --data phantom --rounds 3
      FedAvg over drawn images: needs no download
  medfl run ham10000 --method fedprox --set mu=0.01 --sites 6 --with-local
      FedProx on the images below $MEDFL_DATA, beside what each site reaches alone
  medfl run --resume --out runs/ham10000-fedprox-0 --rounds 300
      go on with that run, for more rounds"""


_COMPARE_EXAMPLES = """\
examples
  medfl compare pneumonia --data phantom --methods fedavg,fedprox --rounds 3 --out grids/first
      two methods, three seeds, on drawn images
  medfl compare ham10000 --methods fedavg,fedbm --method 'fedcb classifier=random_frozen' \\
    --partition dirichlet:0.05 --partition dirichlet:0.1 --seeds 0,1,2 --out grids/ham
      a variant besides, on two partitions; called again it runs only what is missing"""


class _Parser(argparse.ArgumentParser):
    """argparse with medfl's one-line errors."""

    def __init__(self, **settings: Any) -> None:
        """Take full option names only: a short form could mean something else in the next version."""
        super().__init__(**settings, allow_abbrev=False, formatter_class=_Help)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Refuse what this verb does not know here, where its options can be named."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown {' '.join(unknown)}", unknown[0].partition("=")[0])
        return parsed, unknown

    def error(self, message: str, unknown: str = "") -> NoReturn:
        """Turn a usage error into an InputError."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise InputError(
            " ".join(message.split()),
            usage if len(usage) < 200 else f"the options of {self.prog} are {', '.join(known)}",
            did_you_mean(unknown, known, f"see {self.prog} --help"),
        )


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, at most 100 columns, with the examples kept as written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=terminal.width() - 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parser().parse_args(given)
        options.given = given
        return int(options.verb(options) or 0)
    except SystemExit as done:  # argparse after --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        _say("interrupted: what was saved is intact; a run continues with --resume")
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MedflError as error:
        if "--debug" in given:
            traceback.print_exc()
        _say(f"error: {' '.join(str(error).split())}")
        return error.exit_code


def _parser() -> _Parser:
    parser = _Parser(
        prog="medfl",
        description="Federated training of MONAI bundles across sites that may not share data.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"medfl {metadata.version('medfl')}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_Parser)
    _run_flags(_verb(verbs, "run", "federate a bundle with a method", _run, _RUN_EXAMPLES))
    for name, text, function in (
        ("methods", "table of methods, or one method with its options and equations", _methods),
        ("bundles", "table of bundles, or one bundle with its classes, protocol and data", _bundles),
    ):
        verb = _verb(verbs, name, text, function)
        verb.add_argument("name", nargs="?", metavar="NAME", help=f"one of the {name}; all of them if left out")
    _add_compare(verbs)
    _add_data(verbs)
    _add_concepts(verbs)
    for module in (new, report_cli, subgroups, export_cli, site_cli):
        module.add(verbs, _Parser, _verb, _show)
    flare_cli.add(verbs, _Parser, _verb, _show, _run_flags, _run, _pairs)
    return parser


def _verb(verbs: Any, name: str, text: str, function: Callable[[Any], int | None], examples: str = "") -> Any:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", epilog=examples or None)
    verb.set_defaults(verb=function)
    verb.add_argument("--json", action="store_true", help="one JSON document on stdout, logs on stderr")
    verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return verb


# medfl run


def _run_flags(run: Any) -> None:
    run.add_argument(
        "bundle", nargs="?", metavar="BUNDLE", help="name of a shipped bundle (medfl bundles), or the folder of any"
    )
    what = run.add_argument_group("what")
    what.add_argument(
        "--method", metavar="NAME", help="a method (medfl methods), or the dotted path of your own; default fedavg"
    )
    arguments.what(what, "option of the method (medfl methods NAME); may be repeated")
    arguments.partition(arguments.sites(run))
    arguments.training(run)
    arguments.robustness(run)
    machine = arguments.machine(run)
    machine.add_argument(
        "--jobs", default="auto", metavar="auto|N", help="worker processes; they never change a result; default auto"
    )
    machine.add_argument(
        "--runtime", default="simulator", metavar="simulator|monai-fl|flare|flare-poc",
        help="who runs the sites, with the same results: worker processes, MONAI FL's ClientAlgo in this one, a job on "
        "NVIDIA FLARE's simulator, or one on a FLARE federation with certificates on this machine",
    )  # fmt: skip
    output = run.add_argument_group("output")
    output.add_argument("--out", type=Path, metavar="DIR", help="new run folder; default runs/BUNDLE-METHOD-SEED")
    output.add_argument("--resume", action="store_true", help="continue the run in --out, perhaps with more --rounds")
    output.add_argument("--from", dest="source", type=Path, metavar="RUN.JSON", help="repeat a recorded run")
    output.add_argument(
        "--with-local", action="store_true", help="first train each site alone with the same steps, as its reference"
    )
    output.add_argument(
        "--save-predictions", action="store_true",
        help="segmentation: write the predicted masks of the test images as NIfTI or PNG, in their files' geometry",
    )  # fmt: skip
    output.add_argument(
        "--profile", action="store_true",
        help="say where the time of the rounds went, and write profile.json, a trace for Perfetto or chrome://tracing",
    )  # fmt: skip
    output.add_argument("--track", metavar="mlflow[:URI]", help="write the numbers to MLflow as well")
    output.add_argument("--quiet", action="store_true", help="say nothing but errors while running")


def _add_compare(verbs: Any) -> None:
    text = "run a grid of methods, partitions and seeds, and compare them"
    compare = _verb(verbs, "compare", text, _compare, _COMPARE_EXAMPLES)
    compare.add_argument(
        "bundle",
        nargs="?",
        metavar="BUNDLE",
        help="name of a shipped bundle, or the folder of any; of --paper, all its own",
    )
    what = compare.add_argument_group("what")
    what.add_argument("--methods", default="", metavar="A,B,...", help="methods with their defaults")
    what.add_argument(
        "--paper", metavar="PAPER/TABLE",
        help="the grid of a published table, as fedbm/table3, and its figures beside ours; --methods picks some",
    )  # fmt: skip
    what.add_argument(
        "--scale", type=arguments.reader(float, "--scale"), metavar="FACTOR",
        help="with --paper: only this part of its rounds, said in the tables",
    )  # fmt: skip
    what.add_argument(
        "--method", dest="entries", action="append", default=[], metavar="'NAME OPTION=VALUE ...'",
        help="one more method with options of its own; may be repeated, also with the same name",
    )  # fmt: skip
    what.add_argument(
        "--seeds",
        metavar="0,1,2",
        help="seeds, which also draw the partitions; default 0,1,2, or the published table's",
    )
    arguments.what(what, "option of every method that has it; may be repeated")
    arguments.partition(arguments.sites(compare), "append")
    arguments.training(compare, seed=False)
    machine = arguments.machine(compare)
    machine.add_argument(
        "--jobs", default="auto", metavar="auto|N",
        help="runs at the same time, on a GPU no more than fit its memory; they change no result; default auto",
    )  # fmt: skip
    output = compare.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, required=True, metavar="DIR",
        help="folder of the runs and tables; what is there already is not run again",
    )  # fmt: skip
    output.add_argument("--against", metavar="METHOD", help="the others are tested against it; default: the first")
    output.add_argument(
        "--target", metavar="VALUE|METHOD",
        help="rounds, bytes and seconds to this validation metric, or to a method's best; default: that of --against",
    )  # fmt: skip
    output.add_argument(
        "--published", action="store_true", help="also print what the papers' tables say of these methods"
    )
    output.add_argument("--quiet", action="store_true", help="say nothing but errors while running")


def _compare(options: Any) -> int:
    if options.paper:
        return _paper(options)
    if options.scale is not None:
        raise InputError(f"--scale {options.scale:g} without --paper", "it reduces a published table", "use --rounds")
    if options.bundle is None:
        raise InputError("no bundle", "a shipped bundle's name or a folder", "see medfl bundles")
    jobs, set_, config = _jobs(options.jobs), _pairs("--set", options.options), _pairs("--config", options.config)
    seeds = _seeds(options.seeds or "0,1,2")
    with without_gc():
        from medfl.compare.grid import Entry, Grid, compare, write_tables

    names = [name.strip() for name in options.methods.split(",") if name.strip()] + options.entries
    if not names:
        raise InputError("no methods", "--methods A,B,... or --method 'NAME OPTION=VALUE ...'", "add one of these")
    grid = Grid(
        options.bundle,
        tuple(Entry.read(name) for name in dict.fromkeys(names)),
        tuple(options.partition or (None,)),
        tuple(dict.fromkeys(seeds)),
        set_,
        config,
        arguments.requested(options, *_SHARED),
    )
    say = str if options.quiet else _log
    bar = sys.stderr.isatty() and not options.quiet
    named = {"against": options.against, "target": options.target}
    found, failed = compare(grid, options.out, at_once=jobs, progress=bar, say=say, **named)
    document: dict[str, Any] = {"folder": str(options.out), "failed": failed}
    if found is None:
        _show(options, document, lambda: "no run finished")
        return 1
    written = write_tables(found, options.out, **named)
    document |= {"tables": {form: str(path) for form, path in written.items()}, "ranks": found.ranks()}
    lines = [written["md"].read_text(), *(f"written: {path}" for path in written.values())]
    if options.published:
        from medfl.compare.papers.runs import published

        document["published"] = published(found)
        lines += ["", "## Beside the papers' figures", *document["published"]]
    lines += [f"FAILED: {title}: {text}" for title, text in failed.items()]
    _show(options, document, lambda: "\n".join([*lines, found.describe()]))
    return 1 if failed else 0


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(seed) for seed in text.split(","))
    except ValueError as error:
        raise InputError(f"--seeds {text}", "whole numbers, as 0,1,2", "write only digits and commas") from error


def _paper(options: Any) -> int:
    with without_gc():
        from medfl.compare.papers import runs as paper_runs
        from medfl.compare.papers import tables as paper_tables

    for flag, value in (("--against", options.against), ("--target", options.target), ("--method", options.entries)):
        if value:
            raise InputError(f"{flag} with --paper", "a published table has its own rows and tests", "leave it out")
    table = paper_tables.load(options.paper)
    requested = arguments.requested(options, *_SHARED)
    wanted = [name.strip() for name in options.methods.split(",") if name.strip()]
    say = str if options.quiet else _log
    lines, code, document = paper_runs.run(
        table,
        options.out,
        bundle=options.bundle,
        methods=wanted,
        seeds=None if options.seeds is None else _seeds(options.seeds),
        partitions=options.partition,
        scale=1.0 if options.scale is None else options.scale,
        options=_pairs("--set", options.options),
        config=_pairs("--config", options.config),
        requested=requested,
        at_once=_jobs(options.jobs),
        progress=sys.stderr.isatty() and not options.quiet,
        say=say,
    )
    _show(options, document, lambda: "\n".join(lines))
    return code


_SHARED = ("presets", "data", "sites")


def _run(options: Any) -> int:
    jobs, set_, config = _jobs(options.jobs), _pairs("--set", options.options), _pairs("--config", options.config)
    with without_gc():
        from medfl.runs.launch import federate  # torch and monai take seconds to import

    document = federate(
        bundle=options.bundle,
        options=set_,
        config=config,
        requested=arguments.requested(options, "method", "partition", *_SHARED),
        out=options.out,
        resume=options.resume,
        source=options.source,
        jobs=jobs,
        with_local=options.with_local,
        save_predictions=options.save_predictions,
        profile=options.profile,
        track=options.track,
        runtime=options.runtime,
        min_replies=options.min_replies,
        deadline=options.deadline,
        progress=sys.stderr.isatty() and not options.quiet,
        command="medfl " + shlex.join(options.given),
        say=str if options.quiet else _log,
    )
    return _show(options, document, lambda: _result(Path(document["folder"])))


def _result(folder: Path) -> str:
    from medfl.report import result_table

    *table, data = result_table(folder).splitlines()
    return "\n".join([*table, f"report: {folder / 'report.html'}", f"run folder: {folder}", data])


def _jobs(text: str) -> int | None:
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and int(text)):  # of ² isdigit holds too
        raise InputError(f"--jobs {text}", "auto or a whole number of at least 1", "give for example --jobs 2")
    return int(text)


def _pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"{flag} {text}", f"{flag} takes NAME=VALUE", "write it with an equals sign")
        pairs[name] = value
    return pairs


# medfl methods, bundles, report


def _methods(options: Any) -> int:
    from medfl.cli import catalogue

    document = catalogue.methods(options.name)
    return _show(options, document, lambda: catalogue.methods_text(document, terminal.width()))


def _bundles(options: Any) -> int:
    from medfl.cli import catalogue

    document = catalogue.bundles(options.name)
    return _show(options, document, lambda: catalogue.bundles_text(document, terminal.width()))


# medfl data


def _add_data(verbs: Any) -> None:
    text = "make, fetch or check the images of a bundle"
    data = verbs.add_parser("data", help=text, description=text[0].upper() + text[1:] + ".")
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True, parser_class=_Parser)
    make = _verb(actions, "make", "write a phantom cohort (drawn images) in the layout of the real data", _data_make)
    fetch = _verb(actions, "fetch", "download the real data, showing licence and checksums", _data_fetch)
    check = _verb(actions, "check", "verify a folder: layout, counts, unreadable images by name", _data_check)
    for verb in (make, fetch, check):
        verb.add_argument("bundle", metavar="BUNDLE", help="name of a shipped bundle (medfl bundles)")
    make.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    for flag, metavar, help_ in (
        ("--per-class", "N", "images a class"),
        ("--size", "PIXELS", "side of the images"),
        ("--seed", "S", "seed of the drawing; default 0"),
    ):
        make.add_argument(flag, type=arguments.reader(int, flag), metavar=metavar, help=help_)
    fetch.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where to; an interrupted download continues"
    )
    check.add_argument("--data", type=Path, metavar="DIR", help="the folder; default: one below $MEDFL_DATA")


def _data_make(options: Any) -> int:
    from medfl import datasets

    given = {name: value for name in ("per_class", "size", "seed") if (value := getattr(options, name)) is not None}
    folder = datasets.write_phantom(options.bundle, options.out, **given)
    document = {"name": options.bundle, "folder": str(folder), "source": "phantom"}
    return _show(options, document, lambda: f"PHANTOM cohort (drawn images) of {options.bundle}: {folder}")


def _data_fetch(options: Any) -> int:
    from medfl import datasets
    from medfl.datasets.readers.download import fetch

    files = [str(path) for path in fetch(datasets.get(options.bundle), options.out, progress=sys.stderr.isatty())]
    return _show(options, {"name": options.bundle, "files": files}, lambda: "\n".join(files))


def _data_check(options: Any) -> int:
    from medfl import datasets
    from medfl.cli import catalogue

    report = datasets.check(options.bundle, options.data, progress=sys.stderr.isatty())
    _show(options, report.as_dict(), lambda: catalogue.check_text(report.as_dict(), terminal.width()))
    if not report.ok:
        more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        raise InputError(f"{report.problems[0]}{more}", "a folder without problems can be used", "repair or remove it")
    return 0


# medfl concepts


def _add_concepts(verbs: Any) -> None:
    concepts = _verb(verbs, "concepts", "build and store the text embeddings of a bundle's classes", _concepts)
    concepts.add_argument("bundle", metavar="BUNDLE", help="name of a shipped bundle, or the folder of any")
    concepts.add_argument(
        "--plm", required=True, metavar="NAME",
        help="language model: biomedclip, clip, bert, roberta, minilm, or a folder that transformers can read",
    )  # fmt: skip
    concepts.add_argument("--model", metavar="DIR", help="folder to take it from; default: the hub's cache, or the hub")
    concepts.add_argument("--out", type=Path, metavar="FILE", help="default: where --set plm=NAME looks for it")
    concepts.add_argument("--unmasked", action="store_true", help="mean over the padding too, as the authors' code")
    concepts.add_argument(
        "--dropout", type=arguments.reader(int, "--dropout"), metavar="SEED",
        help="leave the language model's dropout on, as the authors' code",
    )  # fmt: skip


def _concepts(options: Any) -> int:
    from medfl.bundle import text_embeddings
    from medfl.bundle.bundle import Bundle

    bundle = Bundle(options.bundle)
    if (options.unmasked or options.dropout is not None) and options.out is None:
        raise InputError(
            "--unmasked or --dropout without --out",
            "such embeddings are used with --set plm=FILE, never by the model's name",
            "add --out FILE.safetensors",
        )
    path = options.out or text_embeddings.cached(options.plm, bundle.text)
    if path.suffix != ".safetensors":
        raise InputError(f"--out {path}", "embeddings are written as FILE.safetensors", "end it in .safetensors")
    made = text_embeddings.build(
        options.plm, bundle.text, options.model, download=True, masked=not options.unmasked, dropout=options.dropout
    )
    made.save(path)
    classes, prompts, size = made.values.shape
    document = {
        "bundle": bundle.name, "plm": made.plm, "weights_sha256": made.weights_sha256, "pooling": made.pooling,
        "classes": classes, "prompts": prompts, "dimension": size, "file": str(path),
    }  # fmt: skip
    text = f"{classes} classes x {prompts} prompts x {size} dimensions of {made.plm} ({made.pooling}): {path}"
    return _show(options, document, lambda: text)


def _show(options: Any, document: dict[str, Any], text: Callable[[], str]) -> int:
    """Print the result: the document with --json, else its text."""
    _print(json.dumps(document) if options.json else text())
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _log(text: str) -> None:
    """Say a line while running; on a terminal a long one is broken between words, a table is left as it is."""
    _say("\n".join(terminal.wrap_to_terminal(text)) if "\n" not in text and sys.stderr.isatty() else text)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
