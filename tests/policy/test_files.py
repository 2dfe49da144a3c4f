"""Every path is checked where the file is opened, and a header that names another file opens nothing."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from medfl.bundle.guarded import check_content
from medfl.core.errors import InputError, root_cause
from medfl.core.untrusted import Refused
from tests.policy.test_evaluate import configuration

LOAD = {"_target_": "LoadImaged", "keys": "image"}


def secret(tmp_path: Path) -> Path:
    """A picture outside of the bundle."""
    path = tmp_path / "outside" / "secret.png"
    path.parent.mkdir()
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(path)
    return path


def first_item(root: Path, content: dict[str, Any]) -> Any:
    """Read the first item; MONAI's own words about a failing transform are left out."""
    try:
        return configuration(
            root, {"bundle_root": ".", "imports": ["$import os"], **content}
        ).evaluated("x")[0]
    except Exception as error:
        raise root_cause(error) from error


ELSEWHERE: dict[str, dict[str, Any]] = {
    "in_a_data_list": {
        "x": {"_target_": "Dataset", "data": "$[{'image': @far}]", "transform": LOAD}
    },
    "behind_a_transform": {
        "there": {"_target_": "Lambdad", "keys": "image", "func": "$lambda x: @far"},
        "both": {"_target_": "Compose", "transforms": ["@there", LOAD]},
        "x": {"_target_": "Dataset", "data": [{"image": "a.png"}], "transform": "@both"},
    },
    "by_medfl_s_own_reader": {
        "there": {"_target_": "Lambdad", "keys": "image", "func": "$lambda x: @far"},
        "read": {"_target_": "medfl.datasets.ReadPixelsd", "keys": "image"},
        "both": {"_target_": "Compose", "transforms": ["@there", "@read"]},
        "x": {"_target_": "Dataset", "data": [{"image": "a.png"}], "transform": "@both"},
    },
    "in_an_array": {"x": {"_target_": "ImageDataset", "image_files": "$np.array([@far])"}},
    "in_a_dictionary_of_lists": {
        "x": {"_target_": "Dataset", "data": "$[{'image': [@far]}]", "transform": LOAD}
    },
    "of_a_list_of_decathlon": {
        "x": {"_target_": "Dataset", "data": "$[{'image': i} for i in [@far]]", "transform": LOAD}
    },
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_file_elsewhere_is_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = secret(tmp_path)
    monkeypatch.chdir(path.parent)
    far = "$os.sep + " + " + os.sep + ".join(repr(part) for part in path.parts[1:])
    with pytest.raises(
        (InputError, Refused),
        match="neither below the bundle nor below its data",
    ):
        first_item(tmp_path / "bundle", {"far": far, **ELSEWHERE[name]})


def test_files_of_the_bundle_are_read(tmp_path: Path) -> None:
    root = tmp_path / "bundle"
    root.mkdir()
    Image.fromarray(np.ones((4, 4), dtype=np.uint8)).save(root / "a.png")
    for transform in (LOAD, {"_target_": "medfl.datasets.ReadPixelsd", "keys": "image"}):
        data = {
            "_target_": "Dataset",
            "data": "$[{'image': @bundle_root + '/a.png'}]",
            "transform": transform,
        }
        assert float(first_item(root, {"x": data})["image"].sum()) == 16


NRRD = b"NRRD0004\ntype: uint8\ndimension: 1\nsizes: 4\nencoding: raw\n"
GIFTI = b'<?xml version="1.0"?>\n<GIFTI><DataArray Encoding="ExternalFileBinary" ExternalFileName="%s"/></GIFTI>'
HEADERS: dict[str, tuple[str, bytes]] = {
    "detached_nrrd": ("a.nhdr", NRRD + b"data file: ../outside/secret.png\n"),
    "detached_nrrd_by_its_other_field": ("a.nhdr", NRRD + b"datafile: secret\n"),
    "nrrd_whose_pixels_lie_elsewhere": ("a.nrrd", NRRD + b"data file: secret\n"),
    "meta_image": (
        "a.mhd",
        b"NDims = 1\nDimSize = 4\nElementType = MET_UCHAR\nElementDataFile = secret\n",
    ),
    "meta_image_in_one_file": ("a.mha", b"NDims = 1\nDimSize = 4\nElementDataFile=secret\n"),
    "meta_image_that_begins_oddly": (
        "a.mha",
        b"Comment = \x00\x01\nNDims = 1\nElementDataFile = LIST\nsecret\n",
    ),
    "gifti": ("a.gii", GIFTI % b"secret"),
    "gifti_in_gzip": ("a.gii.gz", gzip.compress(GIFTI % b"secret")),
    "hdf5": ("a.mnc", b"\x89HDF\r\n\x1a\n" + bytes(100)),
    "index_of_a_slide": ("a.vms", b"[Virtual Microscope Specimen]\nImageFile=../secret.jpg\n"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_names_another_file_is_refused(name: str, tmp_path: Path) -> None:
    file, content = HEADERS[name]
    root = tmp_path / "bundle"
    root.mkdir()
    (root / file).write_bytes(content)
    load = {**LOAD, "reader": "PILReader"}
    data = {
        "_target_": "Dataset",
        "data": f"$[{{'image': @bundle_root + '/{file}'}}]",
        "transform": load,
    }
    with pytest.raises(
        RuntimeError, match="names another file"
    ):  # which MONAI's loader says of each of its readers
        first_item(root, {"x": data})


def test_pixels_in_the_file_itself_are_read(tmp_path: Path) -> None:
    nibabel.save(
        nibabel.Nifti1Image(np.ones((2, 2, 2), np.float32), np.eye(4)), tmp_path / "a.nii.gz"
    )
    (tmp_path / "a.nrrd").write_bytes(NRRD + b"\n" + bytes(4))
    (tmp_path / "a.mha").write_bytes(
        b"NDims = 1\nDimSize = 4\nElementDataFile = LOCAL\n" + bytes(4)
    )
    (tmp_path / "a.gii").write_bytes(GIFTI % b"")
    (tmp_path / "cut.nii.gz").write_bytes(gzip.compress(bytes(100))[:-20])
    (tmp_path / "series").mkdir()
    for path in tmp_path.iterdir():
        check_content(path)
    (tmp_path / "b.mhd").write_bytes(b"ElementDataFile = b.raw\n")
    with pytest.raises(Refused, match=r"b\.mhd"):
        check_content(tmp_path / "b.mhd")


@pytest.mark.parametrize(
    ("unit", "factor"), [("micron", 1e-3), ("meter", 1e3), ("mm", 1.0), ("unknown", 1.0)]
)
def test_lengths_are_mm_by_the_readers_of_monai_too(
    tmp_path: Path, unit: str, factor: float
) -> None:
    root = tmp_path / "bundle"
    root.mkdir()
    affine = np.diag([2.0, 3, 4, 1])
    affine[:3, 3] = 5, 6, 7
    image = nibabel.Nifti1Image(np.ones((2, 3, 4), np.float32), affine)
    image.header.set_xyzt_units(unit)
    nibabel.save(image, root / "a.nii")
    data = {
        "_target_": "Dataset",
        "data": "$[{'image': @bundle_root + '/a.nii'}]",
        "transform": LOAD,
    }
    read = first_item(root, {"x": data})["image"]
    affine[:3] *= factor
    assert np.allclose(read.affine, affine)
    assert np.allclose(read.meta["original_affine"], affine)
