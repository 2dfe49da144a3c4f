"""FedBN: BatchNorm stays, everything else is FedAvg."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from monai.networks.nets import UNet
from torch import Tensor, nn

from medfl.methods import load
from medfl.networks import build
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, judged, sgd, simulate

METHOD, FEDAVG = load("fedbn"), load("fedavg")
NORM = {
    f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}


class Shortcut(nn.Module):
    """A residual block with its second BatchNorm inside a Sequential, where the name does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.shortcut = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4))
        self.bn_free = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn_free((self.bn1(self.conv(x)) + self.shortcut(x)).relu().mean((2, 3)))


def by_statistics(network: nn.Module) -> set[str]:
    """Find BatchNorm layers by their running mean instead of their type."""
    prefixes = {
        name.removesuffix("running_mean")
        for name in network.state_dict()
        if name.endswith("running_mean")
    }
    return {name for name in network.state_dict() if name[: name.rfind(".") + 1] in prefixes}


def test_one_step_by_hand() -> None:
    """BatchNorm1d with statistics (0, 1) and momentum 0.1, then a linear layer: the statistics stay, w is averaged.

    Site a sees x = (0, 2): batch mean 1, unbiased variance 2: running mean 0.1, variance 0.9 + 0.2 = 1.1.
    Site b sees x = (0, 6): mean 3, variance 18: 0.3 and 2.7. After a round w is common, the four numbers are not.
    """
    data = {
        name: (torch.tensor([[0.0], [x]]), torch.zeros(2)) for name, x in (("a", 2.0), ("b", 6.0))
    }
    toy = Toy(
        data,
        lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)),
        lambda o, t: o.square().mean(),
        sgd(0.1),
    )
    outcome = simulate(METHOD, toy)
    for name, mean, variance in (("a", 0.1, 1.1), ("b", 0.3, 2.7)):
        own = judged(METHOD, toy, outcome, name)
        assert own["0.running_mean"].item() == pytest.approx(mean)
        assert own["0.running_var"].item() == pytest.approx(variance)
        assert bits(own["1.weight"]) == bits(outcome.server["weights"]["1.weight"])
    expected = (
        outcome.replies["a"]["weights"]["1.weight"] + outcome.replies["b"]["weights"]["1.weight"]
    ) / 2
    torch.testing.assert_close(outcome.server["weights"]["1.weight"], expected)


def test_batch_norm_is_in_no_message_and_the_rest_is_equal_everywhere(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 3)
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        assert set(message["weights"]) == set(classes.initial) - NORM
    own = {name: judged(METHOD, classes, outcome, name) for name in classes.names}
    for name in classes.initial:
        values = [bits(weights[name]) for weights in own.values()]
        if name not in NORM:
            assert values == [values[0]] * 3
        elif name != "1.num_batches_tracked":
            assert len({value[2] for value in values}) == 3


def test_batch_norm_changes_by_local_training_only(classes: Toy) -> None:
    """A site that is absent for a round has the very same BatchNorm after it; a site that trains continues its own."""
    first, second = (
        simulate(METHOD, classes, rounds, [["a", "b"], ["b", "c"]]) for rounds in (1, 2)
    )
    assert bits(second.states["a"]) == bits(first.states["a"])
    assert set(first.states["a"]["weights"]) == NORM
    assert (
        int(second.states["b"]["weights"]["1.num_batches_tracked"]) == 4
    )  # 6 items in batches of 4, two rounds
    assert int(first.states["b"]["weights"]["1.num_batches_tracked"]) == 2


def test_a_site_continues_with_its_own_batch_norm(classes: Toy) -> None:
    """With rate 0 nothing but the running statistics moves, so they are those of local training for all rounds."""
    toy = replace(classes, optimizer=sgd(0.0))
    federated, local = simulate(METHOD, toy, 3), simulate(load("local"), toy, 3)
    for name in toy.names:
        for key, tensor in federated.states[name][
            "weights"
        ].items():  # not to the bit: averaging equal weights rounds
            torch.testing.assert_close(
                tensor, local.states[name]["weights"][key], rtol=1e-5, atol=1e-6
            )
        assert not torch.equal(
            federated.states[name]["weights"]["1.running_mean"], toy.initial["1.running_mean"]
        )


def test_without_batch_norm_it_is_fedavg_bit_for_bit(classes: Toy) -> None:
    toy = replace(classes, network=classifier(dropout=0.3), optimizer=sgd(0.1, momentum=0.9))
    assert bits(simulate(METHOD, toy, 3).server) == bits(simulate(FEDAVG, toy, 3).server)
    with toy.networks.scope():
        assert METHOD.global_predictor(toy.host(), simulate(METHOD, toy).server) is not None


def test_there_is_no_global_model_with_batch_norm(classes: Toy) -> None:
    with classes.networks.scope():
        assert METHOD.global_predictor(classes.host(), simulate(METHOD, classes).server) is None
    assert METHOD.judged == "personal"


def unet(norm: str) -> UNet:
    return UNet(2, 1, 2, channels=(4, 8), strides=(2,), num_res_units=1, norm=norm)


@pytest.mark.parametrize(
    "network",
    [Shortcut(), unet("batch"), build("resnet20", 1, 2), build("resnet18", 1, 2)],
    ids=["sequential", "monai adn", "resnet20", "resnet18"],
)
def test_layers_are_found_by_type(network: nn.Module) -> None:
    names = METHOD.personal_names(network)
    assert names == by_statistics(network)
    assert 0 < len(names) < len(network.state_dict())


def test_names_prove_nothing() -> None:
    names = METHOD.personal_names(Shortcut())
    assert "shortcut.1.running_var" in names
    assert "bn_free.weight" not in names
    assert any("adn.N" in name for name in METHOD.personal_names(unet("batch")))
    assert not any("bn" in name for name in METHOD.personal_names(unet("batch")))


def test_other_norms_stay_only_if_asked() -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.LayerNorm(4),
        nn.BatchNorm2d(4),
    )
    every = load("fedbn", norms="all").personal_names(network)
    assert {name[0] for name in METHOD.personal_names(network)} == {"4"}
    assert {name[0] for name in every} == {"1", "2", "3", "4"}
    assert METHOD.personal_names(unet("instance")) == set()


def test_the_mean_is_by_samples_or_uniform() -> None:
    toy = Toy(blobs({"a": 4, "b": 12}), classifier(norm=True), cross_entropy, sgd(0.1))
    for weights, share in (("samples", 0.25), ("uniform", 0.5)):
        outcome = simulate(load("fedbn", weights=weights), toy)
        a, b = (outcome.replies[name]["weights"]["0.weight"] for name in "ab")
        torch.testing.assert_close(
            outcome.server["weights"]["0.weight"], share * a + (1 - share) * b
        )
