"""Images without labels: what is found at files, folders, archives and DICOM series, and how each is called."""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK as sitk
from PIL import Image

from medfl.core.errors import InputError
from medfl.datasets import read_pixels
from medfl.datasets.readers.dicom import own_locale
from medfl.datasets.readers.tables import image_files
from medfl.datasets.readers.unlabelled import named, without_ending
from tests.datasets.test_volumes import IMAGE, save, save_dicom


def draw(*files: Path) -> None:
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), number).save(file)


def test_a_folder_gives_all_below_it_by_their_paths(tmp_path: Path) -> None:
    draw(
        *(
            tmp_path / name
            for name in (
                "b.png",
                "ä b/a.JPG",
                ".hidden.png",
                ".trash/c.png",
                "__MACOSX/d.png",
                "@eaDir/e.png",
            )
        )
    )
    (tmp_path / "notes.txt").write_text("no image")
    save(tmp_path / "v.nii.gz", IMAGE)
    assert list(named([tmp_path])) == ["b.png", "v.nii.gz", "ä b/a.JPG"]


def test_a_folder_that_may_not_be_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path / "a" / "b.png", tmp_path / "c" / "d.png", tmp_path / "lost+found" / "e.png")
    scan = os.scandir

    def scanned(path: str) -> Any:
        if Path(path).name in ("c", "lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scanned)
    for read in (lambda: named([tmp_path]), lambda: image_files(tmp_path)):
        with pytest.raises(InputError, match=r"folder .*c \(Permission denied\)"):
            read()


def test_series_are_found_with_and_without_endings(tmp_path: Path) -> None:
    for name in ("one/t1", "two"):
        (tmp_path / name).mkdir(parents=True)
        save_dicom(tmp_path / name, IMAGE)
    for file in (tmp_path / "two").iterdir():
        file.rename(file.with_suffix(""))
    assert named([tmp_path]) == {"one/t1": str(tmp_path / "one/t1"), "two": str(tmp_path / "two")}
    assert named([tmp_path / "two"]) == {"two": str(tmp_path / "two")}
    slices = sorted((tmp_path / "one/t1").iterdir())
    assert named(slices) == {"t1": str(tmp_path / "one/t1")}, (
        "files of one series stand for it, once"
    )


def test_for_pictures_each_dicom_file_is_one(tmp_path: Path) -> None:
    save_dicom(tmp_path / "t1", IMAGE)
    (tmp_path / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
    names = sorted(f"t1/{path.name}" for path in (tmp_path / "t1").iterdir())
    assert list(named([tmp_path], series=False)) == names
    assert list(named([tmp_path])) == ["t1"]


@pytest.mark.parametrize("stored", ["int16", "uint16"])
@pytest.mark.parametrize(
    ("kind", "window", "wanted"),
    [
        ("MONOCHROME2", None, [0, 85, 170, 255]), ("MONOCHROME1", None, [255, 170, 85, 0]),
        ("MONOCHROME2", ("1501", "1001"), [0, 0, 255, 255]), ("MONOCHROME1", ("501", "1001"), [255, 0, 0, 0]),
        ("MONOCHROME2", ("1501\\40", "3001\\80"), [0, 85, 170, 255]),
    ],
)  # fmt: skip
def test_a_dicom_picture_is_read_as_a_viewer_shows_it(
    kind: str, window: tuple[str, str] | None, wanted: list[int], stored: str, tmp_path: Path
) -> None:
    picture = sitk.GetImageFromArray(np.array([[0, 1000], [2000, 3000]], dtype=stored))
    for tag, value in zip(("0028|1050", "0028|1051"), window or (), strict=False):
        picture.SetMetaData(tag, value)
    with own_locale():
        sitk.WriteImage(picture, str(tmp_path / "x.dcm"))
    content = (tmp_path / "x.dcm").read_bytes()
    assert content.count(b"MONOCHROME2") == 1
    (tmp_path / "IM001").write_bytes(content.replace(b"MONOCHROME2", kind.encode()))
    pixels = read_pixels(str(tmp_path / "IM001"), channels=1)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (2, 2, 1))
    assert pixels.ravel().tolist() == wanted


def test_damaged_dicom_files_are_refused_by_name(tmp_path: Path) -> None:
    for content in (bytes(128) + b"DICM", b"", b"text"):
        (tmp_path / "x.dcm").write_bytes(content)
        with pytest.raises(InputError, match="DICOM file .*x.dcm cannot be read"):
            read_pixels(str(tmp_path / "x.dcm"))


def test_archives_give_what_is_in_them(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", tmp_path / "b.png")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        for member in ("in/a.png", "b.png"):
            archive.write(tmp_path / Path(member).name, member)
        archive.writestr("notes.txt", "no image")
    np.savez(
        tmp_path / "s.npz",
        test_images=np.arange(2 * 9, dtype=np.uint8).reshape(2, 3, 3),
        test_labels=[[0], [1]],
    )
    found = named([tmp_path / "z.zip", tmp_path / "s.npz"])
    assert list(found) == ["b.png", "in/a.png", "test_images_000000", "test_images_000001"]
    assert read_pixels(found["b.png"])[0, 0, 0] == 1
    assert read_pixels(found["test_images_000001"])[0, 0, 0] == 9


def test_images_of_one_name_stay_apart(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("x/a/1.png", "y/a/1.png", "x/b/1.png", "x/b/2.png")]
    draw(*files)
    assert list(named([file.parent for file in files[1:3]])) == ["a/1.png", "b/1.png", "2.png"]
    assert list(named([files[0].parent, files[1].parent])) == [str(files[0]), str(files[1])]
    assert list(named([files[3], files[3]])) == [str(files[3]), f"{files[3]}#1"]
    assert [without_ending(name) for name in ("a.b.nii.gz", "c.PNG", "d")] == ["a.b", "c", "d"]


def test_a_folder_means_what_its_checks_took_it_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle's place is checked as it is written: a tilde is a name, not the user's folder."""
    draw(tmp_path / "a.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match="~ is no file and no folder"):
        named(["~"])


def test_places_without_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty holds no image; files that end in .*DICOM"):
        named([tmp_path / "empty"])
    with pytest.raises(InputError, match="nowhere is no file and no folder"):
        named([tmp_path / "nowhere"])
