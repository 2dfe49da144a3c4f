"""The sandbox of `medfl site serve`: what FLARE's process of a site may do, and that a job runs in it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from medfl import datasets
from medfl.bundle.files import shipped_folders
from medfl.cli import verbs as cli
from medfl.flare import offer as flare_offer, serve
from medfl.flare.parts import ALLOWED
from medfl.flare.site_config import SiteConfig
from medfl.flare.site_sandbox import SiteSandbox
from medfl.safety import sandbox
from tests.support.local_federation import SERVER, LocalFederation
from tests.support.programs import python_path

landlock = pytest.mark.skipif(
    sandbox.abi() < 4, reason="the kernel's Landlock is missing, or older than ABI 4"
)
CONFIG = {"network": "small_cnn", "image_size": 16}
SCRIPT = """
DIR="$( cd "$( dirname "${BASH_SOURCE[0]}" )" && pwd )"
mkdir -p "$DIR/../transfer"
exec python3 "$DIR/tries.py"
"""
TRIES = """
import json, os, socket, subprocess, sys
from pathlib import Path

here = Path(sys.argv[0]).resolve().parent
told = json.loads((here / "told.json").read_text())
kit, port, internal, elsewhere = Path(told["kit"]), *told["ports"]

def connect(port):
    socket.create_connection(("127.0.0.1", port), 5).close()

def append(path):
    with open(path, "a") as file:
        file.write("x")

tries = {
    "state": lambda: append(told["folder"] + "/state"),
    "audit log": lambda: append(told["audit"]),
    "read data": lambda: Path(told["data"], "image").read_text(),
    "read policy": lambda: Path(told["policy"]).read_text(),
    "temporary": lambda: __import__("tempfile").TemporaryFile().write(b"x"),
    "server": lambda: connect(port),
    "internal": lambda: socket.create_server(("127.0.0.1", internal)).close(),
    "python": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "beside the audit log": lambda: append(told["audit"] + ".1"),
    "data": lambda: append(told["data"] + "/image"),
    "policy": lambda: append(told["policy"]),
    "kit": lambda: append(kit / "local" / "medfl.yaml"),
    "key": lambda: (kit / "startup" / "sub_start.sh").unlink(),
    "secret": lambda: (kit.parent / "secret").read_text(),
    "elsewhere": lambda: connect(elsewhere),
    "program": lambda: subprocess.run(["touch", told["folder"] + "/x"], check=True),
    "listen": lambda: socket.create_server(("127.0.0.1", elsewhere)),
}
result = {}
for name, attempt in tries.items():
    try:
        attempt()
        result[name] = "done"
    except PermissionError:
        result[name] = "refused"
Path(told["folder"], "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        yield one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def kit(tmp_path: Path, ports: tuple[int, int]) -> Path:
    """A kit whose script tries things in the place of FLARE."""
    kit = tmp_path / "kit"
    for folder in (
        kit / "startup",
        kit / "local",
        tmp_path / "data",
        tmp_path / "log",
        tmp_path / "state",
    ):
        folder.mkdir(parents=True)
    service = {"servers": [{"service": {"target": f"127.0.0.1:{ports[0]}"}}]}
    (kit / "startup" / "fed_client.json").write_text(json.dumps(service))
    (kit / "startup" / "sub_start.sh").write_text(SCRIPT)
    (kit / "startup" / "tries.py").write_text(TRIES)
    for file in ("data/image", "policy.yaml", "secret"):
        (tmp_path / file).write_text("as it was")
    (kit / "local" / "medfl.yaml").write_text(
        "bundle: mednist\nfolder: ../../state\ndata: ../../data\n"
        "audit: ../../log/audit.jsonl\npolicy: ../../policy.yaml\n"
    )
    return kit


def tell(kit: Path, config: SiteConfig, ports: tuple[int, int]) -> None:
    """Say to the script where everything is."""
    internal = json.loads((kit / "local" / "comm_config.json").read_text())["internal"][
        "resources"
    ]["port"]
    told = {
        "kit": str(kit),
        "ports": [ports[0], internal, ports[1]],
        "folder": config.folder,
        "audit": config.audit,
    }
    told |= {"data": config.data, "policy": config.policy}
    workspace = Path(config.folder) / f"flare-{kit.name}"
    (workspace / "startup" / "told.json").write_text(json.dumps(told))


@landlock
def test_a_site_s_process_writes_its_folder_and_connects_to_its_server_alone(
    kit: Path, ports: tuple[int, int]
) -> None:
    config = SiteConfig.read(kit / "local" / "medfl.yaml")
    box = SiteSandbox(kit, config)
    assert (
        SiteConfig.read(Path(config.folder) / f"flare-{kit.name}" / "local" / "medfl.yaml")
        == config
    )
    tell(kit, config, ports)
    before = (kit / "local" / "medfl.yaml").read_bytes()
    assert serve.start(kit, box) == 0
    result = json.loads((Path(config.folder) / "result.json").read_text())
    done = [
        "state",
        "audit log",
        "read data",
        "read policy",
        "temporary",
        "server",
        "internal",
        "python",
    ]
    assert [name for name, how in result.items() if how == "done"] == done
    assert (kit / "local" / "medfl.yaml").read_bytes() == before
    assert box.line.startswith(
        f"Landlock ABI {sandbox.abi()}: writes below {config.folder} only, TCP ports "
    )


@landlock
def test_what_flare_reads_is_copied_anew_with_whole_paths(kit: Path, tmp_path: Path) -> None:
    config = SiteConfig.read(kit / "local" / "medfl.yaml")
    workspace = SiteSandbox(kit, config).workspace
    assert SiteConfig.read(workspace / "local" / "medfl.yaml") == config
    port = json.loads((kit / "local" / "comm_config.json").read_text())["internal"]["resources"][
        "port"
    ]
    (workspace / "local" / "medfl.yaml").write_text("bundle: evil\nfolder: /\n")
    (workspace / "local" / "more.json").write_text("{}")
    precious = tmp_path / "precious" / "startup"
    precious.mkdir(parents=True)
    workspace = SiteSandbox(kit, config).workspace
    assert SiteConfig.read(workspace / "local" / "medfl.yaml") == config
    assert not (workspace / "local" / "more.json").exists()
    assert (
        json.loads((kit / "local" / "comm_config.json").read_text())["internal"]["resources"][
            "port"
        ]
        == port
    )
    workspace.rename(tmp_path / "moved")
    workspace.symlink_to(precious.parent)
    assert not SiteSandbox(kit, config).workspace.is_symlink()
    assert list(precious.iterdir()) == []


@landlock
def test_an_audit_log_in_the_folder_is_not_followed_to_another_file(
    kit: Path, tmp_path: Path
) -> None:
    """What an earlier bundle could put there must not become writable."""
    (tmp_path / "state" / "audit.jsonl").symlink_to(tmp_path / "secret")
    config = SiteConfig(
        "mednist", str(tmp_path / "state"), audit=str(tmp_path / "state" / "audit.jsonl")
    )
    box = SiteSandbox(kit, config)
    code = f"open({str(tmp_path / 'state' / 'audit.jsonl')!r}, 'a')"
    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=box.enter, capture_output=True, text=True
    )
    assert "PermissionError" in done.stderr
    assert (tmp_path / "secret").read_text() == "as it was"


def serving(kit: Path, *more: str) -> str:
    """Return the line about the sandbox."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["site", "serve", "--kit", str(kit), "--check", "--json", *more]) == 0
    return str(json.loads(out.getvalue())["sandbox"])


def test_a_site_without_a_sandbox_is_warned(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kit / "local" / "medfl.yaml").write_text(
        "bundle: mednist\nfolder: ../../state\ndata: ../../data\n"
    )
    assert serving(kit, "--no-sandbox").startswith("WARNING: NOT IN FORCE (--no-sandbox): ")
    if sandbox.abi():
        assert serving(kit) == f"Landlock ABI {sandbox.abi()}"
    monkeypatch.setattr(sandbox, "abi", lambda: 0)
    assert serving(kit).startswith("WARNING: NOT IN FORCE (this machine lacks a Linux kernel of ")


@landlock
@pytest.mark.flare
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # FLARE's own
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_of_two_sites_runs_in_it_over_tls(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    with LocalFederation(
        tmp_path / "federation", ["north", "south"], ALLOWED, environment
    ) as federation:
        for name in (SERVER, "north", "south"):
            own = ["--folder", str(tmp_path / f"state-{name}")]
            if name != SERVER:
                data = datasets.write_phantom(
                    "ham10000", tmp_path / f"data-{name}", per_class=10, size=16
                )
                own += ["--data", str(data), *(f"--permit={one}" for one in CONFIG)]
                own += ["--audit", str(tmp_path / f"log-{name}" / "audit.jsonl")]
            command = [
                sys.executable,
                "-m",
                "medfl",
                "site",
                "serve",
                "--kit",
                str(federation.kit(name)),
            ]
            if name == "north":  # the others have their files written by the command
                # not shipped, though it has the same files: a worker opens it
                copy = shutil.copytree(shipped_folders()["ham10000"], tmp_path / "ham10000")
                document = {
                    "bundle": str(copy),
                    "folder": own[1],
                    "data": str(data),
                    "permits": [*CONFIG],
                }
                document |= {"audit": own[-1], "channels": ["red", 2]}
                (federation.kit(name) / "local" / "medfl.yaml").write_text(json.dumps(document))
                own = []
            own = ["ham10000", *own] if own else []
            with (federation.folder / f"{name}.txt").open("wb") as output:
                federation._processes[name] = subprocess.Popen(
                    [*command, *own],
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **environment},
                )
        federation.ready(240)
        requested = {"method": "scaffold", "rounds": 2, "local_epochs": 1, "batch_size": 8}
        document = flare_offer.export(
            "ham10000",
            ["north", "south"],
            tmp_path / "job",
            config=CONFIG,
            requested=requested,
            rehearsal=True,
        )
        assert (
            federation.wait(federation.submit(Path(document["job"])), 300) == "FINISHED:COMPLETED"
        )
    (run,) = (tmp_path / "state-server").glob("ham10000-*")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["rounds"], summary["channels"]) == (2, {"north": ["red", "blue"]})
    assert "the others being zero there: north red, blue." in (run / "report.html").read_text()
    for name in ("north", "south"):
        assert "sandbox: Landlock ABI" in federation.log(name)
        begun = (tmp_path / f"state-{name}" / "worker").is_dir()
        assert begun == (name == "north")
        assert (tmp_path / f"log-{name}" / "audit.jsonl").read_text().count("\n") > 3
        assert "require_signed_jobs" not in federation.log(name)
