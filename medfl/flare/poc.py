"""`nvflare poc`: a FLARE server and sites with certificates, as processes on this machine, for one job.

FLARE creates the startup kits, starts the processes and stops them; the ports are FLARE's own, 8002 and 8003.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medfl.core import Print, RunError
from medfl.flare.files import allow_classes
from medfl.flare.job import EACH_SITE_IS_A_PROCESS, execute_with, follow, require_flare
from medfl.runtimes import Runtime

if TYPE_CHECKING:
    from nvflare.fuel.flare_api.flare_api import Session


_KITS = Path("workspace", "example_project", "prod_00")


def prepare(folder: Path, sites: Sequence[str], classes: Sequence[str], *flags: str) -> Path:
    """Create the startup kits of a federation in a new folder, and return their folder; nothing is started.

    Args:
        folder: absolute.
        sites: their names.
        classes: class paths that a job may name besides FLARE's own.
        flags: of `nvflare poc prepare`, as --he for keys of homomorphic encryption.

    Raises:
        RunError: FLARE could not create them.
    """
    folder.mkdir(parents=True)
    # FLARE lists the kits that it made in a file below HOME: this user's own stays unchanged
    _command(folder, "prepare", "-c", *sites, *flags, HOME=str(folder))
    kits = folder / _KITS
    for name in ("server", *sites):
        allow_classes(kits / name / "local" / "resources.json", classes)

    return kits


@contextlib.contextmanager
def running(folder: Path, **variables: str) -> Iterator[Session]:
    """Start what was prepared in a folder, with these variables in its environment, and stop it in the end.

    Raises:
        RunError: FLARE could not start the server or a site.
    """
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    admin = "admin@nvidia.com"
    try:
        _command(folder, "start", **variables)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that it connects
            session = new_secure_session(admin, str(folder / _KITS / admin))

        with contextlib.closing(session):
            yield session
    finally:
        with contextlib.suppress(RunError):  # there may be nothing left to stop
            _command(folder, "stop")


def _command(folder: Path, action: str, *arguments: str, **variables: str) -> None:
    """Call `nvflare poc`."""
    done = subprocess.run(
        [sys.executable, "-m", "nvflare.cli", "poc", action, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        # FLARE makes the workspace and accepts no existing one
        env={**os.environ, "NVFLARE_POC_WORKSPACE": str(folder / "workspace"), **variables},
    )

    if done.returncode:
        last_words = (done.stderr or done.stdout).strip()[-400:]
        raise RunError(f"nvflare poc {action} failed; its files are in {folder}: {last_words}")


def _run_job(flare_folder: Path, job: str, clients: list[str], say: Print) -> Path:
    """Run a job, and return the folder of the processes' output."""
    from medfl.flare.parts import SIMULATED  # needs FLARE

    folder = (flare_folder / "federation").resolve()
    prepare(folder, clients, SIMULATED)
    with running(folder) as session:
        say(f"a FLARE server and {len(clients)} sites are up")
        number = session.submit_job(str(flare_folder / job))
        follow(
            lambda: str(session.get_job_meta(number).get("status")).startswith("FINISHED"),
            flare_folder,
            say,
        )

    return folder


RUNTIME = Runtime(
    execute_with(_run_job), EACH_SITE_IS_A_PROCESS, remote=True, require=require_flare
)
