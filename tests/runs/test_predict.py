"""What a trained network says of new images, as files: equal to what the run recorded, and on each file's own grid."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch
import yaml
from monai.networks.nets import DenseNet, DenseNet121
from PIL import Image

import medfl
from medfl import datasets, networks
from medfl.cli.predict import _lines
from medfl.cli.verbs import main
from medfl.core.errors import InputError
from medfl.core.seeding import stream
from medfl.datasets.readers.dicom import own_locale
from medfl.datasets.readers.unlabelled import joined
from medfl.policy import admission
from medfl.runs import references
from medfl.runs.launch import federate
from medfl.runs.predict import predict
from medfl.storage.files import save_weights
from tests.datasets.test_volumes import AFFINE, IMAGE, save, save_dicom
from tests.support.zoo_data import ROOT

BUNDLES = Path(__file__).parents[2] / "bundles"
SMALL = {
    "mednist": ("small_cnn", 2, 1, 6),
    "pbc": ("small_cnn", 2, 3, 8),
    "lung_cxr": ("unet8", 2, 1, 2),
    "hippocampus": ("unet8", 3, 1, 3),
}


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def trained(folder: Path, name: str, data: Path, **settings: Any) -> Path:
    requested = {
        "data": str(data),
        "method": "fedavg",
        "sites": 2,
        "rounds": 1,
        "partition": "iid",
        **settings,
    }
    federate(
        name, config={"network": SMALL[name][0], "image_size": 24}, requested=requested, out=folder, jobs=1,
        save_predictions=datasets.get(name).task == "segmentation",
    )  # fmt: skip
    return folder


def with_weights(name: str, root: Path, channels: int | None = None) -> Path:
    """Return a shipped bundle's folder with weights that were drawn, as somebody hands one on."""
    folder = Path(shutil.copytree(BUNDLES / name, root / f"{name} drawn"))
    network, dimensions, own, classes = SMALL[name]
    channels = channels or own
    for file in (folder / "configs").glob("*.yaml"):
        text = file.read_text()
        content = yaml.safe_load(text)
        if "network_name" in content:
            text = text.replace(
                f"network_name: {content['network_name']}", f"network_name: {network}"
            )
            file.write_text(text.replace(f"in_channels: {own}", f"in_channels: {channels}"))
    metadata = json.loads((folder / "configs/metadata.json").read_text())
    metadata["network_data_format"]["inputs"]["image"]["num_channels"] = channels
    (folder / "configs/metadata.json").write_text(json.dumps(metadata))
    with stream(3, "weights"):
        made = networks.build(network, channels, classes, spatial_dims=dimensions)
    (folder / "models").mkdir()
    save_weights(folder / "models" / "model.safetensors", made.state_dict())
    return folder


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("hands") / "data", per_class=10, size=24
    )


@pytest.fixture(scope="module")
def lungs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "lung_cxr", tmp_path_factory.mktemp("lungs") / "data", per_class=10, size=32
    )


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, hands: Path) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "classifier", "mednist", hands)


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory: pytest.TempPathFactory, lungs: Path) -> Path:
    return trained(
        tmp_path_factory.mktemp("runs") / "segmenter",
        "lung_cxr",
        lungs,
        local_epochs=6,
        batch_size=2,
        lr=0.01,
    )


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("bundles"), dict[str, Path]()
    return lambda name: (
        made.setdefault(name, None) or made.update({name: with_weights(name, root)}) or made[name]
    )


@pytest.fixture
def pictures(tmp_path: Path, hands: Path) -> Path:
    """Some of the phantom's test images, as files of a flat folder."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    with np.load(hands / "mednist_24.npz") as file:
        for index, pixels in enumerate(file["test_images"][:5]):
            Image.fromarray(pixels).save(folder / f"Bild {index} ü.png")
    return folder


def test_files_of_other_kinds_are_told_in_one_note(
    classifier: Path, pictures: Path, tmp_path: Path
) -> None:
    (pictures / "below").mkdir()
    for name in ("notes.txt", "below/a.xml", ".hidden", "labels.csv"):
        (pictures / name).write_text("x")
    (pictures / "labels.csv").write_text("id,label\nBild 0 ü.png,Hand\n")
    said: list[str] = []
    answer = predict(
        classifier, pictures, tmp_path / "out", reference=pictures / "labels.csv", say=said.append
    )
    assert answer["images"] == 5
    assert [line for line in said if "kind" in line] == [
        f"note: {pictures}: 2 files of another kind: left out, first below/a.xml"
    ], "the table of the references is used"
    assert answer["units"] == {}


@pytest.mark.parametrize("named", ["../pictures", "absolute"])
def test_images_are_named_by_a_path_that_leads_upwards(
    named: str, classifier: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    images = tmp_path / "here" / "../pictures" if named == "absolute" else named
    assert len(predict(classifier, images, "../out")["predictions"]) == 5


# As the run said


def test_a_run_s_own_test_images_get_the_digits_of_its_predictions(
    classifier: Path, hands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    with np.load(hands / "mednist_24.npz") as file:
        for index, pixels in enumerate(file["test_images"]):
            Image.fromarray(pixels).save(tmp_path / "in" / f"test_{index:06d}.png")
    given = [str(classifier), str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main(["predict", *given, "--json"]) == 0
    told, recorded = json.loads(capsys.readouterr().out), rows(classifier / "predictions.csv")
    classes, made = told["classes"], rows(tmp_path / "out" / "predictions.csv")
    assert list(made[0]) == ["id", "prediction", *classes]
    assert [{k: str(v) for k, v in row.items()} for row in told["predictions"]] == made
    assert told["data_source"] == "phantom"
    assert [row["id"] for row in made] == [f"{row['id']}.png" for row in recorded]
    for mine, row in zip(made, recorded, strict=True):
        assert mine["prediction"] == classes[int(row["predicted"])]
        assert [float(mine[name]) for name in classes] == [
            float(row[f"p_{name}"]) for name in classes
        ]


def test_masks_and_scores_are_those_of_the_run(
    segmenter: Path, lungs: Path, tmp_path: Path
) -> None:
    answer = medfl.load_run(segmenter).predict(
        lungs / "images", out=tmp_path / "out", reference=lungs / "masks"
    )
    assert len(answer) == len(list((lungs / "images").iterdir()))
    recorded = {row["id"]: row for row in rows(segmenter / "predictions.csv")}
    scored = {Path(row["id"]).stem: row for row in rows(tmp_path / "out" / "scores_by_case.csv")}
    for name, row in recorded.items():
        (own,) = segmenter.glob(f"predictions/*/{name}.png")
        assert own.read_bytes() == (tmp_path / "out" / f"{name}.png").read_bytes()
        assert {k: v for k, v in row.items() if k not in ("id", "site", "loss")} == {
            k: v for k, v in scored[name].items() if k != "id"
        }
    again = json.loads(
        json.dumps(
            predict(segmenter, lungs / "images", tmp_path / "two", reference=lungs / "masks")
        )
    )
    assert again["predictions"] == answer
    assert again["structures"]["lung"]["dice"] == again["scores"]["dice_lung"]
    assert again["units"] == {"hd95": "pixels", "hd95_lung": "pixels"}
    assert any(line.startswith("HD95 (pixels) ") for line in _lines(again))
    shares = {row["id"]: row["lung_share"] for row in answer}
    assert len(set(shares.values())) > 1
    for row in answer:
        mask = np.asarray(Image.open(tmp_path / "out" / row["mask"]))
        assert row["lung_share"] == pytest.approx(np.mean(mask == 255), rel=1e-5)


# Volumes, on the grid of each


def test_volumes_and_series_get_masks_on_their_own_grids(
    bundles: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    voxels = np.random.default_rng(1).integers(0, 500, (26, 42, 25)).astype(np.int16)
    (tmp_path / "in" / "Größe 1").mkdir(parents=True)
    save(tmp_path / "in" / "Größe 1" / "kopf.nii.gz", voxels)
    save_dicom(tmp_path / "in" / "series", voxels)
    assert (
        main(
            [
                "predict",
                str(bundles("hippocampus")),
                str(tmp_path / "in"),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    assert "ml" in capsys.readouterr().out
    table = {row["id"]: row for row in rows(tmp_path / "out" / "predictions.csv")}
    assert {ident: row["mask"] for ident, row in table.items()} == {
        "Größe 1/kopf.nii.gz": "Größe 1/kopf.nii.gz", "series": "series.nii.gz",
    }  # fmt: skip
    written = [nib.load(tmp_path / "out" / row["mask"]) for row in table.values()]
    masks = [np.asarray(each.dataobj) for each in written]
    assert all(
        each.shape == voxels.shape and np.allclose(each.affine, AFFINE, atol=1e-4)
        for each in written
    )
    assert np.array_equal(*masks)
    voxel = abs(np.linalg.det(AFFINE[:3, :3])) / 1000
    for row, mask in zip(table.values(), masks, strict=True):
        told = [float(row["anterior_ml"]), float(row["posterior_ml"])]
        assert told == pytest.approx([(mask == value).sum() * voxel for value in (1, 2)], rel=1e-4)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(tmp_path / "in" / "series")))
    source, mask = reader.Execute(), sitk.ReadImage(str(tmp_path / "out" / "series.nii.gz"))
    assert source.GetSize() == mask.GetSize()
    for part in ("GetSpacing", "GetOrigin", "GetDirection"):
        assert getattr(mask, part)() == pytest.approx(getattr(source, part)(), abs=1e-4)


def test_units_and_forms_of_headers_change_no_figure_and_stay(
    bundles: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One volume in mm, micrometres and metres, with another qform and without a code: millilitres, HD95 and place."""
    generator = np.random.default_rng(1)
    voxels = generator.integers(0, 500, (26, 42, 25)).astype(np.int16)
    truth = np.zeros(voxels.shape, np.uint8)
    truth[5:15, 10:30, 5:20] = 1
    truth[15:20, 10:30, 5:20] = 2
    (tmp_path / "in").mkdir()
    (tmp_path / "masks").mkdir()
    forms = {
        "mm": (1.0, 1, 1),
        "micron": (1e3, 1, 1),
        "meter": (1e-3, 2, 0),
        "unknown": (1.0, 0, 0),
    }
    for unit, (factor, sform, qform) in forms.items():
        place = np.diag([factor] * 3 + [1]) @ AFFINE
        image = nib.Nifti1Image(voxels, None)
        image.header.set_xyzt_units(unit)
        image.header.set_zooms(np.linalg.norm(place[:3, :3], axis=0))
        image.header.set_qform(np.diag([factor, factor, factor, 1.0]), qform)
        image.header.set_zooms(np.linalg.norm(place[:3, :3], axis=0))
        image.header.set_sform(place, sform)
        nib.save(nib.Nifti1Image(voxels, None, image.header), tmp_path / "in" / f"{unit}.nii.gz")
        where = nib.load(tmp_path / "in" / f"{unit}.nii.gz").affine if unit == "unknown" else AFFINE
        reference = nib.Nifti1Image(truth, where)
        reference.header.set_xyzt_units("mm")
        nib.save(reference, tmp_path / "masks" / f"{unit}.nii.gz")
    arguments = [
        "predict",
        str(bundles("hippocampus")),
        str(tmp_path / "in"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*arguments, "--reference", str(tmp_path / "masks")]) == 0, capsys.readouterr()
    for unit in forms:
        source, written = (tmp_path / part / f"{unit}.nii.gz" for part in ("in", "out"))
        for field in (
            "pixdim",
            "xyzt_units",
            "sform_code",
            "qform_code",
            "srow_x",
            "quatern_d",
            "qoffset_z",
        ):
            before, after = (nib.load(path).header[field] for path in (source, written))
            assert np.array_equal(before, after), (unit, field)
        mask, image = sitk.ReadImage(str(written)), sitk.ReadImage(str(source))
        for part in ("GetSpacing", "GetOrigin", "GetDirection"):
            assert getattr(mask, part)() == getattr(image, part)()
    table = {row["id"]: row for row in rows(tmp_path / "out" / "predictions.csv")}
    scores = {row["id"]: row for row in rows(tmp_path / "out" / "scores_by_case.csv")}
    voxel = abs(np.linalg.det(AFFINE[:3, :3])) / 1000
    for unit in ("mm", "micron", "meter"):
        mask = np.asarray(nib.load(tmp_path / "out" / f"{unit}.nii.gz").dataobj)
        assert float(table[f"{unit}.nii.gz"]["anterior_ml"]) == pytest.approx(
            (mask == 1).sum() * voxel, rel=1e-4
        )
        hd95 = float(scores[f"{unit}.nii.gz"]["hd95"])
        assert hd95 == pytest.approx(float(scores["mm.nii.gz"]["hd95"]), rel=1e-4)
        assert 1 < hd95 < 100


def test_channels_and_masks_are_found_by_the_names_of_nnunet(
    bundles: Callable[[str], Path], tmp_path: Path
) -> None:
    voxels = np.random.default_rng(1).integers(0, 500, (26, 42, 25)).astype(np.int16)
    for folder in ("in", "masks"):
        (tmp_path / folder).mkdir()
    save(tmp_path / "in" / "case_0000.nii.gz", voxels)
    save(tmp_path / "masks" / "case.nii.gz", (voxels > 400).astype(np.uint8))
    told = predict(
        bundles("hippocampus"), tmp_path / "in", tmp_path / "out", reference=tmp_path / "masks"
    )
    assert (told["scored"], told["failed"]) == (1, [])
    files = {
        name: f"/{name}"
        for name in ("b_0001.nii", "a_0000.nii", "b_0000.nii", "c.nii", "x/a_0001.nii")
    }
    assert joined(files, 1) == files
    assert joined(files, 2) == {
        "b.nii": "/b_0000.nii | /b_0001.nii", "a_0000.nii": "/a_0000.nii", "c.nii": "/c.nii",
        "x/a_0001.nii": "/x/a_0001.nii",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "count", "axes", "together"),
    [
        ((0, 1, 2), 3, 3, True),
        ((0, 1), 3, 3, False),  # one is missing
        ((0, 1, 2, 3), 3, 3, False),  # one is beyond
        ((1, 2, 3), 3, 3, False),
        ((0, 10, 20), 3, 3, False),  # other numbers
        ((0, 2), 2, 3, False),  # a gap
        ((0,), 1, 3, False),  # no channels
        ((0, 1, 2), 3, 4, False),  # each has all channels
    ],
)
def test_channels_of_one_image_are_volumes_from_0_without_gaps(
    numbers: tuple[int, ...], count: int, axes: int, together: bool, tmp_path: Path
) -> None:
    shape = (4, 5, 6, 3)[:axes]
    files = {}
    for number in numbers:
        name = f"case_{number:04d}.nii.gz"
        save(tmp_path / name, np.arange(np.prod(shape)).reshape(shape).astype(np.int16))
        files[name] = str(tmp_path / name)

    found = joined(files, count)
    assert found == ({"case.nii.gz": " | ".join(files.values())} if together else files)


def test_pictures_are_no_channels_of_each_other(tmp_path: Path) -> None:
    """Three colour pictures for a network of three channels, whatever their numbers."""
    colour = with_weights("pbc", tmp_path)
    for numbers in ((0, 10, 20), (0, 1, 2)):
        folder = tmp_path / str(numbers[1])
        folder.mkdir()
        names = [f"case_{number:04d}.jpg" for number in numbers]
        for seed, name in enumerate(names):
            pixels = np.random.default_rng(seed).integers(0, 255, (24, 24, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
        told = predict(colour, folder, tmp_path / f"out {numbers[1]}")
        assert told["failed"] == []
        assert [row["id"] for row in told["predictions"]] == names


def test_a_network_that_is_prompted_is_told_as_one(tmp_path: Path) -> None:
    """NuClick's, whose images have a click of the label drawn into them."""
    source = ROOT / "pathology_nuclei_classification"
    if not source.is_dir():
        pytest.skip("the zoo's bundle is not at hand")
    bundle = Path(shutil.copytree(source, tmp_path / "nuclick"))
    (bundle / "models").mkdir()
    torch.save(DenseNet121(2, 4, 4).state_dict(), bundle / "models" / "model.pt")
    Image.fromarray(np.zeros((128, 128, 3), np.uint8)).save(tmp_path / "nucleus.png")
    with pytest.raises(InputError) as told:
        predict(bundle, tmp_path / "nucleus.png", tmp_path / "out")
    assert "the bundle's transforms ask for 'label' beside each image" in str(told.value)
    assert "--" not in str(told.value)


def test_a_channel_alone_is_told_as_what_it_is(tmp_path: Path) -> None:
    for name in ("case_0000", "case_0001"):
        save(
            tmp_path / f"{name}.nii.gz",
            np.arange(26 * 42 * 25).reshape(26, 42, 25).astype(np.int16),
        )
    two = with_weights("hippocampus", tmp_path, channels=2)
    told = r"case_0001.nii.gz is one channel; 2 channels an image: .*; give the others too"
    with pytest.raises(InputError, match=told):
        predict(two, tmp_path / "case_0001.nii.gz", tmp_path / "out")
    both = predict(
        two, [tmp_path / "case_0000.nii.gz", tmp_path / "case_0001.nii.gz"], tmp_path / "out"
    )
    assert both["failed"] == []
    assert [row["id"] for row in rows(tmp_path / "out/predictions.csv")] == ["case.nii.gz"]


def test_real_radiographs_of_all_sizes_get_masks_of_theirs(
    bundles: Callable[[str], Path], real_data: Path, tmp_path: Path
) -> None:
    lungs = real_data / "covid_cxr_lungs"
    files = sorted((lungs / "images").iterdir())[:5]
    told = predict(bundles("lung_cxr"), files, tmp_path / "out", reference=lungs / "masks")
    assert told["scored"] == 5
    sizes = [datasets.read_pixels(str(file)).shape[1::-1] for file in files]
    assert len(set(sizes)) > 1
    for row, size in zip(told["predictions"], sizes, strict=True):
        mask = datasets.read_pixels(str(tmp_path / "out" / row["mask"]))[..., 0]
        assert (mask.shape[::-1], set(np.unique(mask).tolist()) - {0, 255}) == (size, set())


def test_dicom_pictures_get_masks_where_they_lie(
    segmenter: Path, lungs: Path, tmp_path: Path
) -> None:
    """A radiograph as its hospital keeps it has the prediction of its PNG, as a slice in its place."""
    (tmp_path / "in").mkdir()
    file = sorted((lungs / "images").iterdir())[0]
    picture = sitk.ReadImage(str(file), sitk.sitkUInt8)[:, 3:]
    picture.SetSpacing((0.25, 0.5))
    with own_locale():
        sitk.WriteImage(picture, str(tmp_path / "in" / "x.dcm"))
        sitk.WriteImage(picture, str(tmp_path / "x.png"))
    (row,) = predict(segmenter, tmp_path / "in", tmp_path / "out")["predictions"]
    (plain,) = predict(segmenter, tmp_path / "x.png", tmp_path / "plain")["predictions"]
    assert row == {"id": "x.dcm", "mask": "x.nii.gz", "lung_share": plain["lung_share"]}
    mask = sitk.ReadImage(str(tmp_path / "out" / "x.nii.gz"))
    with own_locale():
        source = sitk.ReadImage(str(tmp_path / "in" / "x.dcm"))
    assert source.GetSize() == mask.GetSize() == (*picture.GetSize(), 1)
    for part in ("GetSpacing", "GetOrigin", "GetDirection"):
        assert getattr(mask, part)() == pytest.approx(getattr(source, part)(), abs=1e-5)
    shown = np.asarray(Image.open(tmp_path / "plain" / "x.png")) // 255
    assert np.array_equal(sitk.GetArrayFromImage(mask)[0], shown)
    assert 0 < shown.mean() < 1


def test_volumes_for_pictures_and_pictures_for_volumes_are_refused_in_one_line(
    bundles: Callable[[str], Path],
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(tmp_path / "v.nii.gz", IMAGE)
    for bundle, image in (
        ("mednist", tmp_path / "v.nii.gz"),
        ("hippocampus", next(pictures.iterdir())),
    ):
        assert (
            main(["predict", str(bundles(bundle)), str(image), "--out", str(tmp_path / "out")]) == 2
        )
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert str(image) in said
    assert not (tmp_path / "out").exists()


# What goes wrong with one image


def test_bad_images_among_good_are_named_and_the_others_go_on(
    classifier: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = predict(classifier, pictures, tmp_path / "good")["predictions"]
    (pictures / "torn.png").write_bytes(b"\x89PNG no")
    Image.new("RGB", (24, 24), (9, 90, 9)).save(pictures / "colour.png")
    assert (
        main(["predict", str(classifier), str(pictures), "--out", str(tmp_path / "out"), "--json"])
        == 1
    )
    caught = capsys.readouterr()
    told = json.loads(caught.out)
    assert told["predictions"] == good
    assert [one["id"] for one in told["failed"]] == ["colour.png", "torn.png"]
    assert "colour.png has 3 channels" in told["failed"][0]["problem"]
    lines = caught.err.splitlines()
    assert lines[0].startswith("error: colour.png: image ")
    assert lines[-1].startswith("error: 2 of 7 images failed")


def test_where_nothing_can_be_read_nothing_is_written(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "torn.png").write_bytes(b"no")
    with pytest.raises(InputError, match="the one image cannot be predicted: image .*torn.png"):
        predict(classifier, tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "torn.png").rename(tmp_path / "in" / "torn.txt")
    with pytest.raises(InputError, match="in holds no image"):
        predict(classifier, tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_inputs_of_one_name_overwrite_nothing(segmenter: Path, lungs: Path, tmp_path: Path) -> None:
    files = sorted((lungs / "images").iterdir())[:4]
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    picture = Image.open(files[1])
    shutil.copy(files[0], folder / "a.png")
    picture.save(folder / "a.bmp")
    shutil.copy(files[2], folder / "sub" / "a.png")
    shutil.copy(files[3], folder / "a.bmp.png")
    told = predict(segmenter, folder, tmp_path / "out")
    masks = [row["mask"] for row in told["predictions"]]
    assert [row["id"] for row in told["predictions"]] == [
        "a.bmp",
        "a.bmp.png",
        "a.png",
        "sub/a.png",
    ]
    assert len(set(masks)) == 4
    alone = predict(segmenter, files, tmp_path / "alone")["predictions"]
    by_file = [alone[index]["mask"] for index in (1, 3, 0, 2)]
    for mask, own in zip(masks, by_file, strict=True):
        assert (tmp_path / "out" / mask).read_bytes() == (tmp_path / "alone" / own).read_bytes()


# References


def test_classes_are_scored_by_folders_and_by_tables(
    classifier: Path, pictures: Path, tmp_path: Path
) -> None:
    names = sorted(path.name for path in pictures.iterdir())
    labels = ["Hand", "CXR", "Hand", "HeadCT"]
    for name, label in zip(names, labels, strict=False):
        (tmp_path / "classes" / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(pictures / name, tmp_path / "classes" / label)
    table = tmp_path / "labels.csv"
    numbers = {"Hand": "4", "CXR": "CXR", "HeadCT": "HeadCT"}
    lines = [
        f"{name.removesuffix('.png')},{numbers[label]}"
        for name, label in zip(names, labels, strict=False)
    ]
    table.write_text("\n".join(["id,label", *lines]))
    told = [
        predict(classifier, images, tmp_path / f"out{number}", reference=reference)
        for number, (images, reference) in enumerate(
            [
                (pictures, tmp_path / "classes"),
                (pictures, table),
                (tmp_path / "classes", tmp_path / "classes"),
            ]
        )
    ]
    predicted = [row["prediction"] for row in told[0]["predictions"]]
    right = [one == label for one, label in zip(predicted, labels, strict=False)]
    for each in told:
        assert each["scored"] == 4
        assert each["scores"]["accuracy"] == sum(right) / 4
    assert told[0]["scores"] == told[1]["scores"]
    by_case = rows(tmp_path / "out0" / "scores_by_case.csv")
    assert [(row["label"], row["prediction"]) for row in by_case] == list(
        zip(labels, predicted, strict=False)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,label\nBild 0 ü,Foot", "label 'Foot' of Bild 0 ü.png; one of AbdomenCT"),
        ("id,label\nnobody,Hand", "names none of the 5 images in a column 'id'"),
        ("id,label\nBild 0 ü,Hand\nBild 0 ü,CXR", "has two rows for Bild 0 ü.png"),
        ("id,centre\nBild 0 ü,Hand", "has no column of classes"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    text: str, said: str, classifier: Path, pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(InputError, match=said):
        predict(classifier, pictures, tmp_path / "out", reference=tmp_path / "labels.csv")
    assert not (tmp_path / "out").exists()


def test_a_damaged_reference_costs_a_score_and_no_prediction(
    segmenter: Path, lungs: Path, tmp_path: Path
) -> None:
    masks = Path(shutil.copytree(lungs / "masks", tmp_path / "masks"))
    first, second, third, *_ = sorted(masks.iterdir())
    first.write_bytes(b"no")
    second.unlink()
    images = [lungs / "images" / one.name for one in (first, second, third)]
    told = predict(segmenter, images, tmp_path / "out", reference=masks)
    assert (len(told["predictions"]), told["scored"], told["with_reference"]) == (3, 1, 2)
    assert [one["id"] for one in told["failed"]] == [first.name]
    with pytest.raises(InputError, match="has 0 masks, but for none of the images"):
        predict(segmenter, images, tmp_path / "more", reference=pictures_alone(tmp_path))


def pictures_alone(folder: Path) -> Path:
    (folder / "nothing").mkdir()
    return folder / "nothing"


# Bundles and runs that do not predict


def test_a_bundle_predicts_as_its_network_does(
    bundles: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    told = predict(bundles("mednist"), pictures, tmp_path / "out")
    assert told["model"].startswith("bundle ")
    row = told["predictions"][0]
    assert sum(row[name] for name in told["classes"]) == pytest.approx(1, abs=1e-6)
    assert row["prediction"] == max(told["classes"], key=lambda name: row[name])


@pytest.mark.parametrize(
    ("output", "activation", "columns"),
    [
        ({"type": "value", "format": "regression", "spatial_shape": [1, 1]}, {}, ["predicted_a"]),
        (
            {"type": "probabilities", "format": "classes", "spatial_shape": [1, 3]},
            {"softmax": True},
            ["prediction", "a", "b", "c"],
        ),
        (
            {"type": "probabilities", "format": "classes", "spatial_shape": [1, 2]},
            {"sigmoid": True},
            ["predicted_a", "predicted_b", "p_a", "p_b"],
        ),
        (
            {"type": "probability", "format": "classification", "spatial_shape": [1, 1]},
            {"sigmoid": True},
            ["prediction", "background", "a"],
        ),
    ],
)
def test_a_bundle_with_monai_s_files_alone_says_what_it_predicts(
    output: dict[str, Any],
    activation: dict[str, bool],
    columns: list[str],
    pictures: Path,
    tmp_path: Path,
) -> None:
    """As the model zoo writes them: the shape [1, classes] was taken for that of a mask."""
    channels = output["spatial_shape"][1]
    root = tmp_path / "foreign"
    (root / "configs").mkdir(parents=True)
    (root / "models").mkdir()
    small = {"init_features": 4, "growth_rate": 2, "block_config": (1, 1)}
    network = {"spatial_dims": 2, "in_channels": 1, "out_channels": channels, **small}
    read = [
        {"_target_": "LoadImaged", "keys": "image"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
    ]
    after = [{"_target_": "Activationsd", "keys": "pred", **activation}] * bool(activation)
    config = {
        "device": "$torch.device('cpu')",
        "network_def": {"_target_": "DenseNet", **network},
        "preprocessing": {"_target_": "Compose", "transforms": read},
        "postprocessing": {"_target_": "Compose", "transforms": after},
    }
    (root / "configs" / "inference.json").write_text(json.dumps(config))
    described = {
        **output,
        "num_channels": channels,
        "channel_def": dict(zip("012", "abc"[:channels], strict=False)),
    }
    image = {"type": "image", "num_channels": 1, "spatial_shape": [24, 24]}
    data = {"inputs": {"image": image}, "outputs": {"pred": described}}
    metadata = {"version": "0.1.0", "name": "foreign", "network_data_format": data}
    (root / "configs" / "metadata.json").write_text(json.dumps(metadata))
    weights = DenseNet(**network).state_dict()
    torch.save(weights, root / "models" / "model.pt")

    told = predict(root, pictures, tmp_path / "out")
    assert len(told["predictions"]) == 5
    first = rows(tmp_path / "out" / "predictions.csv")[0]
    assert list(first) == ["id", *columns]


def test_what_a_bundle_would_run_is_refused_without_trust(
    bundles: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundles("mednist"), tmp_path / "copy"))
    file = copy / "configs" / "inference.yaml"
    marked = tmp_path / "ran"
    file.write_text(
        f"{file.read_text()}\nharm: \"$__import__('pathlib').Path('{marked}').touch()\"\n"
    )
    with pytest.raises(InputError, match="inference.yaml"):
        predict(copy, pictures, tmp_path / "out")
    with admission.trusting(True):
        assert predict(copy, pictures, tmp_path / "out")["predictions"]


def test_what_is_no_model_is_refused_before_anything_is_written(
    classifier: Path, pictures: Path, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copyfile(classifier / "run.json", begun / "run.json")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("kept")
    plain = Path(shutil.copytree(BUNDLES / "mednist", tmp_path / "plain"))
    for model, settings, said in (
        (pictures, {}, "neither a run .* nor a bundle"),
        (begun, {}, "has no weights yet; .*; let it train: medfl run --resume"),
        (plain, {}, "has no models/model.safetensors or models/model.pt"),
        (classifier, {"site": "site-1"}, "it has one model, the same for all"),
        (classifier, {"site": "north"}, "it has one model, the same for all"),
        (classifier, {"site": "all"}, "the model of one site predicts"),
        (classifier, {"which": "first"}, "--which first; last or best"),
        (classifier, {"reference": tmp_path / "nowhere"}, "--reference .*nowhere is not there"),
        (
            classifier,
            {"out": tmp_path / "full"},
            "full exists and is not empty; a new or empty folder; give a new folder$",
        ),
    ):
        with pytest.raises(InputError, match=said):
            predict(model, pictures, **{"out": tmp_path / "out", **settings})
    assert not (tmp_path / "out").exists()
    assert torch.get_num_threads() == 1


def test_numbers_that_name_classes_are_not_their_indices(tmp_path: Path) -> None:
    """Also where a spreadsheet took their zeros; of classes with other names a number is an index."""
    (tmp_path / "t.csv").write_text("id,label\na,1\nb,3.0\n")
    files = {"a.png": "", "b.png": ""}
    named = references.labels_of(tmp_path / "t.csv", files, ["01", "02", "03"], {})
    assert named == {"a.png": 0, "b.png": 2}
    counted = references.labels_of(tmp_path / "t.csv", files, ["x", "y", "z", "w"], {})
    assert counted == {"a.png": 1, "b.png": 3}
