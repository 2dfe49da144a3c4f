"""FedSemi against its equations, and runs in which sites are without labels."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medfl import datasets
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.data.prepared import unlabelled
from medfl.flare.offer import offer
from medfl.methods import load
from medfl.methods.fedsemi import class_logits, masked_cross_entropy, strong_view
from medfl.runs.launch import federate
from medfl.runs.plan import Request, make_plan
from medfl.runtimes.federation import Federation
from medfl.runtimes.step import site_step
from medfl.training.site import Site
from tests.support.toy import (
    Toy,
    ToyBundle,
    bits,
    blobs,
    classifier,
    run_record,
    sgd,
    simulate,
    three_classes,
)


@dataclass
class Half(Toy):
    """The site b has images only."""

    without: Collection[str] = ("b",)

    def site(self, name: str, round_: int = 1) -> Site:
        site = super().site(name, round_)
        return replace(site, train=unlabelled(site.train)) if name in self.without else site


def half(**changes: Any) -> Half:
    toy = Half(
        blobs({"a": 9, "b": 6, "c": 11}),
        classifier(norm=True, dropout=0.3),
        cross_entropy,
        sgd(0.1),
    )
    return replace(toy, batch_size=4, **changes)


def plain(toy: Toy, weights: dict[str, Tensor]) -> nn.Module:
    network = toy.network()
    network.load_state_dict(weights)
    return network


# The equations


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_site_without_labels_learns_what_the_teacher_is_sure_of(epochs: int) -> None:
    """Two steps written out: pseudo-labels above the threshold, probabilities below, the teacher's mean."""
    x, y = blobs({"b": 12})["b"]
    toy = Half({"b": (x, y)}, classifier(), cross_entropy, sgd(0.5), epochs=epochs)
    method = load(
        "fedsemi", warmup=0, threshold=0.4, unsure=0.5, decay=0.75, strength=0.0, mirror=False
    )
    reply = simulate(method, toy).replies["b"]
    student, teacher = plain(toy, toy.initial), plain(toy, toy.initial)
    shares = []
    for step in range(epochs):
        if step:
            for kept, new in zip(teacher.parameters(), student.parameters(), strict=True):
                kept.data = 0.75 * kept.data + 0.25 * new.data
        q = teacher(x).softmax(1).detach()
        chance, label = q.max(1)
        sure = chance >= 0.4
        assert 0 < sure.sum() < len(x)
        shares.append(sure.double().mean())
        loss = cross_entropy(student(x)[sure], label[sure], reduction="sum") / len(x)
        loss = loss - 0.5 * (q * student(x).log_softmax(1))[~sure].sum() / len(x)
        for parameter, slope in zip(
            student.parameters(), torch.autograd.grad(loss, list(student.parameters())), strict=True
        ):
            parameter.data -= 0.5 * slope
    for name, tensor in student.state_dict().items():
        torch.testing.assert_close(reply["weights"][name], tensor, rtol=0, atol=1e-6)
    assert reply.scalars == {
        "samples": 12,
        "sure": pytest.approx(float(torch.stack(shares).mean())),
    }


def test_the_defaults_of_fixmatch_and_mean_teacher() -> None:
    method = load("fedsemi")
    assert (method.threshold, method.warmup, method.decay, method.unsure) == (0.95, 5, 0.999, 1.0)
    assert (method.weight, method.count, method.strength, method.mirror) == (1.0, "sure", 1.0, True)


def test_the_reply_has_the_received_buffers_and_the_teacher_is_in_evaluation_mode() -> None:
    """The student's running statistics, of changed images, stay at home; a teacher with dropout is sure of the same.

    In training mode its BatchNorm would have those of the batch, and q would be another.
    """
    toy, seen = half(), list[Tensor]()
    made = {name: tensor.clone() for name, tensor in toy.initial.items()}
    statistics = [name for name in made if name.endswith(("running_mean", "running_var"))]
    assert statistics
    for name in statistics:
        made[name] += 0.5
    method = load("fedsemi", warmup=0, threshold=0.4, decay=1.0)
    with toy.networks.scope():
        site = toy.site("b")
        _, reply = method.local_update(site, {}, Message({"weights": made}))
        assert all(torch.equal(reply["weights"][name], made[name]) for name in statistics)
        assert any(
            not torch.equal(reply["weights"][name], made[name]) for name in made if "weight" in name
        )
        feed = method._lessons(site.model(made), site.model(made), site, seen)
        x = toy.data["b"][0]
        _, target, _ = feed(x, None)
    network = plain(toy, made).eval()
    q = network(x).softmax(1).detach()
    sure = q.max(1).values >= 0.4
    torch.testing.assert_close(target[~sure], q[~sure], rtol=0, atol=1e-6)
    assert torch.equal(target[sure].argmax(1), q[sure].argmax(1))
    assert seen[0].item() == pytest.approx(sure.float().mean().item())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 10 images with labels at w = 0, 30 without at w = 1, sure of a third of them
        ({}, 10 / 20),
        ({"weight": 0.5}, 5 / 15),
        ({"count": "all"}, 30 / 40),
        ({"count": "all", "weight": 2.0}, 60 / 70),
        ({"weight": 0.0}, 0.0),
        ({"warmup": 1}, 0.0),
    ],
)
def test_the_weight_of_sites_without_labels(options: dict, expected: float) -> None:
    replies = {
        "a": Message({"weights": {"w": torch.zeros(1)}}, {"samples": 10}),
        "b": Message({"weights": {"w": torch.ones(1)}}, {"samples": 30, "sure": 1 / 3}),
    }
    method, toy = load("fedsemi", {"warmup": 0, **options}), half()
    server = {"weights": {"w": torch.full((1,), 7.0)}}
    assert method.aggregate(toy.host(), server, replies, 2)["weights"]["w"].item() == pytest.approx(
        expected
    )
    alone = method.aggregate(toy.host(), server, {"b": replies["b"]}, 2)["weights"]["w"].item()
    assert alone == (7.0 if expected == 0 else 1.0)
    assert method.observed(server, replies) == {"sure": 1 / 3}


def test_where_all_have_labels_it_is_fedavg_bit_for_bit() -> None:
    ours, fedavg = (simulate(load(name), three_classes(), 3) for name in ("fedsemi", "fedavg"))
    assert bits([ours.server, ours.states]) == bits([fedavg.server, fedavg.states])


@pytest.mark.parametrize("options", [{"weight": 0.0}, {"warmup": 3}])
def test_what_counts_nothing_is_left_out_bit_for_bit_and_costs_a_step(options: dict) -> None:
    alone = replace(half(), data={name: part for name, part in half().data.items() if name != "b"})
    left_out, fedavg = (
        simulate(load("fedsemi", options), half(), 3),
        simulate(load("fedavg"), alone, 3),
    )
    assert bits(left_out.server) == bits(fedavg.server)
    assert left_out.replies["b"].scalars["samples"] == 6
    with (toy := half(epochs=3)).networks.scope():
        site = toy.site("b", 3)
        load("fedsemi", options).local_update(site, {}, Message({"weights": toy.initial}))
    assert sum(report.steps for report in site.journal) == 1


def test_rounds_without_labels_repeat_and_go_on_from_states() -> None:
    method = load("fedsemi", warmup=1, threshold=0.4)
    first, again, wired = (simulate(method, half(), 3, wire=wire) for wire in (False, False, True))
    assert all(
        bits([one.server, one.states]) == bits([first.server, first.states])
        for one in (again, wired)
    )
    two, toy = simulate(method, half(), 2), half()
    with toy.networks.scope():
        _, reply = method.local_update(
            toy.site("b", 3), {}, method.broadcast(toy.host(3), two.server, "b")
        )
        assert bits(reply) == bits(first.replies["b"])


# The view


@pytest.mark.parametrize("sides", [(24, 16), (8, 12, 16)])
def test_a_strong_view_changes_intensities_and_cuts_a_box_out(sides: tuple[int, ...]) -> None:
    x = torch.rand(6, 2, *sides, generator=torch.Generator().manual_seed(0))
    view, seen = strong_view(x, 1.0, False, torch.Generator().manual_seed(1))
    assert view.shape == x.shape
    assert seen.shape == (6, *sides)
    for one, image, where in zip(view, x, seen, strict=True):
        hidden = (where == 0).nonzero()
        lengths = hidden.max(0).values - hidden.min(0).values + 1
        assert len(hidden) == lengths.prod()  # a whole box
        assert all(
            side / 4 <= length <= side / 2 for side, length in zip(sides, lengths, strict=True)
        )
        torch.testing.assert_close(one[:, where == 0], image.mean().expand_as(one[:, where == 0]))
        pair = torch.stack([one[:, where > 0].flatten(), image[:, where > 0].flatten()])
        assert torch.corrcoef(pair)[0, 1] > 0.6  # every pixel is where it was
    same, _ = strong_view(x, 1.0, False, torch.Generator().manual_seed(1))
    assert torch.equal(view, same)


def test_a_mirrored_view_is_for_classification() -> None:
    x = torch.rand(40, 1, 8, 8)
    views = [
        strong_view(x, 0.0, mirror, torch.Generator().manual_seed(3))[0] for mirror in (False, True)
    ]
    turned = [bool(torch.equal(b, a.flip(-1))) for a, b in zip(*views, strict=True)]
    assert 5 < sum(turned) < 35
    assert all(flip or torch.equal(a, b) for flip, a, b in zip(turned, *views, strict=True))


def test_pixels_that_are_cut_out_are_not_learned() -> None:
    y, keep = torch.rand(1, 1, 2, 2), torch.tensor([[[1.0, 0.0], [0.5, 1.0]]])
    logits = torch.randn(1, 1, 2, 2, requires_grad=True)
    masked_cross_entropy(nn.Identity(), logits, torch.cat([1 - y, y], 1), keep).backward()
    expected = keep * (torch.sigmoid(logits.detach()) - y) / 4  # one channel: the logit of class 1
    torch.testing.assert_close(logits.grad, expected)


def test_a_network_without_one_tensor_of_logits_is_refused() -> None:
    with pytest.raises(InputError, match="output is a list; pseudo-labels need one tensor"):
        class_logits(lambda x: [x], torch.zeros(1, 2))  # type: ignore[arg-type]


# Runs


def test_labels_of_such_a_site_reach_nothing() -> None:
    """With other labels at site y what it sends is the same, bit for bit."""

    class Wrong(ToyBundle):
        def prepared(self, section: str, **settings: Any) -> Any:
            kept = super().prepared(section, **settings)
            kept.targets[3:8] = (kept.targets[3:8] + 1) % 3
            return kept

    def reply(bundle: ToyBundle, unlabelled: str) -> Any:
        method = load("fedsemi", threshold=0.4, warmup=0)
        made = Federation(bundle, method, run_record(method="fedsemi", unlabelled=unlabelled))  # type: ignore[arg-type]
        site = made.site("y", 1)
        assert site.train.labels == (
            [] if unlabelled else made.participant_shard("y", "train").labels
        )
        return bits(
            site_step(made, 1, "y", None, Message({"weights": made.networks.initial})).reply
        )

    assert reply(ToyBundle(), "y") == reply(Wrong(), "y")
    assert reply(ToyBundle(), "") != reply(Wrong(), "")


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "pneumonia", tmp_path_factory.mktemp("data") / "phantom", per_class=15, size=28
    )


def run(phantom: Path, out: Path, **changes: Any) -> dict[str, Any]:
    named = {"jobs": 1, "runtime": "simulator", "resume": False}
    called = {name: changes.pop(name, default) for name, default in named.items()}
    requested = {
        "method": "fedsemi", "data": str(phantom), "sites": 3, "partition": "iid", "unlabelled": "site-2,site-3",
        "rounds": 2, "local_epochs": 1, "batch_size": 8, "lr": 0.01, **changes,
    }  # fmt: skip
    config = {"network": "small_cnn", "image_size": 28}
    options = {"threshold": 0.5, "warmup": 1}
    return federate(
        "pneumonia", options=options, config=config, requested=requested, out=out, **called
    )


@pytest.mark.slow
def test_law1_workers_a_resume_and_monai_fl_give_the_same_bits(
    phantom: Path, tmp_path: Path
) -> None:
    whole = run(phantom, tmp_path / "whole")
    run(phantom, tmp_path / "cut", rounds=1)
    others = [
        federate(out=tmp_path / "cut", resume=True, requested={"rounds": 2}, jobs=1),
        run(phantom, tmp_path / "workers", jobs=2),
        run(phantom, tmp_path / "monai", runtime="monai-fl"),
    ]
    for other in others:
        assert (other["run_hash"], other["weights_sha256"]) == (
            whole["run_hash"],
            whole["weights_sha256"],
        )
    rounds = [
        json.loads(line) for line in (tmp_path / "whole" / "rounds.jsonl").read_text().splitlines()
    ]
    assert all(0 < entry["observed"]["sure"] <= 1 for entry in rounds)


@pytest.mark.flare
def test_law1_flare_gives_the_same_bits(phantom: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    whole, other = (
        run(phantom, tmp_path / runtime, runtime=runtime) for runtime in ("simulator", "flare")
    )
    assert (other["run_hash"], other["weights_sha256"]) == (
        whole["run_hash"],
        whole["weights_sha256"],
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            [],
            "method 'fedavg' with site 'site-2', which is without labels; methods that learn without: fedsemi; ",
        ),
        (["--method", "central"], "method 'central' with site 'site-2', which is without labels"),
        (
            ["--unlabelled", "site-1,site-2"],
            "--unlabelled site-1,site-2: no site has labels; the sites of the run are ",
        ),
        (
            ["--unlabelled", "north"],
            "--unlabelled north; the sites of the run are site-1, site-2; ",
        ),
        (["--unlabelled", "site-2,,"], "--unlabelled site-2,,; names of sites, each once; "),
    ],
)
def test_runs_that_cannot_be_are_refused_in_a_line(
    phantom: Path, tmp_path: Path, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = [
        "run",
        "pneumonia",
        "--data",
        str(phantom),
        "--sites",
        "2",
        "--partition",
        "iid",
        "--out",
        str(out),
    ]
    assert cli.main([*command, "--unlabelled", "site-2", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}")
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("sigmoid", [True, False])
def test_channels_of_yes_and_no_have_no_pseudo_labels(sigmoid: bool, tmp_path: Path) -> None:
    """A softmax over structures that overlap says nothing; over those that exclude each other it does."""
    phantom = datasets.write_phantom("hippocampus", tmp_path / "phantom", per_class=10, size=20)
    asked = {
        "method": "fedsemi", "data": str(phantom), "sites": 2, "partition": "iid", "unlabelled": "site-2", "rounds": 1,
        "local_epochs": 1, "batch_size": 2,
    }  # fmt: skip
    loss = {
        "_target_": "DiceCELoss",
        "to_onehot_y": True,
        "sigmoid": sigmoid,
        "softmax": not sigmoid,
    }
    config = {"network": "unet8", "patch_size": [16, 16, 16], "loss": loss}
    plan = make_plan(Request("hippocampus", config=config, **asked))
    if not sigmoid:
        Federation(plan.bundle, plan.method, plan.run)
        return
    with pytest.raises(
        InputError, match="site 'site-2' without labels, whose network says yes or no in each"
    ) as told:
        Federation(plan.bundle, plan.method, plan.run)
    assert "\n" not in str(told.value)


def test_a_job_for_sites_of_which_none_has_labels_is_not_offered() -> None:
    pytest.importorskip("nvflare")
    asked = {"method": "fedsemi", "rounds": 2, "batch_size": 8}
    made = offer(
        "pneumonia", ["north", "south"], requested={**asked, "unlabelled": "south"}, rehearsal=True
    )
    assert made.unlabelled == "south"
    with pytest.raises(InputError, match="no site has labels"):
        offer(
            "pneumonia",
            ["north", "south"],
            requested={**asked, "unlabelled": "south,north"},
            rehearsal=True,
        )
