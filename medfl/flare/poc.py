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


@contextlib.contextmanager
def _federation(folder: Path, sites: Sequence[str]) -> Iterator[Session]:
    """Start a federation in a new folder, for its kits and the output of its processes, and stop it in the end.

    Raises:
        RunError: FLARE could not create the kits, or could not start the server or a site.
    """
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    from medfl.flare.parts import SIMULATED

    workspace = folder / "workspace"  # FLARE makes it and accepts no existing one
    admin = "admin@nvidia.com"
    kits = workspace / "example_project" / "prod_00"
    folder.mkdir(parents=True)
    # FLARE lists the kits that it made in a file below HOME: this user's own stays unchanged
    _command(workspace, "prepare", "-c", *sites, HOME=str(folder))
    for name in ("server", *sites):
        allow_classes(kits / name / "local" / "resources.json", SIMULATED)

    try:
        _command(workspace, "start")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that it connects
            session = new_secure_session(admin, str(kits / admin))

        with contextlib.closing(session):
            yield session
    finally:
        with contextlib.suppress(RunError):  # there may be nothing left to stop
            _command(workspace, "stop")


def _command(workspace: Path, action: str, *arguments: str, **variables: str) -> None:
    """Call `nvflare poc`."""
    done = subprocess.run(
        [sys.executable, "-m", "nvflare.cli", "poc", action, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "NVFLARE_POC_WORKSPACE": str(workspace), **variables},
    )

    if done.returncode:
        last_words = (done.stderr or done.stdout).strip()[-400:]
        raise RunError(
            f"nvflare poc {action} failed; its files are in {workspace.parent}: {last_words}"
        )


def _run_job(flare_folder: Path, job: str, clients: list[str], say: Print) -> Path:
    """Run a job, and return the folder of the processes' output."""
    folder = (flare_folder / "federation").resolve()
    with _federation(folder, clients) as session:
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
