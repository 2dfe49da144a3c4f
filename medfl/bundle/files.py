"""Find bundles and read their files without evaluating them; needs neither PyTorch nor MONAI."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import yaml

from medfl import datasets
from medfl.core import (
    Config,
    Document,
    InputError,
    decode_text,
    did_you_mean,
    pick,
    printable,
    read_bytes,
    read_plain,
    refusing,
    type_errors,
)
from medfl.policy.admission import inspected
from medfl.problem.described import CHANNEL_INDEX, MOST_CHANNELS
from medfl.storage import config_file as config_file

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
RESEARCH_ONLY = "Research only: not for diagnosis or any other clinical use."

_FORMAT = {
    "num_channels": int,
    "spatial_shape": list[int | str],
    "channel_def": dict[str, str],
    "format": str,
}
"""Entries of an input or output in metadata.json that are used."""
_MAX_BYTES = 1 << 20
_HASHES = Path(__file__).with_name("shipped.json")
"""`content_sha256` of each shipped bundle; written by tools/shipped.py."""
_LEFT_BY_TRAINING = ("models/", "output/")
_HASHED = (".json", ".yaml", ".yml", ".py", ".safetensors")
# the C version, if available: eight times as fast
_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def shipped_root() -> Path | None:
    """Return the folder of the shipped bundles: in the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    folders = package / "shipped", package.parent / "bundles"
    return next((folder for folder in folders if folder.is_dir()), None)


def shipped_folders() -> dict[str, Path]:
    """Return the folders of the shipped bundles that can be trained, by name; families are one level down.

    A user's bundle may be beside them: shipped are those whose data set is also medfl's.
    """
    return dict(_folders(shipped_root()))


@lru_cache(maxsize=1)
def _folders(root: Path | None) -> dict[str, Path]:
    if root is None:
        return {}

    files = [*root.glob("*/configs/train.yaml"), *root.glob("*/*/configs/train.yaml")]
    folders = {path.parents[1].name: path.parents[1] for path in files}
    return pick(folders, sorted(folders.keys() & set(datasets.names())))


def shipped() -> tuple[str, ...]:
    """Return the names of the shipped bundles."""
    return tuple(shipped_folders())


def ships_unchanged(name_or_path: str | Path) -> bool:
    """Tell whether a name or folder is a shipped bundle's, with unchanged content since medfl's release."""
    root = shipped_folders().get(str(name_or_path)) or Path(name_or_path).expanduser().resolve()
    if root not in shipped_folders().values():
        return False

    hashes = json.loads(_HASHES.read_text(encoding="utf-8"))
    return bool(content_sha256(root) == hashes.get(root.name))


def content_sha256(root: Path) -> str:
    """Return the hash of all files of a bundle, by name, except those left by MONAI's training."""
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = path.relative_to(root).as_posix()
        if not name.startswith(_LEFT_BY_TRAINING):
            # Git on Windows converts line ends of text
            content = hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).digest()
            digest.update(name.encode() + b"\0" + content)

    return digest.hexdigest()


def find(name_or_path: str) -> Path:
    """Return the folder of a bundle, by its name or path; InputError if it is missing or cannot be trained."""
    if name_or_path in shipped():
        return shipped_folders()[name_or_path]

    path = Path(name_or_path).expanduser().resolve()
    if config_file(path, "train"):
        return path

    if (path / "configs").is_dir():
        has = ", ".join(sorted(file.name for file in (path / "configs").iterdir()))
        raise InputError(
            f"bundle {path} has no configs/train.json or .yaml",
            f"it has {has}",
            "give a bundle that says how to train",
        )

    beside = map(str, Path(name_or_path).parent.glob("*"))
    raise InputError(
        f"bundle {name_or_path!r}",
        f"shipped bundles are {', '.join(shipped()) or 'none'}; a path is a folder with configs/train.json or .yaml",
        did_you_mean(name_or_path, [*shipped(), *beside], "see medfl bundles"),
    )


def read_protocol(name_or_path: str) -> Config:
    """Return the content of a bundle's federated.yaml, empty if there is none.

    It is read before the bundle is inspected, so a third-party one is parsed as plain values of limited size and depth.

    Raises:
        InputError: there is no bundle, or the file is not valid.
    """
    root = find(name_or_path)
    path = config_file(root, "federated")
    if path is None or ships_unchanged(root):
        return read(path) if path else {}

    with refusing(f"{path} cannot be read", "plain JSON or YAML, by names", "repair it"):
        text = decode_text(read_bytes(path, _MAX_BYTES))
        content = read_plain(text, is_json=path.suffix == ".json", nodes=20_000, depth=40)
        return dict(content or {})


def read(path: Path) -> Document:
    """Return the content of a JSON or YAML file; InputError if it is not valid."""
    with refusing(f"{path} cannot be read", "it is valid JSON or YAML", "repair its syntax"):
        content = path.read_bytes()
        if inspected.get(path.resolve()) not in (None, hashlib.sha256(content).hexdigest()):
            raise ValueError("it changed after its inspection")

        text = content.decode()
        return dict(
            (json.loads(text) if path.suffix == ".json" else yaml.load(text, _Loader)) or {}
        )


def read_metadata(root: Path) -> Document:
    """Return the content of a bundle's metadata.json, {} if there is none; a network's only output is called "pred".

    Raises:
        InputError: it is invalid, or describes inputs and outputs in an unknown form.
    """
    path = root / "configs" / "metadata.json"
    described = read(path) if path.is_file() else {}
    kinds = dict.fromkeys(("inputs", "outputs"), dict[str, Document])
    errors = [*type_errors(described, {"network_data_format": kinds})]
    tensors = []
    if not errors:
        formats = described.get("network_data_format", {})
        for kind in kinds:
            tensors += formats.get(kind, {}).values()

        if len(formats.get("outputs", {})) == 1:
            formats["outputs"] = {"pred": tensors[-1]}

    for tensor in tensors:
        errors += type_errors(tensor, _FORMAT, "network_data_format...")
        count = tensor.get("num_channels")
        if isinstance(count, int) and count > MOST_CHANNELS:
            errors.append(f"has {count} channels under num_channels, more than {MOST_CHANNELS}")

        channels = tensor.get("channel_def")
        for key in channels if isinstance(channels, Mapping) else ():
            if not CHANNEL_INDEX.fullmatch(key):
                errors.append(f"has the channel {printable(key, 20)!r} under channel_def")

    if errors:
        raise InputError(
            f"{path} {errors[0]}",
            "a description as MONAI's bundles have it",
            "change it or leave it out",
        )

    return described


def sha256_of(root: Path, protocol: Config) -> str:
    """Return the hash for `Bundle.sha256`: it covers what is trained: of federated.yaml the class texts only."""
    digest = hashlib.sha256(json.dumps(protocol.get("text"), sort_keys=True).encode())
    files = [*root.glob("configs/*"), *root.glob("configs/medfl/*"), *root.glob("embeddings/*")]
    for path in sorted([*files, *root.glob("*.py"), *root.glob("*/**/*.py")]):
        if path.suffix in _HASHED and path.stem != "federated":
            digest.update(path.name.encode() + b"\0" + path.read_bytes())

    for path in _named_files(root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())

    return digest.hexdigest()


def _named_files(root: Path) -> list[Path]:
    """Return the other files named in the configurations that a run reads: weights, lists, labels.

    The bundle's own weights count only if something is loaded: MONAI's training writes them.
    """
    text = ""
    for stem in ("train", "evaluate"):
        if file := config_file(root, stem):
            text += file.read_text("utf-8", "replace")

    counted = {root / "configs", root / "embeddings"}
    files = []
    for path in sorted(root.rglob("*")):
        is_weights = path.parent.name == "models" and path.stem == "model"
        if path.name not in text or (is_weights and "torch.load" not in text):
            continue

        if path.suffix != ".py" and counted.isdisjoint(path.parents) and path.is_file():
            files.append(path)

    return files
