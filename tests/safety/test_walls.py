"""The gate switched off: what hostile bundles do inside the walls, as their code's own process, is to no one's harm."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from monai.bundle import ConfigParser

from medfl.safety import sandbox
from medfl.safety.sandbox import Allowed, Sandbox, devices, python_and_system
from tests.hostile.base import write
from tests.hostile.objects import COMMON, HANDED_ON, OBJECTS
from tests.hostile.table import HOSTILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sandbox.abi() < 6, reason="the kernel's Landlock is older than ABI 6"),
]
_SECONDS = 12


class Neighbourhood:
    """What is around a worker and must stay as it is: files of others, a port that listens, a process."""

    def __init__(self, folder: Path, server: socket.socket) -> None:
        self.folder = folder
        self.server = server
        for name in (
            "account.json",
            "audit.jsonl",
            "policy.yaml",
            "other_run/run.json",
            "home/.ssh/id",
        ):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{name} as it was")

        self.before = self.state()
        self.process = os.fork()
        if not self.process:
            signal.pause()
            os._exit(0)

    def state(self) -> dict[str, tuple[int, float, str]]:
        """Return permissions, time and content of each file."""
        return {
            str(path.relative_to(self.folder)): (
                path.lstat().st_mode,
                path.lstat().st_mtime,
                path.read_text() if path.is_file() else "",
            )
            for path in sorted(self.folder.rglob("*"))
        }

    def check(self, name: str) -> None:
        """Fail where something was changed, reached or ended."""
        assert self.state() == self.before, name
        with pytest.raises(BlockingIOError):
            self.server.accept()
        assert os.waitpid(self.process, os.WNOHANG) == (0, 0), f"{name} ended a process"


@pytest.fixture(scope="module", autouse=True)
def scanned() -> None:
    """Let MONAI look for its classes here, once, and not in each worker."""
    ConfigParser({"x": {"_target_": "Identity"}}).get_parsed_content("x")


@pytest.fixture
def neighbourhood(tmp_path: Path) -> Iterator[Neighbourhood]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        there = Neighbourhood(tmp_path / "others", server)
        yield there
        os.kill(there.process, signal.SIGKILL)
        os.waitpid(there.process, 0)


def evaluated(bundle: Path, scratch: Path, user: int | None = None) -> str:
    """Let MONAI, without medfl's gate, evaluate all of a bundle in a worker; return what the worker wrote of it."""
    scratch.mkdir()
    if user is not None:
        os.chown(scratch, user, user)

    worker = os.fork()
    if not worker:
        try:
            _work(bundle, scratch, user)
        finally:
            os._exit(1)

    deadline = time.monotonic() + _SECONDS
    while os.waitpid(worker, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            break
        time.sleep(0.01)

    file = scratch / "outcome"
    return file.read_text() if file.is_file() else ""


def _work(bundle: Path, scratch: Path, user: int | None) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)

    os.chdir(scratch)
    box = Sandbox(Allowed((*python_and_system(), bundle), (scratch, *devices())))
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    if user is not None:
        os.setgid(user)
        os.setuid(user)

    box.enter()
    outcomes = []
    for file in sorted((bundle / "configs").glob("*")):
        outcomes.append(f"{file.name}: {_outcome(file)}")
        (scratch / "outcome").write_text("\n".join(outcomes))


def _outcome(file: Path) -> str:
    """Return what became of a configuration: "done", or the error of each id that was not."""
    try:
        parser = ConfigParser()
        parser.read_config(str(file))
        parser.read_meta(str(file.parent / "metadata.json"))
    except BaseException as error:
        return type(error).__name__

    errors = []
    for name in list(parser.config):
        try:
            parser.get_parsed_content(name)
        except BaseException as error:
            errors.append(f"{name} {type(error).__name__}")

    return ", ".join(errors) or "done"


def test_every_hostile_bundle_of_the_table_is_harmless(
    tmp_path: Path, neighbourhood: Neighbourhood
) -> None:
    ran = []
    for number, (name, case) in enumerate(HOSTILE.items()):
        bundle = write(tmp_path / f"bundle-{number}", case.train, case.files)
        before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
        outcome = evaluated(bundle, tmp_path / f"scratch-{number}")
        neighbourhood.check(name)
        after = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
        assert after == before, name
        if re.search(r"train\.json: .*\bx\b", outcome) is None and "train.json" in outcome:
            ran.append(name)

    assert len(ran) > len(HOSTILE) / 4  # the gate was off indeed: much of it was evaluated


def test_what_objects_and_their_methods_do_is_harmless(
    tmp_path: Path, neighbourhood: Neighbourhood
) -> None:
    """No expression is asked for the identity of what it calls, or of whom it hands it to."""
    configurations = HANDED_ON | {name: {"x": value} for name, value in OBJECTS.items()}
    ran = 0
    for number, (name, ids) in enumerate(configurations.items()):
        text = json.dumps({**COMMON, **ids}).replace("MARK", str(neighbourhood.folder / "mark"))
        table = {"state.csv": "state,optimizer\n1,2\n"}
        bundle = write(tmp_path / f"bundle-{number}", json.loads(text), table)
        outcome = evaluated(bundle, tmp_path / f"scratch-{number}")
        neighbourhood.check(name)
        ran += "train.json" in outcome and re.search(r"train\.json: .*\bx\b", outcome) is None

    assert ran > len(configurations) / 3


ATTACKS: Mapping[str, str] = {
    "delete": "__import__('shutil').rmtree({others!r})",
    "overwrite": "__import__('pathlib').Path({others!r} + '/account.json').write_text('')",
    "replace": "__import__('pathlib').Path({others!r} + '/audit.jsonl').write_text('x')",
    "times": "__import__('os').utime({others!r} + '/policy.yaml', (0, 0))",
    "permissions": "__import__('os').chmod({others!r} + '/home', 0o777)",
    "link": "__import__('os').link({others!r} + '/home/.ssh/id', 'id')",
    "read": (
        "__import__('pathlib').Path('read').write_text("
        "__import__('pathlib').Path({others!r} + '/home/.ssh/id').read_text())"
    ),
    "list": "__import__('pathlib').Path('list').write_text(str(__import__('os').listdir({others!r})))",
    "glob": (
        "[__import__('pathlib').Path('glob').write_text(name) for name in __import__('glob').glob({others!r} + '/*')]"
    ),
    "table": (
        "__import__('pathlib').Path('table').write_text("
        "__import__('pandas').read_csv({others!r} + '/account.json').to_csv())"
    ),
    "connect": "__import__('socket').create_connection(('127.0.0.1', {port}), 2)",
    "program": "__import__('subprocess').run(['touch', {others!r} + '/touched'])",
    "shell": "__import__('os').system('touch ' + {others!r} + '/touched')",
    "kill": "__import__('os').kill({process}, 9)",
    "kill all": "__import__('os').kill(-1, 9)",
    "environment": (
        "__import__('pathlib').Path('environment').write_bytes(__import__('pathlib').Path('/proc/{process}/environ').read_bytes())"
    ),
    "code in memory": (
        "(lambda m: (m.write(b'\\x48\\xc7\\xc0\\x3c\\x00\\x00\\x00\\x0f\\x05'), m))"
        "(__import__('mmap').mmap(-1, 4096, prot=7))"
    ),
    "a call of the kernel": (
        "__import__('ctypes').CDLL(None).syscall(82, ({others!r} + '/account.json').encode(), b'gone')"
    ),
    "forks": "[__import__('os').fork() for _ in range(3)]",
}
_LEFT = ("read", "list", "glob", "table", "environment", "id")
"""Files of the scratch folder that an attack which succeeds would leave."""


@pytest.mark.parametrize("user", [None, 65534], ids=["as this user", "as nobody"])
def test_code_of_any_kind_changes_reads_reaches_and_ends_nothing(
    user: int | None, neighbourhood: Neighbourhood, tmp_path: Path
) -> None:
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        if user is not None and folder.owner() == "root" and folder != Path("/tmp"):
            folder.chmod(0o755)

    port = neighbourhood.server.getsockname()[1]
    for number, (name, attack) in enumerate(ATTACKS.items()):
        code = attack.format(
            others=str(neighbourhood.folder), port=port, process=neighbourhood.process
        )
        bundle = write(tmp_path / f"bundle-{number}", {"x": f"${code}"})
        scratch = tmp_path / f"scratch-{number}"
        outcome = evaluated(bundle, scratch, user)
        neighbourhood.check(name)
        left = sorted(path.name for path in scratch.iterdir() if path.name in _LEFT)
        assert [file for file in left if (scratch / file).stat().st_size] == [], (name, outcome)
        if name not in (
            "glob",
            "kill all",
            "code in memory",
            "a call of the kernel",
            "forks",
            "shell",
        ):
            assert "x " in outcome, (name, outcome)  # it was tried, and failed


def test_the_attacks_succeed_without_walls(
    neighbourhood: Neighbourhood, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the test above would show nothing."""
    parser = ConfigParser({"x": "$" + ATTACKS["replace"].format(others=str(neighbourhood.folder))})
    parser.get_parsed_content("x")
    assert neighbourhood.state() != neighbourhood.before
    monkeypatch.chdir(tmp_path)
    parser = ConfigParser({"x": "$" + ATTACKS["environment"].format(process=neighbourhood.process)})
    parser.get_parsed_content("x")
    assert (tmp_path / "environment").stat().st_size
