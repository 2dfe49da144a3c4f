"""Data sets taken apart, and their transforms run once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import (
    ArrayDataset,
    CacheDataset,
    Dataset,
    MetaTensor,
    NPZDictItemDataset,
    PILReader,
    list_data_collate,
    pad_list_data_collate,
)
from monai.transforms import (
    BorderPadd,
    Compose,
    CopyItemsd,
    EnsureChannelFirstd,
    Flipd,
    Lambdad,
    LoadImaged,
    NormalizeIntensityd,
    OneOf,
    RandAdjustContrastd,
    RandAffined,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandLambdad,
    RandScaleCropd,
    RandScaleIntensity,
    RandScaleIntensityd,
    RandSpatialCropd,
    RandSpatialCropSamplesd,
    Resized,
    ScaleIntensityRanged,
)
from PIL import Image
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from medfl.core.errors import InputError
from medfl.data import prepare as preparing
from medfl.data.prepare import prepare
from medfl.data.prepared import Augmented, Prepared, Shard, Stacked
from medfl.data.samples import Sampled, SampleMaker, without_draws
from medfl.data.source import Source, records, take_apart
from medfl.evaluation.save_masks import is_picture, to_original

ENTRIES = [{"image": torch.full((1, 4, 4), float(i)), "label": i % 2} for i in range(6)]
DOUBLE = Lambdad("image", lambda image: image * 2)
ADD = Lambdad("image", lambda image: image + 1)
SCALE = RandScaleIntensityd("image", 0.5, prob=1.0)


def made(dataset: Any, **options: Any) -> Prepared:
    source = take_apart(dataset)
    return prepare(records(source, "train", []), source, **options)


def images(
    prepared: Prepared, generator: torch.Generator | None = None, size: int = 3
) -> list[float]:
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
    assert take_apart(Subset(Dataset(ENTRIES, compose), [4, 1])) == Source(
        [ENTRIES[4], ENTRIES[1]], (compose,)
    )
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
    assert source.repeatable
    assert source.transforms == (add,)
    assert [int(source.entries[i]["label"]) for i in range(2)] == [2, 0]
    assert not take_apart(Own()).repeatable
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


@pytest.mark.parametrize("missing", [None, "", float("nan"), np.float64("nan"), "nan", "<NA>"])
def test_a_patient_or_centre_that_a_table_lacks_is_none(missing: Any) -> None:
    entry = {"id": "a", "patient": missing, "lesion": "l7", "centre": missing}
    assert records(Source([entry, {"id": "b", "patient": missing}]), "train", []) == [
        {"id": "a", "group": "l7"}, {"id": "b"},
    ]  # fmt: skip


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
        first, again, other = (
            images(prepared, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
        )
        assert first == again != other
        assert images(prepared) == images(prepared, size=1)


def test_several_samples_an_item() -> None:
    crop = RandSpatialCropSamplesd("image", (2, 2), num_samples=3, random_size=False)
    prepared = made(Dataset(ENTRIES, Compose([crop, RandFlipd("image", prob=0.5)])))
    assert [len(x) for x, _ in prepared.batches(torch.arange(5), 2, None)] == [6, 6, 3]


def test_collate_and_prepare_batch_of_the_bundle() -> None:
    """Different sizes are padded by the bundle's own collate; its prepare_batch takes other keys."""
    entries = [
        {"scan": torch.ones(1, 2 + i, 2), "mask": torch.zeros(1, 2 + i, 2)} for i in range(2)
    ]

    def pair(batch: Any, device: Any, non_blocking: bool, **_: Any) -> Any:
        return batch["scan"].to(device), batch["mask"].to(device)

    prepared = made(Dataset(entries), collate=pad_list_data_collate, prepare_batch=pair)
    x, y = next(prepared.batches(torch.arange(2), 2, None))
    assert type(x) is torch.Tensor
    assert x.shape == y.shape == (2, 1, 3, 2)
    with pytest.raises(InputError, match="prepare_batch returns 3"):
        next(
            made(Dataset(ENTRIES), prepare_batch=lambda *_: (1, 2, 3)).batches(
                torch.arange(2), 2, None
            )
        )


def test_unstackable_sizes_are_batched_one_by_one() -> None:
    entries = [{"image": torch.ones(1, 2 + i, 2), "label": 0} for i in range(2)]
    assert [x.shape[2] for x, _ in Shard.of(made(Dataset(entries)), [0, 1]).batches(1)] == [2, 3]


# Compact, and in batches


PIXELS = [
    {
        "image": torch.randint(256, (3, 24, 24), generator=torch.Generator().manual_seed(i)),
        "label": i % 2,
    }
    for i in range(6)
]
NORMALISE = [
    ScaleIntensityRanged("image", 0, 255, 0, 1),
    NormalizeIntensityd("image", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225], channel_wise=True),
    BorderPadd("image", 2, mode="reflect"),
]  # leaves MetaTensors


def test_stacked_images_are_those_of_the_transforms() -> None:
    compose = Compose(NORMALISE)
    prepared = made(Dataset(PIXELS, compose))
    assert isinstance(prepared, Stacked)
    ((x, y),) = prepared.batches(torch.arange(6), 6, None)
    assert torch.equal(x, torch.stack([compose(dict(entry))["image"] for entry in PIXELS]))
    assert y.tolist() == [0, 1, 0, 1, 0, 1]


def test_item_by_item_what_is_kept_is_what_the_transforms_get() -> None:
    seen: list[torch.Tensor] = []
    look = RandLambdad("image", lambda image: seen.append(image.clone()) or image, prob=1.0)
    compose = Compose(NORMALISE)
    prepared = made(Dataset(PIXELS, Compose([*NORMALISE, look])))
    assert isinstance(prepared, Sampled)
    images(prepared)
    expected = [compose(dict(entry))["image"] for entry in PIXELS]
    for given, image in zip(seen[-6:], expected, strict=True):
        assert isinstance(given, MetaTensor)
        assert torch.equal(given, image)
        assert torch.equal(given.affine, image.affine)
        assert [step["class"] for step in given.applied_operations] == [
            step["class"] for step in image.applied_operations
        ]


@pytest.mark.parametrize(
    "collate", [pad_list_data_collate, lambda samples: list_data_collate(samples)]
)
def test_what_the_bundle_collates_by_itself_is_done_item_by_item(collate: Any) -> None:
    assert isinstance(made(Dataset(ENTRIES, Compose([SCALE])), collate=collate), Sampled)
    assert isinstance(made(Dataset(ENTRIES, Compose([SCALE]))), Augmented)


def test_patches_of_volumes_of_different_sizes_are_cut_in_batches() -> None:
    entries = [
        {
            "image": torch.full((1, 5 + i, 6), float(i)),
            "label": torch.full((1, 5 + i, 6), i, dtype=torch.uint8),
        }
        for i in range(4)
    ]
    crop = RandSpatialCropd(["image", "label"], (4, 4), random_size=False)
    prepared = made(Dataset(entries, Compose([crop, SCALE])))
    assert isinstance(prepared, Augmented)
    ((x, y),) = prepared.batches(torch.arange(4), 4, torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (4, 1, 4, 4)
    assert [mask.unique().tolist() for mask in y] == [[0], [1], [2], [3]]
    larger = RandSpatialCropd(["image", "label"], (6, 4), random_size=False)  # one item has only 5
    assert isinstance(made(Dataset(entries, Compose([larger]))), Sampled)


CONTRAST = RandAdjustContrastd("image", prob=0.5)


@pytest.mark.parametrize(
    ("transforms", "in_threads"),
    [
        ([CONTRAST], True),
        ([CONTRAST, RandFlipd("image", 0.5)], True),
        ([CONTRAST, Lambdad("image", lambda image: image + torch.rand(1))], False),
        ([RandLambdad("image", lambda image: image + torch.rand(1), prob=1.0)], False),
        ([OneOf([CONTRAST, SCALE])], False),
    ],
)
def test_only_transforms_with_a_state_of_their_own_run_in_threads(
    transforms: list[Any], in_threads: bool
) -> None:
    prepared = made(Dataset(PIXELS, Compose([*NORMALISE, *transforms])))
    assert isinstance(prepared, Sampled)
    assert prepared.in_threads == in_threads
    drawn = [images(prepared, torch.Generator().manual_seed(seed), size=1) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    prepared.in_threads = False
    assert images(prepared, torch.Generator().manual_seed(1), size=1) == drawn[0]
    assert images(prepared) == images(prepared, size=1)


def test_a_seed_reaches_the_parts_of_a_transform_apart() -> None:
    """With one seed for all parts, the angle of what is rotated with probability 0.5 would always be below 0."""
    rotate = RandAffined("image", prob=0.5, rotate_range=0.8)
    samples = SampleMaker([{"id": "a"}], Source([ENTRIES[0]], (Compose([rotate]),)))
    angles, shared = [], []
    for seed in range(300):
        samples.reseed(seed)
        for found, set_state in ((angles, None), (shared, rotate.set_random_state)):
            if set_state is not None:
                set_state(seed)
            rotate.randomize(None)
            rotate.rand_affine.randomize()
            if rotate._do_transform:
                found.append(rotate.rand_affine.rand_affine_grid.rotate_params[0])
    assert 0.4 < np.mean(np.array(angles) > 0) < 0.6
    assert max(shared) < 0


# Bad input


def boom(image: torch.Tensor) -> torch.Tensor:
    if float(image.mean()) == 4:
        raise OSError("image file is truncated")
    return image


@pytest.mark.parametrize(
    "order",
    [[Lambdad("image", boom), SCALE], [SCALE.__class__("image", 0.0), Lambdad("image", boom)]],
)
def test_failure_names_the_item(order: list[Any]) -> None:
    with pytest.raises(
        InputError, match="item 'train-4' cannot be prepared: OSError: image file is truncated"
    ):
        images(made(Dataset(ENTRIES, Compose(order))))


def test_metadata_beside_the_image_as_in_older_monai_are_asked_for_by_a_setting() -> None:
    steps = [Lambdad("image", torch.as_tensor), CopyItemsd("image_meta_dict", names="other")]
    with pytest.raises(
        InputError, match="KeyError: .*image_meta_dict.*give its LoadImage `image_only: false`"
    ):
        made(Dataset([{"image": 1.0}], Compose(steps)))


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
    with pytest.raises(
        InputError, match=r"item '4' cannot be prepared: OSError: .*; every item.*; remove the item"
    ):
        made(Dataset(entries, Compose([Lambdad("image", boom)])), jobs=2)


# Without random transforms


NAMED = [
    {"id": str(i), "image": torch.full((1, 6, 6), float(i)) + torch.arange(6.0), "label": i % 2}
    for i in range(5)
]
PADDED = BorderPadd("image", 2)
CROP = RandSpatialCropd("image", [6, 6], random_size=False)
NOISY = RandScaleIntensityd("image", 0.5, prob=1.0)


@pytest.mark.parametrize(
    "random",
    [[PADDED, CROP, NOISY], [PADDED, RandAdjustContrastd("image", prob=1.0), CROP, NOISY]],
    ids=["batch", "item"],
)
def test_items_that_stand_still_are_those_of_evaluation(random: list[Any]) -> None:
    """A border and the middle of a random crop cancel each other; nothing else that is random is left."""
    moving, fixed = (
        made(Dataset(NAMED, Compose([DOUBLE, *random]))),
        made(Dataset(NAMED, Compose([DOUBLE]))),
    )
    assert isinstance(moving, Augmented if len(random) == 3 else Sampled)
    order = torch.tensor([3, 0, 4])
    still = [next(p.batches(order, 3, None))[0] for p in (moving.deterministic(), fixed)]
    torch.testing.assert_close(*still, rtol=0, atol=0)
    assert not torch.equal(next(moving.batches(order, 3, None))[0], still[0])
    drawn = next(moving.deterministic().batches(order, 3, torch.Generator()))[0]
    assert torch.equal(drawn, still[0])
    whole = next(moving.deterministic(uncropped=True).batches(order, 3, None))[0]
    assert torch.equal(whole[..., 2:-2, 2:-2], still[1])
    assert whole.shape[2:] == (10, 10)


def test_items_without_random_transforms_are_their_own_still_view() -> None:
    for prepared in (made(Dataset(NAMED, Compose([DOUBLE]))), made(Own())):
        assert prepared.deterministic() is prepared
    own = made(Dataset(NAMED, Compose([lambda sample: sample])))
    assert images(own.deterministic()) == images(own)


@pytest.mark.parametrize(
    ("crop", "size"),
    [
        (RandSpatialCropSamplesd("image", [4, 2], 3, random_size=False), (4, 2)),
        (RandCropByPosNegLabeld("image", "mask", [2, 2], num_samples=2), (2, 2)),
        (RandScaleCropd("image", 0.5, random_size=False), (3, 3)),
        (RandSpatialCropd("image", -1, random_size=False), (6, 6)),
    ],
)
def test_the_middle_of_a_random_crop(crop: Any, size: tuple[int, ...]) -> None:
    sample = {"image": torch.arange(36.0).reshape(1, 6, 6), "mask": torch.ones(1, 6, 6)}
    (middle,) = without_draws([crop], uncropped=False)
    assert middle(sample)["image"].shape[1:] == size
    assert torch.equal(middle(sample)["image"], middle(sample)["image"])
    assert without_draws([crop], uncropped=True) == []


@pytest.mark.parametrize("reader", ["PILReader", PILReader(reverse_indexing=False)])
@pytest.mark.parametrize("side", [-1, 12])
def test_masks_of_pictures_that_monai_reads_lie_as_their_files(
    tmp_path: Path, reader: Any, side: int
) -> None:
    """Wide ones, whose columns come first where MONAI's reader is left as it is; resized and flipped or not."""
    picture = np.zeros((24, 36, 3), np.uint8)
    picture[2:12, 20:34] = 250
    Image.fromarray(picture).save(tmp_path / "a.png")
    steps = [LoadImaged("image", reader=reader), EnsureChannelFirstd("image"), Flipd("image", 0)]
    steps += [Resized("image", (side, side))] if side > 0 else []
    whole = Compose([*steps, Lambdad("image", lambda x: x.float())])
    prepared = made(Dataset([{"image": str(tmp_path / "a.png"), "label": torch.zeros(1)}], whole))
    (geometry,) = prepared.geometry
    assert geometry.original_shape == (24, 36)
    assert is_picture(geometry)
    columns, rows = (
        (1.0, 1.0) if side < 0 else (36 / 12, 24 / 12)
    )  # in pixels of the file, from which distances are
    assert sorted(geometry.spacing) == pytest.approx([rows, columns])
    x, _ = next(Shard.of(prepared, [0]).batches(1))
    mask = to_original((x[0, 0] > 125).long(), geometry)
    assert (mask.astype(bool) == (picture[..., 0] > 125)).mean() > (0.999 if side < 0 else 0.9)
