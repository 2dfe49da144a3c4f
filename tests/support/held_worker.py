"""Workers of tests/runtimes/test_held.py: one that works as it should, and some that do not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from medfl.runtimes.monai_fl import worker


def attack(paths: list[str]) -> dict[str, str]:
    """Try what a worker may not; return what came of each attempt."""
    account = Path(paths[1])
    attempts = {
        "read": account.read_text,
        "write": lambda: account.write_text("mine"),
        "beside": lambda: Path(f"{account}.new").touch(),
        "remove": account.unlink,
        "rename": lambda: Path(paths[0], "x").rename(account),
        "connect": lambda: socket.create_connection(("127.0.0.1", 9), 1),
        "program": lambda: subprocess.run(["/bin/true"], check=True),
        "parent": lambda: os.kill(os.getppid(), signal.SIGTERM),
        "environment": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
    }
    outcome = {}
    Path(paths[0], "x").touch()
    for name, attempt in attempts.items():
        try:
            attempt()
            outcome[name] = "done"
        except PermissionError:
            outcome[name] = "refused"
        except OSError as error:
            outcome[name] = str(error)

    return outcome


def opened(job: dict[str, Any]) -> Any:
    task = job["task"]
    if task == "attack":
        sys.stdout.write("a line with \x1b[31m of its own\n")
        sys.stdout.flush()
        raise RuntimeError(f"attacked: {attack(job['paths'])}")
    if task == "end":
        os._exit(7)
    if task == "talk":
        sys.stdout.write("one more line\n" * 30_000)
        sys.stdout.flush()
        os._exit(0)
    if task == "hang":
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if "--hard" in sys.argv else stop)
        time.sleep(300)
    if task == "garbage":
        ends = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
        for end in ends:
            try:
                os.write(end, b"\xff" * 16)
            except OSError:
                continue
        time.sleep(300)

    from tests.runtimes.test_monai_fl import federation

    return federation(task, messages="topk:0.1"), "x"


def stop(number: int, frame: object) -> None:
    from medfl.runtimes.monai_fl.view import Aborted

    raise Aborted("aborted")


if __name__ == "__main__":
    worker.begin(opened)
