"""Bundles, runs and images that somebody else made, through `medfl predict`: told in a line, and nothing harmed."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from medfl.cli.verbs import main
from medfl.core.names import is_formula
from medfl.storage.run_documents import read_rows
from tests.runs.test_predict import with_weights


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_weights("mednist", tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def lung_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_weights("lung_cxr", tmp_path_factory.mktemp("bundles"))


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 24), dtype=np.uint8)).save(
        file, "PNG"
    )
    return file.getvalue()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(png())
    return tmp_path / "in"


def said(capsys: pytest.CaptureFixture[str], *given: object) -> tuple[int, str]:
    """Return exit code and stderr of a prediction, which is one line where it is an error."""
    code = main(["predict", *map(str, given)])
    return code, capsys.readouterr().err


def described(bundle: Path, root: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    changed = Path(shutil.copytree(bundle, root / "changed"))
    file = changed / "configs" / "metadata.json"
    content = json.loads(file.read_text())
    change(content["network_data_format"])
    file.write_text(json.dumps(content))
    return changed


# Bundles


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(outputs=[1]),
        lambda told: told["outputs"].update(pred="x"),
        lambda told: told["outputs"]["pred"].update(channel_def=["a", "b"]),
        lambda told: told["outputs"]["pred"].update(channel_def={"9" * 5000: "a", "1": "b"}),
        lambda told: told["outputs"]["pred"].update(channel_def={"0": {"x": 1}}),
        lambda told: told["inputs"]["image"].update(num_channels="many"),
        lambda told: told["inputs"]["image"].update(spatial_shape=7),
        lambda told: told.update(inputs="x"),
        lambda told: told["inputs"].update(image=[1]),
    ],
)
def test_metadata_of_another_form_are_refused_in_a_line(
    change: Callable[[dict[str, Any]], None],
    bundle: Path,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = said(
        capsys, described(bundle, tmp_path, change), pictures, "--out", tmp_path / "out"
    )
    assert code == 2
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert "metadata.json" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["id", "prediction", "=cmd()", "-2+cmd|' /C x'!A0", "two\nlines", "Hand"]
)
def test_classes_are_columns_of_a_table_and_no_formulas(
    name: str, bundle: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = described(
        bundle, tmp_path, lambda told: told["outputs"]["pred"]["channel_def"].update({"0": name})
    )
    code, text = said(capsys, changed, pictures, "--out", tmp_path / "out")
    assert code == 2
    assert text.count("\n") == 1
    assert "class" in text


def test_weights_that_are_no_numbers_predict_nothing(
    bundle: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = Path(shutil.copytree(bundle, tmp_path / "changed"))
    weights = load_file(changed / "models" / "model.safetensors")
    save_file(
        {k: v * float("nan") for k, v in weights.items()}, changed / "models" / "model.safetensors"
    )
    code, text = said(capsys, changed, pictures, "--out", tmp_path / "out")
    assert code == 2
    assert "are not finite" in text
    assert not (tmp_path / "out").exists()


# Images


def test_pipes_devices_and_names_that_are_no_text_are_left_out_and_told(
    bundle: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b.png", "b.dcm", "b.zip"):
        os.mkfifo(pictures / name)
    (pictures / "z.png").symlink_to("/dev/zero")
    (pictures / os.fsdecode(b"\xff.png")).write_bytes(png())
    code, text = said(capsys, bundle, pictures, "--out", tmp_path / "out")
    assert code == 0, text
    assert "5 pipes, devices, or names that are not in UTF-8" in text
    with (tmp_path / "out" / "predictions.csv").open() as file:
        assert [row["id"] for row in csv.DictReader(file)] == ["a.png"]
    (pictures / "a.png").unlink()
    code, text = said(capsys, bundle, pictures, "--out", tmp_path / "none")
    assert code == 2
    assert "holds no image" in text


def header(shape: str) -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (63 - (len(text) + 10) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"\x93NUMPY\x09\x00" + b"x" * 100,
        header("('a', 1, 1)"),
        header("(1000000000, 8, 8)") + b"x" * 64,
    ],
)
def test_a_damaged_stack_is_one_image_that_fails(
    content: bytes, bundle: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(pictures / "b.npz", "w") as file:
        file.writestr("x.npy", content)
    code, text = said(capsys, bundle, pictures / "b.npz", "--out", tmp_path / "out")
    assert code == 2
    assert text.count("\n") == 1
    code, _ = said(capsys, bundle, pictures, "--out", tmp_path / "out")
    assert code == 1
    assert len((tmp_path / "out" / "predictions.csv").read_text().splitlines()) == 2


def test_names_of_images_lead_nowhere_and_steer_nothing(
    lung_bundle: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [
        "../../evil.png",
        "/abs.png",
        "n\nl\x1b[31m.png",
        "q" * 5000 + ".png",
        "d" * 200 + "/" + "e/" * 700 + "f.png",
    ]
    with zipfile.ZipFile(pictures / "b.zip", "w") as file:
        for name in names:
            file.writestr(name, png())
        file.writestr("bad\x1b[31m\n.png", b"x")
    (pictures / "a.png").rename(pictures / "a.jpg")
    for name in ("a.png/b.png", "predictions.csv/c.png", '=HYPERLINK("x").png'):
        (pictures / name).parent.mkdir(exist_ok=True)
        (pictures / name).write_bytes(png())
    code, text = said(capsys, lung_bundle, pictures, "--out", tmp_path / "outer" / "out")
    assert code == 1
    assert "\x1b" not in text
    assert text.count("\n") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "outer"]
    assert [path.name for path in (tmp_path / "outer").iterdir()] == ["out"]
    file = tmp_path / "outer" / "out" / "predictions.csv"
    assert not any(map(is_formula, file.read_text().replace("\n", ",").split(",")))
    rows = [row for _, row in read_rows(file)]
    assert len(rows) == len(names) + 3
    assert '=HYPERLINK("x").png' in [row["id"] for row in rows]
    assert all((tmp_path / "outer" / "out" / row["mask"]).is_file() for row in rows)
