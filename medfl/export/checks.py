"""What a bundle has to be before it is called finished: MONAI's own checks and the model zoo's checklist, offline."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from medfl.bundle.configuration import config_file, read
from medfl.core.seeding import stream
from medfl.export.formats import quiet

LARGE = 25_000_000
"""Bytes from which the zoo wants a file in large_files.yml."""
SCHEMA = Path(__file__).parent / "schemas" / "bundle_metadata.json"
_ANY = 64
"""Pixels along an axis that takes any size."""
_NECESSARY = ("configs/metadata.json", "LICENSE", "docs/README.md", "models/model.pt")
_SECTIONS = ("Authors", "Tags", "Model Description", "Data", "Preprocessing", "Performance", "References", "License")
_WRITTEN = (".json", ".yaml", ".yml", ".md", ".txt", "")
_PERSONAL = re.compile(
    r"""(?:^|[\s"'`=(\[,:])((?:~/|/(?:home|root|Users|tmp|var|mnt|media|opt|srv|private|scratch|data|work)/|[A-Za-z]:\\)[^\s"'`)\]]*)""",
    re.MULTILINE,
)
_IN_BINARY = re.compile(rb"(?:/home/|/Users/|/root/|/tmp/|site-packages/)[\w./-]{3,60}")


def problems(folder: Path, data: str | None = None) -> list[str]:
    """Return what is wrong with a bundle, nothing if it may be given away.

    Necessary files, a semantic version with its line in the changelog, the sections of the README, hashes of all
    weights, large files listed, no path of anybody's machine, metadata by MONAI's schema, and a network that takes and
    gives what metadata says.

    Args:
        folder: the bundle's.
        data: the images' folder, for bundles whose network is built after their data list.

    Returns:
        One line each.
    """
    missing = [f"{name} is missing" for name in _NECESSARY if not (folder / name).is_file()]
    if missing:
        return missing
    meta = read(folder / "configs" / "metadata.json")
    found = [*_version(meta), *_readme(folder), *_hashes(folder, meta), *_large(folder), *_places(folder)]
    return [*found, *_schema(folder), *([] if found else _in_and_out(folder, data))]


def _version(meta: dict[str, Any]) -> Iterator[str]:
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


def _hashes(folder: Path, meta: dict[str, Any]) -> Iterator[str]:
    stated = (meta.get("medfl") or {}).get("files", {})
    here = {path.relative_to(folder).as_posix() for path in (folder / "models").iterdir()}
    for name in sorted(here ^ stated.keys()):
        yield (
            f"metadata.json lists {name}, which is not here"
            if name in stated
            else f"metadata.json does not list {name}"
        )
    for name in sorted(here & stated.keys()):
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != stated[name]["sha256"]:
            yield f"{name} has another sha256 than metadata.json says"


def _large(folder: Path) -> Iterator[str]:
    file = folder / "large_files.yml"
    listed = yaml.safe_load(file.read_text())["large_files"] if file.is_file() else []
    known = {one["path"]: one for one in listed}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.stat().st_size > LARGE and known.get(name, {}).get("hash_type") != "sha256":
            yield f"{name} has more than 25 MB and is not in large_files.yml with its sha256"


def _places(folder: Path) -> Iterator[str]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix in _WRITTEN:
            text = path.read_text(encoding="utf-8")
            for place in _PERSONAL.finditer(text):
                if not re.search(r"\+\s*['\"]$", text[: place.start(1)]):  # else below @bundle_root or the like
                    yield f"{name} names a place of somebody's machine: {place[1][:80]}"
                    break
        elif binary := _IN_BINARY.search(path.read_bytes()):
            yield f"{name} names a place of somebody's machine: {binary[0].decode()}"


# MONAI's own


def _schema(folder: Path) -> Iterator[str]:
    from monai.bundle import verify_metadata

    try:
        with quiet():
            verify_metadata(meta_file=str(folder / "configs" / "metadata.json"), filepath=str(SCHEMA))
    except Exception as error:  # a ValueError of many lines, or what jsonschema finds
        yield f"metadata.json is refused by MONAI's verify_metadata: {' '.join(str(error).split())[:200]}"


def _in_and_out(folder: Path, data: str | None) -> Iterator[str]:
    from monai.bundle import verify_net_in_out

    config = config_file(folder, "inference") or config_file(folder, "train")
    assert config is not None
    content = read(config)
    if "network_def" not in content:
        return
    given = [("bundle_root", str(folder)), ("initial_weights", None), *([("dataset_dir", data)] if data else [])]
    named: dict[str, Any] = {key: value for key, value in given if key in content}
    try:
        with quiet(), stream(0, "net in out"):
            verify_net_in_out(
                net_id="network_def", meta_file=str(folder / "configs" / "metadata.json"), config_file=str(config),
                device="cpu", any=_ANY, **named,
            )  # fmt: skip
    except Exception as error:  # whatever the network raises
        yield f"MONAI's verify_net_in_out fails: {' '.join(str(error).split())[:200]}"
