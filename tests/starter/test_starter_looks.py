"""What `medfl new` sees in folders: depths, files that are left out or broken, folders that are no classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import medfl
from medfl.bundle.bundle import Bundle
from medfl.bundle.open import check_folder
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.datasets import ReadPixelsd
from medfl.partner import preflight
from medfl.policy.policy import Policy
from medfl.starter import starter

DRAWS = np.random.default_rng(0)


def picture(path: Path, most: float = 255, dtype: type = np.uint8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = DRAWS.uniform(0, most, (8, 8))
    pixels.flat[:2] = 0, most
    Image.fromarray(pixels.astype(dtype)).save(path)


def classes(root: Path, *names: str, ending: str = "png", **about: float | type) -> Path:
    for name in names:
        for number in range(12):
            picture(root / name / f"{number:02d}.{ending}", **about)
    return root


def pairs(root: Path, most: int = 1) -> Path:
    for number in range(12):
        picture(root / "images" / f"c{number:02d}.png")
        mask = np.zeros((8, 8), np.uint8)
        mask[2:5, 2:6] = most
        (root / "masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(root / "masks" / f"c{number:02d}.png")
    return root


@pytest.mark.parametrize(
    ("about", "brightest", "own_depth"),
    [
        ({"most": 200}, 1, 255),
        ({"most": 300, "dtype": np.uint16}, 1, 1023),
        ({"most": 60000, "dtype": np.uint16}, 1, 65535),
        ({"most": 70000, "dtype": np.int32, "ending": "tif"}, 70000, 0),
        ({"most": 1, "dtype": np.float32, "ending": "tif"}, 1, 0),
        ({"most": 99, "dtype": np.float32, "ending": "tif"}, 255, 0),
        ({"most": 4095, "dtype": np.float32, "ending": "tif"}, 65535, 0),
    ],
)
def test_the_brightest_value_is_that_of_the_type_or_seen(
    about: dict, brightest: int, own_depth: int, tmp_path: Path
) -> None:
    seen = starter.survey(classes(tmp_path, "a", "b", **about))
    assert (seen.brightest, seen.own_depth) == (brightest, own_depth)
    notes = (
        "pictures of 16 bits with values up to 300: read as 0 to 1023; brighter ones are refused",
    )
    assert seen.notes == (notes if own_depth == 1023 else ())


@pytest.mark.parametrize("depth", [255, 4095, 65535])
def test_pictures_are_the_same_to_a_network_however_many_of_their_bits_they_use(
    depth: int, tmp_path: Path
) -> None:
    """Version 0.6.0 divided those of 12 bits by 65535, so that all were black; and told a class of brighter ones."""
    grey = DRAWS.integers(0, 256, (24, 8, 8))
    grey[:, 0, :2] = 0, 255
    for number, pixels in enumerate(grey):
        for place, most in (("8", 255), ("other", depth)):
            path = tmp_path / place / "ab"[number % 2] / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(
                (pixels * (most / 255)).round().astype(np.uint16 if place == "other" else np.uint8)
            ).save(path)
    shown = []
    for place in ("8", "other"):
        bundle = starter.write(tmp_path / f"b{place}", starter.survey(tmp_path / place), size=16)
        section = Bundle(
            str(bundle), {"dataset_dir": str(tmp_path / place)}, policy=Policy(trusted=True)
        ).section("train")
        shown.append([_transformed(section, entry) for entry in section.source.entries])
    for one, same in zip(*shown, strict=True):
        np.testing.assert_allclose(one, same, atol=0.02)
    brighter = tmp_path / "brighter.png"
    Image.fromarray(np.full((8, 8), 65535, np.uint16)).save(brighter)
    for place, most in (("8", 255), ("other", depth)):
        opened = Bundle(str(tmp_path / f"b{place}"), {"dataset_dir": str(tmp_path / place)})
        opened.open_places([brighter])
        section = opened.section("train")
        if most < 65535:
            with pytest.raises(RuntimeError) as caught:
                _transformed(section, {**section.source.entries[0], "image": str(brighter)})
            told = f"holds values up to 65535; pictures of 16 bits with values up to {most},"
            assert told in str(caught.value.__cause__)


def _transformed(section: Any, entry: Any) -> Any:
    for transform in section.source.transforms:
        entry = transform(entry)
    return np.asarray(entry["image"])


def test_pictures_of_8_and_16_bits_are_each_read_by_their_own_depth(tmp_path: Path) -> None:
    """None becomes black, as where all are divided by 65535."""
    data = classes(classes(tmp_path / "data", "a", most=255), "b", most=60000, dtype=np.uint16)
    seen = starter.survey(data)
    assert (seen.brightest, seen.own_depth) == (1, 65535)
    assert seen.notes == (
        "pictures of several depths, each divided by its own: 12 of at most 255, 12 of at most 65535",
    )
    bundle = starter.write(tmp_path / "mine", seen, size=16)
    section = Bundle(str(bundle), {"dataset_dir": str(data)}, policy=Policy(trusted=True)).section(
        "train"
    )
    for entry in (section.source.entries[0], section.source.entries[-1]):
        assert (
            0.5 < float(ReadPixelsd("image", size=16, own_depth=65535)(entry)["image"].max()) <= 1
        )
        sample = entry
        for transform in section.source.transforms:
            sample = transform(sample)
        assert 1 < float(sample["image"].max() - sample["image"].min()) <= 4
    run = medfl.run(bundle, data=data, out=tmp_path / "run", jobs=1, sites=2, rounds=1, say=str)
    assert np.isfinite(run.summary["last"]["accuracy"])


def test_depths_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    classes(classes(tmp_path, "a"), "b", most=3000, dtype=np.uint16)
    picture(tmp_path / "b" / "float.tif", 90000, np.float32)
    with pytest.raises(
        InputError,
        match="several depths: 12 of at most 255, 12 of at most 4095, 1 of at most 90000;",
    ):
        starter.survey(tmp_path)


def test_pictures_of_16_bits_train(tmp_path: Path) -> None:
    data = classes(tmp_path / "data", "a", "b", most=60000, dtype=np.uint16)
    bundle = starter.write(tmp_path / "mine", starter.survey(data), size=16)
    run = medfl.run(bundle, data=data, out=tmp_path / "run", jobs=1, sites=2, rounds=1, say=str)
    assert np.isfinite(run.summary["last"]["accuracy"])
    file = next((data / "a").iterdir())
    answers = run.predict([str(file)]), run.predict([np.array(Image.open(file))])
    assert answers[0][0]["p_a"] == answers[1][0]["p_a"]


def test_what_is_left_out_is_counted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = classes(tmp_path / "data", "a", "b")
    for name in ("loose.png", "_old/1.png", "_old/2.png", ".hidden/1.png"):
        picture(data / name)
    for name in ("a/1.dcm", "notes.txt", ".DS_Store"):
        (data / name).write_text("")
    (data / "cases.csv").write_text(
        "file\n" + "".join(f"{c}/{n:02d}.png\n" for c in "ab" for n in range(12))
    )
    left = (
        "3 images in no class folder: left out, first loose.png",
        "2 files that do not end in .jpg, .jpeg, .png, .bmp, .tif, .tiff: left out, first notes.txt",
    )
    assert starter.survey(data).notes == left
    told = ["--images", str(data)]
    assert cli.main(["new", str(tmp_path / "mine"), *told]) == 0
    assert all(f"note: {line}\n" in capsys.readouterr().out for line in left[:1])
    assert cli.main(["new", str(tmp_path / "other"), *told, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == list(left)


def test_images_without_a_mask_are_counted(tmp_path: Path) -> None:
    data = pairs(tmp_path, 3)
    for number in range(3):
        picture(data / "images" / f"d{number}.png")
    (data / "masks" / "readme.txt").write_text("")
    assert starter.survey(data / "images", data / "masks").notes == (
        "3 images without a mask: left out, first d0.png",
        "1 files that do not end in .jpg, .jpeg, .png, .bmp, .tif, .tiff: left out, first readme.txt",
        "masks have the values 0, 3: classes 0 to 1 in training, and these values again in what medfl predict writes; "
        "a site's masks may have no others",
    )


def test_up_to_five_broken_files_are_named(tmp_path: Path) -> None:
    classes(tmp_path, "a", "b")
    for number in range(7):
        (tmp_path / "a" / f"{number:02d}.png").write_bytes(b"no picture")
    with pytest.raises(
        InputError, match=r"^7 of 24 images: image .*00\.png.*04\.png .* and 2 more files;"
    ) as caught:
        starter.survey(tmp_path)
    assert "05.png" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ("test", "train", "other"),
            r"folders test, train in .* are named as sections, .*column 'section' of cases",
        ),
        (("Validation", "TEST"), r"folders TEST, Validation in .* are named as sections"),
        (("train",), r"folders train in .* are named as sections"),
        (
            ("Images", "masks", "overlays"),
            r"folders Images and masks .*; give --images \S+/Images --masks \S+/masks",
        ),
    ],
)
def test_folders_that_are_no_classes_are_refused(
    names: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=told):
        starter.survey(classes(tmp_path, *names))


@pytest.mark.parametrize("name", ["03_mask", "03_Mask_1", "03_seg2", "03.label"])
def test_masks_among_labelled_pictures_are_refused(name: str, tmp_path: Path) -> None:
    classes(tmp_path, "benign", "control")
    picture(tmp_path / "benign" / f"{name}.png")
    with pytest.raises(
        InputError, match=rf"class folder \S+/benign holds pictures and their masks, as \S+{name}"
    ):
        starter.survey(tmp_path)


@pytest.mark.parametrize("second", ["_mask_1", "_mask2", "_seg-3"])
def test_a_second_mask_beside_an_image_is_refused_not_left_out(second: str, tmp_path: Path) -> None:
    """A picture with two lesions and a mask of each, as ultrasound of breasts is published: one would be background."""
    pairs(tmp_path)
    for path in (tmp_path / "masks").iterdir():
        path.rename(tmp_path / "images" / f"{path.stem}_mask.png")

    assert starter.survey(tmp_path / "images").counts == (12, 12)
    picture(tmp_path / "images" / f"c03{second}.png")
    with pytest.raises(
        InputError, match=r"masks \S+c03\S+ and \S+c03\S+ are both the mask of \S+ \S+c03\.png"
    ):
        starter.survey(tmp_path / "images")


def test_a_numbered_mask_is_that_of_its_image(tmp_path: Path) -> None:
    pairs(tmp_path)
    for path in (tmp_path / "masks").iterdir():
        path.rename(tmp_path / "masks" / f"{path.stem}_mask_1.png")

    assert starter.survey(tmp_path / "images", tmp_path / "masks").counts == (12, 12)


def test_masks_that_are_mostly_structure_are_told(tmp_path: Path) -> None:
    """As inverted ones are, of all hospitals or of one: by new, data check and site check."""
    pairs(tmp_path, 255)
    survey = starter.survey(tmp_path / "images", tmp_path / "masks")
    assert not any("larger than" in note for note in survey.notes)
    bundle = str(starter.write(tmp_path / "bundle", survey))
    for path in sorted((tmp_path / "masks").iterdir())[:3]:
        Image.fromarray(255 - np.asarray(Image.open(path))).save(path)

    told = "a structure is larger than the background: is that 0 in the masks?, in 3 files"
    assert told in starter.survey(tmp_path / "images", tmp_path / "masks").notes
    assert told in check_folder(bundle, tmp_path).notes
    found = preflight.check(preflight.PreflightOptions(bundle, str(tmp_path)))
    assert told in [line.text for line in found.lines]


def test_a_mask_with_one_structure_larger_than_the_background_is_told(tmp_path: Path) -> None:
    """Inverted ones of several structures too; several that fill an image together are let be."""
    pairs(tmp_path)
    masks = tmp_path / "masks"
    folders = tmp_path / "images", masks
    for path in masks.iterdir():
        Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) // 13).save(path)

    assert not any("larger than" in note for note in starter.survey(*folders).notes)
    for path in masks.iterdir():
        Image.fromarray(np.uint8(np.arange(64).reshape(8, 8) // 20 == 0) + np.uint8(1)).save(path)

    assert any("larger than" in note for note in starter.survey(*folders).notes)


@pytest.mark.parametrize(
    ("first", "second"), [("NV", "nv"), ("1", "01"), ("true", "ja"), ("a", "a ")]
)
def test_class_folders_that_may_say_the_same_are_told(
    tmp_path: Path, first: str, second: str
) -> None:
    """As of a table's column, of which alone it was told."""
    root = classes(tmp_path, first, second, "other")
    told = f"names that may say the same: {first!r} and {second!r}; they count as different"
    assert told.replace(
        f"{first!r} and {second!r}", " and ".join(map(repr, sorted((first, second))))
    ) in (starter.survey(root).notes)
    assert not any(
        "may say the same" in note
        for note in starter.survey(classes(tmp_path / "x", "a", "b")).notes
    )


def test_a_centre_in_two_spellings_is_one_site(tmp_path: Path) -> None:
    """Else the bundle named two, one of which had no image."""
    classes(tmp_path, "a", "b")
    rows = [
        f"{name}/{n:02d}.png,{'North' if n % 2 else 'north' if n % 4 else 'south'}"
        for name in "ab"
        for n in range(12)
    ]
    (tmp_path / "cases.csv").write_text("\n".join(["file,Center", *rows]))
    assert starter.survey(tmp_path).centres == ("North", "south")


def test_images_that_are_turned_by_exif_are_told_beside_their_masks(tmp_path: Path) -> None:
    """A program that draws masks on the pixels as stored makes masks that lie on their side; squares hide it."""
    pairs(tmp_path)
    for path in sorted((tmp_path / "images").iterdir())[:5]:
        opened = Image.open(path)
        exif = opened.getexif()
        exif[274] = 6
        opened.save(path, exif=exif)

    told = "the image is turned upright by its EXIF, the mask is as stored, in 5 files"
    survey = starter.survey(tmp_path / "images", tmp_path / "masks")
    assert told in survey.notes
    assert told in check_folder(str(starter.write(tmp_path / "b", survey)), tmp_path).notes


def test_channels_of_pictures_in_several_files_are_refused_as_such(tmp_path: Path) -> None:
    """As nnU-Net has them; each was said to be no file."""
    pairs(tmp_path)
    for path in [*(tmp_path / "images").iterdir()]:
        picture(path.with_name(f"{path.stem}_0001.png"))
        path.rename(path.with_name(f"{path.stem}_0000.png"))

    with pytest.raises(
        InputError,
        match=r"c00_0001\.png has its channels in several files .*; save them as one RGB",
    ):
        starter.survey(tmp_path / "images", tmp_path / "masks")


def test_masks_of_numbered_objects_are_told(tmp_path: Path) -> None:
    """Instances, as nuclei are published: each number would be a class. Structures, some of them absent, are let be."""
    for numbers in ((1, 2), (1, 3, 2, 4), (1,), (3, 2, 1), (4,), (2, 5)):
        for case in range(12):
            picture(tmp_path / "images" / f"c{case:02d}.png")
            mask = np.zeros((8, 8), np.uint8)
            for place, number in enumerate(numbers):
                mask[place, : case % 4 if len(numbers) > 3 else 2] = number

            (tmp_path / "masks").mkdir(exist_ok=True)
            Image.fromarray(mask).save(tmp_path / "masks" / f"c{case:02d}.png")

        told = starter.survey(tmp_path / "images", tmp_path / "masks").notes
        assert not any("numbered objects" in note for note in told)

    for case, path in enumerate(sorted((tmp_path / "masks").iterdir())):
        mask = np.zeros((8, 8), np.uint8)
        mask.flat[: case % 5 + 1] = np.arange(1, case % 5 + 2)
        Image.fromarray(mask).save(path)

    told = starter.survey(tmp_path / "images", tmp_path / "masks").notes
    assert any("numbered objects (cells, nuclei)" in note for note in told)
    # some of them were removed again
    for case, path in enumerate(sorted((tmp_path / "masks").iterdir())):
        mask = np.zeros((8, 8), np.uint8)
        numbers = [number for number in range(1, 9 + case % 5) if number % 4 != case % 4]
        mask.flat[: len(numbers)] = numbers
        Image.fromarray(mask).save(path)

    told = starter.survey(tmp_path / "images", tmp_path / "masks").notes
    assert any("numbered objects (cells, nuclei)" in note for note in told)
    for case, path in enumerate(sorted((tmp_path / "masks").iterdir())):
        mask = np.zeros((8, 8), np.uint8)
        mask.flat[: case % 5 + 1] = np.arange(1, case % 5 + 2)
        Image.fromarray(mask).save(path)

    named = starter.survey(tmp_path / "images", tmp_path / "masks", names=["a", "b", "c", "d", "e"])
    assert not any("numbered objects" in note for note in named.notes)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_picture_with_nan_is_refused_by_name(value: float, tmp_path: Path) -> None:
    classes(tmp_path, "a", "b", ending="tif", most=1, dtype=np.float32)
    pixels = np.full((8, 8), 0.5, np.float32)
    pixels[2, 3] = value
    Image.fromarray(pixels).save(tmp_path / "b" / "03.tif")
    with pytest.raises(InputError, match=r"b/03\.tif has values that are no numbers \(NaN or inf"):
        starter.survey(tmp_path)


def test_a_column_that_seems_to_name_sections_is_told(tmp_path: Path) -> None:
    """The split that a data set was published with would be passed over unsaid."""
    classes(tmp_path, "images")
    lines = ["file,label,split,set"]
    for number in range(12):
        section = ("Train", "TEST", "val")[number // 4]
        lines.append(f"{number:02d}.png,{'ab'[number % 2]},{section},{number % 5}")

    table = tmp_path / "table.csv"
    table.write_text("\n".join(lines) + "\n")
    told = starter.survey(tmp_path / "images", labels=table).notes
    (note,) = (note for note in told if note.startswith("column"))
    assert note.startswith(
        "column 'split' is not used: to take the sections from it, call it section"
    )
    text = "\n".join(lines).replace("split", "section").replace("Train", "train")
    table.write_text(text.replace("TEST", "test").replace("val", "validate"))
    seen = starter.survey(tmp_path / "images", labels=table)
    assert not any(note.startswith("column") for note in seen.notes)
    assert seen.tested == 4


@pytest.mark.parametrize("ending", [".webp", ".img", ".npy", ""])
def test_files_of_a_kind_that_is_not_read_are_told(ending: str, tmp_path: Path) -> None:
    for place in ("classes/ill", "images", "masks"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / f"a{ending}").write_bytes(b"RIFF")

    told = f"its files end in {ending or 'no dot'}"
    with pytest.raises(InputError, match=f"0 folders with pictures, {told};"):
        starter.survey(tmp_path / "classes")

    with pytest.raises(InputError, match=f"images has no image: {told};"):
        starter.survey(tmp_path / "images", tmp_path / "masks")

    picture(tmp_path / "images" / "a.png")
    with pytest.raises(InputError, match=f"masks has no image: {told};"):
        starter.survey(tmp_path / "images", tmp_path / "masks")


def test_swapped_folders_and_masks_without_classes_are_told(tmp_path: Path) -> None:
    data = pairs(tmp_path / "swapped")
    for path in (data / "images").iterdir():
        Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).save(path)
        Image.fromarray(np.eye(16) > 0).save(data / "masks" / path.name)
    with pytest.raises(
        InputError, match=r"files in \S+/masks look like masks, those in \S+/images like .*; swap"
    ):
        starter.survey(data / "masks", data / "images")
    data = pairs(tmp_path / "empty", 0)
    with pytest.raises(InputError, match="have no value but 0; .*check that these are the masks"):
        starter.survey(data / "images", data / "masks")
    data = pairs(tmp_path / "grey", 200)
    assert starter.survey(data / "images", data / "masks").mask_values == (0, 200)


def test_names_of_classes_beyond_16_bits_are_written_so_that_a_bundle_reads_them(
    tmp_path: Path,
) -> None:
    """JSON has two escapes for one of them, which YAML refuses: the bundle could not be opened."""
    classes(tmp_path / "data", "healthy \u2764\ufe0f", "tumour \U0001f9e0")
    folder = starter.write(tmp_path / "b", starter.survey(tmp_path / "data"))
    assert check_folder(str(folder), tmp_path / "data").classes[1] == "tumour \U0001f9e0"


@pytest.mark.parametrize("are_images", [True, False])
def test_pictures_with_volumes_as_masks_are_refused_as_such(
    tmp_path: Path, are_images: bool
) -> None:
    """It was said that files end in `.gz`, and that they are to end in `.nii.gz`."""
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    for case in range(3):
        picture(tmp_path / ("images" if are_images else "masks") / f"c{case}.png")
        place = tmp_path / ("masks" if are_images else "images") / f"c{case}.nii.gz"
        place.write_bytes(b"\x1f\x8b")

    allowed = r"\.gz; files that end in [a-z., ]*\.tiff; convert"
    if not are_images:
        allowed = r"\.png; files that end in [a-z., ]*\.mha, or folders"

    with pytest.raises(InputError, match=f"masks has no image: its files end in {allowed}"):
        starter.survey(tmp_path / "images", tmp_path / "masks")


def test_files_named_as_if_they_were_in_an_archive_are_left_out_and_told(tmp_path: Path) -> None:
    classes(tmp_path, "a", "b")
    picture(tmp_path / "a" / "scans.zip!x.png")
    assert any("1 pipes, devices, or names" in note for note in starter.survey(tmp_path).notes)
