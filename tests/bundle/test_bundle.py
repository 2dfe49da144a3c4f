"""A bundle read by following references: overrides, merging, errors, loss, optimiser, metric, notes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.metrics import MeanAbsoluteError
from torch import nn

from medfl import datasets
from medfl.bundle.bundle import Bundle, OwnMetric, read_protocol, shipped
from medfl.core.errors import InputError
from medfl.evaluation.evaluators import ClassEvaluator
from medfl.evaluation.metrics import Cases, higher_is_better, summarise
from medfl.policy.policy import Policy
from medfl.problem.tasks import KINDS
from medfl.problem.tasks.regression import NumberEvaluator
from medfl.runs.plan import Request, make_plan

Edit = Callable[[dict[str, Any]], object]


def content(labels: list[Any] | None = None) -> dict[str, Any]:
    """A classification of four tiny tensors, as small as a bundle gets."""
    labels = [0, 1, 2, 0] if labels is None else labels
    items = [
        {"image": f"$torch.full((1, 4, 4), {i}.0)", "label": label, "id": f"i{i}"}
        for i, label in enumerate(labels)
    ]
    loader = {
        "_target_": "DataLoader",
        "dataset": "@train#dataset",
        "batch_size": "@batch_size",
        "shuffle": True,
    }
    return {
        "bundle_root": ".",
        "device": "$torch.device('cuda')",
        "batch_size": 2,
        "width": 16,
        "items": items,
        "network": "$torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(@width, 3)).to(@device)",
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "optimizer": {
            "_target_": "torch.optim.SGD",
            "params": "$@network.parameters()",
            "lr": 0.1,
            "momentum": 0.9,
        },
        "train": {
            "dataset": {
                "_target_": "CacheDataset",
                "data": "@items",
                "transform": None,
                "cache_rate": 1.0,
            },
            "dataloader": loader,
            "trainer": {
                "_target_": "SupervisedTrainer",
                "train_data_loader": "@train#dataloader",
                "network": "@network",
                "loss_function": "@loss",
                "optimizer": "@optimizer",
            },
        },
        "validate": {
            "dataset": {"_target_": "Dataset", "data": "@items"},
            "dataloader": {
                "_target_": "DataLoader",
                "dataset": "@validate#dataset",
                "batch_size": 3,
            },
            "evaluator": {
                "_target_": "SupervisedEvaluator",
                "val_data_loader": "@validate#dataloader",
            },
        },
    }


def written(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    (folder / "configs").mkdir(exist_ok=True)
    for name, value in {"train": config, **files}.items():
        (folder / "configs" / f"{name}.json").write_text(json.dumps(value))
    return folder


TRUSTED = Policy(trusted=True)


def opened(
    folder: Path, edit: Edit = lambda config: None, policy: Policy | None = None, **files: Any
) -> Bundle:
    config = content()
    edit(config)
    return Bundle(str(written(folder, config, **files)), policy=policy)


# Configuration


def test_root_and_device_are_ours(tmp_path: Path) -> None:
    bundle = opened(tmp_path)
    assert bundle.get("bundle_root") == str(tmp_path.resolve())
    assert bundle.get("device") == torch.device("cpu")


def test_overrides(tmp_path: Path) -> None:
    written(tmp_path, content())
    assert Bundle(str(tmp_path), {"batch_size": 4}).batch_size == 4
    assert Bundle(str(tmp_path), {"train::dataloader::batch_size": 3}).batch_size == 3
    with pytest.raises(
        InputError,
        match="id 'batchsize' of bundle .*; train.json has bundle_root, device, batch_size",
    ):
        Bundle(str(tmp_path), {"batchsize": 4})


def test_no_such_bundle(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shipped bundles are .*ham10000"):
        Bundle("ham1000")
    with pytest.raises(InputError, match="configs/train.json"):
        Bundle(str(tmp_path))


def remove(*path: str) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return edit


def put(value: Any, *path: str) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (remove("train"), "train.json has no id 'train#trainer'"),
        (remove("train", "trainer", "optimizer"), "train.json has no id 'train#trainer#optimizer'"),
        (
            remove("loss"),
            "train.json has no id 'loss', which 'train#trainer#loss_function' refers to",
        ),
        (remove("validate"), "train.json has no id 'validate#evaluator'"),
        (
            put("SupervisedEvaluator", "train", "trainer", "_target_"),
            "'train#trainer' is a SupervisedEvaluator",
        ),
        (
            put("$1 / 0", "width"),
            "train.json: id 'width' fails with ZeroDivisionError: division by zero",
        ),
        (
            put("$nowhere.x", "width"),
            "train.json: id 'width' fails with NameError: name 'nowhere' is not defined",
        ),
        (put("$3", "network"), "id 'train#trainer#network' is a int"),
        (put("$3", "optimizer"), "id 'train#trainer#optimizer' is a int"),
        (put(15, "width"), "network and loss fail on item 'i0': RuntimeError: .*shapes"),
        (
            put([], "validate", "dataset", "data"),
            "data list 'validate#dataset#data' of section 'validate' is empty",
        ),
        (put([], "items"), "train.json: the data list 'items' of section 'validate' is empty"),
        (
            put("$@train#trainer", "loss"),
            "id 'train#trainer#loss_function' needs 'train#trainer', a SupervisedTrainer",
        ),
        (put("%nowhere", "validate", "dataset"), "its references \\(%\\) cannot be followed"),
        (put("$iter([])", "train", "dataset"), "a data set to be divided can be indexed"),
        (
            put("$len", "train", "dataloader", "collate_fn"),
            "collate_fn makes a int of samples; a batch is a dict",
        ),
    ],
)
def test_errors_name_id_file_and_cause(edit: Edit, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:  # noqa: PT012 (opening fails for some, using for others)
        bundle = opened(tmp_path, edit, TRUSTED)  # MONAI's own parser says most of them
        bundle.items("validate")
        _ = bundle.classes
    assert re.search(said, str(caught.value))
    assert str(caught.value).count("; ") >= 2


def test_an_id_of_a_file_that_is_not_read_is_found_and_can_be_given(tmp_path: Path) -> None:
    """As of bundles that hand several files to `monai.bundle run` at once."""

    def edit(config: dict[str, Any]) -> None:
        (tmp_path / "configs").mkdir()
        common = {"loss": config.pop("loss"), "bundle_root": "/home/author/bundle"}
        (tmp_path / "configs" / "common.json").write_text(json.dumps(common, indent=4))

    says = "no id 'loss', .*add it: common.json, which is not read with train.json, has one"
    with pytest.raises(InputError, match=says):
        _ = opened(tmp_path, edit, TRUSTED).classes
    loss = {"_target_": "torch.nn.CrossEntropyLoss"}
    assert Bundle(str(tmp_path), {"loss": loss}, policy=TRUSTED).task == "classification"
    with pytest.raises(InputError, match="override one of these ids"):
        Bundle(str(tmp_path), {"los": loss}, policy=TRUSTED)


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_files_that_are_no_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.json").write_text(text)
    with pytest.raises(InputError, match=r"train.json cannot be read: .*repair"):
        Bundle(str(tmp_path))


def test_what_writes_is_never_made(tmp_path: Path) -> None:
    """Engines are refused; saving transforms are left out wherever they stand, with their arguments."""
    mark = f"$__import__('pathlib').Path({str(tmp_path / 'mark')!r}).touch()"
    post = {
        "_target_": "Compose",
        "transforms": [{"_target_": "SaveImaged", "keys": "pred", "output_dir": mark}],
    }

    def edit(config: dict[str, Any]) -> None:
        config["validate"]["evaluator"] |= {"postprocessing": post, "val_handlers": [mark]}
        config["train"]["trainer"]["train_handlers"] = [mark]
        config["initialize"] = config["run"] = [mark]

    bundle = opened(tmp_path, edit, TRUSTED)
    for key in ("train#trainer", "validate#evaluator"):
        with pytest.raises(InputError, match="are not made here"):
            bundle.get(key)
    assert len(bundle.get("validate#evaluator#postprocessing").transforms) == 0
    assert "scored without SaveImaged" in " ".join(bundle.notes)
    assert not (tmp_path / "mark").exists()


def test_a_file_is_read_by_every_id_that_needs_it(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("abc")
    edit = put("$open(@bundle_root + '/classes.txt')", "file")

    def both(config: dict[str, Any]) -> None:
        edit(config)
        config |= {"first": "$@file.read()", "second": "$@file.read() + '!'"}

    bundle = opened(tmp_path, both)
    assert (bundle.get("first"), bundle.get("second")) == ("abc", "abc!")


def test_unseeded_shuffles_are_the_same_each_time(tmp_path: Path) -> None:
    edit = put("$list(np.random.permutation(1000))", "order")
    assert opened(tmp_path, edit).get("order") == opened(tmp_path, edit).get("order")


# Network, loss, optimiser


def test_networks_share_nothing(tmp_path: Path) -> None:
    bundle = opened(tmp_path)
    one, two = bundle.network(), bundle.network()
    assert not {p.data_ptr() for p in one.parameters()} & {p.data_ptr() for p in two.parameters()}


GROUPS = "$[{'params': [@network[1].bias], 'lr': 0.5}, {'params': @network[1].weight}]"


@pytest.mark.parametrize(
    ("node", "groups"),
    [
        (
            {
                "_target_": "torch.optim.SGD",
                "params": "$@network.parameters()",
                "lr": 0.1,
                "momentum": 0.9,
            },
            [(2, 0.1)],
        ),
        ({"_target_": "torch.optim.AdamW", "params": GROUPS, "lr": 0.1}, [(1, 0.5), (1, 0.1)]),
        ({"_target_": "Novograd", "params": "$@network.parameters()", "lr": 0.1}, [(2, 0.1)]),
        (
            "$torch.optim.RMSprop(filter(lambda p: p.ndim == 2, @network.parameters()), lr=0.1)",
            [(1, 0.1)],
        ),
    ],
)
def test_optimizer_takes_this_network(
    node: Any, groups: list[tuple[int, float]], tmp_path: Path
) -> None:
    """Any expression that groups or filters parameters works, and a step moves the given network only."""
    bundle = opened(tmp_path, put(node, "optimizer"))
    network, other = bundle.network(), bundle.network()
    optimizer = bundle.optimizer(network)
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == groups
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held <= {id(p) for p in network.parameters()}
    before, untouched = (
        {n: p.detach().clone() for n, p in net.named_parameters()} for net in (network, other)
    )
    bundle.loss(network(torch.ones(2, 1, 4, 4)), torch.tensor([0, 1])).backward()
    optimizer.step()
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, before[name]) == (id(parameter) not in held)
    assert all(
        torch.equal(parameter, untouched[name]) for name, parameter in other.named_parameters()
    )
    assert {group["lr"] for group in bundle.optimizer(network, lr=0.7).param_groups} == {0.7}
    assert not bundle.optimizer(network).state, "a fresh optimiser has no memory"


def test_loss_is_reduced_as_the_trainer_does(tmp_path: Path) -> None:
    bundle = opened(
        tmp_path, put({"_target_": "torch.nn.CrossEntropyLoss", "reduction": "none"}, "loss")
    )
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    assert torch.equal(bundle.loss(x, y), nn.CrossEntropyLoss(reduction="none")(x, y).mean())


# Data and task


def test_items_task_and_classes(tmp_path: Path) -> None:
    bundle = opened(tmp_path)
    assert bundle.items("train")[1] == {"id": "i1", "label": 1}
    assert (bundle.task, bundle.classes) == ("classification", ("class 0", "class 1", "class 2"))
    assert bundle.batch_size == 2
    assert bundle.evaluator == ClassEvaluator(batch_size=3)


@pytest.mark.parametrize("label", [-1, 3])
def test_label_outside_the_classes(label: int, tmp_path: Path) -> None:
    bundle = Bundle(str(written(tmp_path, content([0, 1, label, 0]))))
    with pytest.raises(
        InputError,
        match=f"item 'i2' of section 'train' has label {label}; .* has 3 classes, labels 0 to 2",
    ):
        _ = bundle.classes


def regression(config: dict[str, Any]) -> None:
    config["loss"] = {"_target_": "torch.nn.MSELoss"}
    config["train"]["dataset"]["transform"] = {
        "_target_": "Lambdad", "keys": "label", "func": "$lambda y: torch.full((3,), float(y))",
    }  # fmt: skip
    config["validate"]["dataset"]["transform"] = "%train#dataset#transform"


def test_whole_numbers_may_be_a_regression(tmp_path: Path) -> None:
    bundle = opened(tmp_path, regression)
    assert (bundle.task, bundle.key_metric) == ("regression", "mae")
    assert bundle.classes == ("number 0", "number 1", "number 2")
    assert bundle.records("train")[0].keys() == {"id", "target"}


@pytest.mark.parametrize(
    ("name", "compare", "expected"),
    [
        ("val_distance_to_truth", None, "val_distance_to_truth"),
        ("val_gap", "$lambda current, best: current < best", "val_gap_error"),
        ("val_gap", "$lambda current, best: current > best", "val_gap"),
        ("val_mse", "$lambda current, best: current < best", "val_mse"),
    ],
)
def test_key_metric_and_its_direction(
    name: str, compare: str | None, expected: str, tmp_path: Path
) -> None:
    def edit(config: dict[str, Any]) -> None:
        regression(config)
        metric = {
            "_target_": "MeanSquaredError",
            "output_transform": "$monai.handlers.from_engine(['pred', 'label'])",
        }
        config["validate"]["evaluator"]["key_val_metric"] = {name: metric}
        if compare:
            config["validate"]["evaluator"]["metric_cmp_fn"] = compare

    bundle = opened(tmp_path, edit)
    assert bundle.key_metric == expected
    assert isinstance(bundle.evaluator, NumberEvaluator)
    assert compare is None or higher_is_better(expected) == (">" in compare)


def test_evaluator_under_another_name(tmp_path: Path) -> None:
    """The evaluator is the one that the trainer's ValidationHandler calls."""

    def edit(config: dict[str, Any]) -> None:
        config["check"] = config.pop("validate")
        config["check"]["dataloader"]["dataset"] = "@check#dataset"
        config["check"]["evaluator"]["val_data_loader"] = "@check#dataloader"
        handler = {"_target_": "ValidationHandler", "validator": "@check#evaluator", "interval": 1}
        config["train"]["trainer"]["train_handlers"] = [handler]

    assert len(opened(tmp_path, edit).items("validate")) == 4


def test_test_data_come_from_evaluate(tmp_path: Path) -> None:
    """evaluate.json gives test data where it changes the data themselves, directly or through an id that they use."""
    assert not opened(tmp_path).has_test
    assert not opened(tmp_path, evaluate={"validate#dataset#cache_rate": 0, "run": []}).has_test
    direct = opened(
        tmp_path,
        evaluate={"validate#dataset#data": [{"image": "$torch.ones(1, 4, 4)", "label": 0}]},
    )
    assert direct.has_test
    assert [len(direct.items(section)) for section in ("train", "validate", "test")] == [4, 4, 1]

    def edit(config: dict[str, Any]) -> None:
        config["fold"] = 0
        config["validate"]["dataset"]["data"] = "$@items[@fold:]"

    indirect = opened(tmp_path, edit, evaluate={"fold": 3})
    assert [item["id"] for item in indirect.items("test")] == ["i3"]
    with pytest.raises(InputError, match="evaluate.json: 'a#b' cannot be merged"):
        _ = opened(tmp_path, evaluate={"a#b": 1}).has_test


def test_notes(tmp_path: Path) -> None:
    """What of the bundle's own training is not followed is said."""

    def edit(config: dict[str, Any]) -> None:
        config["schedule"] = {"_target_": "LrScheduleHandler"}
        config["train"]["trainer"] |= {
            "amp": True,
            "inferer": {"_target_": "SlidingWindowInferer", "roi_size": [4, 4]},
        }
        config["train"]["dataloader"] |= {
            "shuffle": False,
            "sampler": "$torch.utils.data.SubsetRandomSampler([0])",
        }

    said = " ".join(opened(tmp_path, edit).notes)
    assert all(
        word in said
        for word in ("learning rate schedule", "mixed precision", "inferer", "SubsetRandomSampler")
    )
    assert opened(tmp_path).notes == ()


# Shipped


TWO_CONV = {
    "_target_": "medfl.networks.build",
    "name": "two_conv",
    "in_channels": 1,
    "num_classes": 6,
}


@pytest.mark.parametrize(
    "config",
    [
        {"network": "two_conv"},
        {"network_name": "two_conv"},
        {"network": TWO_CONV},
        {"network_def": TWO_CONV},
    ],
)
def test_another_network_is_given_by_its_name_under_either_id_or_as_a_module(
    config: dict[str, Any],
) -> None:
    """In a shipped bundle `network` is the module, as in the zoo; a plain name given to it is that of the network."""
    bundle = Bundle("mednist", {**config, "image_size": 28})
    assert type(bundle.network()).__name__ == "TwoConv"
    assert isinstance(bundle.get("network"), nn.Module)
    assert bundle.get("network_name") == (
        "small_cnn" if TWO_CONV in config.values() else "two_conv"
    )


@pytest.mark.parametrize("name", shipped())
def test_shipped(name: str) -> None:
    """Task, classes and network of a shipped bundle are known without its data, as it declares by itself."""
    assert {"trial": False, "scores": "medfl"}.items() <= read_protocol(name).items()
    task = datasets.get(name).task
    network = "unet8" if task == "segmentation" else "small_cnn"
    bundle = Bundle(name, {"network": network, "image_size": 28})
    assert (bundle.task, bundle.key_metric) == (task, KINDS[task].key_metric)
    assert bundle.notes == ()
    convolution = next(
        m for m in bundle.network().modules() if isinstance(m, nn.Conv2d | nn.Conv3d)
    )
    sides = (28,) * (3 if isinstance(convolution, nn.Conv3d) else 2)
    images = torch.rand(2, int(bundle.get("in_channels")), *sides)
    assert bundle.network()(images).shape == (
        2,
        bundle.get("num_classes"),
        *(sides if task == "segmentation" else ()),
    )


def test_a_bundle_s_hash_is_of_every_file_that_its_configuration_names(tmp_path: Path) -> None:
    config = {
        **content(),
        "side": "$@bundle_root + '/models/search_code.pt'",
        "ckpt": "models/model.pt",
    }
    folder = written(tmp_path, config)
    (folder / "models").mkdir()
    seen = [Bundle(str(folder)).sha256]
    for name, counts in {
        "models/search_code.pt": True, "models/model.pt": False, "models/other.pt": False, "notes.txt": False,
    }.items():  # fmt: skip
        for text in ("one", "other"):
            (folder / name).write_text(text)
            now = Bundle(str(folder)).sha256
            assert (now != seen[-1]) is counts, name
            seen.append(now)
    (folder / "models" / "search_code.pt").rename(folder / "search_code.pt")
    assert Bundle(str(folder)).sha256 != seen[-1]
    config["_desc_"] = "weights by torch.load"
    folder = written(tmp_path, config)
    before = Bundle(str(folder)).sha256
    (folder / "models" / "model.pt").write_text("third")
    assert Bundle(str(folder)).sha256 != before


BOMB = "\n".join(
    ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "[" * 5000,
        "x: !!python/object/apply:os.system [true]",
        "- 1",
        "x: " + "1" * 10_000,
        "#" * 2**21,
    ],
)
def test_what_is_read_before_the_gate_is_plain_and_bounded(text: str, tmp_path: Path) -> None:
    folder = written(tmp_path, content())
    (folder / "configs" / "federated.yaml").write_text(text)
    for read in (lambda: read_protocol(str(folder)), lambda: make_plan(Request(str(folder)))):
        with pytest.raises(InputError, match=r"federated.yaml cannot be read") as caught:
            read()
        assert len(str(caught.value)) < 600


def test_what_a_bundle_declares_is_taken_at_its_word_and_no_step_is_tried(tmp_path: Path) -> None:
    """Without the words the task of the same folder is found by a step, on images that are not here.

    A shipped bundle of an earlier release had no such words: they are taken to be there when it is opened as one.
    """
    folder = Path(shutil.copytree(Bundle("mednist").root, tmp_path / "mine"))
    config = {"dataset_dir": str(tmp_path / "nowhere")}
    bundle = Bundle(str(folder), config)
    assert (bundle.dataset, bundle.task, bundle.channels) == ("", "classification", 1)
    assert bundle.evaluator == ClassEvaluator(), "not with the batch size of its own loader"

    protocol = folder / "configs" / "federated.yaml"
    text = protocol.read_text().replace("trial: false\nscores: medfl\n", "")
    assert len(text) < len(protocol.read_text())
    protocol.write_text(text)
    with pytest.raises(InputError, match="nowhere"):
        _ = Bundle(str(folder), config).task
    former = Bundle(str(folder), config, known_as="mednist")
    assert (former.task, former.evaluator) == ("classification", ClassEvaluator())
    assert former.sha256 == bundle.sha256, "a hash of what is trained, not of how it is described"


def test_a_bundle_tells_its_own_metric_and_not_what_it_is_computed_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metric = OwnMetric("their_mae", MeanAbsoluteError(_both), None)
    monkeypatch.setattr(Bundle, "_own_metric", metric)
    values = {"own_pred": torch.tensor([1.0, 2]), "own_label": torch.tensor([1.0, 4])}
    bundle = object.__new__(Bundle)
    told = bundle.told(Cases(("a", "b"), {**values, "loss": torch.zeros(2)}))
    assert summarise(told) == {"their_mae": 1.0, "loss": 0.0}
    assert not values.keys() & told.values.keys()


def _both(cases: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([case["pred"] for case in cases]), torch.stack(
        [case["label"] for case in cases]
    )
