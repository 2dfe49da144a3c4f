"""Walls around a verb that opens a foreign bundle: a worker in a sandbox does the work, a keeper waits for it.

The keeper is the process that was started. It opens nothing of the bundle, and has left nothing to the worker but the
streams of the terminal. The worker, its child, reads what the command line names and the installation, writes one
folder, and has neither network nor programs. It cannot get out, so what a bundle may do is not asked.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from medfl.cli.parser import log, warn
from medfl.core.errors import InputError
from medfl.core.run import Run
from medfl.safety import sandbox as walls
from medfl.safety.bounds import end_group_with_keeper, wait
from medfl.safety.sandbox import Allowed, Sandbox, devices, private_folders, python_and_system
from medfl.storage.places import cache_folder, record_of
from medfl.storage.run_documents import read_run

_COMPILERS = ("/usr", "/bin", "/lib", "/lib64")
_DOTTED = re.compile(r"([A-Za-z_]\w*)(\.\w+)+(:\w+)?")
"""The dotted path of a method of the user's own; group 1 is the module or package."""


@dataclass(frozen=True)
class Use:
    """What a verb opens and writes.

    Attributes:
        bundles: names or folders of bundles, or folders with weights in a bundle's layout.
        runs: run folders or run.json files, whose records name bundles.
        folder: folder that is written, made where it is not there.
        file: name of the verb's argument with a new file or folder: the keeper takes it over from the worker;
            `args.shown_file` stays the one that was given.
        connects: why the verb needs connections or programs, "" where it needs none.
        compiles: whether compilers may be executed.
        ports: TCP ports that are connected to, of any machine: Landlock knows no addresses.
    """

    bundles: Sequence[str | Path] = ()
    runs: Sequence[Path] = ()
    folder: Path | None = None
    file: str = ""
    connects: str = ""
    compiles: bool = False
    ports: Sequence[int] = ()


def hold(args: Namespace, use: Use) -> None:
    """Go on in a worker inside the walls if a bundle is foreign, or `--sandbox` is given; else return as called.

    Only the program `medfl` divides itself: a process of somebody else's, which calls `main`, works as it is.

    Raises:
        InputError: there are no walls on this machine and no `--trust`, the verb needs what they refuse, or
            `--sandbox` is asked of a process of somebody else's.
    """
    if use.file:
        args.shown_file = getattr(args, use.file)

    records = [*filter(None, map(_record, use.runs))]
    foreign = []
    reasons = []
    for bundle in (*use.bundles, *(run.bundle_path for run in records)):
        from medfl.bundle.files import ships_unchanged  # imports NumPy, which refusals need not

        if bundle and not ships_unchanged(bundle):
            foreign.append(bundle)
            reasons.append(f"bundle {bundle}, which is not shipped, or changed since,")

    for run in filter(_brings_code, records):
        reasons.append(f"the record of run {run.run_hash}")

    is_asked_for = getattr(args, "sandbox", False)
    if not is_asked_for and not (reasons and getattr(args, "own_process", False)):
        return

    if getattr(args, "no_sandbox", False):
        if is_asked_for:
            raise InputError("--sandbox with --no-sandbox", "one of them", "leave one out")
        log("note: --no-sandbox: what this bundle says is run with your rights")
        return

    about = "--sandbox" if is_asked_for else reasons[0]
    runtime = getattr(args, "runtime", "")
    connects = f"--runtime {runtime}" if runtime.startswith("flare") else use.connects
    if connects:
        if is_asked_for:
            remedy = "leave it out"
        else:
            remedy = "leave it out, or add --no-sandbox"

        raise InputError(f"{about} with {connects}", "work without connections", remedy)

    if lacking := walls.lacking():
        if is_asked_for or not getattr(args, "trust", False):
            advice = "install it" if "libseccomp" in lacking else "run it there"
            if not is_asked_for:
                flag = "--trust" if hasattr(args, "trust") else "--no-sandbox"
                advice += f", or add {flag}: it then runs with your rights"
            raise InputError(f"{about} on this machine", lacking, advice)
        log(f"note: --trust: no walls around this bundle, as they need {lacking}")
        return

    if not getattr(args, "own_process", False):
        raise InputError(
            "--sandbox in Python's own process", "the program medfl", "call it by its name"
        )

    _divide(args, use, [*map(Path, foreign), *_named(args, records)])


def _brings_code(run: Run) -> bool:
    """Tell whether a record has expressions that its bundle, a shipped one, does not have."""
    file = Path(run.bundle_path) / "configs" / "federated.yaml"
    shipped = file.read_text() if file.is_file() else ""
    return any(text.startswith("$") and text not in shipped for text in _texts(run.config))


def _divide(args: Namespace, use: Use, readable: Sequence[Path]) -> None:
    """Return in the worker; the keeper stays in here until it ends."""
    folder = use.folder
    scratch = None
    was_there = folder is not None and folder.exists()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        scratch = Path(tempfile.mkdtemp(prefix="medfl-"))
        folder = scratch

    target = None
    if use.file and getattr(args, use.file) is not None:
        target = Path(getattr(args, use.file))
        inside = (scratch or folder) / target.name
        setattr(args, use.file, inside)

    first_path = [os.fsencode(path.resolve()) for path in readable[:1]]
    key = hashlib.sha256(b"".join(first_path)).hexdigest()[:16]
    private = cache_folder("sandbox") / key
    variables = private_folders(private)
    programs = (*_COMPILERS, sys.prefix, sys.base_prefix) if use.compiles else ()
    allowed = Allowed(
        read=(*python_and_system(), *readable, cache_folder(""), _hub()),
        write=(folder, private, *devices()),
        programs=tuple(map(Path, programs)),
        connect=tuple(use.ports),
    )
    sandbox = Sandbox(allowed)
    sys.stdout.flush()
    sys.stderr.flush()
    closes_with_keeper, keeper = os.pipe()
    worker = os.fork()
    if not worker:
        os.setpgid(0, 0)  # what the terminal sends, the keeper passes on: once
        os.close(keeper)
        end_group_with_keeper(closes_with_keeper)
        os.environ.update(variables)
        tempfile.tempdir = None  # which the keeper's own may have set
        sandbox.enter()
        if not getattr(args, "quiet", False):
            log(f"sandbox: {sandbox.line(folder)}")
        return

    code = _kept(worker)
    try:
        if target is not None and code == 0:
            _take_over(inside, target)
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        elif not was_there:
            with suppress(OSError):  # a refused run has written nothing, and leaves no folder
                folder.rmdir()

    os._exit(code)  # it has printed nothing since the worker began


def _kept(worker: int) -> int:
    """Wait for the worker, pass signals on to it, and return its exit code."""

    def pass_on(number: int, _: object) -> None:
        os.kill(worker, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)

    code, reason = wait(worker)
    if code < 0:
        reason = reason or f"by {signal.Signals(-code).name}"
        warn(f"error: the worker was ended: {reason}; what was saved is intact")
        return 1

    return code


def _take_over(inside: Path, target: Path) -> None:
    """Put a file or folder that the worker wrote where the user wants it, of links and special files nothing."""
    if inside.is_dir() and not inside.is_symlink():
        target.mkdir(parents=True, exist_ok=True)
        for entry in inside.iterdir():
            _take_over(entry, target / entry.name)
        return

    handle = os.open(inside, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)


def _record(path: Path) -> Run | None:
    """Return a run's record; None for one that cannot be read: told later."""
    try:
        return read_run(record_of(path))[0]
    except (InputError, OSError):
        return None


def _named(args: Namespace, records: Sequence[Run]) -> Iterator[Path]:
    """Yield the files and folders that are named: on the command line, in records, by $MEDFL_DATA."""
    recorded: list[object] = []
    for run in records:
        recorded += [run.bundle_path, run.data.folder, run.options, run.config]
        recorded.append(run.public and run.public.data.folder)

    paths = (text for text in _texts(recorded) if "/" in text)
    for text in (os.environ.get("MEDFL_DATA", ""), *args.given, *paths):
        value = text.partition("=")[2]
        parts = [text, value, text.partition(":")[2], value.partition(":")[2]]
        if dotted := _DOTTED.fullmatch(text):
            parts += [dotted[1], f"{dotted[1]}.py"]

        for part in parts:
            if part and os.path.exists(path := os.path.expanduser(part)):
                yield Path(path)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        value = list(value.values())

    if isinstance(value, (list, tuple)):
        for member in value:
            yield from _texts(member)


def _hub() -> Path:
    """Return the folder of models from the hub, without the user's token beside it."""
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
