"""The verb `medfl calibrate`: sets, masks and intervals with guaranteed coverage, for a finished run."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from typing import Any

from medfl.cli import arguments
from medfl.cli.parser import add_verb, show
from medfl.cli.walls import Use, hold
from medfl.core import tables, terminal
from medfl.core.documents import Document
from medfl.core.errors import InputError
from medfl.core.setting_values import WAYS, check_coverage
from medfl.storage.places import check_which

_EXAMPLES = """\
Nothing is trained. Each site tells one histogram of the scores of its validation
images; medfl predict and medfl export take up what is written.

examples
  medfl calibrate runs/ham10000-fedavg-0 --coverage 0.95 --scores aps
      sets of classes that have the true one in 95 % of new images
  medfl calibrate SERVER/ham10000-evaluate-... --coverage 0.9
      by what the sites of a FLARE job told (medfl flare export --evaluate --calibrate lac)
  medfl calibrate runs/lungs --share shrunken --by sex
      a threshold for each site, drawn towards that of all; reached by sex too"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    text = "give a finished model's predictions a promised coverage: sets of classes or findings, masks, intervals"
    verb = add_verb(verbs, "calibrate", text, _calibrate, _EXAMPLES)
    verb.set_defaults(coverage=0.9, strength=100.0, min_count=0)
    verb.add_path(
        "run",
        "RUN",
        "a run folder; its images must be available, unless its sites told their sums",
        arguments.run_folder,
    )
    verb.add_number(
        "--coverage",
        "C",
        "share of the truth that is promised to be covered, above 0 and below 1; default: 0.9",
        float,
    )
    verb.add_text(
        "--scores",
        "lac|aps",
        "of a classification: lac (default; the smallest sets) or aps (the most probable classes, never none)",
        default="",
    )
    verb.add_argument(
        "--share",
        default="pooled",
        choices=WAYS,
        help="whose thresholds predict: pooled (default; one of all sites), alone (of each site) or shrunken "
        "(between both); all three are examined",
    )
    verb.add_number(
        "--strength",
        "M",
        "shrunken: number of images that those of all other sites count as, together; default: 100",
        float,
    )
    verb.add_text(
        "--by",
        "COLUMN",
        "examine groups of test images too: centre, site, sex, age (bands of 20 years) or localisation",
        default="",
    )
    verb.add_number(
        "--min-count",
        "K",
        "tell no sums of a site, and no counts, of fewer images; default: 0, of groups 10",
    )
    verb.add_path(
        "--policy",
        "FILE",
        "policy of the sites: what each may tell, by outbound and jobs (evaluate)",
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
