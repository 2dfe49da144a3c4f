"""Where files lie for which nobody named a place, and whether a place that was named will do."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from medfl.core import portable
from medfl.core.errors import InputError
from medfl.core.names import PRIVATE_CACHE, check_name

LOCAL_REFERENCE = ("local",)
"""The Local reference may lie in a run folder before the run itself."""

PHANTOM = "phantom"
"""What `--data` says in the place of a folder, for drawn images."""

WHICH = {"last": "weights", "best": "best"}
"""What `--which` says -> name of the weights' file in a run folder."""

FOLDS = "folds.json"
"""What a cross-validation's folder has, and no run's: what was asked for."""

TRIAL = "trial.json"
"""What is said of a run that was validated only, in the place of summary.json."""

CROSS_SITE = "cross_site.csv"
"""Scores of every model at every site, in a run folder."""

CONTRIBUTION = "contribution.csv"
"""What each site contributed, in a run folder."""

CALIBRATION = "calibration.json"
"""What `medfl calibrate` writes into a run folder, and `medfl export` into the docs/ of a bundle."""

_LEAST_SIDE = 16
_WEIGHTS = {
    "run": ("the weights of a run that is finished", ("weights.safetensors",)),
    "bundle": (
        "a bundle's weights",
        ("models/model.safetensors", "models/model.pt", "models/model.ts"),
    ),
}


_PRETRAINED = {
    "torchvision": ("TORCH_HOME", "~/.cache/torch", "hub/checkpoints/{}-*.pth"),
    "timm": (
        "HF_HOME",
        "~/.cache/huggingface",
        "hub/models--timm--{}/snapshots/*/model.safetensors",
    ),
}
"""Where PyTorch's and Hugging Face's caches have the pretrained weights of a network."""
BACKBONES = ("backbone", *_PRETRAINED)
"""Kinds of `--init` that give a network all but its head."""

_PRIVATE = ("prepared", "answers", "embeddings", PHANTOM)
"""Kinds of cache that a worker in a sandbox has for itself: what a bundle makes there, others would take up."""


def config_file(root: Path, stem: str, *, medfl: bool = True) -> Path | None:
    """Return a bundle's configuration file of this name, JSON or YAML, None if there is none.

    An export has some twice: in configs/ for MONAI alone, and in configs/medfl/ for medfl, which then reads only these;
    `medfl=False` returns the first.
    """
    for place in ("configs/medfl",) * medfl + ("configs",):
        for suffix in (".json", ".yaml", ".yml"):
            if (file := root / place / f"{stem}{suffix}").is_file():
                return file

    return None


def cache_folder(kind: str, *, shared: bool = False) -> Path:
    """Return the user's cache folder of one kind ($XDG_CACHE_HOME/medfl/<kind>); it may not exist yet.

    A portable process has its own, for others may have been filled with other bits; a worker in a sandbox likewise,
    unless `shared` says to look into everybody's.
    """
    if not shared and kind in _PRIVATE and os.environ.get(PRIVATE_CACHE):
        return Path(os.environ[PRIVATE_CACHE]) / kind

    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # expanduser leaves the ~ of a user who has no home, as in some containers.
    if home.startswith("~"):
        raise InputError(
            "a user without a home",
            "HOME or XDG_CACHE_HOME is set, for the cache",
            "set one of them",
        )

    root = Path(home) / "medfl"
    if portable.active():
        return root / "portable" / kind

    return root / kind


def default_run_folder(bundle: str, method: str, seed: int) -> Path:
    """Return the run folder where --out names none; InputError if the bundle's folder has no name for one."""
    return Path("runs") / f"{check_name(bundle, 'bundle')}-{method.rpartition('.')[2]}-{seed}"


def is_run(folder: Path) -> bool:
    """Tell whether a model's folder is a run's, else it is a bundle's; InputError if it is neither."""
    if (folder / "run.json").is_file():
        return True
    if (folder / "configs").is_dir():
        return False
    raise InputError(
        f"{folder} is neither a run (no run.json) nor a bundle (no configs/)",
        "a folder that medfl run or medfl export wrote, or any MONAI bundle with weights in models/",
        "name one, as runs/NAME",
    )


def require_unused(
    path: Path, beside: Sequence[str] = (), advice: str = "give a new folder, or add --resume"
) -> None:
    """Raise an InputError if a folder cannot be made, or holds anything but what `beside` names."""
    # The path is written into JSON records, which are UTF-8.
    if "\ufffd" in (shown := os.fsencode(path).decode(errors="replace")):
        raise InputError(
            f"--out {shown}", "a path in UTF-8", "give another name, or run with PYTHONUTF8=1"
        )

    parent = next(folder for folder in [path, *path.absolute().parents] if folder.exists())
    if parent != path and not (parent.is_dir() and os.access(parent, os.W_OK)):
        if parent.is_dir():
            reason = "may not be written to"
        else:
            reason = "is not a folder"

        raise InputError(
            f"--out {path} cannot be made: {parent} {reason}",
            "a new folder",
            "give a writable place",
        )

    if not path.exists():
        return

    used = [path]
    if path.is_dir():
        used = [p for p in path.iterdir() if not _leftover(p) and p.name not in beside]
    if used:
        raise InputError(f"--out {path} exists and is not empty", "a new or empty folder", advice)


def require_new_bundle(root: Path, size: int | None = None) -> None:
    """Raise an InputError if no bundle can be written into this folder, or not with pictures of this size."""
    if root.exists():
        raise InputError(
            f"{root} exists", "a new folder for the bundle", "give a path that does not exist"
        )
    check_name(root.name, "bundle name")
    if size is not None and size < _LEAST_SIDE:
        allowed = f"a whole number of at least {_LEAST_SIDE} pixels"
        raise InputError(f"--size {size}", allowed, f"give {_LEAST_SIDE} or more")


def require_for_export(out: Path) -> None:
    """Raise an InputError if no exported bundle can be written into this folder."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise InputError(
            f"--out {out} exists and is not empty", "a new or empty folder", "give a new folder"
        )
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(
            f"--out {out} cannot be made in {above}",
            "a writable folder",
            "put it into such a folder",
        )


def require_there(path: Path) -> None:
    """Raise an InputError if there are no images because nothing is there."""
    if not path.is_dir() and not path.is_file():
        raise InputError(
            f"{path} is no file and no folder", "images that are there", "check the path"
        )


def check_which(which: str) -> None:
    """Raise an InputError if a run has no weights of this word."""
    if which not in WHICH:
        raise InputError(f"--which {which}", "last or best", "give --which last or --which best")


def require_run(path: Path) -> None:
    """Raise an InputError if a folder holds no run."""
    if not (path / "run.json").is_file():
        raise InputError(
            f"--out {path} holds no run (no run.json)",
            "the folder of an earlier run",
            "start without --resume",
        )


def folder_to_resume(path: Path) -> Path:
    """Return the folder for --resume: the run's own, for a fold that of its cross-validation."""
    if (path.parent / FOLDS).is_file():
        return path.parent

    return path


def record_of(source: Path) -> Path:
    """Return the run.json that `--from` names, itself or by its folder."""
    return source / "run.json" if source.is_dir() else source


def weights_file(text: str) -> Path:
    """Return the file that `--init` names.

    It is FILE, run:DIR, bundle:DIR, backbone:FILE, or torchvision:NAME or timm:NAME, which are looked for where these
    libraries keep their downloads.

    Raises:
        InputError: it is not there.
    """
    kind, colon, folder = text.partition(":")
    if colon and kind in _PRETRAINED:
        return _downloaded(text, *_PRETRAINED[kind])

    if not (colon and kind in _WEIGHTS):
        path = Path(text.removeprefix("backbone:")).expanduser()
        if not path.is_file():
            raise InputError(
                f"--init {text}",
                "FILE or backbone:FILE (.safetensors, .pt, .ts), run:DIR, bundle:DIR, torchvision:NAME, timm:NAME",
                "name one that is there",
            )

        return path

    description, names = _WEIGHTS[kind]
    for name in names:
        path = Path(folder).expanduser() / name
        if path.is_file():
            return path

    raise InputError(
        f"--init {text}",
        f"{description}: {' or '.join(names)} in this folder",
        "name another folder",
    )


def _downloaded(text: str, variable: str, home: str, pattern: str) -> Path:
    """Return the only file of a library's cache with the weights that a text names."""
    name = text.partition(":")[2]
    root = Path(os.environ.get(variable) or home).expanduser()
    if re.fullmatch(r"[\w.-]+", name):
        files = sorted(root.glob(pattern.format(name)))
    else:
        files = []

    if len(files) == 1:
        return files[0]

    raise InputError(
        f"--init {text}",
        f"one file {pattern.format(name)} in {root}, where the library puts what it downloads; there are {len(files)}",
        "download it there, copy it from a machine with a network, or name the file: --init backbone:FILE",
    )


def _leftover(path: Path) -> bool:
    """Return whether a kill left this before run.json was written; nothing in it is needed."""
    return path.name == ".run.json.tmp" or (
        path.name == "state" and path.is_dir() and not any(path.iterdir())
    )
