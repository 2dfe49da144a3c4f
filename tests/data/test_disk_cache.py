"""Prepared samples on disk: the same numbers as in memory, made once, made again when something changed."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import (
    Compose,
    LoadImaged,
    RandAdjustContrastd,
    RandFlipd,
    RandHistogramShiftd,
    RandSpatialCropd,
    ScaleIntensityd,
)

from medfl.core.errors import InputError, RunError
from medfl.data import prepare as module
from medfl.data.prepare import DiskCache, OnDisk, budget, prepare, sample_key, size_of
from medfl.data.prepared import Augmented, Prepared
from medfl.data.samples import Sampled
from medfl.data.source import Source

GIB = 2**30


@pytest.fixture
def entries(tmp_path: Path) -> list[dict[str, Any]]:
    """Four volumes of different shapes with masks."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(4):
        shape = (12 + index, 10, 11)
        paths = {"image": tmp_path / f"v{index}.nii.gz", "label": tmp_path / f"m{index}.nii.gz"}
        affine = np.diag([1.0, 2.0, 1.5, 1.0])
        nib.save(nib.Nifti1Image(rng.normal(size=shape).astype(np.float32), affine), paths["image"])
        nib.save(
            nib.Nifti1Image(rng.integers(0, 2, shape).astype(np.uint8), affine), paths["label"]
        )
        made.append({"id": f"case-{index}", **{key: str(path) for key, path in paths.items()}})
    return made


def loading(*random: Any) -> Compose:
    keys = ["image", "label"]
    return Compose([LoadImaged(keys, ensure_channel_first=True), ScaleIntensityd("image"), *random])


CROP = RandSpatialCropd(["image", "label"], (8, 8, 8), random_size=False)
FLIP = RandFlipd(["image", "label"], 0.5, 0)
NOT_BATCHED = RandHistogramShiftd("image", prob=0.5)


def prepared(entries: list[dict[str, Any]], cache_in: DiskCache | None, *random: Any) -> Prepared:
    return prepare(entries, Source(entries, (loading(*random),)), cache=cache_in)


def cache_in(
    folder: Path, entries: list[dict[str, Any]], most: int = 0, parts: tuple[str, ...] = ("scaled",)
) -> DiskCache:
    return DiskCache(folder, lambda index: sample_key(parts, entries[index]), most)


def drawn(data: Prepared, seed: int | None = 3) -> list[torch.Tensor]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return [part for batch in data.batches(torch.arange(4), 1, generator) for part in batch]


def test_patches_from_the_disk_are_those_from_memory(
    entries: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    memory, disk = (
        prepared(entries, place, CROP, FLIP) for place in (None, cache_in(folder, entries))
    )
    assert isinstance(disk, Augmented)
    assert isinstance(disk.cached, OnDisk)
    assert len(list(folder.iterdir())) == 4
    for seed in (3, 4):
        assert all(
            torch.equal(a, b) for a, b in zip(drawn(memory, seed), drawn(disk, seed), strict=True)
        )


def test_whole_volumes_keep_their_geometry(entries: list[dict[str, Any]], tmp_path: Path) -> None:
    memory, disk = (
        prepared(entries, place) for place in (None, cache_in(tmp_path / "cache", entries))
    )
    assert all(
        torch.equal(a, b) for a, b in zip(drawn(memory, None), drawn(disk, None), strict=True)
    )
    assert [geometry.spacing for geometry in disk.geometry] == [(1.0, 2.0, 1.5)] * 4
    assert [geometry.original_shape for geometry in disk.geometry] == [
        (12 + i, 10, 11) for i in range(4)
    ]
    assert [geometry.file for geometry in disk.geometry] == [entry["image"] for entry in entries]
    assert [geometry.file for geometry in memory.geometry] == [
        geometry.file for geometry in disk.geometry
    ]


def test_volumes_of_bytes_keep_their_geometry(tmp_path: Path) -> None:
    entries = []
    for index in range(2):
        voxels = np.random.default_rng(index).integers(0, 256, (12, 10, 9)).astype(np.uint8)
        nib.save(
            nib.Nifti1Image(voxels, np.diag([1.0, 2.0, 1.5, 1.0])), tmp_path / f"v{index}.nii.gz"
        )
        entries.append(
            {"id": str(index), "image": str(tmp_path / f"v{index}.nii.gz"), "label": index}
        )
    load = Compose([LoadImaged("image", ensure_channel_first=True), ScaleIntensityd("image")])
    for place in (None, cache_in(tmp_path / "cache", entries)):
        data = prepare(entries, Source(entries, (load,)), cache=place)
        assert [geometry.spacing for geometry in data.geometry] == [(1.0, 2.0, 1.5)] * 2
        assert [geometry.original_shape for geometry in data.geometry] == [(12, 10, 9)] * 2
        x = torch.cat([x for x, _ in data.batches(torch.arange(2), 1, None)])
        assert torch.equal(
            x, torch.stack([load(dict(entry))["image"].as_tensor() for entry in entries])
        )
    assert (tmp_path / "cache").exists()


def test_a_sample_is_prepared_once_and_again_when_its_file_or_the_transforms_change(
    entries: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    own = LoadImaged.__call__

    def counting(self: LoadImaged, data: Any, *rest: Any) -> Any:
        loaded.append(data["id"])
        return own(self, data, *rest)

    monkeypatch.setattr(LoadImaged, "__call__", counting)
    folder = tmp_path / "cache"
    prepared(entries, cache_in(folder, entries), CROP)
    assert set(loaded) == {f"case-{i}" for i in range(4)}

    def again(place: DiskCache) -> list[str]:
        loaded.clear()
        prepared(entries, place, CROP)
        return loaded[1:]  # the first sample is always made: its size decides

    assert again(cache_in(folder, entries)) == []
    image = nib.load(entries[2]["image"])
    changed = image.get_fdata() + 1
    nib.save(nib.Nifti1Image(changed.astype(np.float32), image.affine), entries[2]["image"])
    assert again(cache_in(folder, entries)) == ["case-2"]
    assert again(cache_in(folder, entries, parts=("other transform",))) == [
        f"case-{i}" for i in range(4)
    ]


LONG = np.arange(5000.0).reshape(50, 100)  # NumPy and torch write it with an ellipsis
OTHER = np.where(LONG == 2550, -1, LONG)
PAIRS = {
    "array": (LONG, OTHER),
    "shape of an array": (LONG, LONG.reshape(100, 50)),
    "type of an array": (LONG, LONG.view(np.int64)),
    "mask of an array": (np.ma.array(LONG), np.ma.array(LONG, mask=LONG == 2550)),
    "array of objects": (LONG.astype(object), OTHER.astype(object)),
    "tensor": (torch.tensor(LONG), torch.tensor(OTHER)),
    "shape of a tensor": (torch.zeros(4), torch.zeros(2, 2)),
    "type of a tensor": (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
    "half tensor": (torch.zeros(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)),
    "affine": (
        MetaTensor(torch.zeros(1, 2, 2)),
        MetaTensor(torch.zeros(1, 2, 2), affine=2 * torch.eye(4)),
    ),
    "array in a list": ([LONG], [OTHER]),
    "array in a mapping": ({"pixels": LONG}, {"pixels": OTHER}),
    "grouping": (["a", ["b", "c"]], [["a", "b"], "c"]),
    "bar": (["a|b"], ["a", "b"]),
}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=list(PAIRS))
def test_the_key_is_of_all_that_an_entry_holds(one: Any, other: Any) -> None:
    assert sample_key((), {"image": one}) != sample_key((), {"image": other})
    assert sample_key(({"override": one},), {}) != sample_key(({"override": other},), {})
    assert sample_key(({"override": one},), {"image": one}) == sample_key(
        ({"override": deepcopy(one)},), {"image": one}
    )


def test_a_file_named_inside_a_mapping_counts(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"1")
    entry = {"image": {"left": str(tmp_path / "a.png")}}
    before = sample_key((), entry)
    assert sample_key((), deepcopy(entry)) == before
    (tmp_path / "a.png").write_bytes(b"2")
    assert sample_key((), entry) != before


def test_what_fits_stays_in_memory(entries: list[dict[str, Any]], tmp_path: Path) -> None:
    """The first sample: 12 * 10 * 11 float32 voxels of the image, and as many of the mask."""
    folder = tmp_path / "cache"
    data = prepared(entries, None, CROP)
    first = size_of(data.cached[0])
    assert first == 12 * 10 * 11 * 8
    assert isinstance(prepared(entries, cache_in(folder, entries, 4 * first), CROP).cached, list)
    assert not folder.exists()
    assert isinstance(
        prepared(entries, cache_in(folder, entries, 4 * first - 1), CROP).cached, OnDisk
    )


def test_samples_made_in_threads_from_the_disk_are_those_from_memory(
    entries: list[dict[str, Any]], tmp_path: Path
) -> None:
    contrast = RandAdjustContrastd("image", prob=1.0)  # not among those that act on batches
    memory, disk = (
        prepared(entries, place, CROP, contrast)
        for place in (None, cache_in(tmp_path / "cache", entries))
    )
    assert isinstance(disk, Sampled)
    assert isinstance(disk.samples.cached, OnDisk)
    assert all(torch.equal(a, b) for a, b in zip(drawn(memory), drawn(disk), strict=True))
    assert not torch.equal(drawn(disk, 3)[0], drawn(disk, 4)[0])


def test_a_mapped_sample_can_be_changed_without_changing_its_file(tmp_path: Path) -> None:
    place = DiskCache(tmp_path, lambda index: f"s{index}", 0)
    kept = place.keep(
        1, lambda indices: iter([{"image": MetaTensor(torch.ones(2, 3))} for _ in indices])
    )
    kept[0]["image"].zero_()
    assert kept[0]["image"].sum() == 6


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    place = DiskCache(tmp_path, lambda index: f"s{index}", 0)
    kept = place.keep(1, lambda indices: iter([{"image": torch.ones(2)} for _ in indices]))
    (tmp_path / "s0.pt").write_bytes(b"nothing")
    with pytest.raises(RunError, match=r"s0\.pt cannot be read .* remove the file"):
        kept[0]


def test_the_budget_is_a_third_of_the_free_memory_or_what_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MEDFL_MEMORY", raising=False)
    monkeypatch.setattr(module, "free_ram", lambda: 6 * GIB)
    assert budget() == 2 * GIB
    monkeypatch.setenv("MEDFL_MEMORY", "0.5")
    assert budget() == GIB // 2
    for wrong in ("much", "0", "-1"):
        monkeypatch.setenv("MEDFL_MEMORY", wrong)
        with pytest.raises(InputError, match=f"MEDFL_MEMORY={wrong}; GiB for prepared images"):
            budget()


def test_free_ram_is_known_here() -> None:
    assert 1 << 20 < module.free_ram() < 1 << 50
