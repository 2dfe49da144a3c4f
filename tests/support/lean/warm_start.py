"""Programs that tests start, without seconds of imports: forked from a process that has imported torch and MONAI.

A program `python -m MODULE` of `MODULES`, or a script of `benchmarks`, asks the warm process before it imports anything
(`hand_over`). That one forks a child with the program's folder, environment, arguments and streams, which runs the
module or script as Python would. The program itself stays: it passes signals on to the child, takes it and what it has
started along when it is killed, and ends as the child does.

A program that is not like the warm process goes on by itself, as always: in a sandbox, under other limits, with other
variables that libraries read when they are imported, or with more open files than the three streams.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
from typing import Any

FLARE, KERNEL = "nvflare.private.fed.app.", "ipykernel_launcher"
MODULES = (
    "medfl", "monai.bundle", "tests.support.coverage_fuzz", "tests.support.watched", KERNEL,
    f"{FLARE}simulator.simulator", f"{FLARE}simulator.simulator_worker", f"{FLARE}client.worker_process",
    f"{FLARE}server.runner_process",
)  # fmt: skip
BENCHMARKS = os.path.abspath(f"{__file__}/../../../../benchmarks") + os.sep
READ_BY_IMPORTS = (
    "GOMP_",
    "KMP_",
    "LD_",
    "MKL_",
    "MONAI",
    "MPL",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "TORCH",
)
INLINE = "module://matplotlib_inline.backend_inline"
ALIKE = (
    "PYTHONPATH",
    "MPLBACKEND",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
)
"""Of these the first two are followed by the fork, and the others are what imports of the tests' process have set."""
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
RLIMITS = 1 + max(number for name, number in vars(resource).items() if name.startswith("RLIMIT_"))
BY_ITSELF = 256
"""The answer to a program that is not like the warm process; every other answer is an exit code."""


def likeness() -> list[Any]:
    """Return what has to be equal for a fork to be as good as a start."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        bounds = [
            line.split()
            for line in file
            if line.startswith(("CapEff", "Gid", "NoNewPrivs", "Seccomp:", "Uid"))
        ]
    limits = [list(resource.getrlimit(number)) for number in range(RLIMITS)]
    read = {name: text for name, text in os.environ.items() if name.startswith(READ_BY_IMPORTS)}
    for name in ALIKE:
        read.pop(name, None)
    python = [sys.prefix, os.path.realpath(sys.executable)]  # `python3` in scripts of FLARE's
    return [bounds, limits, read, python, list(map(int, sys.flags))]


# The program's half


def hand_over(address: str, words: list[str]) -> None:
    """Let the warm process at a socket run this program, and end as it does; return if that cannot be.

    Args:
        words: what follows `python` on the command line.
    """
    unbuffered = words[:1] == ["-u"]
    given = words[unbuffered:]
    is_script = bool(given) and os.path.abspath(given[0]).startswith(BENCHMARKS)
    program, *arguments = [*given[not is_script :], ""]
    if not is_script and (given[:1] != ["-m"] or program not in MODULES):
        return
    more_files = set(os.listdir("/proc/self/fd")) - {
        "0",
        "1",
        "2",
        "3",
    }  # the last is the folder that is listed
    if more_files and not program.startswith(FLARE):  # whose sockets leak
        return
    asked = {
        "like": likeness(), "program": program, "arguments": arguments[:-1], "unbuffered": unbuffered, "path": sys.path,
        "folder": os.getcwd(), "environment": dict(os.environ), "mask": os.umask(0), "parent": os.getppid(),
        "ignored": [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN],
    }  # fmt: skip
    os.umask(asked["mask"])
    with socket.socket(socket.AF_UNIX) as warm:
        try:
            warm.connect(address)
        except OSError:
            return
        code = answer(warm, json.dumps(asked).encode())
    if code < 0:
        with contextlib.suppress(OSError):  # of two signals the handling cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code != BY_ITSELF:
        os._exit(code)


def answer(warm: socket.socket, text: bytes) -> int:
    """Send a request with the three streams; return how the child ended, to which signals are passed on."""
    streams = array.array("i", [0, 1, 2])
    warm.sendmsg([struct.pack("<q", len(text))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    warm.sendall(text)
    before = {kind: signal.getsignal(kind) for kind in PASSED_ON}
    for kind, does in before.items():
        if does is not signal.SIG_IGN:
            signal.signal(kind, lambda number, _: warm.sendall(bytes([number])))
    told = warm.recv(4)
    for kind, does in before.items():
        signal.signal(kind, does)
    return int(struct.unpack("<i", told)[0]) if told else 1


# The warm process's half


def requests(address: str, like: list[Any]) -> dict[str, Any]:
    """Serve programs at a socket until standard input ends; return in a child what its program asked for."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen(64)
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # nobody asks how those end that watch over a child
    while True:
        ready, _, _ = select.select([server, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = server.accept()
        if not os.fork():
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return child(connection, like)
        connection.close()


def child(connection: socket.socket, like: list[Any]) -> dict[str, Any]:
    """Read a request, fork and watch over the child, in which this returns the request."""
    head, ancillary, *_ = connection.recvmsg(8, socket.CMSG_SPACE(12))
    streams, text = array.array("i", ancillary[0][2]), b""
    while len(text) < struct.unpack("<q", head)[0]:
        text += connection.recv(1 << 20)
    asked = json.loads(text)
    if asked["like"] != like:
        connection.sendall(struct.pack("<i", BY_ITSELF))
        os._exit(0)
    pid = os.fork()
    if not pid:
        connection.close()
    else:
        watch(pid, connection)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return dict(asked)


def watch(pid: int, connection: socket.socket) -> None:
    """Pass signals on to a child, kill it and what it has started when its program is gone, and say how it ended."""
    for stream in (0, 1, 2):
        os.close(stream)
    end = os.pidfd_open(pid)
    while end not in select.select([end, connection], [], [])[0]:
        numbers = connection.recv(64)
        for number in numbers:
            os.kill(pid, number)
        for one in [] if numbers else [pid, *descendants(pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("<i", code))
    os._exit(0)


def descendants(pid: int) -> list[int]:
    """Return what a process has started, which whoever kills its program's tree does not see."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                children = [int(child) for child in file.read().split()]
            found += [one for child in children for one in (child, *descendants(child))]
    return found


def become(asked: dict[str, Any], set_by_imports: dict[str, str]) -> None:
    """Make this process the program that was asked for."""
    import numpy

    numpy.random.seed()  # noqa: NPY002 - its state is drawn when it is imported
    if asked["program"] == KERNEL or "MPLBACKEND" in asked["environment"]:
        # a kernel says it by the variable, to itself and its commands; matplotlib reads it when it is imported
        import matplotlib

        matplotlib.rcParams["backend"] = asked["environment"].get("MPLBACKEND", INLINE)
    for (
        number
    ) in PASSED_ON:  # the warm process may be in the background, where an interrupt is ignored
        does = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else does)
    os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(set_by_imports | asked["environment"])
    tempfile.tempdir = None  # of the warm process's TMPDIR
    os.umask(asked["mask"])
    os.getppid = lambda: int(asked["parent"])
    sys.argv = [asked["program"], *asked["arguments"]]
    is_script = asked["program"].endswith(".py")
    sys.path[:] = [
        os.path.dirname(asked["program"]) if is_script else asked["folder"],
        *asked["path"],
    ]
    sys.path_importer_cache.clear()
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        stream = open(number, "w", buffering=1, errors=errors, closefd=False)  # noqa: SIM115
        whole_lines = number == 2 or stream.isatty()
        stream.reconfigure(line_buffering=whole_lines, write_through=asked["unbuffered"])
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def imports() -> None:
    """Import what the programs need, which starts no thread."""
    from medfl.core.importing import without_gc

    with without_gc():
        import monai.bundle  # noqa: F401

        import medfl.runs.launch  # noqa: F401

        # what FLARE's processes import; it is not installed everywhere
        with contextlib.suppress(ImportError):
            import medfl.flare.parts
            import medfl.flare.server
            import medfl.flare.site  # noqa: F401 (the programs that are forked find it loaded)
    assert len(os.listdir("/proc/self/task")) == 1


if __name__ == "__main__":
    LIKE, BEFORE = likeness(), dict(os.environ)
    imports()
    import gc

    gc.freeze()
    ASKED = requests(sys.argv[1], LIKE)
    become(ASKED, {name: text for name, text in os.environ.items() if name not in BEFORE})
    if ASKED["program"].endswith(".py"):
        runpy.run_path(ASKED["program"], run_name="__main__")
    else:
        runpy.run_module(ASKED["program"], run_name="__main__", alter_sys=True)
