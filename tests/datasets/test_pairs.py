"""Images with masks: what is read, what is refused, and where a predicted mask lies in the file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.data import Dataset, MetaTensor, list_data_collate
from monai.losses import DiceCELoss
from monai.transforms import (
    Compose,
    EnsureTyped,
    Flipd,
    NormalizeIntensityd,
    ScaleIntensityRanged,
    SpatialCropd,
)
from PIL import Image

from medfl.core.errors import InputError
from medfl.data.prepare import prepare
from medfl.data.source import take_apart
from medfl.datasets.own import above
from medfl.datasets.readers.pairs import mask_index, paired, read_pair
from medfl.datasets.readers.reading import JOINED, content_key
from medfl.datasets.readers.transforms import ReadPaird, WriteMaskd
from medfl.storage.shared_memory import dump_shared, load_shared

HEIGHT, WIDTH = 40, 60


def disc(row: float, column: float, radius: float) -> np.ndarray:
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.hypot(rows - row, columns - column) < radius


MASK = disc(15, 38, 9)
PICTURE = (40 + 160 * MASK + np.arange(WIDTH)).astype(np.uint8)


def save(path: Path, pixels: np.ndarray) -> str:
    Image.fromarray(pixels).save(path)
    return str(path)


@pytest.fixture
def image(tmp_path: Path) -> str:
    return save(tmp_path / "a.png", PICTURE)


@pytest.fixture
def mask(tmp_path: Path) -> str:
    return save(tmp_path / "a_mask.png", MASK)


# What is read


@pytest.mark.parametrize(
    "stored",
    [
        MASK,
        MASK.astype(np.uint8),
        MASK * np.uint8(255),
        np.repeat(MASK[..., None] * np.uint8(255), 3, -1),
    ],
    ids=["1-bit", "0 and 1", "0 and 255", "equal colours"],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_mask_of_two_classes_is_read_from_every_form(
    tmp_path: Path, image: str, stored: np.ndarray, zipped: bool
) -> None:
    uri = save(tmp_path / "m.png", stored)
    if zipped:
        with zipfile.ZipFile(tmp_path / "m.zip", "w") as file:
            file.write(uri, "in/m.png")
        uri = f"{tmp_path}/m.zip!in/m.png"
    pixels, found, shape = read_pair(image, uri, channels=1)
    assert np.array_equal(pixels[..., 0], PICTURE)
    assert (found.dtype, shape) == (np.uint8, (HEIGHT, WIDTH))
    assert np.array_equal(found, MASK)


def test_more_classes_are_indices_and_an_empty_mask_is_allowed(tmp_path: Path, image: str) -> None:
    stored = MASK + 2 * disc(20, 10, 5).astype(np.uint8)
    assert np.array_equal(read_pair(image, save(tmp_path / "m.png", stored), classes=3)[1], stored)
    assert not read_pair(image, save(tmp_path / "none.png", np.zeros_like(MASK)))[1].any()


def test_two_lungs_in_two_files_are_joined(tmp_path: Path, image: str) -> None:
    left, right = disc(20, 15, 8), disc(20, 45, 8)
    files = [save(tmp_path / "left.png", left), save(tmp_path / "right.png", right * np.uint8(255))]
    assert np.array_equal(read_pair(image, JOINED.join(files))[1], left | right)
    before = content_key(JOINED.join(files))
    assert before == ",".join(map(content_key, files))
    save(tmp_path / "right.png", left)
    assert content_key(JOINED.join(files)) != before
    with pytest.raises(InputError, match=r"gone\.png"):
        content_key(JOINED.join([files[0], f"{tmp_path}/gone.png"]))


def test_grey_and_colour_images_are_converted(tmp_path: Path, mask: str) -> None:
    uri = save(tmp_path / "rgb.png", np.repeat(PICTURE[..., None], 3, -1))
    assert read_pair(uri, mask, channels=1, convert=True)[0].shape == (HEIGHT, WIDTH, 1)
    with pytest.raises(InputError, match=r"rgb\.png has 3 channels; the data set has 1"):
        read_pair(uri, mask, channels=1)


# What is refused


def bad_mask(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return PICTURE, pixels


COLOURS = np.stack([MASK, MASK, ~MASK], -1) * np.uint8(255)
WRONG = {
    "shape": (
        *bad_mask(MASK[:, :50]),
        r"m\.png has 40 x 50 pixels .*, its image .*i\.png 40 x 60; .* same shape",
    ),
    "values": (
        *bad_mask(MASK * np.uint8(7)),
        r"m\.png of image .*i\.png has the value 7 at \d+ pixels; .* 0 to 1, or 0 and 255",
    ),
    "many": (
        *bad_mask(PICTURE),
        r"m\.png of image .*i\.png has the values 40, 41, 42, 43, 44 and \d+ more",
    ),
    "mixed": (
        *bad_mask(MASK * np.uint8(255) + disc(30, 8, 3)),
        r"m\.png of image .*i\.png has the value 255 at",
    ),
    "colours": (*bad_mask(COLOURS), r"m\.png of image .*i\.png has 3 channels that differ"),
    "alpha": (
        *bad_mask(np.dstack([MASK * np.uint8(255)] * 4)),
        r"m\.png of image .*i\.png has 4 channels",
    ),
    "zero": (
        np.zeros_like(PICTURE),
        MASK,
        r"i\.png has the value 0 in all its pixels; an image shows something",
    ),
    "constant": (
        np.full((HEIGHT, WIDTH, 3), (9, 8, 7), np.uint8),
        MASK,
        r"i\.png has the value 9, 8, 7 in all",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_pair_is_one_line_with_files_and_values(tmp_path: Path, name: str) -> None:
    picture, stored, message = WRONG[name]
    uris = save(tmp_path / "i.png", picture), save(tmp_path / "m.png", stored)
    with pytest.raises(InputError, match=message) as caught:
        ReadPaird(size=16)({"image": uris[0], "label": uris[1]})
    assert "\n" not in str(caught.value)


def test_values_outside_three_classes_and_pixels_that_are_no_numbers(
    tmp_path: Path, image: str
) -> None:
    with pytest.raises(
        InputError, match=r"has the value 255 at .*; its labels are the whole numbers 0 to 2"
    ):
        read_pair(image, save(tmp_path / "m.png", MASK * np.uint8(255)), classes=3)
    holes = PICTURE.astype(np.float32)
    holes[3, 4] = np.nan
    with pytest.raises(InputError, match=r"n\.tif has values that are no numbers"):
        read_pair(save(tmp_path / "n.tif", holes), str(tmp_path / "m.png"))


@pytest.mark.parametrize("broken", ["image", "mask"])
def test_an_unreadable_file_is_named(tmp_path: Path, image: str, mask: str, broken: str) -> None:
    path = Path({"image": image, "mask": mask}[broken])
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InputError, match=rf"{path.name} cannot be read"):
        read_pair(image, mask)


def test_bad_arguments() -> None:
    for given, message in (
        ({"classes": 1}, "classes=1"),
        ({"keys": "image"}, "two"),
        ({"size": 0}, "image size 0"),
    ):
        with pytest.raises(InputError, match=message):
            ReadPaird(**given)


# Pairing


def test_pairs_by_name(tmp_path: Path, image: str) -> None:
    for folder, names in (("i", "abc"), ("m", ("a_segmentation", "b_Mask", "c", "d"))):
        (tmp_path / folder).mkdir()
        for name in names:
            save(tmp_path / folder / f"{name}.png", MASK)
    masks = mask_index([tmp_path / "m"])
    assert sorted(masks) == ["a", "b", "c", "d"]
    table = paired(dict.fromkeys("abce", image), masks, str.upper, {"official": "test"})
    assert [(r.id, r.centre, r.group, r.mask) for r in table.records] == [
        (key, key.upper(), key, masks[key]) for key in "abc"
    ]
    assert {r.sections["official"] for r in table.records} == {"test"}
    assert table.notes == ["1 of 4 images have no mask and are left out, first e"]
    assert table.problems == [f"mask {masks['d']} has no image"]


# Where pixels lie


@pytest.mark.parametrize("size", [(32, 48), (32, 80), (120, 180)])
def test_resized_image_and_mask_stay_in_place(image: str, mask: str, size: tuple[int, int]) -> None:
    """The centre of the disc, brought back by the affine, is where it was; each mask pixel has the class with
    the largest share: PyTorch's antialiased bilinear weights, another implementation of the same filter, agree."""
    item = ReadPaird(channels=1, size=size)({"image": image, "label": mask})
    affine, label = np.asarray(item["image"].affine), item["label"].numpy()[0]
    bright = item["image"].numpy()[0].astype(float) - np.interp(
        affine[1, 1] * np.arange(size[1]) + affine[1, 3], np.arange(WIDTH), 40 + np.arange(WIDTH)
    )
    for weight, slack in ((label, 0.3), (np.clip(bright, 0, None), 0.25)):
        rows, columns = (np.average(index, weights=weight) for index in np.indices(size))
        found = affine @ (rows, columns, 0, 1)
        assert found[:2] == pytest.approx((15, 38), abs=slack)
    classes = torch.from_numpy(np.stack([index == MASK for index in range(2)])).double()[None]
    shares = torch.nn.functional.interpolate(
        classes, size=size, mode="bilinear", antialias=True, align_corners=False
    )[0]
    clear = (shares[0] - shares[1]).abs().numpy() > 0.01
    assert np.array_equal(label[clear], shares.argmax(0).numpy()[clear])
    assert clear.mean() > 0.9


def test_the_item_as_transforms_and_losses_take_it(image: str, mask: str) -> None:
    item = ReadPaird(channels=1, size=32)({"image": image, "label": mask, "id": "a"})
    picture, label = item["image"], item["label"]
    assert (type(picture), picture.shape, picture.dtype) == (MetaTensor, (1, 32, 32), torch.uint8)
    assert (type(label), label.shape, label.dtype) == (torch.Tensor, (1, 32, 32), torch.uint8)
    assert picture.meta["filename_or_obj"] == image
    assert tuple(picture.meta["spatial_shape"]) == (HEIGHT, WIDTH)
    assert np.array_equal(picture.meta["original_affine"], np.eye(4))
    assert item["id"] == "a"
    loss, scores = (
        DiceCELoss(to_onehot_y=True, softmax=True),
        torch.arange(2048.0).sin().reshape(1, 2, 32, 32),
    )
    assert loss(scores, label[None]) == loss(scores, label[None].long())
    assert torch.equal(load_shared(dump_shared(item))["image"].affine, picture.affine)


def test_pictures_of_16_bits_can_be_scaled(tmp_path: Path, mask: str) -> None:
    deep = save(tmp_path / "deep.tif", PICTURE.astype(np.uint16) * 257)
    for item in ({"image": deep, "label": mask}, {"image": deep}):
        item = ReadPaird()(item)
        assert item["image"].dtype == torch.int32
        scaled = Compose([ScaleIntensityRanged("image", 0, 65535, 0, 1)])(item)["image"]
        assert np.allclose(scaled[0], PICTURE / 255, atol=1e-6)


def test_without_a_mask_only_the_image_is_read(image: str, mask: str) -> None:
    reader = ReadPaird(channels=1, size=32)
    alone = reader({"image": image})
    assert alone.keys() == {"image"}
    assert torch.equal(alone["image"], reader({"image": image, "label": mask})["image"])
    whole = ReadPaird()({"image": image, "label": mask})["image"]
    assert whole.shape == (1, HEIGHT, WIDTH)
    assert np.array_equal(whole.affine, np.eye(4))


CHAIN = [
    ScaleIntensityRanged("image", 0, 255, 0, 1),
    NormalizeIntensityd("image"),
    EnsureTyped("image", track_meta=True),
]


def test_prepared_images_know_their_spacing(image: str, mask: str) -> None:
    data = Dataset(
        [{"image": image, "label": mask, "id": "a"}],
        Compose([ReadPaird(channels=1, size=20), *CHAIN]),
    )
    prepared = prepare([{"id": "a"}], take_apart(data))
    geometry = prepared.geometry[0]
    assert geometry.spacing == (HEIGHT / 20, WIDTH / 20)
    assert (geometry.original_shape, geometry.file) == ((HEIGHT, WIDTH), image)
    ((x, y),) = prepared.batches(torch.tensor([0]), 1, None)
    assert (x.shape, y.shape, y.dtype) == ((1, 1, 20, 20), (1, 1, 20, 20), torch.uint8)


# What is written


def written(tmp_path: Path, item: dict, scores: torch.Tensor) -> np.ndarray:
    WriteMaskd("pred", output_dir=tmp_path / "out")({**item, "pred": scores})
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == "a.png"
    return np.array(Image.open(path))


def scores_of(label: torch.Tensor, classes: int = 2) -> torch.Tensor:
    return torch.nn.functional.one_hot(label[0].long(), classes).permute(2, 0, 1).float()


def test_a_mask_that_was_enlarged_comes_back_as_it_was(
    tmp_path: Path, image: str, mask: str
) -> None:
    """At three times the size, each pixel of the file lies on the middle one of its nine."""
    item = ReadPaird(channels=1, size=(3 * HEIGHT, 3 * WIDTH))({"image": image, "label": mask})
    assert np.array_equal(written(tmp_path, item, scores_of(item["label"])), MASK * np.uint8(255))


@pytest.mark.parametrize(
    "moved",
    [
        [],
        [Flipd(["image", "label"], 1)],
        [SpatialCropd(["image", "label"], roi_start=(2, 10), roi_end=(30, 40))],
    ],
    ids=["as read", "flipped", "cropped"],
)
def test_a_prediction_is_written_where_the_affine_says(
    tmp_path: Path, image: str, mask: str, moved: list
) -> None:
    item = Compose([ReadPaird(channels=1, size=(36, 44)), *CHAIN, *moved])(
        {"image": image, "label": mask}
    )
    found = written(tmp_path, item, scores_of(item["label"])) > 0
    assert found.shape == MASK.shape
    assert 2 * (found & MASK).sum() / (found.sum() + MASK.sum()) > 0.95


def test_a_batch_taken_apart_by_monai_and_several_classes(tmp_path: Path, image: str) -> None:
    stored = MASK + 2 * disc(20, 10, 5).astype(np.uint8)
    read = ReadPaird(channels=1, classes=3, size=(3 * HEIGHT, 3 * WIDTH))
    item = read({"image": image, "label": save(tmp_path / "m.png", stored)})
    batch = list_data_collate([item])
    apart = {"image": batch["image"][0], "label": batch["label"][0]}
    assert np.array_equal(written(tmp_path, apart, scores_of(apart["label"], 3)), stored)


def test_nothing_is_overwritten(tmp_path: Path, image: str, mask: str) -> None:
    (tmp_path / "b").mkdir()
    other = save(tmp_path / "b" / "a.png", PICTURE)
    items = [ReadPaird(channels=1)({"image": uri, "label": mask}) for uri in (image, other)]
    scores = scores_of(items[0]["label"])
    write = WriteMaskd("pred", output_dir=tmp_path / "out")
    for _ in range(2):  # the same image again is no clash
        write({**items[0], "pred": scores})
    with pytest.raises(
        InputError, match=r"a\.png and .*b/a\.png would both be written to .*out/a\.png"
    ):
        write({**items[1], "pred": scores})
    with pytest.raises(InputError, match=r"the prediction of .*a\.png would replace it"):
        WriteMaskd("pred", output_dir=tmp_path)({**items[0], "pred": scores})
    assert np.array_equal(np.array(Image.open(image)), PICTURE)
    root = above({"image": uri} for uri in (image, other))
    write = WriteMaskd("pred", output_dir=tmp_path / "kept", root=root)
    for item in items:
        write({**item, "pred": scores})
    assert root == str(tmp_path)
    assert sorted(path.relative_to(tmp_path / "kept") for path in (tmp_path / "kept").rglob("*.png")) == [
        Path("a.png"), Path("b/a.png"),
    ]  # fmt: skip
    elsewhere = WriteMaskd("pred", output_dir=tmp_path / "other", root=tmp_path / "b")
    elsewhere({**items[0], "pred": scores})  # not below the root: no subfolder
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["a.png"]
    with pytest.raises(InputError, match=r"'image' does not say where .*filename_or_obj"):
        write({"image": items[0]["image"].as_tensor(), "pred": scores})
