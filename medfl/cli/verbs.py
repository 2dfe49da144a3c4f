"""The command line: `medfl VERB ...`, each verb a module.

Exit codes: 0, 1 (failed while running), 2 (bad input), 130 (Ctrl-C), 143 (SIGTERM). An error is one line on stderr.
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NoReturn

from medfl.cli import (
    calibrate,
    catalogue,
    compare,
    concepts,
    data,
    evaluate,
    export,
    flare,
    new,
    plan,
    predict,
    report,
    run,
    site,
    subgroups,
    tune,
)
from medfl.cli.parser import Parser, intact, log, warn
from medfl.core import VERSION, MedflError, portable, reason, terminal

EXAMPLES = """\
examples
  medfl run pneumonia --data phantom --rounds 3
      a first run, on synthetic images
  medfl bundles
      list the data sets; medfl methods lists the methods
  medfl run ham10000 --data DIR --partition centre --method scaffold --rounds 20
      four hospitals, real images"""

VERBS = (
    run,
    catalogue,
    compare,
    tune,
    data,
    concepts,
    new,
    plan,
    predict,
    evaluate,
    report,
    subgroups,
    calibrate,
    export,
    site,
    flare,
)
"""Modules whose `add` adds a verb, in the order of `medfl --help`."""


def command() -> NoReturn:
    """Run `medfl` or `python -m medfl`, and exit without freeing torch and MONAI, which takes Python two seconds."""
    code = 1

    def leave() -> None:
        """End the process with its code."""
        with suppress(OSError, ValueError):  # on a full disk Python itself reports it at exit
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    atexit.register(leave)  # registered before all others, so called after them
    sys.exit(code := main(own_process=True))


def main(arguments: Sequence[str] | None = None, *, own_process: bool = False) -> int:
    """Run one command and return its exit code.

    With `own_process` nobody else uses this process: third-party bundles are opened in a sandbox (`medfl.cli.walls`).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    terminal.mend_streams()
    if own_process:
        warnings.formatwarning = terminal.warn_plainly  # type: ignore[assignment]  # takes any text

    options = None
    try:
        with terminal.sigterm_as_ctrl_c():
            options = parser().parse_args(words)
            options.given = words
            options.own_process = own_process
            if getattr(options, "portable", False):
                portable.enable()  # before any numerical library is imported

            with _trusting(options):
                return int(options.verb(options) or 0)
    except SystemExit as done:  # argparse after --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt as signalled:
        terminated = isinstance(signalled, terminal.Terminated)
        word = "ended by SIGTERM" if terminated else "interrupted"
        warn(f"{word}: {intact(options)}")
        return 143 if terminated else 130
    except BrokenPipeError:  # the reader of our output has closed it, e.g. `| head`
        terminal.flush(sys.stdout)
        return 0
    except (MedflError, MemoryError, OSError, ImportError) as error:
        if "--debug" in words:
            traceback.print_exc()

        if isinstance(error, MemoryError):
            message = f"out of memory ({error})"
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            message = f"no space left on the disk; free some; {intact(options)}"
        elif isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {reason(error)}; check that it is there, and its rights"
        else:
            message = str(error)

        log(f"error: {' '.join(message.split())}")
        terminal.flush(sys.stdout)
        if isinstance(error, MedflError):
            return error.exit_code

        return 1


def _trusting(args: Namespace) -> AbstractContextManager[None]:
    if not getattr(args, "trust", False):
        return nullcontext()
    from medfl.policy import admission

    return admission.trusting(True)


def parser() -> Parser:
    """Return the parser of all verbs."""
    top = Parser(
        prog="medfl",
        description="Federated training of MONAI bundles across sites that may not share data.",
        epilog=EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"medfl {VERSION}")
    top.add_switch("--debug", "show the traceback of an error")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Parser)

    for module in VERBS:
        module.add(verbs)

    return top
