"""The command line: `medfl VERB ...`. One-line errors, exit codes 0, 1 (failed while running), 2 (bad input), 130 (Ctrl-C)."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from medfl.errors import InputError, MedflError

_EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """argparse with medfl's one-line errors."""

    def error(self, message: str) -> NoReturn:
        """Turn a usage error into an InputError."""
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise InputError(message, usage if len(usage) < 400 else f"the options of {self.prog}", f"see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        options = _parser().parse_args(given)
        options.given = given
        return int(options.verb(options) or 0)
    except KeyboardInterrupt:
        _say("interrupted: what was saved is intact; continue with --resume")
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MedflError as error:
        if debug:
            traceback.print_exc()
        _say(f"error: {' '.join(str(error).split())}")
        return error.exit_code


def _parser() -> _Parser:
    parser = _Parser(prog="medfl", description="Federated training of MONAI bundles across sites that may not share data.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(metavar="VERB", required=True, parser_class=_Parser)
    _add_run(verbs)
    for name, text, function in (
        ("methods", "table of methods, or one method with its options", _methods),
        ("bundles", "table of bundles, or one bundle", _bundles),
    ):
        verb = _verb(verbs, name, text, function, json_output=True)
        verb.add_argument("name", nargs="?", help=f"one of the {name}")
    _add_data(verbs)
    report = _verb(verbs, "report", "write report.html of one or several run folders", _report)
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a folder that medfl run wrote")
    return parser


def _verb(verbs: Any, name: str, text: str, function: Callable[[Any], int | None], *, json_output: bool = False) -> Any:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.set_defaults(verb=function)
    verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if json_output:
        verb.add_argument("--json", action="store_true", help="one JSON document on stdout, logs on stderr")
    return verb


# medfl run


def _add_run(verbs: Any) -> None:
    run = _verb(verbs, "run", "federate a bundle with a method", _run, json_output=True)
    run.add_argument("bundle", nargs="?", help="a shipped bundle's name, or the folder of any MONAI bundle")
    what = run.add_argument_group("what")
    what.add_argument("--method", help="method name (see medfl methods), or the dotted path of your own; default fedavg")
    what.add_argument("--set", dest="options", action="append", default=[], metavar="OPTION=VALUE", help="option of the method")
    what.add_argument("--config", action="append", default=[], metavar="ID=VALUE", help="id of the bundle's configuration")
    what.add_argument("--data", metavar="DIR|phantom", help="default: a folder below $MEDFL_DATA, else the phantom cohort")
    sites = run.add_argument_group("sites")
    sites.add_argument("--sites", type=int, metavar="N", help="number of sites")
    sites.add_argument(
        "--partition", metavar="SPEC", help="iid | dirichlet:BETA | classes:C | shots:N,K,STD | centre | file:PATH.csv"
    )
    sites.add_argument("--cohort", type=float, metavar="FRACTION", help="fraction of the sites in each round")
    train = run.add_argument_group("training")
    train.add_argument("--rounds", type=int, metavar="R", help="rounds")
    train.add_argument("--local-epochs", type=int, metavar="E", help="passes over a site's data a round")
    train.add_argument("--batch-size", type=int, metavar="B", help="images a step")
    train.add_argument("--lr", type=float, metavar="X", help="learning rate of round 1")
    train.add_argument("--seed", type=int, metavar="S", help="seed of everything random; default 0")
    train.add_argument("--eval-every", type=int, metavar="N", help="rounds between evaluations; 0: after the last only; default 1")
    machine = run.add_argument_group("machine")
    machine.add_argument("--device", metavar="auto|cpu|cuda[:i]", help="default cpu")
    machine.add_argument("--amp", action="store_true", default=None, help="automatic mixed precision")
    machine.add_argument("--jobs", default="auto", metavar="auto|N", help="worker processes; never change a result")
    machine.add_argument("--threads", type=int, metavar="T", help="threads of each worker; default 1; may change the last bits")
    machine.add_argument("--runtime", default="simulator", metavar="simulator", help="who runs the sites")
    output = run.add_argument_group("output")
    output.add_argument("--out", type=Path, metavar="DIR", help="run folder; default runs/BUNDLE-METHOD-SEED")
    output.add_argument("--resume", action="store_true", help="continue the run in --out")
    output.add_argument("--from", dest="source", type=Path, metavar="RUN.JSON", help="repeat a recorded run")
    output.add_argument("--with-local", action="store_true", help="first run Local with the same steps, as each site's reference")
    output.add_argument("--quiet", action="store_true", help="say nothing but errors while running")


_REQUESTED = (
    "method", "data", "sites", "partition", "cohort", "rounds", "local_epochs", "batch_size", "lr", "seed", "device", "amp",
    "threads", "eval_every",
)  # fmt: skip


def _run(options: Any) -> int:
    from medfl.federate import federate  # torch and monai take seconds to import

    if options.runtime != "simulator":
        raise InputError(f"--runtime {options.runtime}", "runtimes here are: simulator", "leave it out")
    document = federate(
        bundle=options.bundle,
        options=_pairs("--set", options.options),
        config=_pairs("--config", options.config),
        requested={name: getattr(options, name) for name in _REQUESTED if getattr(options, name) is not None},
        out=options.out,
        resume=options.resume,
        source=options.source,
        jobs=_jobs(options.jobs),
        with_local=options.with_local,
        progress=sys.stderr.isatty() and not options.quiet,
        command="medfl " + shlex.join(options.given),
        say=str if options.quiet else _say,
    )
    if options.json:
        _print(json.dumps(document))
    else:
        from medfl.report import result_table

        folder = Path(document["folder"])
        *table, data = result_table(folder).splitlines()
        _print("\n".join([*table, f"report: {folder / 'report.html'}", f"run folder: {folder}", data]))
    return 0


def _jobs(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"--jobs {text}", "auto or a whole number of at least 1", "correct it")
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
    from medfl import catalogue

    document = catalogue.methods(options.name)
    _print(json.dumps(document) if options.json else catalogue.methods_text(document))
    return 0


def _bundles(options: Any) -> int:
    from medfl import catalogue

    document = catalogue.bundles(options.name)
    _print(json.dumps(document) if options.json else catalogue.bundles_text(document))
    return 0


def _report(options: Any) -> int:
    from medfl.report import write_report

    for folder in options.folders:
        _print(str(write_report(folder)))
    return 0


# medfl data


def _add_data(verbs: Any) -> None:
    data = verbs.add_parser("data", help="make, fetch or check the images of a bundle", description="The images of a bundle.")
    actions = data.add_subparsers(metavar="ACTION", required=True, parser_class=_Parser)
    make = _verb(actions, "make", "write a phantom cohort in the real layout", _data_make)
    make.add_argument("bundle")
    make.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    make.add_argument("--per-class", type=int, metavar="N", help="images a class")
    make.add_argument("--size", type=int, metavar="PIXELS", help="side of the images")
    make.add_argument("--seed", type=int, default=0, metavar="S")
    fetch = _verb(actions, "fetch", "download the real data (licence and checksums shown)", _data_fetch)
    fetch.add_argument("bundle")
    fetch.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to; an interrupted download continues")
    check = _verb(actions, "check", "verify a folder: layout, counts, unreadable images by name", _data_check, json_output=True)
    check.add_argument("bundle")
    check.add_argument("--data", type=Path, metavar="DIR", help="default: below $MEDFL_DATA")


def _data_make(options: Any) -> int:
    from medfl import datasets

    size = {name: getattr(options, name) for name in ("per_class", "size") if getattr(options, name) is not None}
    _print(f"PHANTOM cohort: {datasets.write_phantom(options.bundle, options.out, seed=options.seed, **size)}")
    return 0


def _data_fetch(options: Any) -> int:
    from medfl import datasets
    from medfl.datasets.download import fetch

    _print(str(fetch(datasets.get(options.bundle), options.out, progress=sys.stderr.isatty())))
    return 0


def _data_check(options: Any) -> int:
    from medfl import datasets

    report = datasets.check(options.bundle, options.data, progress=sys.stderr.isatty())
    _print(json.dumps(report.as_dict()) if options.json else str(report))
    return 0 if report.ok else 2


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
