"""Data sets taken apart, and their transforms run once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import ArrayDataset, CacheDataset, Dataset, NPZDictItemDataset, list_data_collate, pad_list_data_collate
from monai.transforms import (
    Compose,
    Lambdad,
    RandFlipd,
    RandLambdad,
    RandScaleIntensity,
    RandScaleIntensityd,
    RandSpatialCropSamplesd,
)
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from medfl import preparing
from medfl.errors import InputError
from medfl.prepared import Prepared, Sampled, Shard, Stacked
from medfl.preparing import Source, prepare, records, take_apart

ENTRIES = [{"image": torch.full((1, 4, 4), float(i)), "label": i % 2} for i in range(6)]
DOUBLE = Lambdad("image", lambda image: image * 2)
ADD = Lambdad("image", lambda image: image + 1)
SCALE = RandScaleIntensityd("image", 0.5, prob=1.0)


def made(dataset: Any, **options: Any) -> Prepared:
    source = take_apart(dataset)
    return prepare(records(source, "train", []), source, **options)


def images(prepared: Prepared, generator: torch.Generator | None = None, size: int = 3) -> list[float]:
    order = torch.arange(len(prepared))
    return [float(image.mean()) for x, _ in prepared.batches(order, size, generator) for image in x]


# Taking apart


class Own(torch.utils.data.Dataset[Any]):
    """A data set that only its own class can read, with a random transform inside."""

    def __init__(self) -> None:
        self.transform = Compose([SCALE])

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.transform({"image": torch.full((1, 4, 4), index + 1.0), "label": 0})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ENTRIES)


def test_take_apart_lists() -> None:
    """Caches, subsets, concatenations and data sets over data sets come down to one list and its transforms."""
    assert take_apart(ENTRIES) == Source(ENTRIES)
    assert take_apart(np.array(ENTRIES)).entries == ENTRIES
    compose = Compose([DOUBLE])
    whole = CacheDataset(ENTRIES, compose, progress=False)
    assert take_apart(whole) == Source(ENTRIES, (whole.transform,))
    assert take_apart(Subset(Dataset(ENTRIES, compose), [4, 1])) == Source([ENTRIES[4], ENTRIES[1]], (compose,))
    parts = ConcatDataset([Dataset(ENTRIES[:2], compose), Dataset(ENTRIES[4:], compose)])
    assert take_apart(parts) == Source(ENTRIES[:2] + ENTRIES[4:], (compose,))
    add = Compose([ADD])
    assert take_apart(Dataset(Dataset(ENTRIES, compose), add)) == Source(ENTRIES, (compose, add))
    assert take_apart(Dataset(ENTRIES)) == Source(ENTRIES)


def test_take_apart_data_sets_of_their_own(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.ones((3, 4, 4)), labels=np.arange(3))
    npz = NPZDictItemDataset(str(tmp_path / "a.npz"), {"images": "image", "labels": "label"})
    add = Compose([ADD])
    source = take_apart(Dataset(Subset(npz, [2, 0]), add))
    assert not source.is_list
    assert source.fixed
    assert source.transforms == (add,)
    assert [int(source.entries[i]["label"]) for i in range(2)] == [2, 0]
    assert not take_apart(Own()).fixed
    assert not take_apart(ConcatDataset([Dataset(ENTRIES, ADD), Dataset(ENTRIES, DOUBLE)])).is_list
    with pytest.raises(TypeError, match="Stream"):
        take_apart(Stream())


# Records


@pytest.mark.parametrize(
    ("label", "index"),
    [
        (3, 3), (-1, -1), (np.int64(2), 2), (np.array(2), 2), (torch.tensor(2), 2), (np.array([2]), 2), (2.0, 2),
        (np.float32(2), 2), ("2", 2), ("-1", -1), (True, 1), ("a.nii", None), (2.5, None), (None, None), ([0, 1], None),
        (np.array([0, 1]), None), (float("nan"), None), ("", None),
    ],
)  # fmt: skip
def test_labels(label: Any, index: int | None) -> None:
    record = records(Source([{"image": "a.png", "label": label}]), "train", [])[0]
    assert record.get("label") == index
    assert type(record.get("label")) in (int, type(None))


def test_records() -> None:
    entries = [
        {"image": "/data/a/1.png", "label": 0, "patient": 7, "center": "Vienna"},
        {"image": ["/data/b/1.png", "/data/b/2.png"]},
        {"image": "/elsewhere/1.png"},
        {"image": "/data/a/1.png"},
        {"id": "own", "image": "/data/c.png"},
        {"scan": Path("/data/s.npy")},
        {"image": torch.zeros(1)},
    ]
    made = records(Source(entries), "validate", [Path("/data"), Path("/root")])
    ids = ["a/1.png", "b/1.png", "/elsewhere/1.png", "a/1.png#3", "own", "s.npy", "validate-6"]
    assert [record["id"] for record in made] == ids
    assert made[0] == {"id": "a/1.png", "label": 0, "centre": "Vienna", "group": "7"}
    assert records(take_apart(Own()), "train", [])[3] == {"id": "train-3"}


# Preparing


def test_without_random_transforms_two_tensors() -> None:
    prepared = made(Dataset(ENTRIES, Compose([DOUBLE, Compose([ADD])])))
    assert isinstance(prepared, Stacked)
    assert images(prepared) == [1, 3, 5, 7, 9, 11]
    assert prepared.targets.tolist() == [0, 1, 0, 1, 0, 1]


def test_deterministic_transforms_run_once() -> None:
    calls: list[int] = []
    count = Lambdad("label", lambda label: calls.append(label) or label)
    after = Lambdad("image", lambda image: image + 100)
    prepared = made(Dataset(ENTRIES, Compose([count, SCALE, after])))
    assert isinstance(prepared, Sampled)
    for _ in range(3):
        images(prepared, torch.Generator().manual_seed(0))
    assert len(calls) == len(ENTRIES)
    assert all(value >= 100 for value in images(prepared)), (
        "what follows the random transforms is applied in evaluation"
    )


def test_random_transforms_do_not_write_into_what_is_kept() -> None:
    spoil = RandLambdad("image", lambda image: image.add_(1), prob=1.0)
    prepared = made(Dataset(ENTRIES, Compose([spoil])))
    assert images(prepared) == images(prepared) == [1, 2, 3, 4, 5, 6]


def test_seeds() -> None:
    """Random transforms follow the generator, also those that a data set applies by itself."""
    pixels = [torch.full((1, 4, 4), i + 1.0) for i in range(3)]
    arrays = ArrayDataset(pixels, RandScaleIntensity(0.5, prob=1.0), labels=[0, 1, 1])
    for dataset in (Dataset(ENTRIES[1:], Compose([SCALE])), Own(), Subset(Own(), [1, 2]), arrays):
        prepared = made(dataset)
        first, again, other = (images(prepared, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert first == again != other
        assert images(prepared) == images(prepared, size=1)


def test_several_samples_an_item() -> None:
    crop = RandSpatialCropSamplesd("image", (2, 2), num_samples=3, random_size=False)
    prepared = made(Dataset(ENTRIES, Compose([crop, RandFlipd("image", prob=0.5)])))
    assert [len(x) for x, _ in prepared.batches(torch.arange(5), 2, None)] == [6, 6, 3]


def test_collate_and_prepare_batch_of_the_bundle() -> None:
    """Different sizes are padded by the bundle's own collate; its prepare_batch takes other keys."""
    entries = [{"scan": torch.ones(1, 2 + i, 2), "mask": torch.zeros(1, 2 + i, 2)} for i in range(2)]

    def pair(batch: Any, device: Any, non_blocking: bool, **_: Any) -> Any:
        return batch["scan"].to(device), batch["mask"].to(device)

    prepared = made(Dataset(entries), collate=pad_list_data_collate, prepare_batch=pair)
    x, y = next(prepared.batches(torch.arange(2), 2, None))
    assert type(x) is torch.Tensor
    assert x.shape == y.shape == (2, 1, 3, 2)
    with pytest.raises(InputError, match="prepare_batch returns 3"):
        next(made(Dataset(ENTRIES), prepare_batch=lambda *_: (1, 2, 3)).batches(torch.arange(2), 2, None))


def test_unstackable_sizes_are_batched_one_by_one() -> None:
    entries = [{"image": torch.ones(1, 2 + i, 2), "label": 0} for i in range(2)]
    assert [x.shape[2] for x, _ in Shard.of(made(Dataset(entries)), [0, 1]).batches(1)] == [2, 3]


# Bad input


def boom(image: torch.Tensor) -> torch.Tensor:
    if float(image.mean()) == 4:
        raise OSError("image file is truncated")
    return image


@pytest.mark.parametrize(
    "order", [[Lambdad("image", boom), SCALE], [SCALE.__class__("image", 0.0), Lambdad("image", boom)]]
)
def test_failure_names_the_item(order: list[Any]) -> None:
    with pytest.raises(InputError, match="item 'train-4' cannot be prepared: OSError: image file is truncated"):
        images(made(Dataset(ENTRIES, Compose(order))))


@pytest.mark.parametrize("transforms", [[], [SCALE]])
def test_channels_are_compared(transforms: list[Any]) -> None:
    entries = [*ENTRIES, {"image": torch.zeros(3, 4, 4), "label": 0, "id": "odd"}]
    with pytest.raises(InputError, match="image 'odd' has 3 channels, 'train-0' has 1"):
        made(Dataset(entries, Compose(transforms)))


def test_sizes_without_channels_are_not_compared() -> None:
    """Before a random transform adds the channel, the first axis is a size."""
    entries = [{"image": torch.zeros(4 + i, 4, 4), "label": 0} for i in range(3)]
    add = Lambdad("image", lambda image: image[None])
    assert len(made(Dataset(entries, Compose([RandFlipd("image", prob=0.0), add])))) == 3


def test_worker_processes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of forked workers equal our own, lambdas and all; their errors arrive."""
    entries = [{**entry, "id": str(i)} for i, entry in enumerate(ENTRIES * 30)]
    dataset = Dataset(entries, Compose([DOUBLE, SCALE]))
    monkeypatch.setattr(preparing, "_PARALLEL_FROM", 100)
    one, two = (made(dataset, jobs=jobs, collate=list_data_collate) for jobs in (1, 2))
    assert images(one) == images(two)
    with pytest.raises(InputError, match=r"item '4' cannot be prepared: OSError: .*; every item.*; remove or repair"):
        made(Dataset(entries, Compose([Lambdad("image", boom)])), jobs=2)
