"""The sandbox around a verb that opens a third-party bundle: a worker does the work, a keeper waits for it.

The keeper is the original process. It opens nothing of the bundle, and leaves the worker only the streams of the
terminal. The worker, its child, reads what the command line names and the installation, writes one
folder, and has neither network nor programs. It cannot get out, so the bundle's actions need not be judged.
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
from threading import Thread

from medfl.cli.parser import intact, log, warn
from medfl.core import (
    InputError,
    Run,
    RunError,
    not_plain,
    outside_walls,
    pass_on,
    printable,
    take_sigterm,
)
from medfl.safety import sandbox as walls
from medfl.safety.bounds import close_from, end_group_with_keeper, wait
from medfl.safety.sandbox import (
    Allowed,
    Sandbox,
    devices,
    forget_environment,
    private_folders,
    python_and_system,
)
from medfl.storage import (
    FOLDS,
    GRID,
    LOCAL_REFERENCE,
    cache_folder,
    made,
    read_run,
    record_of,
    require_unused,
    required_cache,
    writing,
)
from medfl.storage.places import CALIBRATION
from medfl.storage.run_documents import brings_code

_COMPILERS = ("/usr", "/bin", "/lib", "/lib64")
_DOTTED = re.compile(r"([A-Za-z_]\w*)(\.\w+)+(:\w+)?")
"""The dotted path of a user's own method; group 1 is the module or package."""


@dataclass(frozen=True)
class Use:
    """What a verb opens and writes.

    Attributes:
        bundles: names or folders of bundles, or folders with weights in a bundle's layout.
        runs: run folders or run.json files, whose records name bundles.
        folder: folder that is written, created if missing.
        file: name of the verb's argument with a new file or folder: the keeper takes it over from the worker;
            `args.shown_file` remains the given one.
        connects: why the verb needs connections or programs, "" if it needs none.
        compiles: whether compilers may be executed.
        ports: TCP ports to connect to, on any machine: Landlock cannot restrict addresses.
    """

    bundles: Sequence[str | Path] = ()
    runs: Sequence[Path] = ()
    folder: Path | None = None
    file: str = ""
    connects: str = ""
    compiles: bool = False
    ports: Sequence[int] = ()


def hold(args: Namespace, use: Use) -> None:
    """Continue in a sandboxed worker if a bundle is third-party, or `--sandbox` is given; else return unchanged.

    Only the program `medfl` forks itself: another process that calls `main` works unsandboxed.

    Raises:
        InputError: this machine has no sandbox and there is no `--trust`, the verb needs what the sandbox refuses, or
            `--sandbox` is requested in another process.
    """
    if use.file:
        args.shown_file = getattr(args, use.file)

    records = [*filter(None, map(_record, use.runs))]
    paths = [*_named(args, records)]
    foreign = _foreign(args, use, records, paths)
    reasons = [f"bundle {name}, which is not shipped, or changed since," for name in foreign]
    for run in records:
        if brings_code(run.bundle_path, run.config):
            reasons.append(f"the record of run {run.run_hash}")

    is_own = getattr(args, "own_process", False)
    if getattr(args, "sandbox", False):
        why = "--sandbox"
    elif reasons and is_own:
        why = reasons[0]
    else:
        # A foreign bundle that comes up all the same has nothing around it
        free = getattr(args, "no_sandbox", False) or (
            getattr(args, "trust", False) and walls.lacking()
        )
        outside_walls.set(args.given if is_own and not free else None)
        return

    if _wanted(args, use, why):
        _require_own_folder(use)
        _divide(args, use, [*map(Path, foreign), *paths], "" if foreign else "".join(reasons))


def _foreign(
    args: Namespace, use: Use, records: Sequence[Run], named: Sequence[Path]
) -> list[str | Path]:
    """Return the bundles that a verb opens, by their names or folders, and that do not ship unchanged."""
    init = getattr(args, "init", None) or ""
    weights_of = os.path.expanduser(init.rpartition(":")[2])  # its configuration is not read
    bundles = [*use.bundles, *(run.bundle_path for run in records)]
    bundles += [path for path in named if (path / "configs").is_dir() and str(path) != weights_of]
    if not any(bundles):
        return []

    from medfl.bundle.files import ships_unchanged  # imports NumPy, which refusals need not

    return [bundle for bundle in bundles if bundle and not ships_unchanged(bundle)]


def _wanted(args: Namespace, use: Use, why: str) -> bool:
    """Tell whether to go on inside walls; without them the user is told what that means.

    Raises:
        InputError: as `hold`.
    """
    is_asked_for = why == "--sandbox"
    if getattr(args, "no_sandbox", False):
        if is_asked_for:
            raise InputError("--sandbox with --no-sandbox", "one of them", "leave one out")
        log("note: --no-sandbox: what this bundle says is run with your rights")
        return False

    runtime = getattr(args, "runtime", "")
    connects = f"--runtime {runtime}" if runtime.startswith("flare") else use.connects
    if connects:
        remedy = "leave it out" if is_asked_for else "leave it out, or add --no-sandbox"
        raise InputError(f"{why} with {connects}", "work without connections", remedy)

    if lacking := walls.lacking():
        if is_asked_for or not getattr(args, "trust", False):
            advice = "install it" if "libseccomp" in lacking else "run it there"
            if not is_asked_for:
                flag = "--trust" if hasattr(args, "trust") else "--no-sandbox"
                advice += f", or add {flag}: it then runs with your rights"
            raise InputError(f"{why} on this machine", lacking, advice)
        log(f"note: --trust: no walls around this bundle, as they need {lacking}")
        return False

    if not getattr(args, "own_process", False):
        raise InputError(
            "--sandbox in Python's own process", "the program medfl", "call it by its name"
        )

    return True


def _require_own_folder(use: Use) -> None:
    """Raise an InputError if the folder that is written has something of the user's, or of another run."""
    folder = use.folder
    if folder is None or folder in use.runs:
        return
    if not any((folder / name).is_file() for name in (FOLDS, GRID, CALIBRATION)):
        require_unused(folder, LOCAL_REFERENCE)


def _divide(args: Namespace, use: Use, readable: Sequence[Path], why: str) -> None:
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

    # For each bundle, and each record with code: no other process uses files that one creates there
    first_path = why.encode() + b"".join(os.fsencode(path.resolve()) for path in readable[:1])
    private = required_cache("sandbox") / hashlib.sha256(first_path).hexdigest()[:16]
    variables = private_folders(private)
    programs = (*_COMPILERS, sys.prefix, sys.base_prefix) if use.compiles else ()
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    # models from the hub, without the user's token beside them
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    allowed = Allowed(
        read=(*python_and_system(), *readable, cache_folder("embeddings"), hub),
        write=(folder, private, *devices()),
        programs=tuple(map(Path, programs)),
        connect=tuple(use.ports),
    )
    sandbox = Sandbox(allowed)
    sys.stdout.flush()
    sys.stderr.flush()
    closes_with_keeper, keeper = os.pipe()
    channels = {stream: _channel(stream) for stream in (1, 2)}
    worker = os.fork()
    if not worker:
        os.setpgid(0, 0)  # what the terminal sends, the keeper passes on: once
        take_sigterm()
        os.close(keeper)
        end_group_with_keeper(closes_with_keeper)
        forget_environment()
        os.environ.update(variables)
        tempfile.tempdir = None  # which the keeper's own may have set
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, (_, end) in channels.items():
            os.dup2(end, stream)
        sandbox.enter()
        close_from(3)  # file handles that were left open for medfl are not for a bundle
        if not getattr(args, "quiet", False):
            log(f"sandbox: {sandbox.line(folder)}")
        return

    showing = []
    for stream, (source, end) in channels.items():
        os.close(end)
        showing.append(Thread(target=pass_on, args=(source, stream), daemon=True))
        showing[-1].start()

    code = _kept(worker, showing, intact(args))
    try:
        if target is not None and target != inside and code == 0:
            _take_over(inside, target)
    finally:
        if scratch is not None:
            with suppress(RecursionError):  # endlessly nested folders remain
                shutil.rmtree(scratch, ignore_errors=True)
        elif not was_there:
            with suppress(OSError):  # a refused run has written nothing, and leaves no folder
                folder.rmdir()

    os._exit(code)  # it has printed nothing since the worker started


def _channel(stream: int) -> tuple[int, int]:
    """Return the keeper's and the worker's end of an output stream: a terminal if it is one."""
    if not os.isatty(stream):
        return os.pipe()

    import fcntl  # not available on Windows
    import termios
    import tty

    keeper, worker = os.openpty()
    tty.setraw(worker)
    size = fcntl.ioctl(stream, termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(worker, termios.TIOCSWINSZ, size)
    return keeper, worker


def _kept(worker: int, showing: Sequence[Thread], kept: str) -> int:
    """Wait for the worker and for what shows its output, pass signals on to it, and return its exit code.

    `kept` says what is left where it was ended from outside.
    """

    def signalled(number: int, _: object) -> None:
        """Pass a signal on to the worker."""
        with suppress(ProcessLookupError):
            os.kill(worker, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signalled)

    code, reason = wait(worker)
    for thread in showing:
        thread.join()

    if code < 0:
        reason = reason or f"by {signal.Signals(-code).name}"
        warn(f"error: the worker was ended: {reason}; {kept}")
        return 1

    return code


def _take_over(inside: Path, target: Path) -> None:
    """Move a file or folder written by the worker to where the user wants it: completely or not at all.

    Raises:
        RunError: there is a link, or a special file, in it; or it cannot be written there.
    """
    for odd in not_plain(inside.parent):
        raise RunError(
            f"the worker left {printable(odd)}, which is no plain file: nothing is taken"
        )

    copy = target.with_name(f".{target.name}.tmp")
    with made(target.parent), writing(target):
        try:
            # what a keeper left that was killed; a link there would be written through
            _remove(copy)
            todo = [(inside, copy)]
            for source, place in todo:
                if source.is_dir():
                    place.mkdir()
                    todo += [(entry, place / entry.name) for entry in source.iterdir()]
                else:
                    shutil.copyfile(source, place)

            os.replace(copy, target)
        finally:
            _remove(copy)


def _remove(path: Path) -> None:
    """Remove a file, or a folder with all in it, if there is one; a link, and not what it leads to."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def _record(path: Path) -> Run | None:
    """Return a run's record; None for an unreadable one, which is reported later."""
    try:
        return read_run(record_of(path))[0]
    except (InputError, OSError):
        return None


def _named(args: Namespace, records: Sequence[Run]) -> Iterator[Path]:
    """Yield the named files and folders: on the command line, in records, by $MEDFL_DATA."""
    recorded: list[object] = []
    for run in records:
        recorded += [run.bundle_path, run.data.folder, run.options, run.config]
        recorded.append(run.public and run.public.data.folder)

    paths = (text for text in _texts(recorded) if "/" in text)
    for text in (os.environ.get("MEDFL_DATA", ""), *args.given, *paths):
        value = text.partition("=")[2]
        first, _, last = value.partition(":")
        parts = [text, value, text.partition(":")[2], first, last]
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
