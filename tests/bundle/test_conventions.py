"""How the zoo's bundles say where things are, and what older MONAI and NumPy had."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.bundle.open import open_problem, with_data
from medfl.bundle.zoo import compatibility, conventions
from medfl.core.errors import InputError, RunError
from medfl.data.prepared import Shard, moved
from medfl.policy import admission
from medfl.runs.launch import federate
from medfl.runs.plan import Request, make_plan
from tests.bundle.test_bundle import TRUSTED, content, opened, put, written

DIVIDED = {"sites": 2, "partition": "iid"}


# Where things are


@pytest.mark.parametrize(
    ("before", "folder", "after"),
    [
        ("/workspace/data/prostate/", "/mine", "/mine/"),
        ("/workspace/data/prostate/", "/mine/", "/mine/"),
        ("/workspace/data/prostate", "/mine", "/mine"),
        ("$@bundle_root + '/data/'", "/mine", "/mine/"),
        ("/data/", "$@bundle_root + '/x'", "$@bundle_root + '/x'"),
    ],
)
def test_a_folder_keeps_its_slash(before: str, folder: str, after: str) -> None:
    assert conventions.folder_like(before, folder) == after


def listed(tmp_path: Path, expression: str) -> tuple[dict[str, Any], Path]:
    """Return a configuration whose data list is a file beside the bundle, and a folder for data."""
    config = content()
    config |= {
        "imports": ["$import json", "$import os"],
        "dataset_dir": "/workspace/data",
        "list_file": expression,
    }
    config["items"] = "$json.load(open(@list_file))"
    (tmp_path / "data").mkdir()
    return config, tmp_path / "data"


@pytest.mark.parametrize(
    "expression", ["$@bundle_root + '/configs/d.json'", "$os.path.join(@bundle_root, 'd.json')"]
)
@pytest.mark.parametrize("place", ["d.json", "configs/d.json"])
def test_a_data_list_follows_the_data(expression: str, place: str, tmp_path: Path) -> None:
    config, data = listed(tmp_path, expression)
    items = [{"image": "$0", "label": n, "id": f"i{n}"} for n in range(3)]
    bundle = Bundle(str(written(tmp_path, config)), policy=TRUSTED)
    with pytest.raises(
        InputError,
        match=r"needs the file .*d.json, which is not there; .*; --config list_file=FILE",
    ):
        bundle.items("train")
    (data / "configs").mkdir()
    (data / place).write_text(json.dumps(items))
    bundle = bundle.variant({"dataset_dir": str(data)})
    if place == "d.json" or "configs" in expression:
        assert [item["id"] for item in bundle.items("train")] == ["i0", "i1", "i2"]
        assert bundle._config.lists == {"list_file": str(data / place)}
    else:
        assert not bundle._config.lists


def test_the_bundles_own_list_comes_first_and_that_of_config_before_it(tmp_path: Path) -> None:
    config, data = listed(tmp_path, "$@bundle_root + '/d.json'")
    for folder, name in ((tmp_path, "own"), (data, "data"), (tmp_path / "configs", "given")):
        folder.mkdir(exist_ok=True)
        (folder / "d.json").write_text(json.dumps([{"image": 0, "label": 0, "id": name}]))
    path = str(written(tmp_path, config))
    given = {"list_file": str(tmp_path / "configs" / "d.json")}
    for config, name in (({}, "own"), (given, "given")):
        bundle = Bundle(path, {"dataset_dir": str(data), **config}, policy=TRUSTED)
        assert bundle.items("train")[0]["id"] == name


@pytest.mark.parametrize(
    ("key", "text", "moved"),
    [
        ("x", "$torch.device('cuda')", "$torch.device('cpu')"),
        ("x", '$torch.load(@p, map_location="cuda:0")', "$torch.load(@p, map_location='cpu')"),
        ("x", "$@net.to('cuda:1')", "$@net.to('cpu')"),
        ("x", "$@net.cuda()", "$@net.to('cpu')"),
        ("x", "$1 if @device.type == 'cuda' else 2", "$1 if @device.type == 'cuda' else 2"),
        ("device", "cuda:0", "cpu"),
        ("name", "cuda", "cuda"),
        ("reader", "$monai.data.PILReader", "PILReader"),
        ("reader", "$monai.data.Dataset", "$monai.data.Dataset"),
    ],
)
def test_cuda_by_name_is_the_runs_device_and_a_readers_class_its_name(
    key: str, text: str, moved: str
) -> None:
    assert conventions.rewritten(key, text, torch.device("cpu")) == moved


def test_test_data_that_lie_elsewhere_are_not_needed(tmp_path: Path) -> None:
    """The note says why the validation items serve."""
    path = written(
        tmp_path,
        content(),
        evaluate={"validate#dataset#data": "$__import__('json').load(open('/no/such'))"},
    )
    with admission.trusting(True):
        opened = with_data(open_problem(str(path), {}), None, {})
    assert not opened.bundle.has_test
    assert len(opened.bundle.items("test")) == 4
    assert any("/no/such" in note and "validation items serve" in note for note in opened.notes)


# What a bundle computes


def described(config: dict[str, Any], key: str, stacked: bool) -> None:
    """Let postprocessing read a key of the batch that is neither image nor label."""
    for item in config["items"]:
        item |= {
            "image": f"$torch.rand(1, 4, {4 if stacked else 4 + item['label']})",
            "weight": 3.0,
        }
    config["network"] = "$torch.nn.Conv2d(1, 3, 1).to(@device)"
    config["loss"] = "$lambda p, t: p.mean() + 0 * t.float().mean()"
    scale = {"_target_": "Lambdad", "keys": "pred", "func": "$lambda x: 0 * x"}
    copied = {"_target_": "CopyItemsd", "keys": key, "names": "copied"}
    config["validate"]["evaluator"] |= {
        "postprocessing": {"_target_": "Compose", "transforms": [scale, copied]},
        "key_val_metric": {
            "weight_error": {
                "_target_": "ignite.metrics.MeanSquaredError",
                "output_transform": "@out",
            }
        },
    }
    config["out"] = (
        "$lambda x: (torch.stack([torch.as_tensor(i['copied']) for i in x]).float(), torch.zeros(len(x)))"
    )


@pytest.mark.parametrize("stacked", [True, False])
def test_postprocessing_reads_any_key_of_the_batch(stacked: bool, tmp_path: Path) -> None:
    bundle = opened(tmp_path, lambda config: described(config, "weight", stacked), TRUSTED)
    shard = Shard.of(bundle.prepared("validate"), [0, 2])
    cases = bundle.evaluator(bundle.network(), shard, torch.device("cpu"))
    assert cases.values["weight_error"].tolist() == [9.0, 9.0]


def test_what_postprocessing_misses_is_named(tmp_path: Path) -> None:
    bundle = opened(tmp_path, lambda config: described(config, "nope", True), TRUSTED)
    shard = Shard.of(bundle.prepared("validate"), [0])
    with pytest.raises(RunError, match="validation fails on item 'i0': KeyError: .*nope"):
        bundle.evaluator(bundle.network(), shard, torch.device("cpu"))


def test_labels_that_transforms_compute_are_not_counted(tmp_path: Path) -> None:
    """A run of such a bundle draws its partition without classes."""

    def edit(config: dict[str, Any]) -> None:
        for item in config["items"]:
            item["label"] = f"mask{item['label']}.png"
        number = {"_target_": "Lambdad", "keys": "label", "func": "$lambda x: int(x[4])"}
        for section in ("train", "validate"):
            config[section]["dataset"]["transform"] = {
                "_target_": "Compose",
                "transforms": [number],
            }

    bundle = opened(tmp_path, edit, TRUSTED)
    with admission.trusting(True):
        summary = federate(
            str(bundle.root), requested={**DIVIDED, "rounds": 1}, out=tmp_path / "out"
        )
    assert 0 <= summary["last"]["balanced_accuracy"] <= 1
    assert (tmp_path / "out" / "partition.png").is_file()


def test_targets_may_be_several(tmp_path: Path) -> None:
    """As HoVerNet's: prepare_batch, loss and metric with a dictionary."""

    def edit(config: dict[str, Any]) -> None:
        config["prepare_batch"] = (
            "$lambda b, d, n: (b['image'], {'one': b['label'], 'two': 2 * b['label']})"
        )
        config["train"]["trainer"]["prepare_batch"] = config["validate"]["evaluator"][
            "prepare_batch"
        ] = "@prepare_batch"
        config["loss"] = "$lambda p, t: (p.sum(1) - t['one'] - t['two']).square().mean()"
        out = "$lambda x: tuple(torch.tensor([float(i['label'][k]) for i in x]) for k in ('two', 'one'))"
        metric = {"_target_": "ignite.metrics.MeanAbsoluteError", "output_transform": out}
        config["validate"]["evaluator"]["key_val_metric"] = {"doubled_error": metric}

    bundle = opened(tmp_path, edit, TRUSTED)
    with admission.trusting(True):
        summary = federate(
            str(bundle.root), requested={**DIVIDED, "rounds": 1}, out=tmp_path / "out"
        )
    assert summary["last"]["doubled_error"] == pytest.approx(0.75), "of labels 0, 1, 2, 0"


def test_what_holds_tensors_is_moved_whole() -> None:
    there = moved({"a": torch.ones(1), "b": [torch.ones(1), "x"]}, torch.device("meta"))
    assert (there["a"].device.type, there["b"][0].device.type, there["b"][1]) == (
        "meta",
        "meta",
        "x",
    )


# Schedule and precision


def scheduled(config: dict[str, Any]) -> None:
    config["schedule"] = {
        "_target_": "torch.optim.lr_scheduler.StepLR",
        "optimizer": "@optimizer",
        "step_size": 2,
    }
    config["handlers"] = [{"_target_": "LrScheduleHandler", "lr_scheduler": "@schedule"}]


def test_the_schedule_of_the_trainer_is_run_by_epochs(tmp_path: Path) -> None:
    """Two epochs a round: the third is in the second round, and training differs from a constant rate there."""
    bundle = opened(tmp_path, scheduled)
    assert bundle.is_scheduled
    assert [bundle.rates(epoch)[0] for epoch in range(5)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001]
    )
    assert bundle.rates(2, 1.0) == pytest.approx([0.1])
    network = bundle.network()
    optimizer = bundle.optimizer(network, epoch=2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    before = network[1].weight.detach().clone()
    network(torch.ones(1, 1, 4, 4)).sum().backward()
    optimizer.step()
    assert (network[1].weight != before).all(), "it steps the parameters of this network"


def test_a_run_takes_the_rates_of_its_rounds(tmp_path: Path) -> None:
    hashes = {}
    for name, edit in (("constant", lambda config: None), ("stepped", scheduled)):
        (tmp_path / name).mkdir()
        bundle = opened(tmp_path / name, edit)
        for rounds, epochs in ((1, 2), (2, 1), (1, 3)):
            requested = {**DIVIDED, "rounds": rounds, "local_epochs": epochs}
            out = tmp_path / f"{name}-{rounds}-{epochs}"
            hashes[name, rounds, epochs] = federate(str(bundle.root), requested=requested, out=out)[
                "weights_sha256"
            ]
    for rounds, epochs in ((1, 2), (2, 1)):
        assert hashes["constant", rounds, epochs] == hashes["stepped", rounds, epochs], (
            "two epochs at the first rate"
        )
    assert hashes["constant", 1, 3] != hashes["stepped", 1, 3]


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        ({"epoch_level": False}, "goes by steps or a metric"),
        ({"step_transform": "$lambda engine: 1.0"}, "goes by steps or a metric"),
        ({"_disabled_": True}, "is disabled"),
        ({"_disabled_": "$not @step_rates"}, "is disabled"),
    ],
)
def test_a_schedule_that_is_disabled_or_by_steps_or_metrics_is_not_run(
    handler: dict[str, Any], why: str, tmp_path: Path
) -> None:
    def edit(config: dict[str, Any]) -> None:
        scheduled(config)
        config["handlers"][0] |= handler
        config["step_rates"] = False

    bundle = opened(tmp_path, edit, TRUSTED)
    assert not bundle.is_scheduled
    assert any(f"its learning rate schedule {why}, and is not run" in note for note in bundle.notes)


@pytest.mark.parametrize("disabled", [False, "false", "$not @step_rates", "@off"])
def test_a_schedule_that_an_expression_leaves_on_is_run(disabled: object, tmp_path: Path) -> None:
    """As VISTA3D's."""

    def edit(config: dict[str, Any]) -> None:
        scheduled(config)
        config["handlers"][0]["_disabled_"] = disabled
        config |= {"step_rates": True, "off": False}

    bundle = opened(tmp_path, edit, TRUSTED)
    assert bundle.is_scheduled
    assert not any("schedule" in note for note in bundle.notes)


def test_mixed_precision_of_the_trainer_is_for_gpus(tmp_path: Path) -> None:
    bundle = opened(tmp_path, put(True, "train", "trainer", "amp"))
    assert bundle.amp
    assert not make_plan(Request(str(bundle.root), **DIVIDED)).run.amp, (
        "MONAI's trainer has it on a GPU alone"
    )


def test_a_reader_that_an_expression_names_reads(tmp_path: Path) -> None:
    """As HoVerNet's inference."""
    Image.new("RGBA", (6, 4), (3, 2, 1, 0)).save(tmp_path / "slide.png")
    read = {"_target_": "LoadImaged", "keys": "image", "reader": "$monai.data.PILReader"}
    convert = {"converter": "$lambda x: x.convert('RGB')"}
    bundle = opened(tmp_path, lambda config: config.update(read={**read, **convert}))
    assert bundle.get("read")({"image": str(tmp_path / "slide.png")})["image"].shape == (6, 4, 3)


# Older MONAI and NumPy


def test_numpy_gets_its_old_names_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(np, "product", raising=False)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").write_text(
        "import numpy as np\nsize = np.product((4, 4))\n"
    )

    def edit(config: dict[str, Any]) -> None:
        config |= {"imports": ["$import scripts"], "width": "$scripts.size"}

    bundle = opened(tmp_path, edit, TRUSTED)
    assert bundle.get("width") == 16
    assert bundle.adapted == ("numpy.product",)


def test_an_argument_without_effect_is_left_out(tmp_path: Path) -> None:
    assert compatibility.idle_arguments("SwinUNETR", ["img_size", "in_channels"]) == {"img_size"}
    assert compatibility.idle_arguments("UNETR", ["img_size", "in_channels"]) == set()
    given = ["_target_", "keys", "min_zoom", "max", "constant_values"]
    assert compatibility.idle_arguments("RandZoomd", given) == {"max"}
    assert compatibility.idle_arguments(
        "RandZoomBoxd", ["_target_", "box_keys", "label_keys", "prob"]
    ) == {"label_keys"}


@pytest.mark.parametrize(
    ("old", "axis"),
    [
        ({"_target_": "AddChanneld"}, None),
        ({"_target_": "monai.transforms.AsChannelFirstd"}, -1),
        ({"_target_": "AsChannelFirstd", "channel_dim": 1}, 1),
    ],
)
def test_a_transform_that_monai_has_removed_is_made_as_what_does_the_same(
    old: dict[str, Any], axis: int | None, tmp_path: Path
) -> None:
    bundle = opened(tmp_path, lambda config: config.update(first={**old, "keys": "image"}))
    volume = torch.arange(24.0).reshape(2, 3, 4)
    expected = volume[None] if axis is None else torch.movedim(volume, axis, 0)
    assert torch.equal(bundle.get("first")({"image": volume})["image"], expected)
    name = old["_target_"].rpartition(".")[2]
    assert bundle.adapted == (f"{name}:EnsureChannelFirstd",)
    assert any(
        f"{name} of it is made as EnsureChannelFirstd, which does the same" in note
        for note in bundle.notes
    )


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
def test_labels_that_are_true_or_false_become_numbers_where_the_loss_needs_it(
    kind: torch.dtype, tmp_path: Path
) -> None:
    def edit(config: dict[str, Any]) -> None:
        for item in config["items"]:
            item |= {
                "image": "$torch.rand(1, 4, 4)",
                "label": f"$(torch.rand(3, 4, 4) > 0.5).to({kind})",
            }
        config["network"] = "$torch.nn.Conv2d(1, 3, 1).to(@device)"
        config["loss"] = {"_target_": "DiceLoss", "sigmoid": True, "squared_pred": True}

    bundle = opened(tmp_path, edit, TRUSTED)
    assert bundle.adapted == (compatibility.FLOAT_LABELS,)
    pred, label = torch.rand(2, 3, 4, 4), (torch.rand(2, 3, 4, 4) > 0.5).to(kind)
    assert torch.equal(bundle.loss(pred, label), bundle.loss(pred, label.float()))
    assert type(bundle.loss_function).__name__ == "DiceLoss", (
        "its class tells the task and how outputs are read"
    )


def test_what_was_adapted_is_said_and_part_of_the_run(tmp_path: Path) -> None:
    """And a run for which nothing was has the hash that it always had."""
    zoom = {"_target_": "RandZoomd", "keys": "image", "prob": 0.5, "max": 1.1}
    edit = put({"_target_": "Compose", "transforms": [zoom]}, "train", "dataset", "transform")
    bundle = opened(tmp_path, edit)
    plan = make_plan(Request(str(bundle.root), **DIVIDED))
    assert plan.run.adapted == ("RandZoomd.max",)
    assert any("without 'max'" in note for note in plan.notes)
    without = dataclasses.replace(plan.run, adapted=())
    assert without.run_hash != plan.run.run_hash
    assert "adapted" not in without.to_dict()
    assert type(plan.run).from_dict(json.loads(json.dumps(plan.run.to_dict()))) == plan.run


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (
            {"_target_": "UNet", "dimensions": 2},
            r"'network' .*unexpected keyword.*monai 1.6.1.*names 0.9.0.*--config",
        ),
        ({"_target_": "NoSuchNet"}, r"'network' .*Cannot locate class.*install monai==0.9.0"),
        (
            "$numpy.nosuch(1)",
            r"'network' .*no attribute 'nosuch'.*metadata.json names 1.20.0.*install numpy==1.20.0",
        ),
    ],
)
def test_another_version_is_named(node: Any, said: str, tmp_path: Path) -> None:
    versions = {"monai_version": "0.9.0", "numpy_version": "1.20.0"}
    edited = {**content(), "imports": ["$import numpy"], "network": node}
    bundle = Bundle(str(written(tmp_path, edited, metadata=versions)), policy=TRUSTED)
    with pytest.raises(InputError, match=said):
        bundle.network()


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["imports"] = ["$import importlib"]
        read = {
            "_target_": "Lambdad",
            "keys": "image",
            "func": "$lambda x: importlib.import_module('no_reader')",
        }
        config["train"]["dataset"]["transform"] = {"_target_": "Compose", "transforms": [read]}

    with pytest.raises(
        InputError, match="item 'i0' needs the Python package 'no_reader', which is not installed"
    ):
        _ = opened(tmp_path, edit, TRUSTED).task


def test_arrays_beside_tensors_are_read_and_code_is_not(tmp_path: Path) -> None:
    torch.save({"code": np.eye(2), "score": np.float64(1.5)}, tmp_path / "arrays.pt")
    torch.save({"code": Path("/")}, tmp_path / "object.pt")
    config = {
        **content(),
        "width": "$int(torch.load(@file)['code'].sum())",
        "file": str(tmp_path / "arrays.pt"),
    }
    path = str(written(tmp_path, config))
    assert Bundle(path, policy=TRUSTED).get("width") == 2
    with pytest.raises(InputError, match="Weights only load failed"):
        Bundle(path, {"file": str(tmp_path / "object.pt")}, policy=TRUSTED).get("width")


def test_networks_of_an_inference_fetch_no_weights_since_those_of_the_bundle_follow() -> None:
    given = {
        "net": {"_target_": "ResNet", "pretrained": True},
        "net#pretrained": True,
        "more": [{"pretrained": "@x"}],
    }
    assert conventions.without_fetching(given) == {
        "net": {"_target_": "ResNet", "pretrained": False},
        "net#pretrained": False,
        "more": [{"pretrained": "@x"}],
    }


def test_images_may_be_named_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets.write_phantom("mednist", tmp_path / "images", per_class=10, size=16)
    monkeypatch.chdir(tmp_path)
    found = with_data(open_problem("mednist", {}), "images", {})
    assert len(found.bundle.items("test")) > 0
    assert found.folder == str(tmp_path / "images")


def test_bytes_that_name_classes_stay_what_they_are() -> None:
    loss, pred, label = (
        torch.nn.CrossEntropyLoss(),
        torch.rand(2, 3, 4, 4),
        torch.ones(2, 4, 4, dtype=torch.uint8),
    )
    seen = compatibility.with_float_labels(
        lambda prediction, target: loss(prediction, target.long()) + target.is_floating_point()
    )
    assert torch.equal(seen(pred, label), loss(pred, label.long()))
