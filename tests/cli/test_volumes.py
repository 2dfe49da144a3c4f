"""Bad volumes on the command line: one line that names the file, before anything is trained or written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medfl import datasets
from medfl.cli import verbs as cli

Edit = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "hippocampus", tmp_path_factory.mktemp("cohort") / "data", per_class=10, size=20
    )


@pytest.fixture
def broken(cohort: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A copy of the cohort, and image and mask of its fifth case."""
    folder = Path(shutil.copytree(cohort, tmp_path / "data"))
    (folder / "PHANTOM.json").unlink(missing_ok=True)
    image, mask = (sorted((folder / part).glob("*.nii.gz"))[4] for part in ("imagesTr", "labelsTr"))
    return folder, image, mask


def rewrite(
    path: Path, change: Callable[[np.ndarray], np.ndarray], affine: np.ndarray | None = None
) -> None:
    old = nib.load(path)
    nib.save(
        nib.Nifti1Image(
            change(old.get_fdata()).astype(np.float32), old.affine if affine is None else affine
        ),
        path,
    )


def first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(voxels: np.ndarray) -> np.ndarray:
        voxels[0, 0, 0] = value
        return voxels

    return change


BAD: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "shape": (lambda _, mask: rewrite(mask, lambda v: v[1:]), ("{image}", "{mask}", "one shape")),
    "affine": (
        lambda _, mask: rewrite(mask, lambda v: v, np.diag([1.0, 1.0, 2.0, 1.0])), ("{image}", "{mask}", "affine"),
    ),
    "label": (lambda _, mask: rewrite(mask, first(3)), ("{mask}", "the value 3 at 1 voxels", "0 to 2")),
    "nan": (lambda image, _: rewrite(image, first(np.nan)), ("{image}", "NaN or infinite values at 1 of")),
    "zero": (lambda image, _: rewrite(image, lambda v: v * 0), ("{image}", "the value 0 at every voxel")),
    "series": (lambda image, _: rewrite(image, lambda v: np.stack([v, v], -1)), ("hippocampus_", "has 2 channels")),
    "truncated": (lambda image, _: image.write_bytes(image.read_bytes()[:200]), ("{image}", "cannot be read")),
}  # fmt: skip


@pytest.mark.parametrize("verb", ["run", "check"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_case_is_refused_by_name(
    broken: tuple[Path, Path, Path],
    tmp_path: Path,
    name: str,
    verb: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, image, mask = broken
    edit, texts = BAD[name]
    edit(image, mask)
    out = tmp_path / "out"
    more = (
        ["--out", str(out), "--jobs", "1", "--config", "patch_size=[16,16,16]"]
        if verb == "run"
        else []
    )
    command = ["run"] if verb == "run" else ["data", "check"]
    assert cli.main([*command, "hippocampus", "--data", str(folder), *more]) == 2
    _, stderr = capsys.readouterr()
    last = stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert stderr.count("error: ") == 1
    for text in texts:
        assert text.format(image=image.name, mask=mask.name) in last
    assert not out.exists()


def test_a_patch_larger_than_a_volume(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["run", "hippocampus", "--data", str(cohort), "--out", str(out), "--jobs", "1"]
    assert cli.main([*command, "--config", "patch_size=[64,16,16]"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "smaller than the patch of 64 x 16 x 16" in last
    assert "lower it with --config patch_size=[" in last
    assert not out.exists()


def test_partition_by_class_needs_classes(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "run",
        "hippocampus",
        "--data",
        str(cohort),
        "--out",
        str(tmp_path / "out"),
        "--partition",
    ]
    assert cli.main([*command, "dirichlet:0.5"]) == 2
    assert "this rule divides by class" in capsys.readouterr().err
    assert cli.main([*command, "centre"]) == 2
    capsys.readouterr()
