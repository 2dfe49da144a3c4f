"""Programs in processes of their own without their start: forked from the tests' process, which has imported all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any


def start(function: Callable[..., int | None], *arguments: Any, output: Path) -> ForkProcess:
    """Call a function in a forked process whose exit code it returns; what it prints goes to a file.

    It hears an interrupt as a program does that is started in a terminal.
    """

    def program() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with output.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)

        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.exit(function(*arguments))

    process = multiprocessing.get_context("fork").Process(target=program)
    process.start()
    return process
