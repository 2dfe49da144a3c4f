"""Drawn data for a bundle that is not ours, in the layout that its own configuration looks for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from medfl.bundle.bundle import Bundle
from medfl.cli import main
from medfl.core.errors import InputError
from medfl.core.untrusted import override_value
from medfl.policy.policy import Policy
from tests.zoo.build import ZOO
from tools.synthetic_data import requested_files
from tools.synthetic_data.__main__ import main as draw
from tools.synthetic_data.draw_data import Drawn, draw_data
from tools.synthetic_data.requested_files import noting_lookups

TRUSTED = Policy(trusted=True)


def configured(drawn: Drawn) -> dict[str, str]:
    """Return the overrides that `medfl run` makes of what was drawn."""
    values = dict(text.split("=", 1) for text in drawn.arguments if "=" in text)
    return values | ({"dataset_dir": drawn.arguments[1]} if "--data" in drawn.arguments else {})


def bundle(folder: Path, ids: dict[str, Any], metadata: dict[str, Any] | None = None) -> Path:
    """Write a bundle of pictures whose training and validation lists are the ids `train_list` and `val_list`."""
    config = {
        "imports": ["$import glob", "$import json", "$import os", "$import csv", "$import pathlib"],
        "bundle_root": ".",
        "dataset_dir": "/nowhere/images",
        "device": "$torch.device('cpu')",
        "val_list": "$@train_list[:2]",
        "network": {"_target_": "UNet", "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": [4, 8],
                    "strides": [2]},
        "loss": {"_target_": "DiceLoss", "to_onehot_y": True},
        "optimizer": {"_target_": "torch.optim.Adam", "params": "$@network.parameters()"},
        "transforms": {"_target_": "Compose", "transforms": [
            {"_target_": "LoadImaged", "keys": ["image", "label"]},
            {"_target_": "EnsureChannelFirstd", "keys": ["image", "label"]},
        ]},
        "train_set": {"_target_": "Dataset", "data": "@train_list", "transform": "@transforms"},
        "val_set": {"_target_": "Dataset", "data": "@val_list", "transform": "@transforms"},
        "train_loader": {"_target_": "DataLoader", "dataset": "@train_set", "batch_size": 2},
        "val_loader": {"_target_": "DataLoader", "dataset": "@val_set"},
        "evaluator": {"_target_": "SupervisedEvaluator", "val_data_loader": "@val_loader", "network": "@network"},
        "trainer": {"_target_": "SupervisedTrainer", "train_data_loader": "@train_loader", "network": "@network",
                    "loss_function": "@loss", "optimizer": "@optimizer"},
        **ids,
    }  # fmt: skip
    pictures = {
        "inputs": {"image": {"num_channels": 1, "spatial_shape": [32, 32]}},
        "outputs": {
            "pred": {"format": "segmentation", "num_channels": 2, "spatial_shape": [32, 32]}
        },
    }
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / "train.json").write_text(json.dumps(config))
    content = {"network_data_format": pictures if metadata is None else metadata}
    (folder / "configs" / "metadata.json").write_text(json.dumps(content))
    return folder


def volume(path: Path) -> Any:
    return nibabel.load(path)


CLASSIFIED = {
    "inputs": {"image": {"num_channels": 3, "spatial_shape": [32, 32]}},
    "outputs": {
        "pred": {
            "type": "probabilities",
            "format": "classes",
            "channel_def": {"0": "no", "1": "yes"},
        }
    },
}
ONE_IMAGE = {
    "transforms": {"_target_": "Compose", "transforms": [
        {"_target_": "LoadImaged", "keys": "image"}, {"_target_": "EnsureChannelFirstd", "keys": "image"}
    ]},
    "network": {"_target_": "Classifier", "in_shape": [3, 32, 32], "classes": 2, "channels": [4], "strides": [2]},
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
}  # fmt: skip
PAIRS = {"train_list": "$[{'image': i, 'label': l} for i, l in zip(@images, @labels)]"}


@pytest.mark.parametrize("name", list(ZOO))
def test_every_stand_in_of_the_zoo_trains_on_what_is_drawn(name: str, tmp_path: Path) -> None:
    """Its own data are taken away; network and loss then take the first item, of the task and channels that it says."""
    zoo = ZOO[name](tmp_path / "zoo")
    shutil.rmtree(zoo.path / "data", ignore_errors=True)
    (zoo.path / "configs" / "datalist.json").unlink(missing_ok=True)
    before = sorted(zoo.path.rglob("*"))
    drawn = draw_data(str(zoo.path), tmp_path / "drawn", policy=TRUSTED)
    opened = Bundle(str(zoo.path), configured(drawn), policy=TRUSTED)
    assert (opened.task, opened.channels) == (zoo.task, zoo.in_channels)
    assert {section: len(opened.items(section)) for section in drawn.counts} == drawn.counts
    assert min(drawn.counts.values()) > 0
    assert drawn.notes == ()
    assert sorted(zoo.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("ids", "metadata", "files"),
    [
        pytest.param(
            {
                "images": "$sorted(glob.glob(@dataset_dir + '/img/*.jpg'))",
                "labels": "$sorted(glob.glob(os.path.join(@dataset_dir, 'seg', '*.png')))",
                **PAIRS,
            },
            None, ["img/case_000.jpg", "seg/case_005.png"], id="two patterns",
        ),
        pytest.param(
            {
                "images": "$sorted(pathlib.Path(@dataset_dir).rglob('scan?.png'))",
                "labels": "$[str(i).replace('scan', 'mask') for i in @images]",
                **PAIRS,
            },
            None, ["scan0.png", "mask0.png"], id="a pattern of paths, masks by another name",
        ),
        pytest.param(
            {"list_file": "$@bundle_root + '/lists/all.json'",
             "train_list": "$monai.data.load_decathlon_datalist(@list_file, data_list_key='fold0')"},
            None, ["all.json", "image/case_000.png", "label/case_000.png"], id="a list in the bundle's folder",
        ),
        pytest.param(
            {"rows": "$list(csv.DictReader(open(@dataset_dir + '/all.csv')))",
             "train_list": "$[{'image': os.path.join(@dataset_dir, r['photo']), 'label': int(r['ill'])} for r in @rows"
                           " if r['part'] == 'train']", **ONE_IMAGE},
            CLASSIFIED, ["all.csv", "photo/case_000.png"], id="a class in a table",
        ),
        pytest.param(
            {"train_list": "$[{'image': r['scan'], 'label': {'benign': 0, 'malign': 1}[r['finding']]} for r in"
                           " json.loads(pathlib.Path(@dataset_dir, 'all.json').read_text())['cases']]", **ONE_IMAGE},
            CLASSIFIED, ["all.json", "scan/case_000.png"], id="a class by its name in a JSON list",
        ),
        pytest.param(
            {"files": "$sorted(glob.glob(@dataset_dir + '/*/*.png'))",
             "train_list": "$[{'image': f, 'label': ['cat', 'dog'].index(pathlib.Path(f).parent.name)} for f in"
                           " @files]", **ONE_IMAGE},
            CLASSIFIED, ["cat/case_000.png", "dog/case_001.png"], id="a class by its folder",
        ),
        pytest.param(
            {"kinds": "$sorted(os.listdir(@dataset_dir))",
             "train_list": "$[{'image': f, 'label': n} for n, k in enumerate(@kinds) for f in"
                           " glob.glob(@dataset_dir + '/' + k + '/*.png')]", **ONE_IMAGE},
            CLASSIFIED, ["no/case_000.png", "yes/case_000.png"], id="a folder listed",
        ),
        pytest.param(
            {"train_list": "$[{'image': os.path.join(@dataset_dir, k, f), 'label': n} for n, k in"
                           " enumerate(sorted(os.listdir(@dataset_dir))) for f in"
                           " os.listdir(os.path.join(@dataset_dir, k))]", **ONE_IMAGE},
            CLASSIFIED, ["no/case_000.png", "yes/case_000.png"], id="folders listed in folders",
        ),
        pytest.param(
            {"list_file": "$@dataset_dir + '/all.json'", "train_list": "$json.load(open(@list_file))",
             "transforms": {"_target_": "Compose", "transforms": [
                 {"_target_": "LoadImaged", "keys": ["image", "label"]},
                 {"_target_": "EnsureChannelFirstd", "keys": ["image", "label"]},
                 {"_target_": "SpatialCropd", "keys": ["image", "label"], "roi_center": [16, 16], "roi_size": [8, 8]},
                 {"_target_": "ToTensord", "keys": ["centroid", "mask_value"]},
             ]}},
            None, ["all.json", "image/case_000.png"], id="a place and a number beside the images",
        ),
        pytest.param(
            {"train_set": {"_target_": "NPZDictItemDataset", "npzfile": "$@dataset_dir + '/all.npz'",
                           "keys": {"x": "image", "y": "label"}, "transform": "@transforms"},
             "val_set": {"_target_": "NPZDictItemDataset", "npzfile": "$@dataset_dir + '/val.npz'",
                         "keys": {"x": "image", "y": "label"}, "transform": "@transforms"},
             "transforms": {"_target_": "EnsureChannelFirstd", "keys": ["image", "label"],
                            "channel_dim": "no_channel"}},
            None, ["all.npz", "val.npz"], id="arrays",
        ),
        pytest.param(
            {"train_set": {"_target_": "DecathlonDataset", "root_dir": "@dataset_dir", "task": "Task09_Spleen",
                           "section": "training", "transform": "@transforms", "val_frac": 0.5},
             "val_set": {"_target_": "DecathlonDataset", "root_dir": "@dataset_dir", "task": "Task09_Spleen",
                         "section": "validation", "transform": "@transforms", "val_frac": 0.5}},
            None, ["Task09_Spleen/dataset.json", "Task09_Spleen/image/case_000.png"], id="a decathlon",
        ),
        pytest.param(
            {"list": "$@dataset_dir + '/folds.json'",
             "train_list": "$monai.auto3dseg.utils.datafold_read(@list, basedir=@dataset_dir, fold=0)[0]",
             "val_list": "$monai.auto3dseg.utils.datafold_read(@list, basedir=@dataset_dir, fold=0)[1]"},
            None, ["folds.json"], id="folds",
        ),
    ],
)  # fmt: skip
def test_what_expressions_look_for_is_drawn(
    ids: dict[str, Any], metadata: dict[str, Any] | None, files: list[str], tmp_path: Path
) -> None:
    path = bundle(tmp_path / "bundle", ids, metadata)
    drawn = draw_data(str(path), tmp_path / "drawn")
    present = {
        str(file.relative_to(drawn.folder)) for file in drawn.folder.rglob("*") if file.is_file()
    }
    assert set(files) <= present
    assert all((drawn.folder / name).stat().st_size for name in present)
    opened = Bundle(str(path), configured(drawn))
    assert opened.task == ("segmentation" if metadata is None else "classification")
    assert len(opened.items("train")) == drawn.counts["train"] > 1
    assert drawn.counts["validate"] > 0
    if metadata is not None:
        assert {item["label"] for item in opened.items("train")} == {0, 1}


def test_lists_that_leave_some_out_get_more_cases(tmp_path: Path) -> None:
    ids = {
        "images": "$sorted(glob.glob(@dataset_dir + '/img*.png'))[:-9]",
        "labels": "$sorted(glob.glob(@dataset_dir + '/seg*.png'))[:-9]",
    }
    drawn = draw_data(str(bundle(tmp_path / "bundle", ids | PAIRS)), tmp_path / "drawn")
    assert (drawn.counts["train"], drawn.files) == (3, 24)


def volumes(**ids: Any) -> dict[str, Any]:
    """Return ids of a bundle of volumes with these transforms after those that read."""
    read = [
        {"_target_": "LoadImaged", "keys": ["image", "label"]},
        {"_target_": "EnsureChannelFirstd", "keys": ["image", "label"]},
    ]
    network = {
        "_target_": "UNet",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 3,
        "channels": [4, 8],
    }
    return {
        "list": "$@dataset_dir + '/dataset.json'",
        "train_list": "$monai.data.load_decathlon_datalist(@list)",
        "network": network | {"strides": [2]},
        "transforms": {"_target_": "Compose", "transforms": read + ids.pop("more", [])},
        **ids,
    }


def told(channels: int) -> dict[str, Any]:
    image = {"num_channels": channels, "spatial_shape": ["8*n"] * 3}
    return {
        "inputs": {"image": image},
        "outputs": {"pred": {"format": "labels", "num_channels": 3}},
    }


def test_volumes_have_the_values_spacing_and_intensities_that_are_asked_for(tmp_path: Path) -> None:
    more = [
        {"_target_": "Spacingd", "keys": ["image", "label"], "pixdim": [1.5, 1.5, 2.0]},
        {
            "_target_": "ScaleIntensityRanged",
            "keys": "image",
            "a_min": -57,
            "a_max": 164,
            "b_min": 0,
            "b_max": 1,
        },
    ]
    draw_data(str(bundle(tmp_path / "bundle", volumes(more=more), told(1))), tmp_path / "drawn")
    image, label = (
        volume(tmp_path / "drawn/data" / key / "case_003.nii.gz") for key in ("image", "label")
    )
    assert image.shape == label.shape == (32, 32, 32)
    assert np.allclose(np.diag(image.affine), [1.5, 1.5, 2, 1])
    assert np.unique(label.get_fdata()).tolist() == [0, 1, 2]
    inside, pixels = label.get_fdata() > 0, image.get_fdata()
    assert (
        -57 <= pixels.min() < pixels[~inside].mean() < pixels[inside].mean() < pixels.max() <= 164
    )


def test_images_are_as_large_as_what_is_cut_out_of_them(tmp_path: Path) -> None:
    crop = {
        "_target_": "RandCropByPosNegLabeld",
        "keys": ["image", "label"],
        "label_key": "label",
        "num_samples": 2,
    }
    path = bundle(
        tmp_path / "bundle",
        volumes(more=[{**crop, "spatial_size": "@roi"}], roi=[40, 32, 48]),
        told(1),
    )
    draw_data(str(path), tmp_path / "drawn")
    assert volume(tmp_path / "drawn/data/image/case_000.nii.gz").shape == (40, 32, 48)
    with pytest.raises(
        InputError, match="transforms.*could not be found out|could not be found out.*ROI"
    ):
        draw_data(str(path), tmp_path / "small", size=24)


def test_channels_are_those_of_the_metadata_in_one_file_or_several(tmp_path: Path) -> None:
    draw_data(str(bundle(tmp_path / "one", volumes(), told(2))), tmp_path / "file")
    listed = json.loads((tmp_path / "file/data/dataset.json").read_text())["training"][0]["image"]
    assert isinstance(listed, str)
    assert volume(tmp_path / "file/data" / listed).shape == (32, 32, 32, 2)
    only_read = {"_target_": "Compose", "transforms": [
        {"_target_": "LoadImaged", "keys": ["image", "label"]},
        {"_target_": "EnsureTyped", "keys": ["image", "label"]},
        {"_target_": "ConvertToMultiChannelBasedOnBratsClassesd", "keys": "label"},
    ]}  # fmt: skip
    draw_data(
        str(bundle(tmp_path / "two", volumes(transforms=only_read), told(2))), tmp_path / "files"
    )
    listed = json.loads((tmp_path / "files/data/dataset.json").read_text())["training"][0]["image"]
    assert listed == ["image_0/case_000.nii.gz", "image_1/case_000.nii.gz"]
    mask = volume(tmp_path / "files/data/label/case_000.nii.gz").get_fdata()
    assert np.unique(mask).tolist() == [0, 1, 2, 4]


ARRAYS = PAIRS | {
    "images": "$sorted(glob.glob(@dataset_dir + '/Train/*image.npy'))",
    "labels": "$sorted(glob.glob(@dataset_dir + '/Train/*inst_map.npy'))",
    "transforms": {"_target_": "Compose", "transforms": [
        {"_target_": "LoadImaged", "keys": ["image", "label"]},
        {"_target_": "EnsureChannelFirstd", "keys": ["image", "label"], "channel_dim": -1},
    ]},
}  # fmt: skip


def test_masks_in_arrays_have_the_axis_that_is_asked_for(tmp_path: Path) -> None:
    drawn = draw_data(str(bundle(tmp_path / "bundle", ARRAYS, None)), tmp_path / "drawn")
    assert np.load(drawn.folder / "Train/case_000inst_map.npy").shape == (32, 32, 1)


def test_sides_that_metadata_tell_as_texts_are_numbers(tmp_path: Path) -> None:
    """As those of the zoo's HoVerNet, whose network takes no other size."""
    shapes = {"inputs": {"image": {"num_channels": 1, "spatial_shape": ["48", "40"]}}}
    drawn = draw_data(str(bundle(tmp_path / "bundle", ARRAYS, shapes)), tmp_path / "drawn")
    assert np.load(drawn.folder / "Train/case_000inst_map.npy").shape == (48, 40, 1)


def test_masks_of_one_value_that_are_scaled_are_white(tmp_path: Path) -> None:
    read = {"_target_": "LoadImaged", "keys": ["image", "label"]}
    first = {"_target_": "EnsureChannelFirstd", "keys": ["image", "label"]}
    ids: dict[str, Any] = {
        "images": "$sorted(glob.glob(@dataset_dir + '/*/*[!seg].jpg'))",
        "labels": "$[i.replace('.jpg', '_seg.jpg') for i in @images]",
        "transforms": {"_target_": "Compose", "transforms": [
            read, first, {"_target_": "ScaleIntensityd", "keys": ["image", "label"]}
        ]},
    }  # fmt: skip
    path = bundle(tmp_path / "bundle", ids | PAIRS)
    drawn = draw_data(str(path), tmp_path / "drawn")
    label = Bundle(str(path), configured(drawn)).section("train").source
    masks = [label.transforms[0](entry)["label"] for entry in label.entries]
    assert all(
        mask.round().unique().tolist() == [0, 1] and (mask - mask.round()).abs().max() < 0.05
        for mask in masks
    )


def test_a_transform_that_needs_what_is_not_installed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monai.transforms import EnsureTyped

    def absent(*_: Any, **__: Any) -> None:
        raise ImportError("required package `slides` is not installed")

    monkeypatch.setattr(EnsureTyped, "__call__", absent)
    path = bundle(
        tmp_path / "bundle", volumes(more=[{"_target_": "EnsureTyped", "keys": "image"}]), told(1)
    )
    drawn = draw_data(str(path), tmp_path / "drawn")
    assert (
        "its train images are drawn but not tried: required package `slides` is not installed"
        in drawn.notes
    )
    assert drawn.files == 13


@pytest.mark.parametrize("shared", ["%steps", "@steps", "$@steps"])
def test_a_reader_whose_package_is_missing_is_named_where_it_is_written(
    shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps may stand elsewhere, as the zoo's validation does by `%`; of an expression the place is not known."""
    from monai.transforms import LoadImaged

    whole = LoadImaged.__init__

    def init(self: Any, keys: Any, reader: Any = None, *args: Any, **named: Any) -> None:
        if reader:
            raise ImportError("required package `itk` is not installed")
        whole(self, keys, reader, *args, **named)

    monkeypatch.setattr(LoadImaged, "__init__", init)
    ids = volumes(transforms={"_target_": "Compose", "transforms": shared})
    ids["steps"] = [{"_target_": "LoadImaged", "keys": ["image", "label"], "reader": "ITKReader"}]
    drawn = draw_data(str(bundle(tmp_path / "bundle", ids, told(1))), tmp_path / "drawn")
    assert any("`itk` is not installed" in note for note in drawn.notes)
    with pytest.raises(InputError, match=r"package 'itk'.*--config steps#0#reader=NAME"):
        _ = Bundle(str(tmp_path / "bundle"), configured(drawn)).section("train").source


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    ids = {"images": "$sorted(glob.glob(@dataset_dir + '/img*.png'))",
           "labels": "$sorted(glob.glob(@dataset_dir + '/seg*.png'))"}  # fmt: skip
    path = str(bundle(tmp_path / "bundle", ids | PAIRS))
    pixels = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        draw_data(path, tmp_path / name, seed=seed)
        pixels.append(np.asarray(Image.open(tmp_path / name / "data/imgcase_004.png")).tobytes())
    assert pixels[0] == pixels[1] != pixels[2]


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (
            {
                "train_list": "$[{'image': f, 'label': 0} for f in glob.glob(@dataset_dir + '/*.dcm')]"
            },
            r"'train_list'.*/\*.dcm",
        ),
        (
            {"train_list": "$json.loads(open(@dataset_dir + '/all.xml').read())"},
            "'train_list'.*all.xml",
        ),
        ({"train_list": "$[{'image': '/etc/passwd', 'label': 0}]"}, "/etc/passwd"),
        ({"train_list": "$[{'image': @dataset_dir + '/../x.png', 'label': 0}]"}, "x.png"),
        (
            {"train_list": "$[{'image': f} for f in glob.glob('/nowhere/else/*.png')]"},
            "'train_list'.*/nowhere/else",
        ),
    ],
)
def test_what_cannot_be_found_out_is_named_in_one_line_and_nothing_is_left(
    ids: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bundle(tmp_path / "bundle", ids)
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        assert draw([str(path), "--out", str(tmp_path / name), "--trust"]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: bundle: what its data are to be could not be found out: ")
        assert re.search(named, line)
    assert sorted(os.listdir(tmp_path)) == ["bundle", "empty"]
    assert not any((tmp_path / "empty").iterdir())


@pytest.mark.parametrize(
    "flags", [["--cases", "-1"], ["--cases", "1000"], ["--size", "4"], ["--size", "9999"]]
)
def test_numbers_out_of_range_are_refused(flags: list[str], tmp_path: Path) -> None:
    path = bundle(tmp_path / "bundle", {})
    assert draw([str(path), "--out", str(tmp_path / "drawn"), *flags]) == 2
    assert os.listdir(tmp_path) == ["bundle"]


@pytest.mark.parametrize(
    "formats",
    [
        {"inputs": ["image"]},
        {"inputs": {"image": {"num_channels": "many"}}},
        {"inputs": {"image": {"spatial_shape": 32}}},
        {"outputs": {"pred": {"format": "points", "spatial_shape": ["n"]}}},
    ],
)
def test_metadata_of_another_form_are_named(formats: Any, tmp_path: Path) -> None:
    path = bundle(
        tmp_path / "bundle", {"train_list": "$glob.glob(@dataset_dir + '/*.png')"}, formats
    )
    with pytest.raises(InputError, match="metadata.json: network_data_format: "):
        draw_data(str(path), tmp_path / "drawn")
    assert os.listdir(tmp_path) == ["bundle"]


def test_names_of_classes_lead_nowhere_else(tmp_path: Path) -> None:
    names = {"channel_def": {"0": "..", "1": "../../out", "2": "/etc"}}
    metadata = CLASSIFIED | {"outputs": {"pred": {"format": "classes", **names}}}
    ids = {
        "train_list": "$[{'image': f, 'label': 0} for f in sorted(glob.glob(@dataset_dir + '/*/*.png'))]"
    }
    drawn = draw_data(
        str(bundle(tmp_path / "bundle", {**ONE_IMAGE, **ids}, metadata)), tmp_path / "drawn"
    )
    assert sorted(os.listdir(tmp_path)) == ["bundle", "drawn"]
    assert sorted(path.name for path in drawn.folder.iterdir()) == ["-", "-etc", "..-..-out"]


@pytest.mark.parametrize(
    "files",
    [
        "[f for c in os.listdir(@dataset_dir) for f in glob.glob(os.path.join(@dataset_dir, c, '*.png'))]",
        "glob.glob(os.path.join(@dataset_dir, '[.][.]', '[.][.]', 'outside', '*.png'))",
        "glob.glob(os.path.join(@dataset_dir, '[!0123x]', '*.png'))",
    ],
)
def test_nothing_is_drawn_beside_the_folder(files: str, tmp_path: Path) -> None:
    """Whatever a bundle's folders are called and looked for by."""
    names = {"channel_def": {"0": "../../../evil", "1": str(tmp_path / "absolute")}}
    metadata = CLASSIFIED | {"outputs": {"pred": {"format": "classes", **names}}}
    ids = {
        "imports": ["$import os", "$import glob"],
        "train_list": f"$[{{'image': f, 'label': 0}} for f in {files}]",
    }
    path = bundle(tmp_path / "bundle", {**ONE_IMAGE, **ids}, metadata)
    with suppress(InputError):
        draw_data(str(path), tmp_path / "drawn")
    assert set(os.listdir(tmp_path)) <= {"bundle", "drawn"}


def test_what_is_too_large_to_be_tiny_is_named(tmp_path: Path) -> None:
    crop = {"_target_": "RandCropByPosNegLabeld", "keys": ["image", "label"], "label_key": "label"}
    ids = volumes(more=[{**crop, "spatial_size": [900, 900, 900]}])
    with pytest.raises(InputError, match=r"ROI size \(900, 900, 900\)"):
        draw_data(str(bundle(tmp_path / "bundle", ids, told(1))), tmp_path / "drawn")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists and is not empty"):
        draw_data(str(bundle(tmp_path / "bundle", {})), tmp_path / "drawn")
    assert (tmp_path / "drawn" / "mine.txt").read_text() == "mine"


def test_what_inspection_refuses_is_not_evaluated(tmp_path: Path) -> None:
    path = bundle(
        tmp_path / "bundle", {"train_list": f"$[open('{tmp_path}/written', 'w').close()]"}
    )
    with pytest.raises(InputError, match="is refused"):
        draw_data(str(path), tmp_path / "drawn")
    assert os.listdir(tmp_path) == ["bundle"]


def test_a_run_on_drawn_data_says_phantom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = {"images": "$sorted(glob.glob(@dataset_dir + '/img*.png'))",
           "labels": "$sorted(glob.glob(@dataset_dir + '/seg*.png'))"}  # fmt: skip
    path = str(bundle(tmp_path / "bundle", ids | PAIRS))
    assert draw([path, "--out", str(tmp_path / "drawn")]) == 0
    first, counts, *_, command = capsys.readouterr().out.splitlines()
    assert first.startswith("PHANTOM data (drawn images) for bundle: ")
    assert counts.endswith("items: train 6, validate 2")
    command = command.removeprefix("train on them: medfl ").split()
    assert (
        main([*command, "--rounds", "1", "--sites", "2", "--out", str(tmp_path / "run"), "--quiet"])
        == 0
    )
    assert "PHANTOM data" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["source"] == "phantom"


def test_overrides_are_read_as_a_run_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lists and numbers are no texts, and the command that is told gives them again, trusted as it was."""
    crop = {
        "_target_": "RandCropByPosNegLabeld",
        "keys": ["image", "label"],
        "label_key": "label",
        "num_samples": 2,
    }
    ids = volumes(more=[{**crop, "spatial_size": "@roi"}], roi=[96, 96, 96], name="x", off=True)
    path = str(bundle(tmp_path / "bundle", ids, told(1)))
    given = {"roi": "[16,16,16]", "name": "'7'", "off": "null"}
    config = [part for key, value in given.items() for part in ("--config", f"{key}={value}")]
    for trust in ([], ["--trust"]):
        assert draw([path, "--out", str(tmp_path / f"drawn{len(trust)}"), *config, *trust]) == 0
        command = shlex.split(capsys.readouterr().out.splitlines()[-1])
        assert ("--trust" in command) == bool(trust)
        again = dict(text.split("=", 1) for text in command if "=" in text)
        read = {key: override_value(text) for key, text in again.items()}
        assert read == {"roi": [16, 16, 16], "name": "7", "off": None}
    assert volume(tmp_path / "drawn0/data/image/case_000.nii.gz").shape == (32, 32, 32)


def test_nothing_is_noted_outside_of_the_block(tmp_path: Path) -> None:
    with noting_lookups() as lookups:
        list(tmp_path.glob("*.png"))
    before = list(lookups)
    assert ("pattern", str(tmp_path / "*.png")) in before
    list(tmp_path.glob("*.jpg"))
    assert lookups == before
    assert requested_files.unmatched(lookups) == [str(tmp_path / "*.png")]
