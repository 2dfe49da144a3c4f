"""The verb `medfl plan`: a segmentation bundle planned from all sites' fingerprints."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl.cli import arguments
from medfl.cli.parser import add_verb, show
from medfl.cli.site import add_pairs, of_folder
from medfl.core import InputError
from medfl.storage import require_new_bundle

if TYPE_CHECKING:
    from medfl.data import Fingerprint

_EXAMPLES = """\
examples
  medfl plan site-1.json site-2.json site-3.json --out bundles/organs --memory 8
      from the files that the sites wrote with medfl site fingerprint
  medfl plan --images path/to/images --masks path/to/masks --sites 3 --channels CT --out bundles/organs
      on one machine, as if three sites shared the cases"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = "plan a segmentation bundle from the sites' fingerprints, by nnU-Net's published rules"
    plan = add_verb(verbs, "plan", text, _plan, _EXAMPLES)
    plan.add_path(
        "files",
        "FILE",
        "the sites' fingerprints (medfl site fingerprint)",
        arguments.existing,
        nargs="*",
    )
    add_pairs(plan)
    plan.add_number(
        "--sites", "N", "with --images: number of sites that share the cases; default: 3"
    )
    plan.add_number("--memory", "GB", "memory available to a training step; default: 8", float)
    plan.add_text(
        "--channels",
        "A,B,...",
        "comma-separated names of the images' channels; CT: intensities are Hounsfield units, clipped and scaled "
        "alike at all sites; default: those of nnU-Net's dataset.json",
        default="",
    )
    plan.add_text(
        "--per-site",
        "spacing",
        "one network, but each site resamples to the spacing of its own cases; default: all to one",
        default="",
    )
    plan.add_path(
        "--out", "DIR", "new folder; its name becomes the name of the bundle", required=True
    )
    plan.set_defaults(sites=3, memory=8.0)


def _plan(args: Namespace) -> int:
    require_new_bundle(args.out.expanduser())
    if bool(args.files) == bool(args.images):
        raise InputError(
            "fingerprints and --images, or neither",
            "one of both: FILE ..., or --images DIR --masks DIR",
            "see medfl plan --help",
        )

    from medfl.starter import starter
    from medfl.starter.plan import plan
    from medfl.starter.survey import Survey

    sites = _written(args.files) if args.files else _divided(args)
    planned = plan(sites, args.memory, arguments.parse_names(args.channels), args.per_site)
    folder = starter.write(args.out, Survey.of_plan(planned, len(sites)))
    lines = []
    for decision in planned.choices:
        lines.append(f"{decision.choice}: {_shown(decision.value)} ({decision.because})")

    lines += [f"note: {note}" for note in planned.differences]
    lines += [f"bundle: {folder}", f"next: medfl site inspect {folder}"]
    return show(args, {"bundle": str(folder), **planned.record()}, lines)


def _shown(value: object) -> str:
    """Return a choice as text: sizes as 40 x 56 x 40, each part of a network by its name."""
    if isinstance(value, dict):
        return "; ".join(f"{name} {_shown(part)}" for name, part in value.items())

    if not isinstance(value, tuple):
        return str(value)

    is_size = len(value) <= 3 and not isinstance(value[0], tuple)
    return (" x " if is_size else ", ").join(map(_shown, value))


def _written(files: list[Path]) -> dict[str, Fingerprint]:
    from medfl.data.fingerprint import read

    sites = {path.stem: read(path) for path in files}
    if len(sites) < len(files):
        raise InputError(
            f"{len(files)} fingerprints of {len(sites)} names",
            "a file name for each site",
            "rename those that are alike",
        )

    return sites


def _divided(args: Namespace) -> dict[str, Fingerprint]:
    """Return the fingerprints of sites that share a folder's cases in turn; nothing leaves, so none is suppressed."""
    from medfl.problem.fingerprint import gather

    progress = sys.stderr.isatty()
    empty, cases = of_folder(args, progress)
    count = args.sites
    if not 0 < count <= len(cases):
        raise InputError(
            f"--sites {count}", f"1 to {len(cases)}, the training cases", "give another number"
        )

    sites = {}
    for index in range(count):
        sites[f"site-{index + 1}"] = gather(empty, cases[index::count], 0, progress=progress)

    return sites
