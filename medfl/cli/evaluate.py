"""The verb `medfl evaluate`: evaluate a finished model at sites, without training."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from medfl.cli import arguments
from medfl.cli.parser import add_verb, show
from medfl.cli.run import launch_of, result_lines
from medfl.cli.walls import Use, hold
from medfl.core import Config, Document, InputError, Run, listed, printable
from medfl.core.importing import without_gc
from medfl.storage import is_run, read_run, require_unused

EXAMPLES = """\
Nothing is trained. The result is a run folder of 0 rounds, with the same tables, intervals
and report; medfl subgroups and medfl report take it too.

examples
  medfl evaluate runs/ham10000-fedavg-0 --data DIR --partition centre
      a run's model, configured as in the run, on the test images of each centre in another folder
  medfl evaluate bundles/exported ham10000 --data DIR
      the weights of an exported or other bundle, on a shipped data set
  medfl evaluate model.safetensors bundles/lungs --data lungs --sites 1
      weights for that bundle's network, from a file"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = add_verb(verbs, "evaluate", "examine a finished model, without training", run, EXAMPLES)
    verb.set_defaults(goes_on_by="; the same command goes on")
    verb.add_path(
        "model",
        "MODEL",
        "folder of a run or of a bundle with weights, or a file of weights "
        "(.safetensors, .pt, .pth, or TorchScript, whose code is not run)",
        arguments.existing,
    )
    verb.add_text(
        "bundle",
        "BUNDLE",
        "name of a shipped bundle, or the folder of any bundle, which defines network, data and metrics; "
        "default: the model's own",
        nargs="?",
    )
    group = verb.add_argument_group("what")
    group.add_config("override a value of the bundle's configuration; may be repeated")
    group.add_number("--seed", "N", "seed of the partition; default: 0")
    group.add_preset()
    group.add_text(
        "--data",
        "DIR|phantom",
        "folder of the images, or phantom for synthetic ones; default: those of the run",
    )
    sites = verb.add_argument_group("sites")
    sites.add_number("--sites", "N", "number of sites")
    sites.add_partition()
    sites.add_number(
        "--folds", "K", "test each image once, in K folds split by patient, and pool the metrics"
    )
    sites.add_settings("site_labels", "site_channels", "site_spacing", "metrics")
    machine = verb.add_machine()
    machine.add_trust()
    machine.add_runtime()
    machine.add_jobs("number of worker processes; does not change results")
    output = verb.add_argument_group("output")
    output.add_path("--out", "DIR", "new folder; default: runs/BUNDLE-evaluated-MODEL")
    output.add_switch(
        "--save-predictions", "segmentation: write the predicted masks of the test images"
    )
    output.add_quiet()


def run(args: Namespace) -> int:
    """Execute `medfl evaluate`."""
    config = arguments.parse_pairs("--config", args.config)
    requested = arguments.given_settings(args, "partition", "presets", "data", "sites")
    model = Path(args.model).expanduser()
    bundle, init = _parts(model, args.bundle)
    runs = [model] * init.startswith("run:")
    record = _own_run(model, bundle) if runs else None
    if record is not None:
        # what is given anew counts more than the record
        config = {**record.config, **config}
        if Path(record.data.folder).is_dir():
            requested.setdefault("data", record.data.folder)

    if args.out is None:
        title = f"{Path(bundle).expanduser().resolve().name}-evaluated-{model.resolve().stem}"
        args.out = Path("runs") / title

    resume = _is_begun(args.out, args.folds)
    if not resume:
        require_unused(args.out, advice="give a new folder")
    elif args.folds is None:
        runs.append(args.out)  # what an ended evaluation left there is no folder in use

    hold(args, Use(bundles=[bundle], runs=runs, folder=args.out))
    with without_gc():
        from medfl.runs import folds  # torch and monai take seconds to import
        from medfl.runs.launch import federate

    _check_classes(model, bundle, config)
    method, options = _method_of(model, record)
    requested |= {"method": method, "rounds": 0, "init": init}
    launch = launch_of(args)
    examined: Document = {"options": options, "config": config, "requested": requested}
    if args.folds is None:
        document = federate(bundle, launch=launch, resume=resume, **examined)
    elif resume:
        document = folds.resume(args.out, {}, launch=launch)
    else:
        document = folds.cross_validate(bundle, args.folds, launch=launch, **examined)

    return show(args, document, result_lines(Path(document["folder"])))


def _is_begun(folder: Path, folds: int | None) -> bool:
    """Tell whether an evaluation in this folder was ended before its report was written."""
    record = folder / "run.json"
    if folds is not None:
        record = folder / "fold-1" / "run.json"

    if not record.is_file() or (folder / "report.html").is_file():
        return False

    return read_run(record)[0].rounds == 0


def _own_run(model: Path, bundle: str) -> Run | None:
    """Return the record of a run that is evaluated on its own bundle, None on another."""
    record = read_run(model / "run.json")[0]
    if bundle == record.bundle or Path(bundle).resolve() == Path(record.bundle_path).resolve():
        return record

    return None


def _method_of(model: Path, record: Run | None) -> tuple[str, Config]:
    """Return the method for the evaluation, and its options: the run's own, if it changes the network like FedBM."""
    if record is not None:
        from medfl import methods

        _check_one_model(model, record)
        kind = methods.method_class(record.method)
        if kind.judged == "global" and kind.adapt is not methods.Method.adapt:
            return record.method, record.options

    return "fedavg", {}


def _check_one_model(model: Path, record: Run) -> None:
    """Raise an InputError for a run that has a model for each site but none for all."""
    from medfl.runs.initial_weights import read

    # of personal models the file has each site's tensors below its name
    sites = tuple(f"{site}/" for site in record.partition.sites)
    if any(name.startswith(sites) for name in read(f"run:{model}")):
        raise InputError(
            f"{model}, whose method {record.method!r} has a model for each site and none for all",
            f"its sites are {listed([*map(printable, record.partition.sites)])}",
            f"export one, and examine that: medfl export {model} --site NAME --out DIR; medfl evaluate DIR",
        )


def _check_classes(model: Path, bundle: str, config: Config) -> None:
    """Raise an InputError if the model is known to have other classes than the bundle's."""
    from medfl.bundle.bundle import Bundle
    from medfl.problem import channel_names

    if not model.is_dir() or model == Path(bundle):
        return

    if is_run(model):
        classes = tuple(read_run(model / "run.json")[1].get("classes") or ())
    else:
        classes = channel_names(Bundle(str(model)).metadata)

    expected = channel_names(Bundle(bundle, config).metadata)
    agree = [str(name).casefold() for name in classes] == [name.casefold() for name in expected]
    if classes and expected and not agree:
        raise InputError(
            f"{model}, a model of the classes {listed([*map(printable, classes)])}",
            f"{bundle} has the classes {listed([*map(printable, expected)])}",
            "name a bundle with the model's classes, in its order",
        )


def _parts(model: Path, bundle: str | None) -> tuple[str, str]:
    """Return the bundle, and the model's `--init` value; InputError if no bundle is known."""
    if model.is_dir() and is_run(model):
        return bundle or read_run(model / "run.json")[0].bundle_path, f"run:{model}"

    if model.is_dir():
        return bundle or str(model), f"bundle:{model}"

    if bundle is None:
        raise InputError(
            f"the weights {model} alone",
            "a bundle says which network they are of, and which images it takes",
            f"name one: medfl evaluate {model} BUNDLE",
        )

    return bundle, str(model)
