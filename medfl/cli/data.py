"""The verb `medfl data`: make, fetch or check the images of a bundle."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medfl.cli import arguments
from medfl.cli.parser import add_actions, add_verb, show
from medfl.core import terminal
from medfl.core.errors import InputError
from medfl.core.untrusted import override_value

EXAMPLES = """\
examples
  medfl data make ham10000 --out pictures --per-class 10 --size 32
      small pictures of a shipped bundle's classes
  medfl data make zoo/spleen_ct_segmentation --out spleen
      for any bundle: what its configuration looks for is drawn, or said to be unknown
  medfl data check bundles/mine --data pictures
      is a folder as a bundle of medfl new wants it? counts, patients, unreadable images"""


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    actions = add_actions(verbs, "data", "make, fetch or check the images of a bundle")
    text = "write a phantom cohort (drawn images) in the layout of the real data"
    make = add_verb(actions, "make", text, _make, EXAMPLES)
    fetch = add_verb(actions, "fetch", "download the real data, showing licence and checksums", _fetch)
    check = add_verb(actions, "check", "verify a folder: layout, counts, unreadable images by name", _check)
    shipped = "name of a shipped bundle (medfl bundles)"
    fetch.add_argument("bundle", metavar="BUNDLE", help=shipped)
    check.add_argument("bundle", metavar="BUNDLE", help=f"{shipped}, or the folder of one that medfl new wrote")
    make.add_argument("bundle", metavar="BUNDLE", help=f"{shipped}, or the folder of any")
    make.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    arguments.add_number(make, "--per-class", "N", "images per class; of a bundle by its folder: cases per data list")
    arguments.add_number(make, "--size", "PIXELS", "side of the images")
    arguments.add_number(make, "--seed", "S", "seed of the drawing; default 0")
    arguments.add_config(make, "id of the configuration of a bundle by its folder; may be repeated")
    arguments.add_trust(make)
    text = "where to; an interrupted download continues"
    fetch.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    check.add_argument("--data", type=Path, metavar="DIR", help="the folder; default: one below $MEDFL_DATA")


def _make(args: Any) -> int:
    from medfl import datasets

    sizes = {name: value for name in ("per_class", "size", "seed") if (value := getattr(args, name)) is not None}
    if args.bundle not in datasets.names() and Path(args.bundle).is_dir():
        return _make_foreign(args, sizes)
    folder = datasets.write_phantom(args.bundle, args.out, **sizes)
    document = {"name": args.bundle, "folder": str(folder), "source": "phantom"}
    return show(args, document, lambda: f"PHANTOM cohort (drawn images) of {args.bundle}: {folder}")


def _make_foreign(args: Any, sizes: dict[str, int]) -> int:
    """Draw data for a bundle that is not ours, in the layout that its configuration looks for."""
    from medfl.bundle.draw_data import draw_data

    seed, cases, size = sizes.get("seed", 0), sizes.get("per_class", 0), sizes.get("size")
    config = {key: override_value(text) for key, text in arguments.parse_pairs("--config", args.config).items()}
    drawn = draw_data(args.bundle, args.out, config=config, seed=seed, cases=cases, size=size)
    command = shlex.join(["medfl", "run", args.bundle, *drawn.arguments, *(["--trust"] if args.trust else [])])
    document = {
        "name": Path(args.bundle).resolve().name, "folder": str(drawn.folder), "source": "phantom",
        "files": drawn.files, "items": dict(drawn.counts), "notes": list(drawn.notes), "command": command,
    }  # fmt: skip
    items = ", ".join(f"{section} {count}" for section, count in drawn.counts.items())
    lines = [
        f"PHANTOM data (drawn images) for {document['name']}: {drawn.folder}",
        f"{drawn.files} files; items: {items}",
        *(f"note: {note}" for note in drawn.notes),
        f"train on them: {command}",
    ]
    return show(args, document, lambda: "\n".join(lines))


def _fetch(args: Any) -> int:
    from medfl import datasets
    from medfl.datasets.readers.download import fetch

    files = [str(path) for path in fetch(datasets.get(args.bundle), args.out, progress=sys.stderr.isatty())]
    return show(args, {"name": args.bundle, "files": files}, lambda: "\n".join(files))


def _check(args: Any) -> int:
    from medfl import datasets

    if args.bundle not in datasets.names() and Path(args.bundle).is_dir():
        from medfl.bundle import check_own

        report = check_own.check(args.bundle, args.data, progress=sys.stderr.isatty())
    else:
        report = datasets.check(args.bundle, args.data, progress=sys.stderr.isatty())
    show(args, report.as_dict(), lambda: _check_text(report.as_dict(), terminal.width()))
    if not report.ok:
        more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        raise InputError(f"{report.problems[0]}{more}", "a folder without problems can be used", "repair or remove it")
    return 0


def _check_text(document: Mapping[str, Any], width: int) -> str:
    """Return the text of a data set's check (`CheckReport.as_dict`): where, how many, what is wrong."""
    source = {"phantom": "PHANTOM: drawn images", "real": "real images"}[document["source"]]
    facts = {
        "data set": f"{document['name']}, {source}",
        "folder": document["folder"],
        "layout": document["layout"],
        "split": document["split"],
        "images": str(document["images"]),
    }
    several = any(len(centres) > 1 for centres in document["counts"].values())
    rows = [
        [section, *([centre] if several else []), str(sum(row)), *(str(count) if count else "-" for count in row)]
        for section, centres in document["counts"].items()
        for centre, row in centres.items()
    ]
    head = ["section", *(["centre"] if several else []), "all", *document["classes"]]
    lines = [*terminal.definitions(facts, width), "", *terminal.table(head, rows, width), ""]
    for label, kind in (("note: ", "notes"), ("warning: ", "warnings"), ("problem: ", "problems")):
        lines += [line for text in document[kind] for line in terminal.hanging_indent(label, text, width)]
    return "\n".join([*lines, "the data can be used" if document["ok"] else "the data cannot be used as they are"])
