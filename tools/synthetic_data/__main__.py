"""The command line: `python -m tools.synthetic_data --help`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from medfl.cli.arguments import parse_pairs
from medfl.cli.parser import Parser
from medfl.core.errors import InputError
from medfl.core.untrusted import override_value
from medfl.policy import admission
from tools.synthetic_data import __doc__ as description
from tools.synthetic_data.draw_data import draw_data


def main(argv: Sequence[str] | None = None) -> int:
    """Draw data for the bundle that the command line names, and print how to train on them."""
    parser = Parser(prog="python -m tools.synthetic_data", description=description)
    parser.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    parser.add_argument(
        "--cases", type=int, default=0, metavar="N", help="cases per data list (default: 6)"
    )
    parser.add_argument("--size", type=int, metavar="PIXELS", help="side of the images")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of the drawing (default: 0)"
    )
    parser.add_config("id of the bundle's configuration; may be repeated")
    parser.add_trust()
    args = parser.parse_args(argv)
    try:
        config = {
            key: override_value(text) for key, text in parse_pairs("--config", args.config).items()
        }
        with admission.trusting(args.trust):
            drawn = draw_data(
                args.bundle,
                args.out,
                config=config,
                seed=args.seed,
                cases=args.cases,
                size=args.size,
            )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    items = ", ".join(f"{section} {count}" for section, count in drawn.counts.items())
    print(f"PHANTOM data (drawn images) for {Path(args.bundle).resolve().name}: {drawn.folder}")
    print(f"{drawn.files} files; items: {items}")
    for note in drawn.notes:
        print(f"note: {note}")
    command = ["medfl", "run", args.bundle, *drawn.arguments, *(["--trust"] if args.trust else [])]
    print(f"train on them: {shlex.join(command)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
