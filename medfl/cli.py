"""The command line: `medfl VERB ...`.

Exit codes: 0, 1 (failed while running), 2 (bad input), 130 (Ctrl-C). An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from medfl import terminal
from medfl.errors import InputError, MedflError

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
        near = difflib.get_close_matches(unknown, known, 1)
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise InputError(
            " ".join(message.split()),
            usage if len(usage) < 200 else f"the options of {self.prog} are {', '.join(known)}",
            f"did you mean {near[0]}?" if near else f"see {self.prog} --help",
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
    _add_run(verbs)
    for name, text, function in (
        ("methods", "table of methods, or one method with its options and equations", _methods),
        ("bundles", "table of bundles, or one bundle with its classes, protocol and data", _bundles),
    ):
        verb = _verb(verbs, name, text, function)
        verb.add_argument("name", nargs="?", metavar="NAME", help=f"one of the {name}; all of them if left out")
    _add_data(verbs)
    _add_concepts(verbs)
    report = _verb(verbs, "report", "write report.html of one or several run folders", _report)
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a folder that medfl run wrote")
    report.add_argument(
        "--curves", type=Path, metavar="FILE.png", help="draw the metric of all of them against the bytes sent"
    )
    report.add_argument(
        "--gains", type=Path, metavar="FILE.png", help="who gains: draw and list each site against its Local and FedAvg"
    )
    return parser


def _verb(verbs: Any, name: str, text: str, function: Callable[[Any], int | None], examples: str = "") -> Any:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", epilog=examples or None)
    verb.set_defaults(verb=function)
    verb.add_argument("--json", action="store_true", help="one JSON document on stdout, logs on stderr")
    verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return verb


def _number(kind: type[int] | type[float], flag: str) -> Callable[[str], int | float]:
    """Return a reader of a flag's number; its range is checked where the run is planned."""

    def read(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError as error:
            allowed = "a whole number" if kind is int else "a number"
            raise InputError(f"{flag} {text}", f"{flag} takes {allowed}", "correct it") from error

    return read


# medfl run


def _add_run(verbs: Any) -> None:
    run = _verb(verbs, "run", "federate a bundle with a method", _run, _RUN_EXAMPLES)
    run.add_argument(
        "bundle", nargs="?", metavar="BUNDLE", help="name of a shipped bundle (medfl bundles), or the folder of any"
    )

    def number(group: Any, flag: str, metavar: str, text: str, kind: type[int] | type[float] = int) -> None:
        group.add_argument(flag, type=_number(kind, flag), metavar=metavar, help=text)

    what = run.add_argument_group("what")
    what.add_argument(
        "--method", metavar="NAME", help="a method (medfl methods), or the dotted path of your own; default fedavg"
    )
    what.add_argument(
        "--set", dest="options", action="append", default=[], metavar="OPTION=VALUE",
        help="option of the method (medfl methods NAME); may be repeated",
    )  # fmt: skip
    what.add_argument(
        "--config", action="append", default=[], metavar="ID=VALUE",
        help="id of the bundle's configuration, e.g. network=small_cnn or image_size=64; may be repeated",
    )  # fmt: skip
    what.add_argument(
        "--preset", dest="presets", action="append", metavar="NAME",
        help="values of the bundle's protocol under this name (medfl bundles NAME); may be repeated",
    )  # fmt: skip
    what.add_argument(
        "--data", metavar="DIR|phantom",
        help="folder of the images, or drawn ones; default: a folder below $MEDFL_DATA that the bundle knows, else "
        "phantom",
    )  # fmt: skip
    sites = run.add_argument_group("sites")
    number(sites, "--sites", "N", "number of sites")
    sites.add_argument(
        "--partition", metavar="SPEC",
        help="which site holds which image: iid, dirichlet:BETA, classes:C, shots:N,K,STD, centre (where it was "
        "taken; centre:NAME=TRAIN/TEST,... keeps only so many images of a centre), counts:TRAIN/TEST,... (a site each; "
        "TRAIN includes validation), size (quantiles of the image size) or file:PATH.csv",
    )  # fmt: skip
    number(sites, "--cohort", "FRACTION", "fraction of the sites in each round", float)
    train = run.add_argument_group("training")
    number(train, "--rounds", "R", "rounds of broadcast, local training and aggregation")
    number(train, "--local-epochs", "E", "passes over a site's data a round")
    number(train, "--batch-size", "B", "images a step")
    number(train, "--lr", "X", "learning rate of round 1", float)
    number(train, "--seed", "S", "seed of everything random; default 0")
    number(train, "--eval-every", "N", "rounds between evaluations; 0: after the last only; default 1")
    machine = run.add_argument_group("machine")
    machine.add_argument("--device", metavar="auto|cpu|cuda[:i]", help="where networks are trained; default cpu")
    machine.add_argument("--amp", action="store_true", default=None, help="automatic mixed precision")
    machine.add_argument(
        "--jobs", default="auto", metavar="auto|N", help="worker processes; they never change a result; default auto"
    )
    number(machine, "--threads", "T", "threads of each worker; default 1; more may change the last bits")
    machine.add_argument("--runtime", default="simulator", metavar="simulator", help="who runs the sites")
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
    output.add_argument("--quiet", action="store_true", help="say nothing but errors while running")


_REQUESTED = (
    "method", "presets", "data", "sites", "partition", "cohort", "rounds", "local_epochs", "batch_size", "lr", "seed",
    "device", "amp", "threads", "eval_every",
)  # fmt: skip


def _run(options: Any) -> int:
    if options.runtime != "simulator":
        raise InputError(f"--runtime {options.runtime}", "runtimes here are: simulator", "leave it out")
    jobs, set_, config = _jobs(options.jobs), _pairs("--set", options.options), _pairs("--config", options.config)
    from medfl.launch import federate  # torch and monai take seconds to import

    document = federate(
        bundle=options.bundle,
        options=set_,
        config=config,
        requested={name: getattr(options, name) for name in _REQUESTED if getattr(options, name) is not None},
        out=options.out,
        resume=options.resume,
        source=options.source,
        jobs=jobs,
        with_local=options.with_local,
        save_predictions=options.save_predictions,
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
    return _show(options, document, lambda: catalogue.methods_text(document, terminal.width()))


def _bundles(options: Any) -> int:
    from medfl import catalogue

    document = catalogue.bundles(options.name)
    return _show(options, document, lambda: catalogue.bundles_text(document, terminal.width()))


def _report(options: Any) -> int:
    from medfl.report import write_report

    written = [str(write_report(folder)) for folder in options.folders]
    if options.curves is not None:
        from medfl.curves import write_curves

        written.append(str(write_curves(options.folders, options.curves)))
    if options.gains is None:
        return _show(options, {"reports": written}, lambda: "\n".join(written))
    from medfl.gains import write_gains

    found, file = write_gains(options.folders, options.gains)
    written.append(str(file))
    document = {"reports": written, "gains": found.gains, "values": found.values, "small": sorted(found.small)}
    return _show(options, document, lambda: "\n".join([found.table(), "", *found.summary(), *written]))


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
        make.add_argument(flag, type=_number(int, flag), metavar=metavar, help=help_)
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
    from medfl.datasets.download import fetch

    files = [str(path) for path in fetch(datasets.get(options.bundle), options.out, progress=sys.stderr.isatty())]
    return _show(options, {"name": options.bundle, "files": files}, lambda: "\n".join(files))


def _data_check(options: Any) -> int:
    from medfl import catalogue, datasets

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
        "--dropout", type=_number(int, "--dropout"), metavar="SEED",
        help="leave the language model's dropout on, as the authors' code",
    )  # fmt: skip


def _concepts(options: Any) -> int:
    from medfl import teachers
    from medfl.bundle import Bundle

    bundle = Bundle(options.bundle)
    if (options.unmasked or options.dropout is not None) and options.out is None:
        raise InputError(
            "--unmasked or --dropout without --out",
            "such embeddings are used with --set plm=FILE, never by the model's name",
            "add --out FILE.safetensors",
        )
    path = options.out or teachers.cached(options.plm, bundle.text)
    if path.suffix != ".safetensors":
        raise InputError(f"--out {path}", "embeddings are written as FILE.safetensors", "change the name")
    made = teachers.build(
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
    _say("\n".join(terminal.filled(text)) if "\n" not in text and sys.stderr.isatty() else text)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
