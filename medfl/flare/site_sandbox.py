"""The sandbox of a site's FLARE, which connects to the server's port, and within it the worker's, which does not."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from dataclasses import asdict, replace
from pathlib import Path

import yaml

from medfl.bundle.files import find
from medfl.core import Print, Run
from medfl.flare.files import read_kit_file
from medfl.flare.site_config import CONFIG_FILE, SiteConfig
from medfl.policy.policy import Policy
from medfl.runtimes.monai_fl.held import HeldSite, Worker
from medfl.safety.sandbox import (
    Allowed,
    Sandbox,
    devices,
    private_folders,
    program_files,
    python_and_system,
)
from medfl.storage import cache_folder, write_json

_PROGRAMS = ("bash", "dirname", "mkdir", "rm", "cat")
"""Programs run by the kit's script, besides Python."""

_NETWORK = tuple(
    map(Path, ("/etc", "/run/systemd/resolve", "/run/NetworkManager", "/run/resolvconf"))
)
"""Folders with files that the system replaces while a site serves: a rule for a file would vanish with the file."""


class SiteSandbox:
    """The folder to which a site's FLARE writes, and the sandbox in which it is started.

    The kit, which determines what a job may do, is not even readable: FLARE has a copy, made at each start, in the
        folder.

    Args:
        kit: the startup kit.
        config: the site's settings; its folder exists.

    Attributes:
        workspace: FLARE's folder; the kit's files are copied there.
        variables: for the process's environment.
        line: message to the user.

    Raises:
        InputError: the kernel has no Landlock, or the kit cannot be read.
    """

    def __init__(self, kit: Path, config: SiteConfig) -> None:
        """Create the workspace, and give the rules to the kernel."""
        folder = Path(config.folder)
        inside = _internal_port(kit / "local" / "comm_config.json")
        outside = _server_ports(kit)
        self.workspace = _workspace(kit, folder, config)
        self.variables = private_folders(folder / "sandbox")
        read = [find(config.bundle), *(Path(path) for path in (config.data, config.policy) if path)]
        programs = [sys.executable, *_PROGRAMS, *(["nvidia-smi"] if config.device != "cpu" else [])]
        allowed = Allowed(
            read=(*python_and_system(), *_NETWORK, *read),
            write=(folder, *_audit(config, folder), *devices()),
            connect=(*outside, inside),
            bind=(inside,),
            programs=program_files(programs),
        )
        sandbox = Sandbox(allowed)
        self.enter = sandbox.enter
        self.line = sandbox.line(folder)


def held_site(
    offered: Run, name: str, config: SiteConfig, carried: Path, policy: Policy, say: Print
) -> HeldSite:
    """Return a site whose bundle is opened by a worker, which has no network and writes to one folder.

    Args:
        offered: the run, already accepted.
        name: the site.
        config: its file.
        carried: the folder of the job's configuration.
        policy: the site's.
        say: receives what the worker prints.
    """
    private = Path(config.folder) / "worker"
    variables = private_folders(private)
    paths = [find(config.bundle), carried, cache_folder("embeddings", shared=True)]
    paths += [Path(path) for path in (config.data, config.policy) if path]
    allowed = Allowed(read=(*python_and_system(), *paths), write=(private, *devices()))
    job = {
        "run": offered.to_dict(),
        "config": asdict(config),
        "carried": str(carried),
        "name": name,
    }
    # The account belongs to the images that the site's own file names, whatever the worker states
    run = replace(offered, data=replace(offered.data, folder=config.data))
    worker = Worker("medfl.flare.site_worker", job, allowed, variables, say)
    return HeldSite(name, run, worker, is_reviewed=policy.files is not None)


def _workspace(kit: Path, folder: Path, config: SiteConfig) -> Path:
    """Return FLARE's folder, with the kit's files copied anew: an earlier bundle could have changed the copies."""
    workspace = folder / f"flare-{kit.name}"
    if workspace.is_symlink():
        workspace.unlink()

    workspace.mkdir(exist_ok=True)
    for name in ("startup", "local"):
        target = workspace / name
        if target.is_symlink() or target.is_file():
            target.unlink()
        elif target.exists():
            shutil.rmtree(target)

        shutil.copytree(kit / name, target)  # FLARE follows no links

    settings = {}
    for name, v in asdict(config).items():
        if v:
            settings[name] = list(v) if isinstance(v, tuple) else v

    # its paths are whole, as FLARE starts elsewhere
    (workspace / "local" / CONFIG_FILE).write_text(yaml.safe_dump(settings))
    return workspace


def _audit(config: SiteConfig, folder: Path) -> list[Path]:
    """Return the audit log, created if missing, if it is outside the site's folder."""
    path = Path(os.path.abspath(config.audit)) if config.audit else folder
    if path.is_relative_to(os.path.abspath(folder)):
        return []
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return [path]


def _server_ports(kit: Path) -> list[int]:
    servers = read_kit_file(kit / "startup" / "fed_client.json").get("servers", [])
    ports = []
    for server in servers:
        ports.append(str(server.get("service", {}).get("target", "")).rpartition(":")[2])
    return [int(port) for port in ports if port.isdecimal()]


def _internal_port(path: Path) -> int:
    """Return the port used between FLARE's processes at the site, written because FLARE would choose any."""
    document = read_kit_file(path) if path.is_file() else {}
    resources = document.setdefault(
        "internal", {"scheme": "tcp", "resources": {"host": "localhost"}}
    )["resources"]
    port = int(resources.get("port") or 0)
    if not (port and _is_free(port)):
        # port 0 is any that is free
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        resources["port"] = port
        write_json(path, document)

    return port


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
