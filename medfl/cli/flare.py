"""The verb `medfl flare`: a run as a job of NVIDIA FLARE."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from medfl.cli import run
from medfl.cli.arguments import given_settings, names_of_group, parse_names, parse_pairs
from medfl.cli.method_pages import check_options
from medfl.cli.parser import add_actions, add_verb, show
from medfl.core.documents import Config
from medfl.core.errors import InputError
from medfl.core.settings import COMPUTING, SITES
from medfl.storage.places import require_unused

_SIMULATE = """\
The same as medfl run --runtime flare: one process for the server and one per site, with the simulator's results
bit for bit.

examples
  medfl flare simulate pneumonia --data phantom --sites 2 --rounds 2"""

_POC = """\
Runs as a job of nvflare poc: FLARE creates certificates, starts a server and the sites on this machine,
on ports 8002 and 8003, and the job is submitted to them. Flags and results, bit for bit, are those of medfl run.

examples
  medfl flare poc pneumonia --data phantom --sites 2 --rounds 2"""

_EXPORT = """\
For sites with their own images. Each has the same bundle and has joined with medfl site serve; the job
contains numbers and names, no code and no paths.

examples
  medfl flare export hippocampus --sites north,south --method scaffold --rounds 50 --out jobs
      then nvflare job submit -j jobs/medfl-... --startup-kit ADMIN-KIT, the kit of a
      person who may submit jobs (type admin in project.yml)
  medfl flare export hippocampus --sites north,south --evaluate --init run:runs/hippocampus-fedavg-0 --out jobs
      no training: each site examines the model and shares counts; with --calibrate lac,
      medfl calibrate takes the folder that the server writes
  medfl flare export path/to/bundle --data DIR --sites north,south --plan --out jobs
      no training: each site whose policy says jobs: [plan] shares its fingerprint, for medfl plan
  medfl flare export hippocampus --sites north,south --rehearsal --rounds 2 --out rehearsal
      all sites use synthetic images: medfl data make hippocampus --out DIR
  medfl flare export hippocampus --sites north,south --method scaffold --rounds 80 --resume --out more
      continue from what the server and the sites have kept"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    actions = add_actions(verbs, "flare", "run or write the NVIDIA FLARE job of a run")
    for name, runtime, text, examples in (
        ("simulate", "flare", "run on FLARE's simulator on this machine", _SIMULATE),
        ("poc", "flare-poc", "run on a FLARE federation with certificates on this machine", _POC),
    ):
        action = add_verb(actions, name, text, run.run, examples)
        run.add_flags(action)
        action.set_defaults(runtime=runtime)

    text = "write a job for sites that train on their own images"
    export = add_verb(actions, "export", text, _export, _EXPORT)
    export.add_bundle()
    group = export.add_argument_group("what", "each site permits which ids --config may set")
    group.add_text("--method", "NAME", "a shipped method (medfl methods); default: fedavg")
    group.add_what("set an option of the method (medfl methods NAME); may be repeated", data=False)
    group.add_text(
        "--data",
        "DIR",
        "for a bundle that is not shipped: images to check the run with; neither they nor their place are in the job",
    )
    group.add_switch("--evaluate", "no training: only examine the weights of --init at the sites")
    group.add_text(
        "--calibrate",
        "SCORES",
        "with --evaluate: sites also share histograms of these scores (lac or aps for classes, residual for numbers, "
        "risk for findings and masks), for medfl calibrate",
        default="",
    )
    group.add_switch(
        "--plan", "no training: only ask the sites for their fingerprints, for medfl plan"
    )
    group.add_switch("--rehearsal", "use synthetic images at all sites")
    sites = export.add_argument_group("sites")
    sites.add_text(
        "--sites", "A,B,...", "comma-separated names of the sites in the federation", required=True
    )
    sites.add_settings(*names_of_group(SITES))
    export.add_training()
    export.add_robustness()
    export.add_trust()
    machine = export.add_argument_group(
        "machine", "each site trains on the device that it chooses itself"
    )
    machine.add_settings(*names_of_group(COMPUTING), "threads")
    output = export.add_argument_group("output")
    output.add_path("--out", "DIR", "new folder for the job", required=True)
    output.add_switch("--resume", "continue the run that the server and the sites have kept")


def _export(args: Namespace) -> int:
    values = parse_pairs("--set", args.options)
    config = parse_pairs("--config", args.config)
    sites = parse_names(args.sites)
    if len(set(sites)) != len(sites) or not sites:
        raise InputError(
            f"--sites {args.sites}", "different names, as north,south", "name each site once"
        )

    check_options(args.method or "fedavg", values)
    requested = given_settings(args, "method", "presets")
    require_unused(args.out, advice="give a new folder")
    from medfl.flare.offer import export

    document = export(
        args.bundle,
        sites,
        args.out,
        options=values,
        config=config,
        requested=requested,
        evaluate=args.evaluate,
        calibrate=args.calibrate,
        plan=args.plan,
        rehearsal=args.rehearsal,
        data=args.data,
        resume=args.resume,
        min_replies=args.min_replies,
        deadline=args.deadline,
    )

    return show(args, document, _lines(document))


def _lines(document: Config) -> list[str]:
    return [
        f"job: {document['job']}",
        f"sites: {', '.join(document['sites'])}",
        f"run: {document['run_hash'][:16]}",
        f"bundle: {document['bundle']} ({document['bundle_sha256'][:16]})",
        "submit it with your own startup kit, of type admin:",
        f"  nvflare job submit -j {document['job']} --startup-kit ADMIN-KIT",
    ]
