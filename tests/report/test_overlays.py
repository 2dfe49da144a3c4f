"""Pictures of segmented cases: what they are made of, and which a run leaves."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.inferers import SimpleInferer
from monai.losses import DiceCELoss
from monai.transforms import Compose, NormalizeIntensityd, ScaleIntensityRanged
from PIL import Image
from torch import nn

from medfl.cli import main
from medfl.core.errors import InputError
from medfl.data.prepared import Geometry, Stacked
from medfl.evaluation.evaluators import MaskEvaluator
from medfl.evaluation.slices import Plane, planes, true_colours, unit
from medfl.methods import load
from medfl.report import overlays, write_report
from medfl.report.overlays import Example, dice_strips, ranked
from medfl.report.picture import Picture, mask_pictures, render
from medfl.runs.launch import federate
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.storage.run_folder import RunFolder
from tests.support.toy import SECTIONS, ToyBundle, run_record
from tests.zoo.build import ZOO

NAMES = ("background", "core", "rim")


def picture_geometry(*shape: int) -> Geometry:
    return Geometry(np.eye(4), np.eye(4), shape, "x.png")


# Cases


@pytest.mark.parametrize(
    ("dice", "expected"),
    [
        ({}, {}),
        ({"a": math.nan}, {}),
        ({"a": 0.5, "b": math.nan}, {"a": "only"}),
        ({"a": 0.5, "b": 0.7}, {"b": "best", "a": "worst"}),
        ({"a": 0.5, "b": 0.7, "c": 0.6}, {"b": "best", "c": "median", "a": "worst"}),
        ({"a": 0.5, "b": 0.7, "c": 0.6, "d": 0.9}, {"d": "best", "b": "median", "a": "worst"}),
        ({"b": 1.0, "a": 1.0, "c": 1.0}, {"a": "best", "b": "median", "c": "worst"}),
    ],
)
def test_best_median_and_worst(dice: dict[str, float], expected: dict[str, str]) -> None:
    found = ranked(dice)
    assert found == expected
    assert list(found) == list(expected)


# Planes


def marked(
    affine: np.ndarray[Any, Any],
    shape: tuple[int, int, int],
    at: dict[str, tuple[float, float, float]],
) -> Any:
    """A volume whose voxels nearest to some places (mm, RAS) have the values 1, 2, ..."""
    volume = np.zeros(shape, dtype=np.uint8)
    for value, place in enumerate(at.values(), 1):
        index = np.linalg.inv(affine) @ [*place, 1]
        volume[tuple(np.rint(index[:3]).astype(int))] = value
    return volume


@pytest.mark.parametrize(
    "affine",
    [
        np.diag([1.0, 1, 1, 1]),
        np.array([[-1.0, 0, 0, 9], [0, -1, 0, 9], [0, 0, 1, 0], [0, 0, 0, 1]]),  # LPS, as DICOM
        np.array([[0.0, 0, 1, 0], [1, 0, 0, 0], [0, -1, 0, 9], [0, 0, 0, 1]]),
    ],
)
def test_planes_lie_as_radiologists_are_used_to(affine: np.ndarray[Any, Any]) -> None:
    """The right on the left, anterior and superior above, in the sagittal plane anterior on the left."""
    centre = (5.0, 4.0, 6.0)
    places = {"middle": centre, "right": (8.0, 4, 6), "front": (5.0, 9, 6), "top": (5.0, 4, 8)}
    volume = marked(affine, (10, 10, 10), places)
    reference = (volume == 1).astype(np.uint8)
    found = {
        p.name: p
        for p in planes(
            volume[None].astype(float), reference, volume, Geometry(affine, affine, (10,) * 3, "")
        )
    }
    assert [(plane.name, plane.left) for plane in found.values()] == [
        ("axial", "R"),
        ("coronal", "R"),
        ("sagittal", "A"),
    ]

    def where(plane: Plane, value: int) -> tuple[int, int]:
        rows, columns = np.nonzero(plane.prediction == value)
        return int(rows[0]), int(columns[0])

    assert where(found["axial"], 1) == (9 - 4, 9 - 5)  # row from the front, column from the right
    assert where(found["axial"], 2) == (9 - 4, 9 - 8)
    assert where(found["axial"], 3) == (0, 9 - 5)
    assert where(found["coronal"], 4) == (9 - 8, 9 - 5)
    assert where(found["sagittal"], 3) == (9 - 6, 0)
    assert where(found["sagittal"], 4) == (9 - 8, 9 - 4)


def test_planes_are_as_large_as_in_the_patient() -> None:
    """The first axis leads upwards by 3 mm a step, the second to the left by 1, the third to the front by 0.5."""
    affine = np.array([[0, -1.0, 0, 0], [0, 0, 0.5, 0], [3.0, 0, 0, 0], [0, 0, 0, 1]])
    volume = np.ones((4, 6, 8), dtype=np.uint8)
    axial, coronal, sagittal = planes(
        volume[None].astype(float), volume, volume, Geometry(affine, affine, (4, 6, 8), "")
    )
    assert (axial.size, axial.reference.shape) == ((8 * 0.5, 6), (8, 6))
    assert (coronal.size, coronal.reference.shape) == ((4 * 3, 6), (4, 6))
    assert (sagittal.size, sagittal.reference.shape) == ((4 * 3, 8 * 0.5), (4, 8))


def test_each_plane_shows_some_of_the_reference() -> None:
    """A ring around an empty centre of mass; without a reference the prediction, without any the middle is cut."""
    ring = np.zeros((9, 9, 9), dtype=np.uint8)
    ring[1, 1:8, 4] = ring[7, 1:8, 4] = ring[1:8, 1, 4] = ring[1:8, 7, 4] = 1
    empty = np.zeros_like(ring)
    assert all(plane.reference.any() for plane in planes(ring[None], ring, empty, None))
    assert all(plane.prediction.any() for plane in planes(ring[None], empty, ring, None))
    image = np.arange(9.0)[:, None, None] + np.zeros((9, 9, 9))
    sagittal = planes(image[None], empty, empty, None)[2]
    assert sagittal.image == pytest.approx(np.full((9, 9), 0.5))
    assert sagittal.left == ""


def test_pictures_have_the_colours_of_their_file() -> None:
    """Pale skin and a violet cell, by the transforms of the shipped bundles and back, to the step of a byte."""
    file = np.array(
        [[[224, 172, 150], [112, 60, 160]], [[0, 0, 0], [255, 255, 255]]], np.uint8
    ).transpose(2, 0, 1)
    scale = ScaleIntensityRanged("image", 0, 255, 0, 1)
    mean, sd = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    normalise = NormalizeIntensityd("image", subtrahend=mean, divisor=sd, channel_wise=True)
    mask = np.zeros((2, 2), np.uint8)
    for steps in ([scale, normalise], [Compose([scale]), normalise], [scale]):
        given = Compose(steps)({"image": torch.from_numpy(file).float()})["image"].numpy()
        (plane,) = planes(true_colours(given, steps), mask, mask, picture_geometry(2, 2))
        assert (np.rint(255 * plane.image) == file.transpose(1, 2, 0)).all()
    own = [scale, NormalizeIntensityd("image", channel_wise=True)]
    given = Compose(own)({"image": torch.from_numpy(file).float()})["image"].numpy()
    assert true_colours(given, own) is given, (
        "each channel by its own mean: what was lost is not invented"
    )
    assert true_colours(given[:1], [scale, normalise]).shape == (1, 2, 2)


def test_pictures_are_shown_upright() -> None:
    """Rows first as our readers have them; MONAI's, which have no geometry, the other way."""
    image, mask = np.zeros((3, 4, 6)), np.zeros((4, 6), dtype=np.uint8)
    mask[0, 5] = 1
    image[0, 0, 5] = 1
    (ours,) = planes(image, mask, mask, picture_geometry(4, 6))
    assert (ours.image.shape, ours.size, ours.reference[0, 5]) == ((4, 6, 3), (4.0, 6.0), 1)
    (theirs,) = planes(image, mask, mask, None)
    assert (theirs.image.shape, theirs.size, theirs.reference[5, 0]) == ((6, 4, 3), (6.0, 4.0), 1)
    (grey,) = planes(image[:1], mask, mask, picture_geometry(4, 6))
    assert (grey.image.shape, grey.image[0, 5]) == ((4, 6), 1)
    assert (unit(picture_geometry(4, 6)), unit(None)) == ("pixels", "pixels")
    assert unit(Geometry(np.eye(4), np.eye(4), (4, 6), "slice.nii.gz")) == "mm"


# Pictures


def example(rank: str = "best", shift: int = 0, dims: int = 2) -> Example:
    """A square of two structures, and the same square shifted as prediction."""
    shape = (40, 50, 30)[:dims]
    reference = np.zeros(shape, dtype=np.uint8)
    reference[10:30, 10:30] = 1
    reference[20:30, 10:30] = 2
    prediction = np.roll(reference, shift, 1)
    scores = {"dice": 0.9, "dice_core": 0.8, "dice_rim": 1.0, "hd95": 2.0}
    geometry = (
        picture_geometry(*shape) if dims == 2 else Geometry(np.eye(4), np.eye(4), shape, "x.nii.gz")
    )
    return Example(
        rank,
        f"case {rank}",
        scores,
        np.random.default_rng(0).normal(size=(1, *shape)),
        reference,
        prediction,
        geometry,
    )


def amount(picture: Picture, colour: str) -> int:
    """Number of the pixels of a colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(picture.pixels.astype(int) - wanted).max(2) < 16).sum())


def test_errors_have_their_colours() -> None:
    """Of a square shifted to the right, what is on the left is missed and on the right added."""
    right, wrong = (
        overlays.mask_overlays("masks-x", "x", [example(shift=shift)], NAMES[1:], 0.9)
        for shift in (0, 8)
    )
    assert amount(wrong, overlays.MISSED) > amount(right, overlays.MISSED) + 500
    assert amount(wrong, overlays.ADDED) > amount(right, overlays.ADDED) + 500
    assert amount(wrong, overlays.CONFUSED) == amount(right, overlays.CONFUSED)
    turned = example()
    turned.prediction[10:30, 10:30] = 3 - turned.reference[10:30, 10:30]
    confused = overlays.mask_overlays("masks-x", "x", [turned], NAMES[1:], 0.9)
    assert amount(confused, overlays.CONFUSED) > amount(right, overlays.CONFUSED) + 500
    assert amount(confused, overlays.MISSED) == amount(right, overlays.MISSED)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_picture_of_cases_says_what_it_shows(dims: int, tmp_path: Path) -> None:
    cases = [
        example(rank, shift, dims) for rank, shift in (("best", 0), ("median", 3), ("worst", 40))
    ]
    made = overlays.mask_overlays("masks-x", "a site", cases, NAMES[1:], 0.8125)
    (tmp_path / "masks-x.png").write_bytes(made.png)
    assert Picture.read(tmp_path / "masks-x.png") == made
    assert made.title == "a site: best, median and worst test case"
    assert "median Dice of all test cases of this site is 0.812" in made.caption
    assert ("Volumes are cut" in made.caption) == (dims == 3)
    assert (made.name, made.pixels.shape[1]) == ("masks-x", 1080)


@pytest.mark.parametrize("structures", [1, 12])
def test_any_number_of_structures_and_sizes(structures: int) -> None:
    mask = np.arange(300).reshape(100, 3).astype(np.uint8) % (structures + 1)
    case = Example(
        "only",
        "x" * 200,
        {"dice": 0.0},
        mask[None].astype(float),
        mask,
        mask,
        picture_geometry(100, 3),
    )
    made = overlays.mask_overlays(
        "masks-x", "s" * 300, [case], [f"structure {i}" * 3 for i in range(structures)], 0.0
    )
    assert made.pixels.shape[0] < 700


def test_strips_of_many_sites() -> None:
    """Twenty sites a picture; sites without a value are left out."""
    draw = np.random.default_rng(0)
    dice = {
        f"hospital number {i}": draw.uniform(0.2, 1, size=1 + 40 * i).tolist() for i in range(22)
    }
    first, second = dice_strips({**dice, "none": [math.nan]})
    assert (first.name, second.name) == ("dice-1", "dice-2")
    (few,) = dice_strips({"a": [0.9, math.nan], "b": [0.91, 0.91, 0.91]})
    assert few.name == "dice"
    assert first.pixels.shape[1] == few.pixels.shape[1] == 1080
    assert dice_strips({}) == []


def test_close_points_of_a_strip_lie_beside_each_other() -> None:
    places = overlays._swarm(np.array([0.1, 0.5, 0.501, 0.502, 0.9]), 0.02, 0.05)
    assert places.tolist() == pytest.approx([0, 0, 0.05, -0.05, 0])
    crowded = overlays._swarm(np.full(500, 0.5), 0.02, 0.05)
    assert np.abs(crowded).max() == pytest.approx(0.38)
    assert len(np.unique(crowded)) == 500


def test_a_report_shows_the_worst_and_the_best_sites(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    assert mask_pictures(tmp_path) == ([], 0)
    for number in range(11):
        made = render(
            f"masks-{number}", "x", "", (1, 1), lambda _: None, mark=f"{number * 7 % 11 / 10}"
        )
        (tmp_path / "pictures" / f"{made.name}.png").write_bytes(made.png)
    (strip,) = dice_strips({"a": [0.9]})
    (tmp_path / "pictures" / "dice.png").write_bytes(strip.png)
    found, more = mask_pictures(tmp_path)
    assert [picture.name for picture in found[:1]] == ["dice"]
    assert [float(picture.mark) for picture in found[1:]] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert more == 5


# Runs


class Masks(ToyBundle):
    """Grey pictures whose bright pixels are the mask, ids with a slash; 12 items a section for three sites."""

    def __init__(self) -> None:
        loss = DiceCELoss(to_onehot_y=True, softmax=True)
        super().__init__(
            task="segmentation",
            classes=(),
            structures=NAMES[:2],
            loss=loss,
            network=lambda: nn.Sequential(nn.Conv2d(1, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)),
            evaluator=MaskEvaluator(loss, NAMES[:2], SimpleInferer(), 1.0),
        )

    def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Stacked:
        draw = torch.Generator().manual_seed(SECTIONS.index(section))
        rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
        radii = 3 + torch.arange(12)[:, None, None] / 3
        y = ((rows - 8) ** 2 + (columns - 7) ** 2 < radii**2).long()[:, None]
        x = y + 0.3 * torch.randn(y.shape, generator=draw)
        made = Stacked([{"id": f"{section}{i}"} for i in range(12)], x, y)
        halved = np.diag([2.0, 2, 1, 1])
        halved[:2, 3] = 0.5
        made.geometry = [
            Geometry(halved, np.eye(4), (32, 32), f"{section}{i}.png") for i in range(12)
        ]
        return made


def simulate(out: Path, method: str = "fedavg", jobs: int = 1, save: bool = True) -> dict[str, Any]:
    record = run_record(rounds=2, method=method)
    folder = RunFolder.create(out)
    folder.write_run(
        record, {"task": "segmentation", "key_metric": "dice", "classes": [], "command": ""}
    )
    federation = Federation(Masks(), load(method), record)  # type: ignore[arg-type]
    return Simulator(
        Execution(federation, folder, Launch(jobs=jobs, save_predictions=save))
    ).execute()


@pytest.mark.parametrize("method", ["fedavg", pytest.param("local", marks=pytest.mark.slow)])
def test_a_run_leaves_pictures_masks_and_cases(method: str, tmp_path: Path) -> None:
    """Of the global model, or of each site's own; the pictures say the Dice that predictions.csv has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = simulate(tmp_path / "out", method)
    own = {f"{kind}_core" for kind in ("dice", "hd95", "surface_dice")}
    expected = {"dice", "hd95", "surface_dice", "pixel_accuracy", "loss", "round", "classes", *own}
    assert set(summary["last"]) == expected
    found = {kind: summary["last"][kind] for kind in ("dice", "hd95", "surface_dice")}
    assert summary["last"]["classes"]["core"] == found | {"cases": 12}
    assert summary["units"] == {"hd95": "pixels", "hd95_core": "pixels"}
    names = ["dice", "masks-x", "masks-y", "masks-z"]
    assert sorted(path.stem for path in (tmp_path / "out" / "pictures").iterdir()) == names
    with (tmp_path / "out" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["id"] for row in rows} == {f"test{i}" for i in range(12)}
    own = [float(row["dice"]) for row in rows if row["site"] == "y"]
    assert len(own) == 5
    assert float(Picture.read(tmp_path / "out" / "pictures" / "masks-y.png").mark) == pytest.approx(
        np.median(own), abs=1e-6
    )
    tags = EventAccumulator(str(tmp_path / "out" / "events")).Reload().Tags()["images"]
    assert sorted(tags) == [f"pictures/{name}" for name in names]
    masks = Masks().prepared("test").targets
    for row in rows:
        with Image.open(
            tmp_path / "out" / "predictions" / row["site"] / f"{row['id']}.png"
        ) as image:
            large = np.asarray(image) > 0
        assert large.shape == (32, 32)
        ours, theirs = large[::2, ::2], masks[int(row["id"].removeprefix("test")), 0].numpy() > 0
        dice = 2 * (ours & theirs).sum() / (ours.sum() + theirs.sum())
        assert dice == pytest.approx(float(row["dice"]))
    page = write_report(tmp_path / "out").read_text()
    assert page.count('<figure class="wide">') == 4


def test_workers_and_masks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances are computed for test items, and are in no round."""
    monkeypatch.setattr(
        overlays,
        "mask_overlays",
        lambda name, *_: Picture(name, dice_strips({"a": [1.0]})[0].png, "", ""),
    )
    one, two = simulate(tmp_path / "one"), simulate(tmp_path / "two", jobs=2, save=False)
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["last"] == two["last"]
    assert (tmp_path / "one" / "predictions.csv").read_text() == (
        tmp_path / "two" / "predictions.csv"
    ).read_text()
    assert not (tmp_path / "two" / "predictions").exists()
    rounds = [
        json.loads(line) for line in (tmp_path / "one" / "rounds.jsonl").read_text().splitlines()
    ]
    assert [set(entry["val"]) for entry in rounds] == [
        {"dice", "dice_core", "pixel_accuracy", "loss"}
    ] * 2


@pytest.mark.slow
def test_masks_of_a_foreign_bundle_lie_in_their_files_grid(tmp_path: Path) -> None:
    """Volumes of several sizes and spacings, predicted at 1 mm."""
    bundle = ZOO["seg3d_decathlon_json"](tmp_path)
    requested = {"sites": 1, "rounds": 1, "partition": "iid"}
    summary = federate(
        str(bundle.path),
        config=bundle.overrides,
        requested=requested,
        out=tmp_path / "out",
        jobs=1,
        save_predictions=True,
    )
    assert {"dice", "hd95", "surface_dice", "pixel_accuracy"} <= set(summary["last"])
    assert summary["units"] == {"hd95": "mm", "hd95_ball": "mm"}
    written = sorted((tmp_path / "out" / "predictions").rglob("*.nii.gz"))
    assert len(written) == 2
    originals = {
        path.name: nib.load(path) for path in (bundle.path / "data").rglob("imagesTr/*.nii.gz")
    }
    for path in written:
        mask, (original,) = (
            nib.load(path),
            [image for name, image in originals.items() if name[:6] in path.name],
        )
        assert mask.shape == original.shape
        assert np.allclose(mask.affine, original.affine)
    assert (tmp_path / "out" / "pictures" / "dice.png").is_file()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "cls2d_glob_yaml",
            "--save-predictions with bundle 'cls2d_glob_yaml', a classification task; masks are predicted",
        ),
        (
            "seg2d_npz_subset_yaml",
            "--save-predictions with bundle 'seg2d_npz_.*, whose test images do not say where",
        ),
    ],
)
def test_masks_that_cannot_be_saved(name: str, told: str, tmp_path: Path) -> None:
    bundle = ZOO[name](tmp_path)
    requested = {"sites": 2, "rounds": 1, "partition": "iid"}
    with pytest.raises(InputError, match=told):
        federate(
            str(bundle.path),
            config=bundle.overrides,
            requested=requested,
            out=tmp_path / "out",
            save_predictions=True,
        )
    assert not (tmp_path / "out").exists()


def test_masks_of_pictures_that_monai_reads_have_their_size(tmp_path: Path) -> None:
    bundle = ZOO["seg2d_csv_flat"](tmp_path)
    requested = {"sites": 2, "rounds": 1, "partition": "iid"}
    out = tmp_path / "out"
    federate(
        str(bundle.path),
        config=bundle.overrides,
        requested=requested,
        out=out,
        save_predictions=True,
        jobs=1,
    )
    written = sorted((out / "predictions").rglob("*.png"))
    assert written

    def size(path: Path) -> tuple[int, int]:
        with Image.open(path) as picture:
            return picture.size

    assert {*map(size, written)} == {*map(size, (bundle.path / "data" / "images").glob("*.png"))}


def test_the_command_line_has_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    assert "--save-predictions" in capsys.readouterr().out
