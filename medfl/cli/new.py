"""The verb `medfl new`: a bundle for your own images."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl.cli.arguments import existing, given_columns, parse_names
from medfl.cli.parser import add_verb, show
from medfl.core import listed
from medfl.storage import require_new_bundle

if TYPE_CHECKING:
    from medfl.starter.survey import Survey

_EXAMPLES = """\
examples
  medfl new bundles/lesions --images path/to/pictures
      a folder of pictures for each class: path/to/pictures/<class>/<picture>
  medfl new bundles/lungs --images path/to/images --masks path/to/masks --classes left,right
      pictures or volumes, with masks of the same names
  medfl new bundles/brains --images Dataset001_Brains
      a folder in nnU-Net's or BIDS's layout, or with images and masks side by side (x.png, x_mask.png)
  medfl new bundles/moles --images pictures --labels moles.csv --group-by '^([^_]+)_'
      classes from a table; patients from file names (p01_3.png is of patient p01)
  medfl new bundles/chest --images xrays --labels findings.csv --blank zeros --uncertain ones
      findings: a column each with 0, 1, -1 or nothing (CheXpert), or one column with | between them (NIH)
  medfl new bundles/heads --images ultrasound --labels sizes.csv --label-column hc_mm
      one number per picture"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = "write a bundle for your own images, with classes, findings, numbers or masks"
    new = add_verb(verbs, "new", text, _new, _EXAMPLES)
    new.add_path("bundle", "BUNDLE_DIR", "new folder; its name becomes the name of the bundle")
    new.add_path("--images", "DIR", "folder of the images", existing, required=True)
    new.add_path("--masks", "DIR", "folder of the masks; may be within --images", existing)
    new.add_text(
        "--classes",
        "A,B,...",
        "comma-separated class names of the mask values 1, 2, ...",
        default="",
    )
    new.add_path(
        "--labels",
        "CSV",
        "table of the images' classes, findings or numbers, in --images or beside it: a column of file names, "
        "and a column called label, class or diagnosis, columns of 0 and 1, a column with | between findings, or "
        "a column of numbers",
        existing,
    )
    new.add_text(
        "--task",
        "classification|multilabel|regression",
        "what the table holds: one class, several findings, or a number per image; default: inferred from columns",
        choices=("classification", "multilabel", "regression"),
    )
    new.add_text(
        "--label-column",
        "A,B,...",
        "columns of the classes, findings or numbers; default: recognised by their names and values; may be repeated",
        action="append",
        default=[],
    )
    new.add_columns(file="the images' file names", patient="the patient", centre="the centre")
    new.add_text(
        "--uncertain",
        "ignore|zeros|ones",
        "how to read a finding written as -1, ?, u or uncertain: unknown (ignore; excluded from loss and metrics), "
        "absent (zeros) or present (ones); default: ignore",
        choices=("ignore", "zeros", "ones"),
        default="ignore",
    )
    new.add_text(
        "--blank",
        "ignore|zeros",
        "how to read an empty cell of a finding: unknown (ignore) or absent (zeros, as CheXpert's papers do); "
        "default: ignore",
        choices=("ignore", "zeros"),
        default="ignore",
    )
    new.add_text(
        "--group-by",
        "REGEX",
        "regular expression whose group in the file name is the patient; default: patients from cases.csv",
    )
    new.add_text(
        "--network", "NAME", "network of the bundle (a run can override it); default: a small one"
    )
    new.add_number(
        "--size",
        "PIXELS",
        "side length to which pictures are resized; default: 64, or 128 with masks",
    )
    new.add_switch(
        "--no-plan",
        "volumes: use a small U-Net that trains on a CPU, rather than planning a network for an 8 GB GPU as medfl "
        "plan does, for which each is read once more; implied by --network",
    )


def _new(args: Namespace) -> int:
    require_new_bundle(args.bundle.expanduser(), args.size)  # before every image is read
    from medfl.datasets.readers.label_columns import Wanted
    from medfl.starter import starter

    columns = parse_names(",".join(args.label_column))
    roles = given_columns(args)
    # --label-column names several, which `columns` has
    roles.pop("label", None)
    requested = Wanted(args.task or "", tuple(columns), (), args.uncertain, args.blank, roles)
    survey = starter.survey(
        args.images,
        args.masks,
        names=parse_names(args.classes),
        labels=args.labels,
        group_by=args.group_by,
        wanted=requested,
        progress=sys.stderr.isatty(),
    )
    if survey.kind == "volumes" and args.network is None and not args.no_plan:
        survey = _planned(survey)

    folder = starter.write(args.bundle, survey, network=args.network, size=args.size)
    data = Path(survey.folder)

    if data.is_relative_to(Path.cwd()):
        data = data.relative_to(Path.cwd())

    command = shlex.join(
        ["medfl", "run", str(folder), "--data", str(data), "--out", f"runs/{folder.name}"]
    )
    document = {
        "bundle": str(folder),
        "kind": survey.kind,
        "task": survey.task,
        "data": survey.folder,
        "classes": dict(zip(survey.classes, survey.counts, strict=True)),
        "channels": survey.channels,
        "sides": list(survey.sides),
        "data_source": "phantom" if survey.phantom else "real",
        "notes": list(survey.notes),
        "patients": survey.patients or None,
        "group_by": survey.group_by,
        "offered_group_by": survey.offer and survey.offer[0],
        "said": list(survey.said),
        "tested": survey.tested,
        "offered_folds": survey.folds or None,
        "next": command,
    }

    return show(args, document, _lines(folder, survey, command, _offer(args, survey)))


def _planned(survey: Survey) -> Survey:
    """Return the survey with a plan from its training cases; nothing leaves, so nothing is suppressed."""
    from medfl.cli.site import of_survey
    from medfl.problem.fingerprint import gather
    from medfl.starter import starter
    from medfl.starter.plan import plan

    empty, cases = of_survey(survey)
    planned = plan({"all": gather(empty, cases, 0, progress=sys.stderr.isatty())})
    patch = " x ".join(map(str, planned.patch))
    text = (
        f"planned: a DynUNet, patches of {patch} voxels, {planned.batch_size} in a batch, for a GPU of 8 GB "
        "(docs/plan.json says why); for a CPU: --no-plan"
    )
    notes = list(survey.notes)
    of_normalisation = starter.otherwise_normalised(survey.channel_titles)
    # a plan normalises as nnU-Net does
    if planned.clip and of_normalisation in notes:
        notes.remove(of_normalisation)

    layout = (*survey.said, text)
    return replace(survey, plan=planned, patch=planned.patch, notes=tuple(notes), said=layout)


def _offer(args: Namespace, survey: Survey) -> str:
    """Return the message about unknown patients, with the command that file names suggest."""
    from medfl.datasets.own import NO_PATIENTS

    if survey.offer is None:
        return NO_PATIENTS

    # by then there is a bundle of this name
    again = [f"{word}-by-patient" if word == str(args.bundle) else word for word in args.given]
    command = shlex.join(["medfl", *again, "--group-by", survey.offer[0]])
    return f"{NO_PATIENTS}, or, if the names of the files begin with them ({survey.offer[1]} patients then): {command}"


def _scale(survey: Survey) -> str:
    """Return mean and standard deviation of each number, in its unit."""
    texts = []
    for mean, sd, unit in zip(survey.mean, survey.sd, survey.units, strict=True):
        texts.append(f"{mean:g} ± {sd:g} {unit}".rstrip())

    return ", ".join(texts)


def _lines(folder: Path, survey: Survey, command: str, unknown: str) -> list[str]:
    counts = ", ".join(
        f"{name} {count}" for name, count in zip(survey.classes, survey.counts, strict=True)
    )
    if survey.task == "regression":
        counts += f" (training: {_scale(survey)})"

    colour = {1: "grey", 3: "colour"}.get(survey.channels, f"{survey.channels} channels")
    unit = "voxels" if survey.has_volumes else "pixels"
    sides = map(str, sorted({*survey.sides}))
    lines = [
        f"{counts}; {colour}, sides of {' to '.join(sides)} {unit}; each of these was read",
        *survey.said,
    ]
    if survey.patients:
        lines.append(f"{survey.patients} patients, each in one section")
    else:
        lines.append(f"note: {unknown}")

    if survey.centres:
        lines.append(f"a site for each centre: {listed(survey.centres)}")

    lines += [f"note: {note}" for note in survey.notes]
    if survey.phantom:
        lines.append(
            f"PHANTOM: {survey.phantom} holds drawn images, not real ones; runs on them say so"
        )

    lines += [f"bundle: {folder}", f"next: {command}"]
    if survey.folds:
        lines.append(
            f"or, as {survey.tested} test images are few: {command} --folds {survey.folds}"
        )

    return lines
