"""The verb `medfl export`: the result of a run as a MONAI bundle."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from medfl.cli import arguments
from medfl.cli.parser import add_verb, log, show
from medfl.cli.walls import Use, hold
from medfl.core import Config
from medfl.storage import check_which, require_unused

_EXAMPLES = """\
examples
  medfl export runs/ham10000-fedbm-0 --out ham10000_fedbm
      the global model after the last round, with TorchScript and ONNX
  medfl export runs/ham10000-fedavg-0 --which best --formats onnx --out best
      the model of the best round by the validation metric
  medfl export runs/mednist-fedrep-0 --site site-2 --out site_2
      one site's model, of a method with a model per site; --site all: every site's

The bundle predicts new images with MONAI alone, without medfl; in its folder:
  python -m monai.bundle run --config_file configs/inference.yaml --dataset_dir DIR"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    export = add_verb(
        verbs, "export", "write the result of a run as a MONAI bundle", _export, _EXAMPLES
    )
    export.add_path("run", "RUN", "a folder that medfl run wrote", arguments.run_folder)
    export.add_path("--out", "DIR", "new folder of the bundle", required=True)
    export.add_text(
        "--which",
        "last|best",
        "model of the last round, or the best by validation; default: last",
        default="last",
    )
    export.add_text(
        "--site",
        "NAME",
        "the personal model of this site, or of all sites, if the method has one per site",
    )
    export.add_text(
        "--formats",
        "A,B",
        "formats besides model.pt and model.safetensors: torchscript, onnx or none; default: all that can be written",
    )
    export.add_trust()
    export.add_text("--data", "DIR", "the run's images, if they have moved")


def _export(args: Namespace) -> int:
    check_which(args.which)
    require_unused(args.out, advice="give a new folder")
    hold(args, Use(runs=[args.run], file="out"))
    from medfl.export.formats import parse_formats

    formats = parse_formats(args.formats)
    from medfl.export.bundle_writer import export

    document = export(
        args.run,
        args.out,
        which=args.which,
        site=args.site,
        formats=formats,
        data=args.data,
        say=log,
    )

    for written in document["bundles"]:
        below = Path(written["folder"]).relative_to(args.out)
        written["folder"] = str(args.shown_file / below)

    return show(args, document, _lines(document))


def _lines(document: Config) -> list[str]:
    from medfl.export.formats import format_difference

    lines = []
    for written in document["bundles"]:
        whose = f"site {written['site']}" if written["site"] else "global model"
        lines += [
            f"bundle: {written['folder']} (version {written['version']})",
            f"  {whose}, round {written['round']}",
        ]
        for name, agreement in written["agreement"].items():
            lines.append(
                f"  {name}: differs by {format_difference(agreement['probabilities'])} at most "
                f"(allowed {agreement['limit']:.0e}), on {agreement['images']} {written['measured_on']}"
            )

        if predictions := written["predictions"]:
            lines.append(
                "  predictions.csv of the run: differs by "
                f"{format_difference(predictions['largest_difference'])} at most, on {predictions['items']} items"
            )

        lines += [
            f"  {name}: {f['bytes']} bytes, sha256 {f['sha256'][:16]}..."
            for name, f in written["files"].items()
        ]
        lines += [f"  note: {note}" for note in written["notes"]]

    phantom = "PHANTOM data: images drawn by a program; this model says nothing about patients"
    return [*lines, phantom if document["data_source"] == "phantom" else "real data"]
