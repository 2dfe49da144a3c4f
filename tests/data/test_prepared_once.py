"""What the tests do to save time: images prepared and cohorts drawn once are those of every further time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError
from tests.support.phantoms import draw_once
from tests.support.prepared import Kept, keep_prepared
from tests.support.toy import bits


def opened(folder: Path) -> Bundle:
    return Bundle("skin_lesion", {"dataset_dir": str(folder), "image_size": 16})


def numbers(bundle: Bundle) -> list[object]:
    return [
        bits(list(bundle.prepared(section).batches(torch.arange(3), 3, None)))
        for section in ("validate", "test")
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return datasets.write_phantom("skin_lesion", tmp_path / "data", per_class=10, size=16)


def test_prepared_images_are_those_of_a_new_preparation(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = numbers(opened(data))
    copy = shutil.copytree(data, tmp_path / "copy")
    kept = Kept()
    keep_prepared(monkeypatch, kept)
    assert numbers(opened(data)) == expected
    held = len(kept.samples)
    assert numbers(opened(data)) == expected
    assert len(kept.samples) == held > 0, "the second time all are kept"
    assert numbers(opened(copy)) == expected
    places = [place.file for place in opened(copy).prepared("test").geometry]
    assert places
    assert all(place.startswith(str(copy)) for place in places), "a file keeps its name"


def test_other_pixels_and_other_settings_are_prepared_anew(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_prepared(monkeypatch, Kept())
    first = numbers(opened(data))
    other = Bundle("skin_lesion", {"dataset_dir": str(data), "image_size": 32})
    assert numbers(other) != first
    for item in opened(data).data("test"):
        with Image.open(item["image"]) as image:
            image.point(lambda value: 255 - value).save(item["image"])
    changed = numbers(opened(data))
    assert changed[0] == first[0]
    assert changed[1] != first[1]
    Path(opened(data).data("test")[0]["image"]).write_bytes(b"no picture")
    with pytest.raises(InputError, match="cannot be read"):
        numbers(opened(data))


def test_a_cohort_is_copied_where_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    drawn: list[str] = []
    write = datasets.write_phantom

    def counted(name: str, folder: Path, **given: int) -> Path:
        drawn.append(Path(folder).name)
        return write(name, folder, **given)

    monkeypatch.setattr(datasets, "write_phantom", counted)
    (tmp_path / "kept").mkdir()
    draw_once(monkeypatch, tmp_path / "kept")
    a, b, c = (
        datasets.write_phantom("mednist", tmp_path / name, per_class=10, size=16, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert drawn == ["a", "c"]
    assert content(a) == content(b) != content(c)
    with pytest.raises(InputError, match="exists and is not empty"):
        datasets.write_phantom("mednist", a, per_class=10, size=16, seed=0)
