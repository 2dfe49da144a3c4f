"""The sandbox: what a process may still do in it, tried by processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from medfl.core.errors import InputError
from medfl.safety import sandbox

landlock = pytest.mark.skipif(
    sandbox.abi() < 4, reason="the kernel's Landlock is missing, or older than ABI 4"
)

CHILD = """
import ctypes, fcntl, json, os, resource, socket, subprocess, sys, termios, threading
import pyseccomp
from multiprocessing import get_context
from pathlib import Path
from medfl.safety.sandbox import Allowed, Sandbox, devices, python_and_system

place, allowed, package = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
run, outside, data = place / "run", place / "outside", place / "data"
paths = {name: tuple(map(Path, allowed.get(name, ()))) for name in ("programs",)}
ports = {name: tuple(allowed.get(name, ())) for name in ("connect", "bind")}
box = Sandbox(Allowed((*python_and_system(), data), (run, *devices()), **ports, **paths))
line = box.line(run)
held = os.open(outside / "held", os.O_RDONLY)
box.enter()

def connect(port):
    socket.create_connection(("127.0.0.1", port), 5).close()

def bind(port):
    with socket.socket() as one:
        one.bind(("127.0.0.1", port))

def call(name, *arguments):
    number = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name)
    if ctypes.CDLL(None, use_errno=True).syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def fast_open(function):
    with socket.socket() as client:
        function(client)

def listen_unbound():
    with socket.socket() as server:
        server.listen()

def datagram(address):
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendmsg([b"x"], [], 0, address)

def control(command, value):
    with open(run / "file", "w") as file:
        fcntl.fcntl(file, command, value)

def sibling():
    caller = os.getpid()
    call("clone", 0x8000 | 17, 0, 0, 0, 0)
    if os.getpid() != caller:
        os._exit(0)

def list_folder(path):
    if not os.path.exists(path):
        raise PermissionError
    os.listdir(path)

parent = os.getppid()
empty = ctypes.create_string_buffer(256)
FAST_OPEN = 0x20000000

def in_a_child(task):
    with get_context("fork").Pool(1) as pool:
        return pool.map(task, [place])

def write_outside(place):
    try:
        (place / "outside" / "child").write_text("x")
    except PermissionError:
        return
    raise AssertionError("a child wrote")

tries = {
    "read data": lambda: (data / "image").read_text(),
    "list data": lambda: os.listdir(data),
    "write the run": lambda: (run / "a").write_text("x"),
    "folders in the run": lambda: (run / "b/c").mkdir(parents=True),
    "move in the run": lambda: (run / "a").rename(run / "b/c/a"),
    "delete in the run": lambda: (run / "b/c/a").unlink(),
    "shared memory": lambda: in_a_child(str),
    "null device": lambda: open(os.devnull, "w").write("x"),
    "a child writes outside": lambda: in_a_child(write_outside),
    "import": lambda: __import__("sqlite3"),
    "a pair of sockets": lambda: socket.socketpair(),
    "read outside": lambda: (outside / "secret").read_text(),
    "list outside": lambda: os.listdir(outside),
    "write outside": lambda: (outside / "new").write_text("x"),
    "append outside": lambda: (outside / "secret").open("a"),
    "shorten outside": lambda: os.truncate(outside / "secret", 0),
    "delete outside": lambda: (outside / "secret").unlink(),
    "move out": lambda: (run / "moved").rename(outside / "moved"),
    "move in": lambda: (outside / "secret").rename(run / "secret"),
    "move data": lambda: (data / "image").rename(run / "image"),
    "write data": lambda: (data / "image").write_text("x"),
    "link in": lambda: os.link(data / "image", run / "image"),
    "symlink outside": lambda: os.symlink("secret", outside / "link"),
    "through a symlink": lambda: (run / "way").write_text("x"),
    "a folder outside": lambda: (outside / "folder").mkdir(),
    "a package": lambda: (package / "canary.py").write_text("x"),
    "permissions": lambda: (outside / "secret").chmod(0o777),
    "permissions of a handle": lambda: os.fchmod(held, 0o777),
    "attributes": lambda: os.setxattr(outside / "secret", "user.a", b"x"),
    "program": lambda: subprocess.run(["/bin/true"], check=True),
    "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "python": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "connect": lambda: connect(allowed["port"]),
    "connect elsewhere": lambda: connect(allowed["elsewhere"]),
    "bind": lambda: bind(0),
    "bind there": lambda: bind(allowed["free"]),
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "datagram": lambda: datagram(str(place / "listens")),
    "abstract datagram": lambda: datagram("\\0medfl"),
    "multipath TCP": lambda: socket.socket(proto=262),
    "io_uring": lambda: call("io_uring_setup", 1, empty),
    "fast open": lambda: fast_open(lambda one: one.sendto(b"x", FAST_OPEN, ("127.0.0.1", allowed["elsewhere"]))),
    "fast open of a message": lambda: fast_open(
        lambda one: one.sendmsg([b"x"], [], FAST_OPEN, ("127.0.0.1", allowed["elsewhere"]))
    ),
    "fast open of messages": lambda: fast_open(lambda one: call("sendmmsg", one.fileno(), empty, 1, FAST_OPEN)),
    "listen unbound": listen_unbound,
    "limits of a process": lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE),
    "cores of a process": lambda: os.sched_setaffinity(parent, {0}),
    "scheduler of a process": lambda: os.sched_setscheduler(parent, os.SCHED_BATCH, os.sched_param(0)),
    "priority of a process": lambda: os.setpriority(os.PRIO_PROCESS, parent, 19),
    "environment of a process": lambda: open(f"/proc/{parent}/environ", "rb").read(),
    "maps of a process": lambda: open(f"/proc/{parent}/maps", "rb").read(),
    "memory of a process": lambda: open(f"/proc/{parent}/mem", "rb").read(1),
    "handles of a process": lambda: os.readlink(f"/proc/{parent}/fd/0"),
    "trace a process": lambda: call("ptrace", 16, parent, 0, 0),
    "read a process": lambda: call("process_vm_readv", parent, empty, 1, empty, 1, 0),
    "handle of a process": lambda: call("pidfd_open", parent, 0),
    "a key": lambda: call("add_key", b"user", b"medfl", b"x", 1, -3),
    "keyrings": lambda: call("keyctl", 0, -3, 0),
    "times": lambda: os.utime(outside / "secret", (0, 0)),
    "times of a handle": lambda: os.utime(held, (0, 0)),
    "watch": lambda: call("inotify_init1", 0),
    "watch a folder": lambda: fcntl.fcntl(os.open(run, os.O_RDONLY), fcntl.F_NOTIFY, 0x20),
    "hold a file": lambda: control(fcntl.F_SETLEASE, fcntl.F_WRLCK),
    "signals by a file": lambda: control(fcntl.F_SETOWN, parent),
    "kind of these signals": lambda: control(10, 9),
    "keys of the system": lambda: list_folder("/etc/ssl/private"),
    "the kernel's own files": lambda: list_folder("/sys/kernel/debug"),
    "watch all": lambda: call("fanotify_init", 0, 0),
    "namespace": lambda: call("unshare", 0x10000000),
    "clone into a namespace": lambda: call("clone", 0x10000000 | 17, 0, 0, 0, 0),
    "clone a sibling": sibling,
    "new clone": lambda: call("clone3", empty, 88),
    "mount": lambda: call("mount", b"none", bytes(run), b"tmpfs", 0, 0),
    "root": lambda: os.chroot(run),
    "message queue": lambda: call("mq_open", b"medfl", 0o102, 0o600, 0),
    "shared segment": lambda: call("shmget", 4711, 4096, 0o1600),
    "semaphores": lambda: call("semget", 4711, 1, 0o1600),
    "performance": lambda: call("perf_event_open", empty, parent, -1, -1, 0),
    "program for the kernel": lambda: call("bpf", 0, empty, 72),
    "faults": lambda: call("userfaultfd", 0),
    "dumps": lambda: call("prctl", 4, 1, 0, 0, 0),
    "tracer": lambda: call("prctl", 0x59616D61, -1, 0, 0, 0),
    "owner": lambda: os.chown(outside / "secret", 1, 1),
    "user": lambda: os.setuid(1),
    "groups": lambda: os.setgroups([]),
    "host name": lambda: socket.sethostname("x"),
    "leave the group": os.setsid,
    "another group": lambda: os.setpgid(0, 0),
    "clock": lambda: call("clock_settime", 0, empty),
    "typing": lambda: fcntl.ioctl(0, termios.TIOCSTI, b"x"),
    "signal": lambda: os.kill(os.getppid(), 0),
}
result = {"line": line}
for name, attempt in tries.items():
    try:
        attempt()
        result[name] = "done"
    except Exception as error:
        result[name] = type(error).__name__
        if isinstance(error, OSError) and error.errno not in (1, 13, 18, 38):
            result[name] = str(error)
print(json.dumps(result))
"""
DONE = (
    "read data", "list data", "write the run", "folders in the run", "move in the run", "delete in the run",
    "shared memory", "null device", "a child writes outside", "import", "a pair of sockets",
)  # fmt: skip
NETWORK = (
    "connect",
    "connect elsewhere",
    "bind",
    "bind there",
    "unix socket",
    "netlink",
    "datagram",
    "abstract datagram",
    "multipath TCP",
    "fast open",
    "fast open of a message",
    "fast open of messages",
    "listen unbound",
)
PROGRAMS = ("program", "spawn", "python")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for folder in ("run", "outside", "data"):
        (tmp_path / folder).mkdir()
    for file in ("outside/secret", "outside/held", "data/image", "run/moved"):
        (tmp_path / file).write_text("as it was")
    (tmp_path / "run" / "way").symlink_to("../outside/secret")
    return tmp_path


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Two ports that listen, and one that is free."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        with socket.create_server(("127.0.0.1", 0)) as free:
            last = free.getsockname()[1]
        yield [one.getsockname()[1], other.getsockname()[1], last]


def tried(place: Path, ports: list[int], **allowed: Any) -> dict[str, str]:
    """Return what a child could do: name -> "done" or the error."""
    allowed |= dict(zip(("port", "elsewhere", "free"), ports, strict=True))
    package = Path(json.__file__).parent
    command = [sys.executable, "-c", CHILD, str(place), json.dumps(allowed), str(package)]
    environment = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2])}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert not (package / "canary.py").exists()
    result: dict[str, str] = json.loads(done.stdout)
    return result


def _done(result: dict[str, str]) -> list[str]:
    return [name for name, outcome in result.items() if outcome == "done"]


def tree(folder: Path) -> dict[str, tuple[str, int]]:
    return {path.name: (path.read_text(), path.stat().st_mode) for path in folder.iterdir()}


@landlock
def test_only_the_run_folder_is_written_and_nothing_connected_or_executed(
    place: Path, ports: list[int]
) -> None:
    before = tree(place / "outside"), tree(place / "data")
    result = tried(place, ports)
    line = result.pop("line")
    assert line.startswith(
        f"Landlock ABI {sandbox.abi()}: writes below {place / 'run'} only, no network, no "
    )
    refused = {name: how for name, how in result.items() if how != "done"}
    assert tuple(name for name in result if name not in refused) == DONE
    assert set(refused.values()) <= {"PermissionError", "OSError"}, refused
    assert (tree(place / "outside"), tree(place / "data")) == before


@landlock
def test_an_allowed_port_is_reached_and_no_other(place: Path, ports: list[int]) -> None:
    assert "listen unbound" not in _done(tried(place, ports, connect=[ports[0]]))
    result = tried(place, ports, connect=[ports[0]], bind=[ports[2]])
    assert f"TCP ports {', '.join(map(str, sorted({ports[0], ports[2]})))} only" in result["line"]
    assert [name for name in NETWORK if result[name] == "done"] == [
        "connect",
        "bind there",
        "listen unbound",  # the kernel chooses a port, which no rule of Landlock names
    ]
    assert not any(result[name] == "done" for name in PROGRAMS)


@landlock
def test_an_allowed_program_runs_and_no_other(place: Path, ports: list[int]) -> None:
    loader = [str(path) for path in Path("/lib64").glob("ld-linux*")] + [
        str(p) for p in Path("/lib").glob("ld-linux*")
    ]
    result = tried(place, ports, programs=[os.path.realpath(sys.executable), *loader])
    assert [name for name in PROGRAMS if result[name] == "done"] == ["python"]
    assert not any(result[name] == "done" for name in NETWORK)


@landlock
def test_a_process_with_threads_is_refused() -> None:
    code = (
        "import threading, time; from medfl.safety.sandbox import Allowed, Sandbox\n"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); Sandbox(Allowed()).enter()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert "a sandbox in a process with threads" in done.stderr


def test_without_landlock_it_is_an_error_and_not_a_run_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "abi", lambda: 0)
    with pytest.raises(InputError, match=r"a Linux kernel of at least 5\.13 with Landlock"):
        sandbox.Sandbox(sandbox.Allowed())


@landlock
def test_what_an_older_kernel_does_not_refuse_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert sandbox.Sandbox(sandbox.Allowed()).not_refused == []
    monkeypatch.setattr(sandbox, "abi", lambda: 3)
    box = sandbox.Sandbox(sandbox.Allowed())
    assert box.not_refused == ["TCP connections", "ioctl of devices", "signals to other processes"]
    assert box.line(tmp_path).endswith(
        "does not refuse TCP connections, ioctl of devices, signals to other processes"
    )


@landlock
def test_without_libseccomp_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(InputError, match="the library libseccomp "):
        sandbox.Sandbox(sandbox.Allowed())
