"""The verb `medfl predict`: a trained network's predictions for new images."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from medfl.cli import arguments
from medfl.cli.parser import add_verb, log, show, warn
from medfl.cli.walls import Use, hold
from medfl.core import Config, InputError, RunError, text_table, within
from medfl.storage import check_which, is_run, require_there, require_unused

_EXAMPLES = """\
examples
  medfl predict runs/first new_images --out predictions
      all images below the folder: predictions.csv has id, prediction and the probability of each class
  medfl predict lung_bundle xray.png scans/ --out masks --reference masks_by_hand
      masks on each file's own grid, scored against the masks of the same names
  medfl predict runs/personal new_images --site north --out predictions
      with one site's model, of a method with a model per site"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = "apply a trained network to new images: write classes, findings, numbers or masks, and score them"
    predict = add_verb(verbs, "predict", text, _predict, _EXAMPLES)
    predict.add_path(
        "model",
        "RUN|BUNDLE",
        "a run folder, or a MONAI bundle with weights in models/, as medfl export writes it",
    )
    predict.add_path(
        "images",
        "PATH",
        "image files or folders, searched recursively: PNG, JPEG, BMP, TIFF, NIfTI, NRRD or MetaImage "
        "files, DICOM files and series, .zip and .npz archives",
        nargs="+",
    )
    predict.add_path("--out", "DIR", "new or empty folder", required=True)
    predict.add_path(
        "--reference",
        "DIR|CSV",
        "ground truth to score against: masks named like the images, a folder of images per class, or a "
        "CSV with id and label, or with id and a column for each finding or number",
    )
    predict.set_defaults(
        goes_on_by="; without predictions.csv it is unfinished: repeat it with a new folder"
    )
    predict.add_columns(file="the images' file names", label="the labels")
    predict.add_text(
        "--which",
        "last|best",
        "model of a run: of the last round, or the best by validation; default: last",
        default="last",
    )
    predict.add_text(
        "--site",
        "NAME",
        "the personal model of this site, if the method has one per site; after medfl calibrate also its threshold",
    )
    predict.add_switch(
        "--uncalibrated",
        "ignore medfl calibrate: no sets, no intervals, masks by the usual threshold",
    )
    predict.add_settings("device")
    predict.add_number(
        "--threads", "T", "CPU threads; default: as in the run, or PyTorch's default for a bundle"
    )
    predict.add_trust()


def _predict(args: Namespace) -> int:
    arguments.given_settings(args)
    # PyTorch is imported later: what is wrong with the folders is told at once
    model = args.model.expanduser()
    is_of_run = is_run(model)
    out = args.out.expanduser()
    require_unused(out, advice="give a new folder")
    check_which(args.which)

    for path in args.images:
        require_there(path.expanduser())

    columns = arguments.given_columns(args)
    if columns and args.reference is None:
        raise InputError("a column without --reference", "a column of a table", "add --reference")

    hold(args, Use(bundles=[model] * (not is_of_run), runs=[model] * is_of_run, folder=out))
    from medfl.runs.predict import predict

    document = predict(
        args.model,
        args.images,
        args.out,
        reference=args.reference,
        columns=columns,
        which=args.which,
        site=args.site,
        device=args.device or "cpu",
        thread_count=args.threads,
        calibrated=not args.uncalibrated,
        progress=sys.stderr.isatty(),
        say=log,
    )

    for failure in document["failed"]:
        warn(" ".join(f"error: {failure['id']}: {failure['problem']}".split()))

    show(args, document, _lines(document))
    if failed := len(document["failed"]):
        raise RunError(
            f"{failed} of {document['images']} images failed, as told above; the others are in {args.out}"
        )

    return 0


def _lines(document: Config) -> list[str]:
    lines = [
        f"{len(document['predictions'])} of {document['images']} images predicted by {document['model']}"
    ]
    if document["task"] == "classification":
        counts = Counter(row["prediction"] for row in document["predictions"])
        lines += text_table(
            ["prediction", "images"], [[name, str(count)] for name, count in counts.items()]
        )
    elif document["task"] == "segmentation":
        lines += _structures(document["predictions"])
    else:
        lines += _vectors(document["predictions"], document["classes"])

    if "abstain" in document["predictions"][0]:
        abstained = sum(row["abstain"] for row in document["predictions"])
        lines.append(
            f"abstained: {abstained} images: sets empty or complete, intervals without end"
        )

    if (scores := document["scores"]) is not None:
        from medfl.evaluation import title, without_repeats

        lines += ["", f"scores by the references of {document['scored']} images"]
        units = {name: f" ({unit})" for name, unit in document["units"].items()}
        rows = []

        for name in without_repeats([*scores], [scores]):
            value = scores[name]
            if not name.endswith("_cases"):
                cases = scores.get(f"{name}_cases", document["scored"])
                rows.append([title(name) + units.get(name, ""), f"{value:.3f}", f"{cases:.0f}"])

        for name in document["undefined"]:
            rows.append([title(name), "–", "0"])

        lines += text_table(["metric", "value", "cases"], rows)
        if document["task"] != "segmentation":
            lines += _by_name(document["structures"] or {})

        for name, why in document["undefined"].items():
            lines.append(f"{name} is undefined on these images: {why}")

    lines += ["", *document["files"].values()]
    if document["data_source"] == "phantom":
        lines.append(
            "this model learned from PHANTOM data, images drawn by a program: it says nothing about patients"
        )

    return [*lines, "for research: not a medical device"]


def _by_name(metrics_of: Mapping[str, Config]) -> list[str]:
    """Return a table of the metrics of each finding or number, [] without any."""
    from medfl.evaluation import METRICS, title
    from medfl.report.formatting import number
    from medfl.report.table import LEFT_OUT

    names = list(within(METRICS, set().union(*metrics_of.values())))
    rows = []
    note = []
    for name, values in metrics_of.items():
        cells = [number(values.get(metric)) for metric in names]
        is_out = values.get("scored") == 0
        rows.append([name + "*" * is_out, f"{values.get('cases') or 0:.0f}", *cells])
        if is_out:
            note = [LEFT_OUT]

    return ["", *text_table(["", "cases", *map(title, names)], rows), *note] if rows else []


def _vectors(rows: Sequence[Config], names: Sequence[str]) -> list[str]:
    """Return in how many images each finding is called present, or the range of each number."""
    lines = []
    heads = ["finding", "present", "mean probability"]
    for name in names:
        values = [float(row[f"predicted_{name}"]) for row in rows]
        if f"p_{name}" in rows[0]:
            probability = sum(float(row[f"p_{name}"]) for row in rows) / len(rows)
            lines.append([name, f"{sum(values):.0f} of {len(rows)}", f"{probability:.3f}"])
        else:
            heads = ["number", "mean", "range"]
            mean = sum(values) / len(values)
            lines.append([name, f"{mean:.3f}", f"{min(values):.3f} to {max(values):.3f}"])

    return text_table(heads, lines)


def _structures(rows: Sequence[Config]) -> list[str]:
    """Return the mean amount of each structure in the images, in millilitres or as a share of the pixels."""
    lines = []
    for name in dict.fromkeys(
        key for row in rows for key in row if key not in ("id", "mask", "abstain")
    ):
        values = [row[name] for row in rows if name in row]
        structure, _, unit = name.rpartition("_")
        mean = sum(values) / len(values)
        shown = f"{mean:.1f} ml" if unit == "ml" else f"{mean:.1%} of the pixels"
        lines.append([structure, shown, str(len(values))])

    return text_table(["structure", "mean", "images"], lines)
