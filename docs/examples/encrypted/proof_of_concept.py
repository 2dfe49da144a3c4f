"""`nvflare poc` with keys for homomorphic encryption: a FLARE server and sites as processes on this machine.

FLARE creates the startup kits, starts the processes and stops them; the ports are FLARE's own, 8002 and 8003.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medfl.core.errors import RunError
from medfl.flare.files import allow_classes

if TYPE_CHECKING:
    from nvflare.fuel.flare_api.flare_api import Session

SERVER = "server"
_ADMIN = "admin@nvidia.com"
_PROJECT = "example_project"


class ProofOfConcept:
    """A federation in a new folder, running while its context manager is active.

    Args:
        folder: for its kits and the output of its processes.
        sites: their names.
        classes: class paths that a job may name besides FLARE's own.
        encryption: the kits get keys for homomorphic encryption.
        environment: additional variables for all its processes.

    Raises:
        RunError: FLARE could not create the kits, or could not start the server or a site.
    """

    def __init__(
        self,
        folder: Path,
        sites: Sequence[str],
        classes: Sequence[str],
        *,
        encryption: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Create the kits; nothing is started."""
        self.folder = folder.resolve()
        self.sites = list(sites)
        self._workspace = self.folder / "workspace"  # FLARE makes it and accepts no existing one
        self._environment = {
            **os.environ,
            **(environment or {}),
            "NVFLARE_POC_WORKSPACE": str(self._workspace),
        }
        self._session: Session | None = None

        self.folder.mkdir(parents=True)
        flags = ["--he"] if encryption else []
        # FLARE lists the kits that it made in a file below HOME: this user's own stays unchanged
        self._command("prepare", "-c", *self.sites, *flags, HOME=str(self.folder))

        for name in (SERVER, *self.sites):
            allow_classes(self.kit(name) / "local" / "resources.json", classes)

    def kit(self, name: str) -> Path:
        """Return a startup kit's folder."""
        return self._workspace / _PROJECT / "prod_00" / name

    def __enter__(self) -> ProofOfConcept:
        """Start the server and the sites, and wait until the server knows all of them."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        try:
            self._command("start")
            with contextlib.redirect_stdout(io.StringIO()):  # it prints that it connects
                self._session = new_secure_session(_ADMIN, str(self.kit(_ADMIN)))
        except BaseException:
            self._stop()
            raise

        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def submit(self, job: Path) -> str:
        """Submit an exported job and return FLARE's id for it."""
        assert self._session is not None
        return str(self._session.submit_job(str(job)))

    def status(self, job: str) -> str:
        """Return a job's status in FLARE; it begins with FINISHED once the job has ended."""
        assert self._session is not None
        return str(self._session.get_job_meta(job).get("status", ""))

    def output(self, name: str) -> str:
        """Return the output of a participant's processes."""
        return (self.kit(name) / "poc_console.log").read_text(errors="replace")

    def _stop(self) -> None:
        if self._session is not None:
            self._session.close()
        with contextlib.suppress(RunError):  # there may be nothing left to stop
            self._command("stop")

    def _command(self, action: str, *arguments: str, **variables: str) -> None:
        """Call `nvflare poc`."""
        done = subprocess.run(
            [sys.executable, "-m", "nvflare.cli", "poc", action, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**self._environment, **variables},
        )

        if done.returncode:
            last_words = (done.stderr or done.stdout).strip()[-400:]
            raise RunError(
                f"nvflare poc {action} failed; its files are in {self.folder}: {last_words}"
            )
