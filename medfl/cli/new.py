"""The verb `medfl new`: a bundle for images of one's own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl.cli import arguments
from medfl.cli.parser import add_verb, show
from medfl.storage.places import require_new_bundle

if TYPE_CHECKING:
    from medfl.starter.survey import Survey

_EXAMPLES = """\
examples
  medfl new bundles/lesions --images path/to/pictures
      a folder of pictures for each class: path/to/pictures/<class>/<picture>
  medfl new bundles/lungs --images path/to/images --masks path/to/masks --classes left,right
      pictures or NIfTI volumes, and masks of the same names
  medfl new bundles/brains --images Dataset001_Brains
      a folder in the layout of nnU-Net or BIDS, or of images and masks x_mask.png beside each other
  medfl new bundles/moles --images pictures --labels moles.csv --group-by '^([^_]+)_'
      a table of the classes; the patient of p01_3.png is p01"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = "write a bundle for your own images: labelled pictures, or images with masks"
    new = add_verb(verbs, "new", text, _new, _EXAMPLES)
    new.add_argument(
        "bundle",
        type=Path,
        metavar="BUNDLE_DIR",
        help=("new folder; its name becomes the name of the bundle"),
    )
    new.add_argument(
        "--images",
        type=arguments.existing,
        required=True,
        metavar="DIR",
        help="folder of the images",
    )
    new.add_argument(
        "--masks",
        type=arguments.existing,
        metavar="DIR",
        help=("folder of the masks; may be within --images"),
    )
    new.add_argument(
        "--classes",
        default="",
        metavar="A,B,...",
        help=("comma-separated class names of the mask values 1, 2, ..."),
    )
    new.add_argument(
        "--labels", type=arguments.existing, metavar="CSV",
        help="table of the pictures' classes: a column of file names, and either a column called label, "
             "class or diagnosis, or one column of 0 and 1 per class; in --images or beside it",
    )  # fmt: skip
    new.add_argument(
        "--group-by",
        metavar="REGEX",
        help=(
            "regular expression whose group in a file's name is the patient; default: read cases.csv"
        ),
    )
    new.add_argument(
        "--network",
        metavar="NAME",
        help=("network of the bundle (a run can override it); default: a small one"),
    )
    arguments.add_number(
        new,
        "--size",
        "PIXELS",
        "side length to which pictures are resized; default: 64, or 128 with masks",
    )


def _new(args: Any) -> int:
    require_new_bundle(args.bundle.expanduser(), args.size)  # before every image is read
    from medfl.starter import starter

    seen = starter.survey(
        args.images, args.masks, names=arguments.parse_names(args.classes), labels=args.labels,
        group_by=args.group_by, progress=sys.stderr.isatty(),
    )  # fmt: skip
    folder = starter.write(args.bundle, seen, network=args.network, size=args.size)
    data = Path(seen.folder)
    data = data.relative_to(Path.cwd()) if data.is_relative_to(Path.cwd()) else data
    command = shlex.join(
        ["medfl", "run", str(folder), "--data", str(data), "--out", f"runs/{folder.name}"]
    )
    document = {
        "bundle": str(folder), "kind": seen.kind, "data": seen.folder,
        "classes": dict(zip(seen.classes, seen.counts, strict=True)), "channels": seen.channels,
        "sides": list(seen.sides), "data_source": "phantom" if seen.phantom else "real", "notes": list(seen.notes),
        "patients": seen.patients or None, "group_by": seen.group_by, "offered_group_by": seen.offer and seen.offer[0],
        "said": list(seen.said), "tested": seen.tested, "offered_folds": seen.folds or None, "next": command,
    }  # fmt: skip

    return show(args, document, lambda: _text(folder, seen, command, _offer(args, seen)))


def _offer(args: Any, seen: Survey) -> str:
    """Return what to say of patients that are not known, with the command that file names suggest."""
    from medfl.datasets.own import NO_PATIENTS

    if seen.offer is None:
        return NO_PATIENTS

    again = [f"{word}-by-patient" if word == str(args.bundle) else word for word in args.given]
    command = shlex.join(["medfl", *again, "--group-by", seen.offer[0]])
    return f"{NO_PATIENTS}, or, if the names of the files begin with them ({seen.offer[1]} patients then): {command}"


def _text(folder: Path, seen: Survey, command: str, unknown: str) -> str:
    counts = ", ".join(
        f"{name} {count}" for name, count in zip(seen.classes, seen.counts, strict=True)
    )
    colour = {1: "grey", 3: "colour"}.get(seen.channels, f"{seen.channels} channels")
    unit = "voxels" if seen.kind == "volumes" else "pixels"
    lines = [
        f"{counts}; {colour}, sides of {seen.sides[0]} to {seen.sides[1]} {unit}; each of these was read",
        *seen.said,
        f"{seen.patients} patients, each in one section" if seen.patients else f"note: {unknown}",
        *(f"note: {note}" for note in seen.notes),
        *(
            [f"PHANTOM: {seen.phantom} holds drawn images, not real ones; runs on them say so"]
            if seen.phantom
            else []
        ),
        f"bundle: {folder}",
        f"next: {command}",
        *(
            [f"or, as {seen.tested} test images are few: {command} --folds {seen.folds}"]
            if seen.folds
            else []
        ),
    ]

    return "\n".join(lines)
