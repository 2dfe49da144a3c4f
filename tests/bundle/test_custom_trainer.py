"""Trainers that take their steps by themselves: MONAI's steps to the bit, averaged, scored; who cannot is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.bundle import ConfigParser

from medfl.bundle.bundle import Bundle
from medfl.bundle.configuration import own_python
from medfl.bundle.zoo import compatibility
from medfl.core.errors import InputError
from medfl.core.seeding import stream
from medfl.data.prepared import Shard
from medfl.export.bundle_writer import export
from medfl.policy import admission
from medfl.policy.policy import Policy
from medfl.runs.launch import federate
from medfl.runs.plan import Request, make_plan
from medfl.runtimes.federation import Federation
from medfl.storage.files import load_weights
from medfl.training import LocalSettings, Networks, Site, fit, snapshot
from tests.support.own_trainers import (
    adversarial,
    clicking,
    hands,
    nodules,
    prompting,
    reconstructing,
    regression,
    spleens,
)

ZOO = Path(__file__).resolve().parents[3] / "shared" / "zoo"
CPU = torch.device("cpu")


def run(
    path: Path, out: Path, method: str = "fedavg", jobs: int = 1, **settings: Any
) -> dict[str, Any]:
    config, options = settings.pop("config", {}), settings.pop("options", {})
    requested = {"method": method, "sites": 2, "rounds": 2, "partition": "iid", **settings}
    with admission.trusting(True):
        return federate(
            str(path), config=config, options=options, requested=requested, out=out, jobs=jobs
        )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_weights(folder / "weights.safetensors"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fednova"])
def test_an_iteration_that_adds_nothing_gives_the_weights_of_plain_training(
    method: str, tmp_path: Path
) -> None:
    """A trainer's own step, with a method's gradient, is the step that medfl takes; so are its scores."""
    plain = run(regression(tmp_path / "plain"), tmp_path / "a", method, local_epochs=2)
    own = run(clicking(tmp_path / "own", 0.0), tmp_path / "b", method, local_epochs=2)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert own["last"]["error"] == pytest.approx(plain["last"]["error"], rel=1e-6)
    assert (tmp_path / "a" / "rounds.jsonl").read_text().count('"steps": 4') == 4
    assert (tmp_path / "b" / "rounds.jsonl").read_text().count('"steps": 4') == 4
    assert not (tmp_path / "own" / "saved").exists()


def test_what_draws_inside_an_iteration_is_seeded(tmp_path: Path) -> None:
    """Twice the same bits, with another number of workers too; another seed and another strength give others."""
    path = clicking(tmp_path / "own", 0.5)
    first = run(path, tmp_path / "first")
    again = run(path, tmp_path / "again", jobs=2)
    assert again["weights_sha256"] == first["weights_sha256"]
    assert again["last"] == first["last"]
    plain = run(clicking(tmp_path / "still", 0.0), tmp_path / "still run")
    assert plain["weights_sha256"] != first["weights_sha256"]
    assert run(path, tmp_path / "more", lr=0.002)["weights_sha256"] != first["weights_sha256"]


def test_two_networks_are_trained_as_gan_trainer_does(tmp_path: Path) -> None:
    """MONAI's own trainer, made by MONAI from the same file, over the same batches: the same weights of both."""
    path = adversarial(tmp_path / "gan", batch=3)
    bundle = Bundle(str(path), policy=Policy(trusted=True))
    networks, shard = Networks(bundle.network, 0, CPU), Shard.of(bundle.prepared("train"), range(7))
    settings = LocalSettings(2, 3, bundle.optimizer)
    site = Site(
        "a", 5, shard, shard, shard, bundle.loss, settings, networks, round=1, method="fedavg"
    )
    for _ in range(2):  # the second visit starts with fresh optimisers
        with networks.scope():
            model = networks.lease(networks.initial)
            report = fit(model, site)
            trained = snapshot(model)
    assert report.steps == 2 * 3 * (2 + 1)
    with own_python(path):
        monais = ConfigParser(
            json.loads((path / "configs" / "train.json").read_text())
        ).get_parsed_content("trainer")
    both = {"g_network": monais.g_network, "d_network": monais.d_network}
    for name, network in both.items():
        part = {
            key.removeprefix(f"{name}."): value
            for key, value in networks.initial.items()
            if key.startswith(name)
        }
        network.load_state_dict(part)
    losses = []
    with stream(5, "local") as generator:
        for _ in range(2):
            for batch, _ in shard.batches(3, generator):
                output = monais._iteration(monais, batch)
                losses.append(output["g_loss"] + output["d_loss"])
    expected = {
        f"{name}.{key}": value
        for name, network in both.items()
        for key, value in network.state_dict().items()
    }
    assert same(trained, expected)
    assert report.loss == pytest.approx(sum(losses) / len(losses))


def test_networks_are_averaged_under_the_trainers_names(tmp_path: Path) -> None:
    summary = run(adversarial(tmp_path / "gan"), tmp_path / "out", batch_size=3)
    names = {name.partition(".")[0] for name in weights(tmp_path / "out")}
    assert names == {"g_network", "d_network"}
    assert summary["last"] is None
    assert summary["best"] is None
    with (
        pytest.raises(InputError, match="the export of a run with a GanTrainer"),
        admission.trusting(True),
    ):
        export(tmp_path / "out", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_each_network_is_the_mean_of_what_the_sites_trained(tmp_path: Path) -> None:
    """Sites of unequal size, trained one by one: the mean by hand, weighted by their images, tensor by tensor."""
    path = adversarial(tmp_path / "gan")
    run(path, tmp_path / "out", sites=3, rounds=1, batch_size=1)
    request = Request(str(path), sites=3, rounds=1, batch_size=1, partition="iid")
    with admission.trusting(True):
        plan = make_plan(request)
        federation = Federation(plan.bundle, plan.method, plan.run)
        trained, counts = [], []
        for name in federation.names:
            with federation.scope():
                model = federation.networks.lease(federation.networks.initial)
                fit(model, federation.site(name, 1))
                trained.append(snapshot(model))
            counts.append(len(federation.participant_shard(name, "train")))
    assert len(set(counts)) > 1
    averaged = weights(tmp_path / "out")
    for name, tensor in averaged.items():
        mean = sum(
            state[name].double() * count for state, count in zip(trained, counts, strict=True)
        ) / sum(counts)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-6)
    for network in ("g_network.", "d_network."):
        keys = [
            name
            for name in averaged
            if name.startswith(network) and averaged[name].is_floating_point()
        ]
        for state in trained:
            assert any((averaged[key] - state[key]).abs().max() > 1e-4 for key in keys)


@pytest.mark.parametrize(
    ("make", "method", "changed"),
    [
        (adversarial, "perfedavg", "the loss"),
        (adversarial, "moon", "the loss"),
        (adversarial, "scaffold", "the gradients"),
        (lambda path: clicking(path, 0.0), "central", "the optimiser"),
        (lambda path: clicking(path, 0.0), "perfedavg", "the loss"),
    ],
)
def test_a_method_that_needs_the_step_is_refused(
    make: Callable[[Path], Path], method: str, changed: str, tmp_path: Path
) -> None:
    with pytest.raises(
        InputError,
        match=f"method '{method}', which changes {changed}, with a (Gan|Supervised)Trainer",
    ):
        run(make(tmp_path / "bundle"), tmp_path / "out", method)
    assert not (tmp_path / "out").exists()


def test_a_trainer_that_keeps_no_optimiser_is_refused(tmp_path: Path) -> None:
    path = adversarial(tmp_path / "gan")
    scripts = path / "scripts" / "losses.py"
    scripts.write_text(
        scripts.read_text()
        + "\n\nclass BareTrainer:\n    def __init__(self, **k):\n        self.state = self\n"
    )
    with pytest.raises(InputError, match="'trainer' is a BareTrainer without what it trains"):
        run(path, tmp_path / "out", config={"trainer#_target_": "scripts.losses.BareTrainer"})


@pytest.mark.filterwarnings("ignore:torch.meshgrid")  # MONAI's encoder of points calls it as it was
@pytest.mark.parametrize(
    ("make", "jobs"), [(reconstructing, 2), pytest.param(prompting, 1, marks=pytest.mark.slow)]
)
def test_other_trainers_by_their_own_iteration(
    make: Callable[[Path], Path], jobs: int, tmp_path: Path
) -> None:
    """AdversarialTrainer, and one that draws prompts as VISTA3D's bundle does: they learn, and give the bits again."""
    path = make(tmp_path / "bundle")
    first = run(path, tmp_path / "a", batch_size=1, local_epochs=1)
    assert (
        run(path, tmp_path / "b", batch_size=1, local_epochs=1, jobs=jobs)["weights_sha256"]
        == first["weights_sha256"]
    )
    losses = [
        json.loads(line)["train_loss"]
        for line in (tmp_path / "a" / "rounds.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < losses[0]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "a").values())
    if make is prompting:
        assert 0 < first["last"]["dice"] <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.meshgrid")
def test_a_loss_gets_labels_that_are_true_or_false_as_numbers(tmp_path: Path) -> None:
    """VISTA3D's, which compares labels with a class; recorded only where the loss fails on them."""
    path = prompting(tmp_path / "bundle")
    for loss, adapted in (
        (None, (compatibility.FLOAT_LABELS,)),
        ({"_target_": "DiceCELoss", "sigmoid": True}, ()),
    ):
        bundle = Bundle(str(path), {"loss": loss} if loss else {}, policy=Policy(trusted=True))
        assert bundle.adapted == adapted
        assert any("true or false" in note for note in bundle.notes) == bool(adapted)
    summary = run(path, tmp_path / "out", batch_size=1, rounds=1)
    assert 0 <= summary["last"]["dice"] <= 1
    assert json.loads((tmp_path / "out" / "run.json").read_text())["adapted"] == [
        compatibility.FLOAT_LABELS
    ]


# The public zoo's


def zoo(name: str) -> Path:
    if not (ZOO / name).is_dir():
        pytest.skip(f"the public zoo's {name} is not here")
    return ZOO / name


@pytest.mark.slow
def test_the_zoos_gan_trains_a_round(tmp_path: Path) -> None:
    data = hands(tmp_path / "hands", 12)
    run(
        zoo("mednist_gan"),
        tmp_path / "out",
        rounds=1,
        batch_size=3,
        config={"dataset_dir": str(data)},
    )
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out").values())


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:there are more than 1 component"
)  # MONAI of its two classes Interaction
def test_the_zoos_deepedit_trains_a_round(tmp_path: Path) -> None:
    """Clicks are simulated at the sites; scored by the bundle's own evaluator, which simulates them too.

    The bundle keeps nine volumes for validation, of which two are scored.
    """
    pytest.importorskip("skimage", reason="DeepEdit's transforms need scikit-image")
    config = {
        "dataset_dir": str(spleens(tmp_path / "spleen", 11)), "spatial_size": [32, 32, 32],
        "train#preprocessing_transforms#0#reader": "NibabelReader",
        "validate#dataset#data": "$[{'image': i, 'label': l} for i, l in zip(@images[-2:], @labels[-2:])]",
    }  # fmt: skip
    summary = run(zoo("spleen_deepedit_annotation"), tmp_path / "out", rounds=1, config=config)
    assert 0 < summary["last"]["dice"] <= 1


@pytest.mark.slow
def test_the_zoos_detection_trains_a_round(tmp_path: Path) -> None:
    """One of its transforms gives MONAI's zoom an argument that it does not take any more, and is made without it."""
    data = nodules(tmp_path / "lung", 3)
    config = {
        "dataset_dir": str(data), "data_list_file_path": str(data / "list.json"), "batch_size": 1,
        "patch_size": [32, 32, 32], "val_patch_size": [64, 64, 32], "train#random_transforms#1#prob": 1.0,
    }  # fmt: skip
    summary = run(zoo("lung_nodule_ct_detection"), tmp_path / "out", rounds=1, config=config)
    assert 0 <= summary["last"]["val_coco"] <= 1
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out").values())
