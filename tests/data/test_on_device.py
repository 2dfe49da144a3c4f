"""Prepared data held on a device: what fits, the same batches there, and that no batch crosses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.transforms import (
    Compose,
    RandAffined,
    RandFlipd,
    RandGaussianNoised,
    RandRotate90d,
    RandRotated,
    RandScaleIntensityd,
    RandShiftIntensityd,
    RandSpatialCropd,
)
from torch import Tensor
from torch.utils.data import default_collate

from medfl import datasets
from medfl.data import on_device
from medfl.data.batch_transforms import recipe
from medfl.data.on_device import hold
from medfl.data.prepared import Augmented, Prepared, Shard, Stacked
from medfl.data.samples import Sampled
from medfl.runs import launch
from tests.support import pretended_device as pretended
from tests.support.samples import Plain

CPU = torch.device("cpu")
ROOMY = 10**12
SIDE = 12


@pytest.fixture
def device() -> Iterator[torch.device]:
    if not pretended.available():
        pytest.skip("this torch has no devices written in Python")
    with pretended.in_use() as device:
        yield device


def items(count: int) -> list[dict[str, Any]]:
    return [{"id": str(index), "label": index % 2} for index in range(count)]


def pictures(count: int = 9, *, masks: bool = False) -> Stacked:
    """Images (2, 12, 12) of 8-bit values, with class indices or masks."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(256, (count, 2, SIDE, SIDE), generator=generator).float() / 255
    y = (
        torch.randint(3, (count, 1, SIDE, SIDE), generator=generator)
        if masks
        else torch.arange(count) % 2
    )
    return Stacked(items(count), x, y)


def sampled() -> Sampled:
    plain = Plain(lambda index: {"x": torch.full((2,), float(index)), "y": index})
    return Sampled(items(4), plain, default_collate, lambda batch: (batch["x"], batch["y"]))


TRANSFORMS: dict[str, list[Any]] = {
    "flip": [RandFlipd(("image", "label"), 0.5, 0)],
    "turn": [RandRotate90d(("image", "label"), 0.7)],
    "crop": [RandSpatialCropd(("image", "label"), (8, 8), random_size=False)],
    "scale": [RandScaleIntensityd("image", 0.3, prob=0.7, channel_wise=True)],
    "shift": [RandShiftIntensityd("image", 0.3, prob=0.7)],
    "noise": [RandGaussianNoised("image", 0.6, std=0.5)],
    "affine": [RandAffined("image", prob=0.7, rotate_range=0.8, scale_range=0.2, padding_mode="border")],
    "rotate": [RandRotated("image", 0.7, prob=0.7)],
    "all": [
        RandFlipd(("image", "label"), 0.5, 1), RandSpatialCropd(("image", "label"), (10, 10), random_size=False),
        RandScaleIntensityd("image", 0.2, prob=0.5), RandGaussianNoised("image", 0.5, std=0.1),
    ],
}  # fmt: skip


def augmented(name: str) -> Augmented:
    kept = pictures(masks=True)
    shape = tuple(kept.inputs.shape[2:])
    made = recipe(Compose(TRANSFORMS[name]), 0, frozenset([shape]), 2, torch.float32, True)
    assert made is not None
    return Augmented(kept.items, kept, made)


def epoch(prepared: Prepared) -> list[tuple[Tensor, Tensor]]:
    return list(
        Shard.of(prepared, range(1, len(prepared))).batches(3, torch.Generator().manual_seed(8))
    )


def assert_same_batches(
    prepared: Prepared, device: torch.device, carried: int = 0, tolerance: float = 0.0
) -> None:
    """Take an epoch on both devices; all that crosses are numbers that say what to do, and `carried` large fields."""
    held = prepared.to(device, ROOMY)
    with pretended.crossings() as seen:
        there = epoch(held)
    assert {value.device for batch in there for value in batch} == {device}
    large = [one for one in seen if one.shape.numel() >= SIDE * SIDE]
    assert len(large) <= carried, large
    for (x, y), (x_cpu, y_cpu) in zip(there, epoch(prepared), strict=True):
        torch.testing.assert_close(x.cpu(), x_cpu, rtol=0, atol=tolerance)
        assert torch.equal(y.cpu(), y_cpu)


def test_batches_are_gathered_on_the_device(device: torch.device) -> None:
    assert_same_batches(pictures(), device)


def test_targets_may_lie_elsewhere_than_images(device: torch.device) -> None:
    kept = pictures()
    x, y = Stacked(kept.items, kept.inputs.to(device), kept.targets).rows(torch.tensor([2, 0]))
    assert (x.device, y.device) == (device, CPU)
    assert torch.equal(x.cpu(), kept.inputs[[2, 0]])
    assert torch.equal(y, kept.targets[[2, 0]])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_batches_are_transformed_on_the_device(name: str, device: torch.device) -> None:
    """Of the noise every batch's field is drawn on the CPU, so that it is the same there; it crosses.

    MONAI's rotation takes products in another order for tensors of another type.
    """
    carried, tolerance = 3 if name in ("noise", "all") else 0, 1e-6 if name == "rotate" else 0.0
    assert_same_batches(augmented(name), device, carried, tolerance)


def test_what_fits_in_half_of_the_free_memory_is_held(device: torch.device) -> None:
    train, validate, test = pictures(9), pictures(90), pictures(20)
    free = 2 * (train.nbytes + test.nbytes)
    held, said = hold(
        {"train": train, "validate": validate, "test": test, "public": train},
        device,
        lambda _: free,
    )
    assert [held[name].device.type for name in held] == [
        pretended.NAME,
        "cpu",
        pretended.NAME,
        pretended.NAME,
    ]
    assert held["train"] is held["public"], "held once"
    assert held["validate"] is validate
    assert said == (
        "data held on pretended:0: train (0.0 MB), test (0.0 MB), public (0.0 MB); "
        "copied batch by batch, as they do not fit in half of its free 0.1 MB: validate (0.1 MB)"
    )


def test_what_is_made_item_by_item_stays(device: torch.device) -> None:
    prepared = sampled()
    held, said = hold({"train": prepared}, device, lambda _: ROOMY)
    assert held == {"train": prepared}
    assert said == "data held on pretended:0: none; made item by item on the CPU: train"


def test_nothing_is_done_on_the_cpu() -> None:
    prepared = pictures()
    held, said = hold({"train": prepared}, CPU)
    assert (held, said) == ({"train": prepared}, "")


def test_where_the_pixels_lie_is_kept(device: torch.device) -> None:
    for prepared in (pictures(), augmented("flip")):
        prepared.geometry = ["somewhere"]  # type: ignore[list-item]
        assert prepared.to(device, ROOMY).geometry == ["somewhere"]


def test_batches_of_what_does_not_fit_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory needs a driver, so it is only looked at who is asked for it."""
    asked: list[tuple[int, ...]] = []

    def pin(self: Tensor) -> Tensor:
        asked.append(tuple(self.shape))
        return self

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    prepared, single = pictures(6), sampled()
    held, said = hold({"train": prepared, "test": single}, torch.device("cuda"), lambda _: 10)
    assert [type(held[name]) for name in held] == [Stacked, Sampled]
    assert (prepared.pinned, held["train"].pinned, held["test"].pinned) == (False, True, True)
    epoch(held["train"])
    assert asked == [(3, 2, SIDE, SIDE), (3,), (2, 2, SIDE, SIDE), (2,)]
    asked.clear()
    epoch(prepared)
    assert asked == []
    assert said.startswith("data held on cuda: none; copied batch by batch")


def test_free_memory_counts_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert on_device.free_gpu_memory(torch.device("cuda")) == 130


@pytest.mark.parametrize("free", [ROOMY, 10])
def test_a_run_holds_the_data_that_fit(
    device: torch.device, free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretended.let_runs_name_it(monkeypatch)
    monkeypatch.setattr(launch, "free_gpu_memory", lambda device: free)
    said: list[str] = []
    scans = datasets.write_phantom("pneumonia", tmp_path / "data", per_class=10, size=16)
    requested = {
        "data": str(scans), "sites": 2, "partition": "iid", "rounds": 1, "local_epochs": 1, "batch_size": 4,
        "device": pretended.NAME,
    }  # fmt: skip
    config = {"network": "small_cnn", "image_size": 16}
    launch.federate(
        "pneumonia",
        config=config,
        requested=requested,
        out=tmp_path / "run",
        jobs=1,
        say=said.append,
    )
    (line,) = [line for line in said if line.startswith("data held on ")]
    assert line.startswith(
        f"data held on pretended: {'train (' if free == ROOMY else 'none; copied batch by batch'}"
    )
