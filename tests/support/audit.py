"""What a process does outside of itself, as Python's audit hook sees it: files changed, programs, sockets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_CHANGES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate",
    "os.utime", "os.putenv", "shutil.move", "shutil.rmtree", "shutil.copyfile", "shutil.copytree", "os.chflags",
)  # fmt: skip
"""Events whose arguments name what is changed."""
_NEVER = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect", "socket.bind",
    "socket.sendto", "socket.getaddrinfo", "urllib.Request", "pickle.find_class", "code.__new__", "pty.spawn",
    "ftplib.connect", "smtplib.connect", "webbrowser.open", "builtins.breakpoint", "ctypes.dlopen",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_DECORATORS = "torch.utils._contextlib"

MAY = ("ctypes.dlopen", "os.putenv", "pickle.find_class")
"""Libraries that PyTorch loads, its environment, and what worker processes of one run hand to each other."""
LISTED = {
    "importlib_metadata",
    "medfl",
    "monai",
    "torch",
    "numpy",
    "ignite",
    "scipy",
    "sklearn",
    "matplotlib",
    "PIL",
    "nibabel",
    "pandas",
    "skimage",
    "tqdm",
    "safetensors",
    "yaml",
    "joblib",
    "threadpoolctl",
    "SimpleITK",
    "itk",
    "pydicom",
    "pyseccomp",  # the walls' filter of system calls
    "torchvision",
}
"""Libraries that a run may import while it goes on; Python's own modules beside them."""
EXPORTING = {
    "google",  # its protobuf, which ONNX is written with
    "onnx",
    "onnxruntime",
    "onnxscript",
    "onnx_ir",
    "ml_dtypes",
    "networkx",
    "sympy",
    "triton",
    "tabulate",
    "wcwidth",
}
"""Likewise what an export takes besides."""


def unlisted(modules: Iterable[str]) -> set[str]:
    """Return the libraries of modules that a run has no need to import."""
    libraries = {name.partition(".")[0] for name in modules}
    return {
        name
        for name in libraries - LISTED - EXPORTING - set(sys.stdlib_module_names)
        if name[0] != "_"
    }


def _renames(caller: FrameType) -> bool:
    """Tell whether it is PyTorch (2.15) that gives a decorator as `torch.no_grad` the name of what it decorates."""
    return (
        caller.f_code.co_name == "_set_stack_frame_name"
        and caller.f_globals.get("__name__") == _DECORATORS
    )


class Watch:
    """Collects what happens while it is on; the hook stays with the process, and with those that it forks."""

    def __init__(self, may_change: tuple[Path, ...] = (), may: tuple[str, ...] = ()) -> None:
        """Install the hook.

        Args:
            may_change: folders below which files may change.
            may: events that may happen.
        """
        self.seen: list[str] = []
        self._on, self._roots, self._may = False, [str(root.resolve()) for root in may_change], may
        sys.addaudithook(self._hook)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch; what an import compiles is not written meanwhile, so that it counts for nothing."""
        before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        self._on = True
        try:
            yield
        finally:
            self._on = False
            sys.dont_write_bytecode = before

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on or event in self._may:
            return
        self._on = False
        try:
            if event in _NEVER and not (event == "code.__new__" and _renames(sys._getframe(1))):
                self.seen.append(f"{event} {arguments!r:.200}")
            elif event == "open" and self._changes(arguments):
                self._place(event, arguments[0])
            elif (
                event in ("os.remove", "os.rmdir")
                and isinstance(arguments[1], int)
                and arguments[1] >= 0
            ):
                self._place(
                    event, f"/proc/self/fd/{arguments[1]}/{arguments[0]}"
                )  # of a tree that is removed
            elif event in _CHANGES:
                for place in arguments[event.startswith("shutil.copy") : 2]:
                    self._place(event, place)
        finally:
            self._on = True

    def _changes(self, arguments: tuple[Any, ...]) -> bool:
        mode, flags = arguments[1], arguments[2]
        return (
            bool(flags & _WRITES) if mode is None else any(letter in str(mode) for letter in "wax+")
        )

    def _place(self, event: str, place: Any) -> None:
        if not isinstance(place, str | bytes | os.PathLike):
            return  # a descriptor that is open already
        path = os.path.realpath(os.fsdecode(place))
        if path != os.devnull and not any(
            path == root or path.startswith(root + os.sep) for root in self._roots
        ):
            self.seen.append(f"{event} {path}")
