"""Default locations of files, and checks of locations that were given."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from medfl.core import PRIVATE_CACHE, InputError, check_name, portable

LOCAL_REFERENCE = ("local",)
"""The Local reference may lie in a run folder before the run itself."""

PHANTOM = "phantom"
"""Value of `--data` for phantom images instead of a folder."""

WHICH = {"last": "weights", "best": "best"}
"""Value of `--which` -> name of the weights file in a run folder."""

FOLDS = "folds.json"
"""Found only in a cross-validation's folder: its request."""

GRID = "compare.json"
"""Shared by all runs in a comparison's folder."""

TRIAL = "trial.json"
"""Summary of a run that was only validated, instead of summary.json."""

CROSS_SITE = "cross_site.csv"
"""Scores of every model at every site, in a run folder."""

CONTRIBUTION = "contribution.csv"
"""Each site's contribution, in a run folder."""

CALIBRATION = "calibration.json"
"""Written by `medfl calibrate` into a run folder, and by `medfl export` into the docs/ of a bundle."""

CALIBRATION_SUMS = "calibration_sums.safetensors"
"""Calibration tables released by sites that keep their images, in the run folder of an evaluation job on FLARE."""

_LEAST_SIDE = 16
BEFORE_RECORD = (
    "init.safetensors",
    ".init.safetensors.tmp",
    "text.safetensors",
    ".text.safetensors.tmp",
    ".run.json.tmp",
)
"""Files of a new run's folder before its run.json: worth nothing without it."""
_WEIGHTS = {
    "run": ("the weights of a run that is finished", ("weights.safetensors",)),
    "bundle": (
        "a bundle's weights",
        ("models/model.safetensors", "models/model.pt", "models/model.ts"),
    ),
}


_PRETRAINED = {
    "torchvision": ("TORCH_HOME", "~/.cache/torch", "hub/checkpoints/{}-*.pth"),
    "monai": (
        "HF_HOME",
        "~/.cache/huggingface",
        "hub/models--TencentMedicalNet--MedicalNet-{}/snapshots/*/resnet_*.pth",
    ),
    "timm": (
        "HF_HOME",
        "~/.cache/huggingface",
        "hub/models--timm--{}/snapshots/*/model.safetensors",
    ),
}
"""Locations of a network's pretrained weights in PyTorch's and Hugging Face's caches."""
BACKBONES = ("backbone", *_PRETRAINED)
"""Kinds of `--init` that initialise all of a network but its head."""

_PRIVATE = ("prepared", "answers", "embeddings", PHANTOM)
"""Kinds of cache that a sandboxed worker has for itself: others would use what a bundle writes there."""


def config_file(root: Path, stem: str, *, medfl: bool = True) -> Path | None:
    """Return a bundle's configuration file of this name, JSON or YAML, None if there is none.

    An export has some of them twice: in configs/ for MONAI alone, and in configs/medfl/ for medfl, which then reads
    only the latter; `medfl=False` returns the former.
    """
    for place in ("configs/medfl",) * medfl + ("configs",):
        for suffix in (".json", ".yaml", ".yml"):
            if (file := root / place / f"{stem}{suffix}").is_file():
                return file

    return None


def cache_folder(kind: str, *, shared: bool = False) -> Path:
    """Return the user's cache folder of one kind ($XDG_CACHE_HOME/medfl/<kind>); it may not exist yet.

    A portable process has its own, since others may contain other bits; a sandboxed worker likewise, unless `shared`
    selects the common one.
    """
    if not shared and kind in _PRIVATE and os.environ.get(PRIVATE_CACHE):
        return Path(os.environ[PRIVATE_CACHE]) / kind

    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # expanduser keeps the ~ of a user without a home, as in some containers.
    if home.startswith("~"):
        raise InputError(
            "a user without a home",
            "HOME or XDG_CACHE_HOME is set, for the cache",
            "set one of them",
        )

    root = Path(home) / "medfl"
    # what other kernels prepared may differ in its last bits
    if portable.active():
        return root / "portable" / kind

    return root / kind


def required_cache(kind: str) -> Path:
    """Return the user's cache folder of one kind, which is made; InputError if it cannot be."""
    folder = cache_folder(kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cache {folder}, which cannot be made ({error.strerror})",
            "HOME or XDG_CACHE_HOME is a folder of your own",
            "set one of them",
        ) from error

    return folder


def default_run_folder(bundle: str, method: str, seed: int) -> Path:
    """Return the run folder used without --out; InputError if the bundle's folder has no name for one."""
    return Path("runs") / f"{check_name(bundle, 'bundle')}-{method.rpartition('.')[2]}-{seed}"


def is_run(folder: Path) -> bool:
    """Tell whether a model's folder is a run's rather than a bundle's; InputError if it is neither."""
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
    path: Path,
    beside: Sequence[str] = (),
    advice: str = "give a new folder, or continue: medfl run --resume --out DIR",
) -> None:
    """Raise an InputError if a folder cannot be created, or contains anything but what `beside` names."""
    # The path is written into JSON records, which are UTF-8.
    if "\ufffd" in (shown := os.fsencode(path).decode(errors="replace")):
        raise InputError(
            f"--out {shown}", "a path in UTF-8", "give another name, or run with PYTHONUTF8=1"
        )

    # several folders on the way may have to be made
    parent = next(folder for folder in [path, *path.absolute().parents] if folder.exists())
    if parent != path and not (parent.is_dir() and os.access(parent, os.W_OK)):
        reason = "is not a folder"
        if parent.is_dir():
            reason = "may not be written to"

        raise InputError(
            f"--out {path} cannot be made: {parent} {reason}",
            "a new folder",
            "give a writable place",
        )

    # a link to nothing does not exist, and is no folder either
    if not path.exists() and not path.is_symlink():
        return

    used = [path]
    if path.is_dir():
        used = [p for p in path.iterdir() if not _leftover(p) and p.name not in beside]
    if used:
        raise InputError(f"--out {path} exists and is not empty", "a new or empty folder", advice)


def require_new_bundle(root: Path, size: int | None = None) -> None:
    """Raise an InputError if no bundle can be written to this folder, or not with pictures of this size."""
    if root.exists():
        raise InputError(
            f"{root} exists", "a new folder for the bundle", "give a path that does not exist"
        )
    check_name(root.name, "bundle name")
    if size is not None and size < _LEAST_SIDE:
        raise InputError(
            f"--size {size}",
            f"a whole number of at least {_LEAST_SIDE} pixels",
            f"give {_LEAST_SIDE} or more",
        )


def require_there(path: Path) -> None:
    """Raise an InputError if the image path does not exist."""
    if not path.is_dir() and not path.is_file():
        raise InputError(
            f"{path} is no file and no folder", "images that are there", "check the path"
        )


def check_which(which: str) -> None:
    """Raise an InputError if a run has no weights of this name."""
    if which not in WHICH:
        raise InputError(f"--which {which}", "last or best", "give --which last or --which best")


def require_run(path: Path) -> None:
    """Raise an InputError if a folder contains no run."""
    if not (path / "run.json").is_file():
        raise InputError(
            f"--out {path} holds no run (no run.json)",
            "the folder of an earlier run",
            "start without --resume",
        )


def folder_to_resume(path: Path) -> Path:
    """Return the folder for --resume: the run's own, or for a fold that of its cross-validation."""
    if (path.parent / FOLDS).is_file():
        return path.parent

    return path


def record_of(source: Path) -> Path:
    """Return the run.json that `--from` names, directly or by its folder."""
    return source / "run.json" if source.is_dir() else source


def weights_file(text: str) -> Path:
    """Return the file that `--init`, or MODEL of `medfl evaluate`, names.

    FILE, run:DIR, bundle:DIR, backbone:FILE, or torchvision:NAME, monai:NAME or timm:NAME, which are looked up where
    these libraries keep their downloads.

    Raises:
        InputError: it does not exist.
    """
    kind, colon, folder = text.partition(":")
    if colon and kind in _PRETRAINED:
        return _downloaded(text, folder, *_PRETRAINED[kind])

    if not (colon and kind in _WEIGHTS):
        path = Path(text.removeprefix("backbone:")).expanduser()
        if not path.is_file():
            raise InputError(
                f"weights {text}",
                "FILE or backbone:FILE (.safetensors, .pt, .ts), run:DIR, bundle:DIR, torchvision:, monai:, timm:NAME",
                "name one that is there",
            )

        return path

    description, names = _WEIGHTS[kind]
    for name in names:
        path = Path(folder).expanduser() / name
        if path.is_file():
            return path

    raise InputError(
        f"weights {text}",
        f"{description}: {' or '.join(names)} in this folder",
        "name another folder",
    )


def _downloaded(text: str, name: str, variable: str, home: str, pattern: str) -> Path:
    """Return the only file in a library's cache with the named weights."""
    root = Path(os.environ.get(variable) or home).expanduser()
    files = []
    # a name with * or / would find other files
    if re.fullmatch(r"[\w.-]+", name):
        files = sorted(root.glob(pattern.format(name)))

    if len(files) == 1:
        return files[0]

    raise InputError(
        f"--init {text}",
        f"one file {pattern.format(name)} in {root}, where the library puts what it downloads; there are {len(files)}",
        "download it there, copy it from a machine with a network, or name the file: --init backbone:FILE",
    )


def _leftover(path: Path) -> bool:
    """Return whether a kill left this before run.json was written; nothing in it is needed."""
    if path.name == "state":
        return path.is_dir() and not any(path.iterdir())

    return path.name in BEFORE_RECORD
