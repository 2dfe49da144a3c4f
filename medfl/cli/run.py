"""The verb `medfl run`: federate a bundle with a method."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from medfl.cli import arguments
from medfl.cli.method_pages import check_options
from medfl.cli.parser import add_verb, show, telling
from medfl.cli.walls import Use, hold
from medfl.core import SETTINGS, Config, InputError, Refused, fields_of, json_values, portable
from medfl.core.importing import without_gc
from medfl.runtimes import Launch
from medfl.storage import FOLDS, default_run_folder, read_run, record_of

EXAMPLES = """\
The bundle's protocol, configs/federated.yaml, is that of the paper that used its data.

examples
  medfl run pneumonia --data phantom --rounds 3
      FedAvg on synthetic images: no download needed
  medfl run ham10000 --method fedprox --set mu=0.01 --sites 6 --with-local
      FedProx on the images below $MEDFL_DATA, compared with local training at each site
  medfl run bundles/lungs --data lungs --folds 5 --out runs/lungs
      few images: 5-fold cross-validation, each image is tested once
  medfl run --resume --out runs/ham10000-fedprox-0 --rounds 300
      continue that run, for more rounds"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    add_flags(add_verb(verbs, "run", "federate a bundle with a method", run, EXAMPLES))


def add_flags(run: Any) -> None:
    """Add the flags of `medfl run`."""
    run.add_text(
        "bundle",
        "BUNDLE",
        "name of a shipped bundle (medfl bundles), or the folder of any bundle; with --resume or "
        "--from needed only if the run's bundle has moved or changed version",
        nargs="?",
    )
    group = run.add_argument_group("what")
    group.add_text(
        "--method",
        "NAME",
        "a method (medfl methods), or the dotted path of your own; default: fedavg",
    )
    group.add_what("set an option of the method (medfl methods NAME); may be repeated")
    sites = run.add_sites()
    sites.add_partition()
    sites.add_text(
        "--leave-out",
        "NAME,...",
        "train at all centres but these, and test there: --partition centre:NAME=0/all,...",
    )
    run.add_training()
    run.add_robustness()
    machine = run.add_machine()
    machine.add_trust()
    machine.add_jobs("number of worker processes; does not change results")
    machine.add_runtime()
    output = run.add_argument_group("output")
    output.add_path("--out", "DIR", "new run folder; default: runs/BUNDLE-METHOD-SEED")
    output.add_switch("--resume", "continue the run in --out, optionally for more --rounds")
    output.add_path("--from", "RUN.JSON", "repeat a recorded run", dest="source")
    output.add_number(
        "--folds",
        "K",
        "K-fold cross-validation, split by patient, and pooled metrics over all folds",
    )
    output.add_switch(
        "--with-local", "first train each site alone for the same number of steps, as a baseline"
    )
    output.add_examinations()
    output.add_switch(
        "--save-predictions",
        "segmentation: write the predicted masks of the test images as NIfTI or PNG, in the geometry "
        "of the image files",
    )
    output.add_switch(
        "--profile",
        "run all sites in one process, print where the time went, and write profile.json, a trace for "
        "Perfetto or chrome://tracing",
    )
    output.add_text("--track", "mlflow[:URI]", "log metrics to MLflow")
    output.add_quiet()
    run.set_defaults(goes_on_by="; medfl run --resume --out DIR continues a run")


def run(args: Namespace) -> int:
    """Execute `medfl run`."""
    # first of all: libraries read it while they are imported
    if _was_portable(args):
        portable.enable()

    values = arguments.parse_pairs("--set", args.options)
    config = arguments.parse_pairs("--config", args.config)
    requested = arguments.given_settings(args, "method", "partition", "presets", "data", "sites")
    if args.leave_out:
        requested["partition"] = _without(args.leave_out, requested)

    from medfl.bundle.files import find
    from medfl.runs import request_checks

    launch = launch_of(args)

    if args.resume and args.out and (args.out / FOLDS).is_file():
        begun = [*args.out.glob("fold-*")]
        bundle = str(_recorded(args.out / FOLDS).get("bundle", ""))
        hold(args, Use(bundles=[bundle], runs=begun, folder=args.out))
        return _cross_validate(args, values, config, requested, launch, again=True)

    request_checks.check_before_imports(
        args.bundle,
        requested,
        has_overrides=bool(values or config),
        source=args.source,
        launch=launch,
    )
    if args.bundle is not None and not args.resume:
        check_options(args.method or "fedavg", values)
        find(args.bundle)

    _hold(args)
    if args.folds is not None:
        return _cross_validate(args, values, config, requested, launch, again=False)

    with without_gc():
        from medfl.runs.launch import federate  # torch and monai take seconds to import

    document = federate(
        args.bundle,
        options=values,
        config=config,
        requested=requested,
        source=args.source,
        launch=launch,
    )
    return show(args, document, result_lines(Path(document["folder"])))


def _without(names: str, requested: Config) -> str:
    """Return the partition in which some centres only test; InputError with another partition."""
    for flag in ("partition", "sites"):
        if flag in requested:
            raise InputError(
                f"--leave-out with --{flag}", "it makes the partition", "give one of them"
            )

    if names == "each":
        raise InputError(
            "--leave-out each of one run", "names of centres", "use medfl compare --leave-out each"
        )

    return "centre:" + ",".join(f"{name}=0/all" for name in arguments.parse_names(names))


def _hold(args: Namespace) -> None:
    """Sandbox a third-party bundle, by what the run opens and writes."""
    is_elsewhere = (args.track or "").partition(":")[2]
    hold(
        args,
        Use(
            bundles=[args.bundle] if args.bundle else [],
            runs=list(filter(None, (args.source, args.out if args.resume else None))),
            folder=_run_folder(args),
            connects=f"--track {args.track}" if is_elsewhere else "",
            compiles=args.compile,
        ),
    )


def _run_folder(args: Namespace) -> Path:
    if args.out:
        return Path(args.out)

    if args.source:
        with suppress(InputError, OSError):  # reported later
            run = read_run(record_of(args.source))[0]
            return default_run_folder(run.bundle, run.method, run.seed)

    name = Path(args.bundle or "none").expanduser().resolve().name
    seed = SETTINGS["seed"].default if args.seed is None else args.seed
    return default_run_folder(name, args.method or "fedavg", seed)


def _recorded(path: Path) -> Config:
    """Return a record; {} if it cannot be read, which is reported later."""
    with suppress(Refused):
        document = json_values(path)
        if isinstance(document, dict):
            return document

    return {}


def launch_of(args: Namespace) -> Launch:
    """Return how a run is executed, from the flags that its verb has."""
    flags = fields_of(Launch).keys() & vars(args).keys()
    command = "medfl " + shlex.join(args.given)
    chosen = {name: getattr(args, name) for name in flags}
    return Launch(**{**chosen, "command": command, **telling(args)})


def _was_portable(args: Namespace) -> bool:
    """Return whether the run to resume or repeat is portable."""
    if args.resume and args.out:
        documents = [_recorded(args.out / "run.json"), _recorded(args.out / FOLDS).get("requested")]
    else:
        documents = [args.source and _recorded(record_of(args.source))]

    return any(
        isinstance(document, dict) and document.get("portable") is True for document in documents
    )


def _cross_validate(
    args: Namespace, values: Any, config: Any, requested: Any, launch: Launch, again: bool
) -> int:
    refused = {"--from": args.source, "--profile": args.profile}
    refused |= {"--resume, where no cross-validation is": args.resume and not again}
    refused |= {
        "--resume and other settings": again and any((args.folds, args.bundle, values, config))
    }
    if wrong := next((flag for flag, conflict in refused.items() if conflict), None):
        allowed = "a cross-validation is K new runs; --resume --out DIR alone continues one"
        raise InputError(f"a cross-validation with {wrong}", allowed, "leave it out")

    if not again:
        from medfl.datasets.readers.splitting import check_folds

        check_folds(args.folds)

    with without_gc():
        from medfl.runs import folds

    if again:
        document = folds.resume(args.out, requested, launch=launch)
    else:
        document = folds.cross_validate(
            args.bundle,
            args.folds,
            options=values,
            config=config,
            requested=requested,
            launch=launch,
        )

    return show(args, document, result_lines(Path(document["folder"])))


def result_lines(folder: Path) -> Iterator[str]:
    """Yield the lines printed for a finished run, or for a cross-validation."""
    from medfl.report import result_table
    from medfl.report.folds import Folds

    if (folder / FOLDS).is_file():
        kind = "folder"
        text = Folds.read(folder).text()
    else:
        kind = "run folder"
        text = result_table(folder)

    *table, data = text.splitlines()
    yield from (*table, f"report: {folder / 'report.html'}", f"{kind}: {folder}", data)
