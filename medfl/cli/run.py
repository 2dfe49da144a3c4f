"""The verb `medfl run`: federate a bundle with a method."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from medfl.cli import arguments
from medfl.cli.method_pages import check_options
from medfl.cli.parser import add_verb, show, telling
from medfl.cli.sandbox import enter_sandbox
from medfl.core import portable
from medfl.core.errors import InputError
from medfl.core.importing import without_gc
from medfl.core.places import FOLDS, record_of
from medfl.core.untrusted import Refused, json_values

EXAMPLES = """\
What is not given comes from the bundle's configs/federated.yaml: the protocol
of the paper that used its data.

examples
  medfl run pneumonia --data phantom --rounds 3
      FedAvg over drawn images: needs no download
  medfl run ham10000 --method fedprox --set mu=0.01 --sites 6 --with-local
      FedProx on the images below $MEDFL_DATA, beside what each site reaches alone
  medfl run bundles/lungs --data lungs --folds 5 --out runs/lungs
      few images: five runs, in which each is tested once
  medfl run --resume --out runs/ham10000-fedprox-0 --rounds 300
      go on with that run, for more rounds"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    add_flags(add_verb(verbs, "run", "federate a bundle with a method", run, EXAMPLES))


def add_flags(run: Any) -> None:
    """Add the flags of `medfl run`."""
    run.add_argument(
        "bundle", nargs="?", metavar="BUNDLE",
        help="name of a shipped bundle (medfl bundles), or the folder of any; "
        "with --resume or --from only where the run's has moved, or is of another version",
    )  # fmt: skip
    what = run.add_argument_group("what")
    what.add_argument(
        "--method", metavar="NAME", help="a method (medfl methods), or the dotted path of your own; default fedavg"
    )
    arguments.what(what, "option of the method (medfl methods NAME); may be repeated")
    arguments.partition(arguments.sites(run))
    arguments.training(run)
    arguments.robustness(run)
    machine = arguments.machine(run)
    arguments.trust(machine)
    arguments.jobs(machine, "worker processes; they never change a result")
    machine.add_argument(
        "--runtime", default="simulator", metavar="simulator|monai-fl|flare|flare-poc",
        help="who runs the sites, with the same results: worker processes, MONAI FL's ClientAlgo in this one, a job on "
        "NVIDIA FLARE's simulator, or one on a FLARE federation with certificates on this machine",
    )  # fmt: skip
    output = run.add_argument_group("output")
    output.add_argument("--out", type=Path, metavar="DIR", help="new run folder; default runs/BUNDLE-METHOD-SEED")
    output.add_argument("--resume", action="store_true", help="continue the run in --out, perhaps with more --rounds")
    output.add_argument("--from", dest="source", type=Path, metavar="RUN.JSON", help="repeat a recorded run")
    arguments.number(
        output, "--folds", "K",
        "cross-validation: K runs, each case tested in one of them, patients together; with the folds' pooled figures",
    )  # fmt: skip
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
    output.add_argument(
        "--sandbox", action="store_true",
        help="block writing outside of the run folder, connections, and starting programs, whatever a bundle says; "
        "needs Linux with Landlock",
    )  # fmt: skip
    output.add_argument(
        "--track", metavar="mlflow[:URI]|wandb[:PROJECT]", help="write the numbers to MLflow, or to Weights & Biases"
    )
    arguments.quiet(output)


def run(options: Any) -> int:
    """Execute `medfl run`."""
    if options.sandbox:  # the threads that NumPy's BLAS starts at its import could no more be held in one
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
    if _was_portable(options):
        portable.enable()
    values, config = arguments.pairs("--set", options.options), arguments.pairs("--config", options.config)
    requested = arguments.requested(options, "method", "partition", "presets", "data", "sites")
    from medfl.bundle.files import find
    from medfl.runs import request_checks

    if options.resume and options.out is not None and (options.out / FOLDS).is_file():
        return _cross_validate(options, values, config, requested, again=True)
    request_checks.check_before_imports(
        options.bundle, requested, given=bool(values or config), out=options.out, resume=options.resume,
        source=options.source, runtime=options.runtime,
    )  # fmt: skip
    if options.bundle is not None and not options.resume:
        check_options(options.method or "fedavg", values)
        find(options.bundle)
    if options.folds is not None:
        return _cross_validate(options, values, config, requested, again=False)
    if options.sandbox:
        enter_sandbox(options)
    with without_gc():
        from medfl.runs.launch import federate  # torch and monai take seconds to import

    document = federate(
        bundle=options.bundle, options=values, config=config, requested=requested, out=options.out,
        resume=options.resume, source=options.source, jobs=options.jobs, with_local=options.with_local,
        save_predictions=options.save_predictions, profile=options.profile, track=options.track,
        runtime=options.runtime, min_replies=options.min_replies, deadline=options.deadline,
        command="medfl " + shlex.join(options.given), **telling(options),
    )  # fmt: skip
    return show(options, document, lambda: _result(Path(document["folder"])))


def _was_portable(options: Any) -> bool:
    """Return whether the run to go on with, or to repeat, is portable; what cannot be read is told later."""
    again = [options.out / "run.json", options.out / FOLDS] if options.resume and options.out else []
    for path in [*again, *([record_of(options.source)] if options.source else [])]:
        with suppress(Refused):
            document = json_values(path)
            settings = document.get("requested", document) if isinstance(document, dict) else {}
            return isinstance(settings, dict) and settings.get("portable") is True
    return False


def _cross_validate(options: Any, values: Any, config: Any, requested: Any, again: bool) -> int:
    refused = {"--sandbox": options.sandbox, "--from": options.source, "--profile": options.profile}
    refused |= {"--resume, where no cross-validation is": options.resume and not again}
    refused |= {"--resume and other settings": again and any((options.folds, options.bundle, values, config))}
    if wrong := next((flag for flag, given in refused.items() if given), None):
        allowed = "a cross-validation is K new runs; --resume --out DIR alone goes on with it"
        given = f"--folds with {wrong}" if options.folds else f"a cross-validation with {wrong}"
        raise InputError(given, allowed, "leave it out")
    if not again:
        from medfl.datasets.readers.splitting import check_folds

        check_folds(options.folds)
    with without_gc():
        from medfl.runs import folds
    machine = {"jobs": options.jobs, "track": options.track, **telling(options)}
    if again:
        document = folds.resume(options.out, requested, **machine)
    else:
        names = ("with_local", "save_predictions", "runtime", "min_replies", "deadline")
        document = folds.cross_validate(
            options.bundle, options.folds, options=values, config=config, requested=requested, out=options.out,
            command="medfl " + shlex.join(options.given), settings={name: getattr(options, name) for name in names},
            **machine,
        )  # fmt: skip
    return show(options, document, lambda: _of_folds(Path(document["folder"])))


def _of_folds(folder: Path) -> str:
    from medfl.report.folds import Folds

    *table, data = Folds.read(folder).text().splitlines()
    return "\n".join([*table, f"report: {folder / 'report.html'}", f"folder: {folder}", data])


def _result(folder: Path) -> str:
    from medfl.report import result_table

    *table, data = result_table(folder).splitlines()
    return "\n".join([*table, f"report: {folder / 'report.html'}", f"run folder: {folder}", data])
