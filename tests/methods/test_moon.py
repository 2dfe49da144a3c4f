"""MOON against its equations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from monai.networks.nets import UNet
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods.moon import bottleneck_and_output, contrastive
from medfl.networks.heads import feature_size, features_and_output, head, head_name
from medfl.training.site import Site
from tests.support.toy import Toy, adam, bits, blobs, classifier, cross_entropy, sgd, simulate

METHOD, FEDAVG = load("moon"), load("fedavg")
CLASSES = Task("classification", ("p", "q", "r"))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nothing(output: Tensor, target: Tensor) -> Tensor:
    return 0 * output.sum()


class Turning(nn.Module):
    """Feature (x_0, x_1 + t x_0), then a linear layer that has no say where the loss is `nothing`; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.t, self.head = (
            nn.Parameter(torch.zeros((), dtype=torch.float64)),
            nn.Linear(2, 3, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.stack([x[:, 0], x[:, 1] + self.t * x[:, 0]], 1))


# The loss


def test_equal_references_give_log_2_and_no_gradient() -> None:
    """Check 2."""
    z, anchor = drawn(5, 4).requires_grad_(), drawn(5, 4, seed=1)
    loss = contrastive(z, anchor, anchor, 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert z.grad.abs().max() < 1e-15


@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0])
def test_at_the_poles(tau: float) -> None:
    """Check 3: z = z_g = -z_p gives log(1 + e^(-2 / tau)), the opposite log(1 + e^(2 / tau))."""
    z = drawn(3, 4)
    near, far = (contrastive(z, sign * z, -sign * z, tau).item() for sign in (1, -1))
    assert near == pytest.approx(math.log1p(math.exp(-2 / tau)), abs=1e-12)
    assert far == pytest.approx(math.log1p(math.exp(2 / tau)), abs=1e-12)
    if tau == 0.5:
        assert (near, far) == pytest.approx((0.0181499, 4.0181499), abs=1e-7)


def test_only_directions_count() -> None:
    """Check 4, for each of the three; the mean is over the batch."""
    z, z_g, z_p = (drawn(6, 4, seed=seed) for seed in range(3))
    loss = contrastive(z, z_g, z_p, 0.5)
    factor = torch.arange(1, 7).double()[:, None]
    torch.testing.assert_close(
        contrastive(factor * z, 3 * z_g, 0.2 * z_p, 0.5), loss, rtol=0, atol=1e-12
    )
    each = torch.stack(
        [contrastive(z[i : i + 1], z_g[i : i + 1], z_p[i : i + 1], 0.5) for i in range(6)]
    )
    torch.testing.assert_close(each.mean(), loss, rtol=0, atol=1e-12)


def test_maps_are_averaged_over_space() -> None:
    maps = [drawn(2, 3, 4, 4, 2, seed=seed) for seed in range(3)]
    plain = contrastive(*(value.mean((2, 3, 4)) for value in maps), 0.5)
    torch.testing.assert_close(contrastive(*maps, 0.5), plain, rtol=0, atol=1e-12)


# Training


def test_one_step_by_hand() -> None:
    """Item (1, 0), feature (1, t). Received t = 0, z_g = (1, 0); previous t = 1, z_p = (1, 1); no other loss.

    s_g = 1 / sqrt(1 + t^2), s_p = (1 + t) / sqrt(2 + 2 t^2); at t = 0 they are 1 and 1 / sqrt 2, their derivatives 0
    and 1 / sqrt 2. With tau = 0.5 the loss log(1 + e^(2 (s_p - s_g))) has the derivative sqrt 2 sigma(sqrt 2 - 2).
    """
    toy = Toy(
        {"a": (torch.tensor([[1.0, 0]]).double(), torch.tensor([0]))}, Turning, nothing, sgd(0.1)
    )
    previous = {**toy.initial, "t": torch.ones((), dtype=torch.float64)}
    with toy.networks.scope():
        state, reply = load("moon", mu=3.0).local_update(
            toy.site("a"), {"previous": previous}, Message({"weights": toy.initial})
        )
    slope = math.sqrt(2) / (1 + math.exp(2 - math.sqrt(2)))
    assert reply["weights"]["t"].item() == pytest.approx(-0.1 * 3 * slope, abs=1e-12)
    assert bits(state["previous"]) == bits(reply["weights"])


@pytest.mark.parametrize("optimizer", [sgd(0.1, momentum=0.9, weight_decay=0.01), adam(0.01)])
def test_mu_zero_is_fedavg_bit_for_bit(classes: Toy, optimizer) -> None:
    """Check 1."""
    toy = replace(classes, optimizer=optimizer, epochs=2)
    moon, average = simulate(load("moon", mu=0.0), toy, 3), simulate(FEDAVG, toy, 3)
    assert bits(moon.server) == bits(average.server)
    assert bits(moon.replies) == bits(average.replies)
    assert bits(simulate(METHOD, toy, 3).server) != bits(average.server)


def test_a_first_participation_is_fedavg_bit_for_bit(classes: Toy) -> None:
    cohorts = [["a", "b"], ["a", "c"]]
    first, average = simulate(METHOD, classes, 1, cohorts), simulate(FEDAVG, classes, 1, cohorts)
    assert bits(first.server) == bits(average.server)
    second = simulate(METHOD, classes, 2, cohorts)
    average = simulate(FEDAVG, classes, 2, cohorts)  # c is new in round 2
    assert bits(second.replies["c"]) == bits(average.replies["c"])
    assert bits(second.replies["a"]) != bits(average.replies["a"])


def test_the_previous_model_is_the_sites_own_and_goes_stale(classes: Toy) -> None:
    first, last = (
        simulate(METHOD, classes, rounds, [["a", "b"], ["b"], ["b"]]) for rounds in (1, 3)
    )
    for name in "ab":
        assert bits(first.states[name]) == bits({"previous": first.replies[name]["weights"]})
    assert bits(last.states["a"]) == bits(first.states["a"])
    assert bits(last.states["b"]) == bits({"previous": last.replies["b"]["weights"]})
    assert set(last.replies["b"].tensors) == set(last.down["b"].tensors) == {"weights"}


def test_the_references_are_in_evaluation_mode_without_gradients() -> None:
    """A step runs the model, then the received and the previous one."""
    seen = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.training, torch.is_grad_enabled(), self.weight.requires_grad))
            return super().forward(x)

    toy = Toy(
        blobs({"a": 4}),
        lambda: nn.Sequential(Watched(8, 6), nn.ReLU(), nn.Linear(6, 3)),
        cross_entropy,
    )
    simulate(METHOD, toy, 2)
    assert seen == [
        (True, True, True),
        (True, True, True),
        (False, False, False),
        (False, False, False),
    ]


# The projection


def test_the_projection_of_the_original() -> None:
    """d to d, ReLU, d to 256, then 256 to the classes; z is what leaves it."""
    network = load("moon", projection=True).adapt(classifier()(), CLASSES)
    shapes = [tuple(p.shape) for p in network[4].parameters()]
    assert shapes == [(6, 6), (6,), (256, 6), (256,), (3, 256), (3,)]
    assert (head_name(network), feature_size(network)) == ("4.output", 256)
    x = torch.ones(2, 8)
    z, output = features_and_output(network, x)
    assert bits(z) == bits(network[4].projection(network[:4](x)))
    assert bits(output) == bits(head(network)(z))


def test_the_projection_trains(classes: Toy) -> None:
    method = load("moon", projection=True)
    toy = classes.adapted(method)
    outcome = simulate(method, toy, 2)
    assert outcome.server["weights"]["4.output.weight"].shape == (3, 256)
    assert bits(outcome.server) != bits(
        simulate(load("moon", projection=True, mu=0.0), toy, 2).server
    )


def test_a_projection_needs_a_linear_head() -> None:
    convolutions = nn.Sequential(nn.Conv2d(1, 3, 1))
    assert METHOD.adapt(convolutions, Task("segmentation")) is convolutions
    with pytest.raises(InputError, match="'0' is Conv2d"):
        load("moon", projection=True).adapt(convolutions, CLASSES)


# Segmentation


def unet(dimensions: int = 2) -> nn.Module:
    return UNet(dimensions, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_the_bottleneck_of_a_unet(dimensions: int) -> None:
    """Two strides of 2 leave a quarter of 16: maps of 4 x 4 (x 4), the 8 + 16 channels that the decoder starts from."""
    network = unet(dimensions).eval()
    kept = []
    handle = (
        network.model[1]
        .submodule[2]
        .register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    )
    x = torch.randn(2, 1, *[16] * dimensions, generator=torch.Generator().manual_seed(0))
    z, output = bottleneck_and_output(network, x)
    handle.remove()
    assert z.shape == (2, 24, *[4] * dimensions)
    assert bits(z) == bits(kept[0])
    assert bits(output) == bits(network(x))
    assert not any(module._forward_hooks for module in network.modules())


def test_neither_gates_nor_the_head_are_a_bottleneck() -> None:
    """The gate has one position; a network that keeps its size gives what enters its head."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.gate = (
                nn.Conv2d(1, 2, 2, 2),
                nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(2, 2, 1)),
            )
            self.head = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2, 3, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = self.down(x)
            return self.head(x * self.gate(x))

    x = torch.ones(2, 1, 6, 6)
    gated = Gated()
    assert bits(bottleneck_and_output(gated, x)[0]) == bits(gated.down(x))
    flat = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()), nn.Sequential(nn.Conv2d(4, 2, 1))
    )
    assert bits(bottleneck_and_output(flat, x)) == bits(features_and_output(flat, x))


class Segmenting(Toy):
    def site(self, name: str, round_: int = 1) -> Site:
        return replace(
            super().site(name, round_), task=Task("segmentation", ("background", "lesion"))
        )


def test_segmentation_contrasts_the_bottleneck() -> None:
    """`auto` is `bottleneck` by the task; what enters the head gives something else, mu = 0 FedAvg."""
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = {"a": (x[:3], (x[:3, 0] > 0).long()), "b": (x[3:], (x[3:, 0] > 0.5).long())}
    toy = Segmenting(data, unet, cross_entropy, sgd(0.1), batch_size=2)
    runs = {
        how: bits(simulate(load("moon", feature=how), toy, 2).server)
        for how in ("auto", "bottleneck", "head")
    }
    assert runs["auto"] == runs["bottleneck"] != runs["head"]
    average = bits(simulate(FEDAVG, toy, 2).server)
    assert average not in runs.values()
    assert bits(simulate(load("moon", mu=0.0), toy, 2).server) == average


def test_only_the_encoder_feels_the_bottleneck() -> None:
    """Without another loss the decoder behind the bottleneck gets no gradient, the encoder before it does."""
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    toy = Segmenting({"a": (x, torch.zeros(4))}, unet, nothing, sgd(0.5))
    previous = {name: t + 0.1 if t.is_floating_point() else t for name, t in toy.initial.items()}
    with toy.networks.scope():
        down = Message({"weights": toy.initial})
        _, reply = METHOD.local_update(toy.site("a"), {"previous": previous}, down)
    trainable = dict(toy.networks.fresh().named_parameters())
    moved = {
        name
        for name, t in reply["weights"].items()
        if name in trainable and bits(t) != bits(toy.initial[name])
    }
    assert any(name.startswith("model.0.") for name in moved)
    assert not any(name.startswith("model.2.") for name in moved)
