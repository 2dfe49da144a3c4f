"""Fuzzing that follows the branches of medfl's own code: kinds of files and texts, changed by Atheris (libFuzzer).

    python -m tests.support.coverage_fuzz RUN FOLDER KIND=INPUTS ...

FOLDER has `seeds-KIND` with inputs to begin with. A program of its own, for libFuzzer ends the process: each kind is a
child. Prints how many inputs were declared wrong; anything else that is raised ends it with what libFuzzer says.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections import Counter
from pathlib import Path

import atheris

# What reads the followed kinds, and all that it imports of medfl; the code of other packages is theirs to follow.
with atheris.instrument_imports(include=["medfl"], enable_loader_override=False):
    for name in [name for name in sys.modules if name.partition(".")[0] == "medfl"]:
        del sys.modules[name]  # the warm process has it as it is
    for name in (
        "core.message",
        "storage.run_integrity",
        "policy.expressions",
        "report",
    ):
        importlib.import_module(f"medfl.{name}")
    from medfl.core.errors import MedflError
    from medfl.core.untrusted import Refused

from tests.policy.test_expressions import attempt
from tests.product.test_fuzz import TARGETS, TENSORS, Recorded
from tests.support.mutations import closed

BYTES = 4096
"""The longest input: seeds are cut there; longer ones are hypothesis's."""


def main() -> None:
    """Follow the branches of one kind of input after the other."""
    run, folder = map(Path, sys.argv[1:3])
    for told in sys.argv[3:]:
        kind, _, inputs = told.partition("=")
        if not (child := os.fork()):
            follow(kind, int(inputs), run, folder)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise SystemExit(f"{kind}: libFuzzer ended with {code}")


def follow(kind: str, inputs: int, run: Path, folder: Path) -> None:
    """Fuzz and exit."""
    place = folder / f"place-{kind}"
    place.mkdir()
    decode = None if kind == "expression" else TARGETS[kind][0](Recorded(run, place))[1]
    found: Counter[str] = Counter()

    def each(data: bytes) -> None:
        found["inputs"] += 1
        if decode is None:
            attempt(data.decode(errors="replace"))
            return
        try:
            decode(closed(data) if kind in TENSORS else data)
        except (MedflError, Refused) as error:
            found["declared"] += 1
            if "\n" in str(error):
                raise AssertionError(f"an error of more than one line: {error}") from error

    def tell() -> None:
        sys.stdout.write(f"{kind}: {found['inputs']} inputs, {found['declared']} declared wrong\n")
        sys.stdout.flush()

    atexit.register(tell)
    limits = [
        f"-atheris_runs={inputs}",
        f"-max_len={BYTES}",
        "-rss_limit_mb=4096",
        "-timeout=3600",
        "-seed=1",
    ]
    files = [f"-artifact_prefix={place}/", str(folder / f"seeds-{kind}")]
    atheris.Setup([sys.argv[0], *limits, *files], each)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
