"""A whole FLARE federation on one machine, whose processes a test may kill: certificates, a server, sites, TLS."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # comes with FLARE and has no types
import yaml

from medfl.core.errors import RunError
from medfl.flare.files import allow_classes
from medfl.flare.job import kill_tree

SERVER, ADMIN, _ORG = "server", "admin@medfl.org", "medfl"
_BUILDERS: list[Mapping[str, Any]] = [
    {
        "path": "nvflare.lighter.impl.workspace.WorkspaceBuilder",
        "args": {"template_file": ["master_template.yml"]},
    },
    {
        "path": "nvflare.lighter.impl.static_file.StaticFileBuilder",
        "args": {"config_folder": "config"},
    },
    {"path": "nvflare.lighter.impl.cert.CertBuilder"},
    {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
]


class LocalFederation:
    """A federation in a new folder, for all its files; as a context manager it ends all its processes.

    FLARE may make the `allowed` classes besides its own, at server and sites; what further `builders` of its
    provisioning make is signed.
    """

    def __init__(
        self,
        folder: Path,
        sites: Sequence[str],
        allowed: Sequence[str],
        environment: dict[str, str] | None = None,
        builders: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Provision; nothing is started."""
        self.folder, self.sites = folder.resolve(), list(sites)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._session: Any = None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._environment = {**os.environ, **(environment or {})}
        self._provision([*_BUILDERS[:-1], *builders, _BUILDERS[-1]])
        for name in (SERVER, *self.sites):
            allow_classes(self.kit(name) / "local" / "resources.json", allowed)
        resources = (
            self.kit(SERVER) / "local" / "resources.json"
        )  # FLARE's default is one place for all of a machine
        resources.write_text(
            resources.read_text().replace("/tmp/nvflare/", f"{self.folder}/storage/")
        )

    def kit(self, name: str) -> Path:
        """Return a startup kit's folder."""
        return self.folder / "kits" / "medfl" / "prod_00" / name

    def _provision(self, builders: Sequence[Mapping[str, Any]]) -> None:
        ports = _free_ports(2)
        server: dict[str, Any] = {
            "name": SERVER,
            "type": "server",
            "org": _ORG,
            "default_host": "127.0.0.1",
        }
        server |= {"fed_learn_port": ports[0], "admin_port": ports[1]}
        people = [server, *({"name": name, "type": "client", "org": _ORG} for name in self.sites)]
        people.append({"name": ADMIN, "type": "admin", "org": _ORG, "role": "project_admin"})
        project = {
            "api_version": 3,
            "name": "medfl",
            "description": "one machine",
            "participants": people,
        }
        path = self.folder / "project.yml"
        path.write_text(yaml.safe_dump({**project, "builders": list(builders)}))
        command = [
            sys.executable,
            "-m",
            "nvflare.cli",
            "provision",
            "-p",
            str(path),
            "-w",
            str(self.folder / "kits"),
        ]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=self.folder,
            env={**self._environment, "HOME": str(self.folder)},  # where FLARE keeps settings
        )  # fmt: skip
        if not self.kit(SERVER).is_dir():
            raise RunError(
                f"NVIDIA FLARE could not provision: {(done.stderr or done.stdout).strip()[-400:]}"
            )

    # Processes

    def start(self, *names: str) -> None:
        """Start the server and all sites, or these."""
        for name in names or (SERVER, *self.sites):
            role = "server" if name == SERVER else "client"
            settings = ["secure_train=true", f"org={_ORG}", "config_folder=config"]
            settings += [f"uid={name}"] if role == "client" else []
            module = f"nvflare.private.fed.app.{role}.{role}_train"
            command = [sys.executable, "-u", "-m", module, "-m", str(self.kit(name))]
            command += ["-s", f"fed_{role}.json", "--set", *settings]
            with (self.folder / f"{name}.txt").open("ab") as output:
                self._processes[name] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                    env=self._environment, cwd=self.folder,
                )  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill a participant with its job processes at once, as a power cut would."""
        kill_tree(self._processes.pop(name))

    def kill_jobs(self, name: str) -> None:
        """Kill a participant's job processes, and no other of its own."""
        for process in psutil.Process(self._processes[name].pid).children(recursive=True):
            process.kill()

    def stop(self) -> None:
        """End everything."""
        self._forget_session()
        for name in list(self._processes):
            self.kill(name)

    def __enter__(self) -> LocalFederation:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Jobs

    def ready(self, timeout: float = 120.0) -> None:
        """Wait until the server is up and knows all sites that were started.

        Raises:
            RunError: after the timeout; names the missing sites.
        """
        sites = {name for name in self._processes if name != SERVER}
        there, why = set[str](), ""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            try:
                there = {client.name for client in self._admin().get_system_info().client_info}
                if sites <= there:
                    return
            except Exception as error:  # the server is not up yet, in any of FLARE's ways to say so
                why = f": {' '.join(str(error).split())}"
            self._forget_session()
            time.sleep(1.0)
        missing = ", ".join(sorted(sites - there)) or "the server"
        raise RunError(
            f"no sign of {missing} after {timeout:g} s{why}; the output is in {self.folder}"
        )

    def submit(self, job: Path) -> str:
        """Submit an exported job and return FLARE's id for it."""
        return str(self._admin().submit_job(str(job)))

    def status(self, job: str) -> str:
        """Return a job's status in FLARE."""
        try:
            return str(self._admin().get_job_meta(job).get("status", ""))
        except Exception:  # the server is away
            self._forget_session()
            return ""

    def wait(self, job: str, timeout: float = 600.0) -> str:
        """Wait until a job is over and return its last status.

        Raises:
            RunError: it is not over after the timeout.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            status = self.status(job)
            if status.startswith("FINISHED"):
                return status
            time.sleep(0.5)
        raise RunError(
            f"job {job} is not over after {timeout:g} s; its status is {self.status(job) or 'unknown'}"
        )

    def log(self, name: str) -> str:
        """Return the output of a participant's processes."""
        return (self.folder / f"{name}.txt").read_text(errors="replace")

    def _admin(self) -> Any:
        if self._session is None:
            from nvflare.fuel.flare_api.flare_api import new_secure_session

            with contextlib.redirect_stdout(io.StringIO()):  # it says that it connects
                self._session = new_secure_session(ADMIN, str(self.kit(ADMIN)), timeout=10)
        return self._session

    def _forget_session(self) -> None:
        if self._session is not None:
            with contextlib.suppress(Exception):  # it may be broken already
                self._session.close()
            self._session = None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
