"""Checks of an exported bundle: MONAI's own and the model zoo's checklist, offline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from torch import nn

from medfl.bundle.files import config_file, read
from medfl.core import Document, InputError, Weights, within
from medfl.core.seeding import stream
from medfl.export.formats import quiet
from medfl.storage import file_sha256

LARGE = 25_000_000
"""Bytes above which the zoo requires a file to be listed in large_files.yml."""
SCHEMA = Path(__file__).parent / "schemas" / "bundle_metadata.json"
_ANY_SIZE = 64  # pixels along an axis of variable size
_REQUIRED = ("configs/metadata.json", "LICENSE", "docs/README.md", "models/model.pt")
_SECTIONS = (
    "Authors",
    "Tags",
    "Model Description",
    "Data",
    "Preprocessing",
    "Performance",
    "References",
    "License",
)
_TEXT_SUFFIXES = (".json", ".yaml", ".yml", ".md", ".txt", "")
_PATH_TO_REPORT = re.compile(
    r"""(?:^|[\s"'`=(\[,:])((?:~/|/(?:home|root|Users|tmp|var|mnt|media|opt|srv|private|scratch|data|work)/|[A-Za-z]:\\)[^\s"'`)\]]*)""",
    re.MULTILINE,
)
_LOCAL_PATH_IN_BINARY = re.compile(rb"(?:/home/|/Users/|/root/|/tmp/|site-packages/)[\w./-]{3,60}")


def problems(folder: Path, data: str | None = None) -> list[str]:
    """Return a line for each problem of a bundle.

    Checked are required files, a semantic version with its line in the changelog, the sections of the README, hashes of
    all weights, the list of large files, paths of the local machine, metadata by MONAI's schema, and the network's
    input and output against the metadata.

    Args:
        folder: the bundle.
        data: folder of the images, for bundles whose network is built after their data list.
    """
    missing = [f"{name} is missing" for name in _REQUIRED if not (folder / name).is_file()]
    if missing:
        return missing

    meta = read(folder / "configs" / "metadata.json")
    lines = [*_version(meta), *_readme(folder), *_hashes(folder, meta)]
    lines += [*_large(folder), *_local_paths(folder)]
    # the network of an incomplete bundle may be impossible to build
    in_and_out = () if lines else _in_and_out(folder, data)
    return [*lines, *_schema(folder), *in_and_out]


def _version(meta: Document) -> Iterator[str]:
    version = str(meta.get("version", ""))
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"metadata.json: version {version!r} is not semantic"
    if version not in (meta.get("changelog") or {}):
        yield f"metadata.json: the changelog has no {version}"


def _readme(folder: Path) -> Iterator[str]:
    text = (folder / "docs" / "README.md").read_text(encoding="utf-8")
    for section in _SECTIONS:
        if f"\n## {section}\n" not in text:
            yield f"docs/README.md has no section {section!r}"
    if "not a medical device" not in text:
        yield "docs/README.md does not say that this is not a medical device"


def _hashes(folder: Path, meta: Document) -> Iterator[str]:
    listed = (meta.get("medfl") or {}).get("files", {})
    here = {path.relative_to(folder).as_posix() for path in (folder / "models").iterdir()}
    for name in sorted(here ^ listed.keys()):
        difference = f"does not list {name}"
        if name in listed:
            difference = f"lists {name}, which is not here"

        yield f"metadata.json {difference}"

    for name in sorted(here & listed.keys()):
        if file_sha256(folder / name) != listed[name]["sha256"]:
            yield f"{name} has another sha256 than metadata.json says"


def _large(folder: Path) -> Iterator[str]:
    file = folder / "large_files.yml"

    entries = yaml.safe_load(file.read_text())["large_files"] if file.is_file() else []
    listed = {entry["path"]: entry for entry in entries}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_listed = listed.get(name, {}).get("hash_type") == "sha256"
        if path.is_file() and path.stat().st_size > LARGE and not is_listed:
            yield f"{name} has more than 25 MB and is not in large_files.yml with its sha256"


def _local_paths(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue

        name = path.relative_to(folder).as_posix()
        if path.suffix in _TEXT_SUFFIXES:
            text = path.read_text(encoding="utf-8")
            for path_match in _PATH_TO_REPORT.finditer(text):
                before = text[: path_match.start(1)]
                # a path appended to another string, `@bundle_root + '/data'`, is inside the bundle
                if not re.search(r"\+\s*['\"]$", before):
                    yield f"{name} names a path of the local machine: {path_match[1][:80]}"
                    break

        elif binary := _LOCAL_PATH_IN_BINARY.search(path.read_bytes()):
            yield f"{name} names a path of the local machine: {binary[0].decode()}"


# MONAI's own


def _schema(folder: Path) -> Iterator[str]:
    from monai.bundle import verify_metadata

    try:
        with quiet():
            verify_metadata(
                meta_file=str(folder / "configs" / "metadata.json"), filepath=str(SCHEMA)
            )
    except Exception as error:  # a ValueError of many lines, or an error of jsonschema
        yield f"metadata.json is refused by MONAI's verify_metadata: {' '.join(str(error).split())[:200]}"


def _in_and_out(folder: Path, data: str | None) -> Iterator[str]:
    from monai.bundle import verify_net_in_out

    files = (config_file(folder, stem, medfl=False) for stem in ("inference", "train"))
    config = next(filter(None, files), None)
    content = read(config) if config else {}
    if "network_def" not in content:
        return

    overrides: Document = {"bundle_root": str(folder), "initial_weights": None}
    if data:
        overrides["dataset_dir"] = data

    used = within(overrides, content)
    try:
        with quiet(), stream(0, "net in out"):
            verify_net_in_out(
                net_id="network_def", meta_file=str(folder / "configs" / "metadata.json"), config_file=str(config),
                device="cpu", any=_ANY_SIZE, **used,
            )  # fmt: skip
    except Exception as error:  # of any type, from the network
        yield f"MONAI's verify_net_in_out fails: {' '.join(str(error).split())[:200]}"


def load_weights_into(network: nn.Module, folder: Path, builder: str) -> None:
    """Load the written weights into a network built by a configuration (`what`); InputError for other tensors."""
    weights = torch.load(folder / "models" / "model.pt", weights_only=True)
    if _shapes(weights) != _shapes(network.state_dict()):
        raise InputError(
            f"{builder} builds another network than training",
            "one network for both",
            "let both have the same network_def",
        )
    network.load_state_dict(weights)


def _shapes(state: Weights) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}
