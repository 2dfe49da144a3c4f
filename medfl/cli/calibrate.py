"""The verb `medfl calibrate`: sets, masks and intervals with guaranteed coverage, for a finished run."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from typing import Any

from medfl.cli import arguments
from medfl.cli.parser import add_verb, show
from medfl.cli.walls import Use, hold
from medfl.core import WAYS, Document, InputError, check_coverage, tables, terminal
from medfl.storage import check_which

_EXAMPLES = """\
Nothing is trained. Each site shares one histogram of scores of its validation images;
medfl predict and medfl export use the result.

examples
  medfl calibrate runs/ham10000-fedavg-0 --coverage 0.95 --scores aps
      sets of classes that contain the true one for 95 % of new images
  medfl calibrate SERVER/ham10000-evaluate-... --coverage 0.9
      from what the sites of a FLARE job shared (medfl flare export --evaluate --calibrate lac)
  medfl calibrate runs/lungs --share shrunken --by sex
      a threshold for each site, shrunken towards the pooled one; coverage also by sex"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = "calibrate a finished model to a promised coverage: sets of classes or findings, masks, intervals"
    verb = add_verb(verbs, "calibrate", text, _calibrate, _EXAMPLES)
    verb.set_defaults(coverage=0.9, strength=100.0, min_count=0, goes_on_by="; repeat the command")
    verb.add_path(
        "run",
        "RUN",
        "a run folder; its images must be available, unless its sites shared their histograms",
        arguments.run_folder,
    )
    verb.add_number(
        "--coverage",
        "C",
        "promised coverage of the truth, above 0 and below 1; default: 0.9",
        float,
    )
    verb.add_text(
        "--scores",
        "lac|aps",
        "for classification: lac (default; smallest sets) or aps (most probable classes, never empty)",
        default="",
    )
    verb.add_text(
        "--share",
        "|".join(WAYS),
        "thresholds used for predictions: pooled (default; one for all sites), alone (one per site) or shrunken "
        "(in between); all three are examined",
        default="pooled",
        choices=WAYS,
    )
    verb.add_number(
        "--strength",
        "M",
        "shrunken: total weight of all other sites' images, in images; default: 100",
        float,
    )
    verb.add_text(
        "--by",
        "COLUMN",
        "also report groups of test images: centre, site, sex, age (bands of 20 years) or localisation",
        default="",
    )
    verb.add_number(
        "--min-count",
        "K",
        "suppress counts and histograms of fewer images; default: 0, for groups 10",
    )
    verb.add_path(
        "--policy",
        "FILE",
        "the sites' policy: what each may share, by outbound and jobs (evaluate)",
        arguments.existing,
    )
    verb.add_text(
        "--which",
        "last|best",
        "model of the last round, or the best by validation; default: last",
        default="last",
    )
    verb.add_settings("device")
    verb.add_path("--out", "DIR", "folder of the result; default: that of the run")
    verb.add_trust()


def _calibrate(args: Namespace) -> int:
    check_coverage(args.coverage)
    check_which(args.which)
    if not 0 <= args.strength < math.inf or args.min_count < 0:
        raise InputError("--strength or --min-count", "numbers of at least 0", "give such a number")

    hold(args, Use(runs=[args.run], folder=args.out or args.run))
    from medfl.policy.policy import Policy
    from medfl.runs.calibrate import Options, calibrate
    from medfl.runs.plan import device_named
    from medfl.runs.result import load_run

    values = {field: getattr(args, field) for field in Options.__dataclass_fields__}
    result = load_run(args.run, device_named(args.device or "cpu"))
    policy = None if args.policy is None else Policy.read(args.policy)
    document = calibrate(
        result, Options(**values), args.out, policy=policy, progress=sys.stderr.isatty()
    )
    return show(args, document, _lines(document))


def _lines(document: Document) -> list[str]:
    from medfl.report.coverage import tables_of

    lines = [f"coverage {document['coverage']:g} is promised of {document['promise']}"]
    for head, rows in tables_of(document):
        lines += ["", *tables.text_table(head, rows, spare=["abstained", "from"]), ""]

    for note in document["notes"]:
        lines += terminal.hanging_indent("note: ", note)

    if document["data_source"] == "phantom":
        lines.append("PHANTOM data: images drawn by a program")

    return lines
