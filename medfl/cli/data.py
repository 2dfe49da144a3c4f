"""The verb `medfl data`: make, fetch or check the images of a bundle."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from medfl.cli.parser import add_actions, add_verb, show
from medfl.cli.walls import Use, hold
from medfl.core import Config, InputError, listed, tables, terminal

EXAMPLES = """\
examples
  medfl data make ham10000 --out pictures --per-class 10 --size 32
      a few small synthetic images per class
  medfl data check bundles/mine --data pictures
      check a folder for a bundle of your own: layout, counts, patients, unreadable images"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    actions = add_actions(verbs, "data", "make, fetch or check the images of a bundle")
    text = "write synthetic images in the layout of the real data"
    make = add_verb(actions, "make", text, _make, EXAMPLES)
    fetch = add_verb(
        actions, "fetch", "download the real data, showing its licence and checksums", _fetch
    )
    check = add_verb(
        actions, "check", "verify a data folder: layout, counts, unreadable images", _check
    )
    shipped = "name of a shipped bundle (medfl bundles)"
    fetch.add_text("bundle", "BUNDLE", shipped)
    check.add_text("bundle", "BUNDLE", f"{shipped}, or the folder of one that medfl new wrote")
    make.add_text("bundle", "BUNDLE", shipped)
    make.add_path("--out", "DIR", "new folder", required=True)
    check.add_walls()
    make.add_number(
        "--per-class", "N", "images per class, at least 10; default: depends on the bundle"
    )
    make.add_number(
        "--size",
        "PIXELS",
        "side length of the images, in pixels or voxels; default: depends on the bundle",
    )
    make.add_number("--seed", "S", "random seed; default: 0")
    fetch.add_path(
        "--out", "DIR", "folder to download to; an interrupted download is continued", required=True
    )
    check.add_path("--data", "DIR", "data folder; default: the bundle's folder below $MEDFL_DATA")


def _make(args: Namespace) -> int:
    from medfl import datasets

    if args.bundle not in datasets.names() and Path(args.bundle).is_dir():
        raise InputError(
            f"bundle {args.bundle}",
            "shipped bundles have drawn images (medfl bundles)",
            "draw some in a checkout of medfl: python -m tools.synthetic_data BUNDLE --out DIR",
        )

    folder = datasets.write_phantom(
        args.bundle, args.out, per_class=args.per_class, size=args.size, seed=args.seed or 0
    )
    document = {"name": args.bundle, "folder": str(folder), "source": "phantom"}
    return show(args, document, [f"PHANTOM cohort (drawn images) of {args.bundle}: {folder}"])


def _fetch(args: Namespace) -> int:
    from medfl import datasets
    from medfl.datasets.readers.download import fetch

    files = list(map(str, fetch(datasets.get(args.bundle), args.out, progress=sys.stderr.isatty())))
    return show(args, {"name": args.bundle, "files": files}, files)


def _check(args: Namespace) -> int:
    from medfl import datasets

    if args.bundle not in datasets.names() and Path(args.bundle).is_dir():
        hold(args, Use(bundles=[args.bundle]))
        from medfl.bundle.open import check_folder

        report = check_folder(args.bundle, args.data, progress=sys.stderr.isatty())
    else:
        report = datasets.check(args.bundle, args.data, progress=sys.stderr.isatty())

    show(args, report.as_dict(), _check_lines(report.as_dict()))
    if not report.ok:
        raise InputError(
            listed(report.problems, 1),
            "a folder without problems can be used",
            "repair or remove it",
        )

    return 0


def _check_lines(document: Config) -> list[str]:
    """Return the lines on a data set's check (`CheckReport.as_dict`): folder, counts, problems."""
    source = {"phantom": "PHANTOM: drawn images", "real": "real images"}[document["source"]]
    facts = {
        "data set": f"{document['name']}, {source}",
        "folder": document["folder"],
        "layout": document["layout"],
        "split": document["split"],
        "images": str(document["images"]),
    }
    several = any(len(centres) > 1 for centres in document["counts"].values())
    head = ["section", "centre", "all", *document["classes"]]
    rows = []
    for section, centres in document["counts"].items():
        for centre, row in centres.items():
            counts = [str(count) if count else "-" for count in row]
            rows.append([section, centre, str(sum(row)), *counts])

    if not several:
        for cells in (head, *rows):
            del cells[1]

    lines = [*terminal.definitions(facts), "", *tables.text_table(head, rows), ""]

    for label, kind in (("note: ", "notes"), ("warning: ", "warnings"), ("problem: ", "problems")):
        for text in document[kind]:
            lines += terminal.hanging_indent(label, text)

    verdict = "the data can be used" if document["ok"] else "the data cannot be used as they are"
    return [*lines, verdict]
