"""Which bundles ship with medfl as they are: told by their content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from medfl.bundle import files


def test_the_hashes_are_those_of_the_shipped_bundles() -> None:
    hashes = {name: files.content_sha256(path) for name, path in files.shipped_folders().items()}
    assert json.loads(files._HASHES.read_text()) == hashes, "run python tools/shipped.py"
    assert all(map(files.ships_unchanged, hashes))
    assert all(map(files.ships_unchanged, files.shipped_folders().values()))


def append(bundle: Path) -> None:
    with (bundle / "configs" / "evaluate.yaml").open("a") as file:
        file.write(" ")


def add_code(bundle: Path) -> None:
    (bundle / "scripts").mkdir()
    (bundle / "scripts" / "__init__.py").touch()


def swap_names(bundle: Path) -> None:
    configs = bundle / "configs"
    (configs / "train.yaml").rename(configs / "x")
    (configs / "evaluate.yaml").rename(configs / "train.yaml")
    (configs / "x").rename(configs / "evaluate.yaml")


def remove(bundle: Path) -> None:
    (bundle / "configs" / "inference.yaml").unlink()


def train_by_monai(bundle: Path) -> None:
    (bundle / "models").mkdir()
    (bundle / "models" / "model.pt").write_bytes(b"weights")


def end_lines_as_windows(bundle: Path) -> None:
    file = bundle / "configs" / "train.yaml"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))


@pytest.mark.parametrize(
    ("change", "is_unchanged"),
    [
        (append, False),
        (add_code, False),
        (swap_names, False),
        (remove, False),
        (train_by_monai, True),
        (end_lines_as_windows, True),
    ],
)
def test_an_installed_bundle_that_somebody_changed(
    change: Callable[[Path], None],
    is_unchanged: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy elsewhere, which whoever owns the place may change at any time, does not count as shipped."""
    shipped = files.shipped_folders()["mednist"]
    ignored = shutil.ignore_patterns("models", "output")
    installed, copy = tmp_path / "installed" / "mednist", tmp_path / "mednist"
    for folder in (installed, copy):
        shutil.copytree(shipped, folder, ignore=ignored)

    monkeypatch.setattr(files, "shipped_root", lambda: installed.parent)
    assert files.ships_unchanged("mednist")
    assert files.ships_unchanged(installed)
    assert not files.ships_unchanged(copy)
    change(installed)
    assert files.ships_unchanged("mednist") is is_unchanged
    assert files.ships_unchanged(installed) is is_unchanged
