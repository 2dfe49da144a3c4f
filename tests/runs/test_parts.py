"""`medfl.Parts`: own objects are federated as the same things in a bundle are, bit for bit, and refused in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import DataLoader, Dataset
from monai.networks.nets import BasicUNet, DenseNet
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, RandFlipd, RandGaussianNoised
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import medfl
from medfl.cli import verbs as cli
from medfl.evaluation.metrics import Cases, summarise
from medfl.export.bundle_writer import export
from medfl.problem import parts as parts_module, parts_data
from medfl.storage.files import load_weights

SIZES = {"train": 9, "validate": 4, "test": 4}
SITES = {"north": 0.0, "south": 0.7}
NETWORK = {
    "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "init_features": 4, "growth_rate": 2, "block_config": (1,)
}  # fmt: skip
QUIET: dict[str, Any] = {"say": str, "jobs": 1}


def entries(folder: Path, site: str, section: str) -> list[dict[str, Any]]:
    """Write a section of a site as .npy images, class 1 brighter than class 0; return its data list."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng([len(site), *section.encode()])
    found = []
    for index in range(SIZES[section]):
        ident, label = f"{site}-{section}-{index}", index % 2
        np.save(
            folder / f"{ident}.npy",
            draws.normal(label + SITES[site], 1, (16, 16)).astype(np.float32),
        )
        found.append({"id": ident, "image": str(folder / f"{ident}.npy"), "label": label})
    return found


def transforms(section: str) -> list[Any]:
    steps = [
        LoadImaged("image", reader="NumpyReader"),
        EnsureChannelFirstd("image", channel_dim="no_channel"),
    ]
    draws = [RandFlipd("image", prob=0.5, spatial_axis=0), RandGaussianNoised("image", prob=0.5)]
    return [*steps, *(draws if section == "train" else [])]


def densenet() -> nn.Module:
    return DenseNet(**NETWORK)  # type: ignore[arg-type]


def parts_of(folder: Path) -> medfl.Parts:
    chains = {section: Compose(transforms(section)) for section in SIZES}
    data = {
        site: {
            section: Dataset(entries(folder, site, section), chains[section]) for section in SIZES
        }
        for site in SITES
    }
    return medfl.Parts(
        network=densenet, data=data, loss=nn.CrossEntropyLoss(), classes=("dark", "bright"), batch_size=4,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    )  # fmt: skip


def component(target: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, **arguments}


def bundle_of(root: Path, folder: Path) -> Path:
    """Write the same parts as a MONAI bundle whose data lists name the site."""

    def section(name: str) -> dict[str, Any]:
        lists = [
            {**entry, "centre": site} for site in SITES for entry in entries(folder, site, name)
        ]
        steps = [
            component("LoadImaged", keys="image", reader="NumpyReader"),
            component("EnsureChannelFirstd", keys="image", channel_dim="no_channel"),
        ]
        if name == "train":
            steps.append(component("RandFlipd", keys="image", prob=0.5, spatial_axis=0))
            steps.append(component("RandGaussianNoised", keys="image", prob=0.5))
        dataset = component("Dataset", data=lists, transform=component("Compose", transforms=steps))
        return component("DataLoader", dataset=dataset, batch_size=4)

    evaluator = component(
        "SupervisedEvaluator", device="cpu", val_data_loader=section("validate"), network="@network"
    )
    schedule = component(
        "torch.optim.lr_scheduler.StepLR", optimizer="@optimizer", step_size=1, gamma=0.5
    )
    train = {
        "network": component("monai.networks.nets.DenseNet", **{**NETWORK, "block_config": [1]}),
        "optimizer": component("torch.optim.SGD", params="$@network.parameters()", lr=0.1, momentum=0.9),
        "trainer": component(
            "SupervisedTrainer", device="cpu", max_epochs=1, train_data_loader=section("train"), network="@network",
            optimizer="@optimizer", loss_function=component("torch.nn.CrossEntropyLoss"),
            train_handlers=[component("LrScheduleHandler", lr_scheduler=schedule)],
        ),
        "validate": {"evaluator": evaluator},
    }  # fmt: skip
    (root / "configs").mkdir(parents=True)
    (root / "configs/train.json").write_text(json.dumps(train))
    (root / "configs/evaluate.json").write_text(
        json.dumps({"validate#evaluator#val_data_loader": section("test")})
    )
    return root


def hashes(results: Sequence[medfl.Result]) -> set[tuple[str, float]]:
    return {
        (one.summary["weights_sha256"], one.rounds[-1]["val_balanced_accuracy"]) for one in results
    }


def test_parts_train_as_the_same_parts_in_a_bundle(tmp_path: Path) -> None:
    """Random transforms, a schedule, momentum; one worker and two, MONAI FL, resumed in the middle."""
    parts, settings = parts_of(tmp_path / "images"), {"rounds": 2, "seed": 3, "say": str}
    run = partial(medfl.run, method="fedprox", options={"mu": 0.1}, **settings)
    bundle = run(
        bundle_of(tmp_path / "bundle", tmp_path / "images"),
        partition="centre",
        out=tmp_path / "b",
        jobs=1,
        trust=True,
    )
    whole = run(parts, out=tmp_path / "one", jobs=1)
    two, monai = (
        run(parts, out=tmp_path / "two", jobs=2),
        run(parts, out=tmp_path / "fl", runtime="monai-fl"),
    )
    run(parts, out=tmp_path / "part", jobs=1, rounds=1)
    part = run(parts_of(tmp_path / "images"), out=tmp_path / "part", jobs=1, resume=True)
    assert len(hashes([bundle, whole, two, monai, part])) == 1
    assert bundle.run.partition.sites == whole.run.partition.sites
    assert whole.run.run_hash == two.run.run_hash
    again = medfl.load_run(tmp_path / "one")
    assert (
        again.network().state_dict().keys()
        == load_weights(tmp_path / "one/weights.safetensors").keys()
    )


def test_loaders_and_data_sets_that_only_their_class_can_read_are_federated(tmp_path: Path) -> None:
    """Pairs in memory, split 70/10/20 %, and loaders of MONAI's data sets: the class counts are known of both."""
    draws = torch.Generator().manual_seed(0)
    y = torch.arange(30) % 2
    pairs = TensorDataset(torch.randn(30, 1, 16, 16, generator=draws) + y[:, None, None, None], y)
    north = {
        s: DataLoader(Dataset(entries(tmp_path, "north", s), Compose(transforms(s))), batch_size=3)
        for s in SIZES
    }
    parts = replace(parts_of(tmp_path), data={"north": north, "pairs": pairs}, batch_size=None)
    with pytest.raises(
        medfl.InputError, match="different batch sizes or collate_fn|cannot be prepared"
    ):
        medfl.run(
            replace(
                parts, data={"a": north, "b": {**north, "train": DataLoader(pairs, batch_size=2)}}
            ),
            **QUIET,
        )
    found = medfl.run(
        replace(parts, data={"pairs": pairs, "more": pairs}),
        rounds=1,
        out=tmp_path / "run",
        **QUIET,
    )
    assert [(row["train"], row["validate"], row["test"]) for row in found.sites] == [
        (21, 3, 6),
        (21, 3, 6),
    ]
    assert sum(found.sites[0][f"train_{name}"] for name in ("dark", "bright")) == 21
    loaded = medfl.run(
        replace(parts, data={"north": north}), rounds=1, out=tmp_path / "loaded", **QUIET
    )
    assert (loaded.run.batch_size, len(loaded.sites)) == (3, 1)


def test_a_given_network_is_where_all_begin(tmp_path: Path) -> None:
    torch.manual_seed(5)
    given = densenet()
    parts = replace(
        parts_of(tmp_path / "images"), network=given, optimizer=partial(torch.optim.SGD, lr=1e-12)
    )
    result = medfl.run(parts, rounds=1, out=tmp_path / "run", **QUIET)
    ended = load_weights(tmp_path / "run/weights.safetensors")
    for name, tensor in given.named_parameters():
        torch.testing.assert_close(ended[name], tensor.detach(), atol=1e-6, rtol=0)
    other = replace(parts, network=densenet())
    assert (other.sha256 == parts.sha256, result.run.bundle_sha256 == parts.sha256) == (False, True)


def test_functions_without_a_source_are_told_apart(tmp_path: Path) -> None:
    """As those that are typed at a prompt."""
    parts, space = parts_of(tmp_path / "images"), {}  # type: ignore[var-annotated]
    exec(
        "a = lambda x, y: x.sum() * 0.5\nb = lambda x, y: x.sum() * 0.25\nc = lambda x, y: x.sum() * 0.5",
        space,
    )
    first, other, same = (replace(parts, loss=space[name]).sha256 for name in "abc")
    assert first == same != other


def brier(probabilities: Tensor, label: Tensor) -> Tensor:
    return ((probabilities - nn.functional.one_hot(label, 2)) ** 2).sum()


def test_own_metrics_are_reported_and_choose_the_best_round(tmp_path: Path) -> None:
    parts = replace(
        parts_of(tmp_path / "images"), metrics={"brier_error": brier}, key_metric="brier_error"
    )
    result = medfl.run(parts, rounds=2, out=tmp_path / "run", **QUIET)
    values = [row["val_brier_error"] for row in result.rounds]
    assert result.summary["best"]["round"] == 1 + values.index(min(values))
    test = [brier(torch.as_tensor(row[None]), torch.tensor([label])) for row, label in zip(
        result.probabilities, result.labels, strict=True
    )]  # fmt: skip
    assert result.summary["last"]["brier_error"] == pytest.approx(float(np.mean(test)), abs=1e-6)
    cases = Cases(
        ("a", "b"),
        {"probabilities": torch.eye(2), "label": torch.arange(2), "own": torch.tensor([1.0, 3])},
    )
    assert summarise(cases)["own"] == 2.0


def test_masks_and_other_targets_are_federated(tmp_path: Path) -> None:
    """A segmentation has Dice and an own metric; another task its loss and the first metric as key."""
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(12, 1, 32, 32, generator=draws)
    masks = [{"image": x, "label": (x > 0).to(torch.uint8)} for x in images]
    unet = partial(
        BasicUNet, spatial_dims=2, in_channels=1, out_channels=2, features=(4, 4, 4, 4, 4, 4)
    )
    loss = lambda output, target: nn.functional.cross_entropy(output, target[:, 0].long())  # noqa: E731
    share = lambda output, target: (output.argmax(1) == target[:, 0]).double().mean()  # noqa: E731
    parts = medfl.Parts(
        network=unet, data={"a": masks}, loss=loss, task="segmentation", classes=("background", "bright"),
        metrics={"share": share}, batch_size=4,
    )  # fmt: skip
    result = medfl.run(parts, rounds=1, out=tmp_path / "masks", **QUIET)
    assert {"val_dice", "val_share", "val_loss"} <= result.rounds[-1].keys()
    numbers = [{"image": x, "label": x.mean()[None]} for x in images]
    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(1024, 1))  # noqa: E731
    other = medfl.Parts(
        network=network, data={"a": numbers}, loss=nn.MSELoss(), task="other", batch_size=4,
        metrics={"distance": lambda output, target: (output - target).abs()},
    )  # fmt: skip
    result = medfl.run(other, rounds=1, out=tmp_path / "other", **QUIET)
    assert result.summary["best"]["round"] == 1
    assert {"val_distance", "val_loss"} <= result.rounds[-1].keys()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": "detection"}, "tasks are classification"),
        ({"classes": ("a",)}, "2 or more different names"),
        ({"classes": ("a", "b", "c")}, "3 classes: a, b, c"),
        (
            {"network": partial(DenseNet, **{**NETWORK, "out_channels": 3})},
            "a network with 3 outputs; 2 classes",
        ),
        ({"data": {}}, "site -> data sets"),
        ({"data": {"north": {"trian": []}}}, "did you mean train"),
        ({"data": {"north": {"train": [1, 2]}}}, "data without validate items"),
        ({"data": {"north": [{"image": 1, "label": 0}]}}, "three or more"),
        ({"data": {"north": iter([])}}, "__len__ and __getitem__"),
        ({"network": lambda: 3}, "it makes a torch.nn.Module"),
        (
            {"network": partial(nn.Sequential, nn.Flatten(), nn.Linear(256, 2))},
            "the same layers at each call",
        ),
        (
            {"network": partial(DenseNet, **{**NETWORK, "in_channels": 3})},
            "network and loss fail on item",
        ),
        ({"optimizer": lambda parameters: None}, "a torch.optim.Optimizer"),
        ({"loss": "cross entropy"}, "loss can be called"),
        ({"metrics": {"accuracy": brier}}, "a name that medfl's metrics do not have"),
        ({"metrics": {"odd": lambda output, target: 1 / 0}}, "metric 'odd' fails on item"),
        ({"key_metric": "dise"}, "did you mean|one of accuracy"),
        ({"name": "../x"}, "name of the parts"),
    ],
)
def test_what_cannot_be_federated_is_told_in_one_line(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises((medfl.InputError, medfl.RunError)) as caught:
        medfl.run(
            replace(parts_of(tmp_path / "images"), **changes),
            rounds=1,
            out=tmp_path / "run",
            **QUIET,
        )
    assert any(part in str(caught.value) for part in told.split("|"))
    assert "\n" not in str(caught.value)
    assert "metrics" in changes or not (tmp_path / "run").exists()


def test_a_site_of_parts_may_be_without_labels(tmp_path: Path) -> None:
    parts, asked = parts_of(tmp_path / "images"), {"rounds": 1, "lr": 0.01, **QUIET}
    semi = medfl.run(parts, "fedsemi", unlabelled="south", out=tmp_path / "semi", **asked)
    assert semi.run.unlabelled == "south"
    assert hashes([semi]) != hashes([medfl.run(parts, "fedsemi", out=tmp_path / "all", **asked)])
    with pytest.raises(medfl.InputError, match="site .south., which is without labels"):
        medfl.run(parts, "fedavg", unlabelled="south", out=tmp_path / "refused", **asked)


def test_items_whose_patient_is_not_known_are_split_one_by_one() -> None:
    """They were one patient: all of them in one section."""
    items = [
        {"image": torch.zeros(1), "label": 0, "patient": "p" if n < 2 else math.nan}
        for n in range(20)
    ]
    parts = parts_data._split("north", items)
    assert sum(map(len, parts.values())) == 20
    assert 13 <= len(parts["train"]) <= 14  # of 19 groups


def test_other_parts_are_another_run_and_gone_ones_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(tmp_path / "images")
    medfl.run(parts, rounds=1, out=tmp_path / "run", **QUIET)
    for changes in (
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"optimizer": torch.optim.Adam},
    ):
        with pytest.raises(medfl.InputError, match="--resume with other settings: bundle"):
            medfl.run(
                replace(parts, **changes), rounds=2, out=tmp_path / "run", resume=True, **QUIET
            )
    changed = parts_of(tmp_path / "images")
    np.save(tmp_path / "images/north-train-0.npy", np.zeros((20, 20), np.float32))
    with pytest.raises(medfl.InputError, match="checksum"):
        medfl.run(changed, rounds=2, out=tmp_path / "run", resume=True, **QUIET)
    monkeypatch.setattr(parts_module, "_GIVEN", {})
    with pytest.raises(medfl.InputError, match="made of parts in Python"):
        medfl.load_run(tmp_path / "run").network()
    with pytest.raises(medfl.InputError, match="processes of their own"):
        medfl.run(replace(parts), rounds=1, out=tmp_path / "other", runtime="flare", say=str)


def test_parts_are_compared_judged_again_and_said_to_be_drawn(tmp_path: Path) -> None:
    """What the other verbs do with a run of parts; an export needs a bundle, and says so."""
    parts = replace(parts_of(tmp_path / "images"), drawn=True)
    grid = medfl.compare(
        parts, ["fedavg", "fedprox mu=1.0"], out=tmp_path / "grid", seeds=(0,), rounds=1, **QUIET
    )
    assert len(list((tmp_path / "grid").rglob("summary.json"))) == 2
    assert grid is not None
    run = medfl.run(parts, rounds=1, out=tmp_path / "run", with_local=True, **QUIET)
    assert "PHANTOM" in repr(run)
    assert run.predict() == run.predictions or np.allclose(
        [row["p_dark"] for row in run.predict()],
        [row["p_dark"] for row in run.predictions],
        atol=1e-6,
    )
    assert {row["centre"] for row in run.cases()} == set(SITES)
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    with pytest.raises(medfl.InputError, match="a run of parts in Python"):
        export(tmp_path / "run", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
