"""`medfl run --sandbox`: what the command line names may be read, the run folder be written."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medfl.cli.parser import telling
from medfl.core.errors import InputError
from medfl.core.run import Run
from medfl.core.settings import SETTINGS
from medfl.safety.sandbox import Allowed, Sandbox, devices, private_folders, python_and_system
from medfl.storage.places import cache_folder, default_run_folder, record_of
from medfl.storage.run_documents import read_run

_COMPILERS = ("/usr", "/bin", "/lib", "/lib64")


def enter_sandbox(args: Any) -> None:
    """Enter the sandbox of a run, and say so; before PyTorch is imported, which starts threads.

    `args.out` becomes the run folder, which is made unless the run is resumed: only what exists can be allowed.

    Raises:
        InputError: the kernel has no Landlock, or the run needs what is refused.
    """
    if args.runtime.startswith("flare") or (args.track or "").partition(":")[2]:
        if args.runtime.startswith("flare"):
            what = f"--runtime {args.runtime}"
        else:
            what = f"--track {args.track}"

        raise InputError(
            f"--sandbox with {what}", "a run without connections", "leave one of them out"
        )

    before = _record(args)
    args.out = out = _run_folder(args)
    bundle = args.bundle or (before.bundle_path if before else "")
    private = (
        cache_folder("sandbox")
        / hashlib.sha256(os.fsencode(Path(bundle).resolve())).hexdigest()[:16]
    )
    written = [cache_folder("phantom"), cache_folder("answers")]

    for folder in [*written, *([] if args.resume else [out])]:
        folder.mkdir(parents=True, exist_ok=True)

    variables = private_folders(private)
    programs = (*_COMPILERS, sys.prefix, sys.base_prefix) if args.compile else ()
    allowed = Allowed(
        read=(*python_and_system(), *_named(args, before), cache_folder(""), _hub()),
        write=(out, *written, private, *devices()),
        programs=tuple(map(Path, programs)),
    )
    sandbox = Sandbox(allowed)
    os.environ.update(variables)
    sandbox.enter()
    telling(args)["say"](f"sandbox: {sandbox.line(out)}")


def _record(args: Any) -> Run | None:
    """Return the run to be resumed or repeated; None for a new one, and for one that cannot be read: told later."""
    path = args.source or (args.out if args.resume else None)
    try:
        return read_run(record_of(path))[0] if path else None
    except InputError:
        return None


def _run_folder(args: Any) -> Path:
    if args.out is None and args.source is not None:
        raise InputError("--sandbox with --from", "a run folder that you name", "add --out")
    if args.out is not None:
        return Path(args.out)

    name = Path(args.bundle or "none").expanduser().resolve().name
    seed = SETTINGS["seed"].default if args.seed is None else args.seed
    return default_run_folder(name, args.method or "fedavg", seed)


def _named(args: Any, run: Run | None) -> Iterator[Path]:
    """Yield the files and folders that are named: on the command line, in a record, by $MEDFL_DATA."""
    if run:
        recorded_paths = [run.bundle_path, run.data.folder, run.public and run.public.data.folder]
    else:
        recorded_paths = []

    recorded = [*recorded_paths, run.options, run.config] if run else []
    for text in (
        os.environ.get("MEDFL_DATA", ""),
        *args.given,
        *(t for t in _texts(recorded) if "/" in t),
    ):
        value = text.partition("=")[2]
        for part in (text, value, text.partition(":")[2], value.partition(":")[2]):
            if os.path.exists(path := os.path.expanduser(part)):
                yield Path(path)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _texts(one)


def _hub() -> Path:
    """Return the folder of models from the hub, without the user's token beside it."""
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
