"""FedSM: SoftPull, the selector's one step, routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.methods import load
from medfl.methods.fedsm import SuperModel, soft_pull
from medfl.networks import build
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, judged, sgd, simulate


def replies(values: Mapping[str, float]) -> dict[str, Message]:
    return {
        name: Message(
            {
                "personal": {
                    "w": torch.tensor([v, 2 * v], dtype=torch.float64),
                    "n": torch.tensor(int(v)),
                }
            }
        )
        for name, v in values.items()
    }


def pulled(values: Mapping[str, float], lam: float) -> dict[str, Tensor]:
    return {name: tensors["w"] for name, tensors in soft_pull(replies(values), lam).items()}


# SoftPull


def test_soft_pull_by_hand() -> None:
    """N = 3, lambda = 0.7, w = 0, 3, 9: a <- 0.7 * 0 + 0.15 * (3 + 9) = 1.8; b <- 2.1 + 0.15 * 9 = 3.45;
    c <- 6.3 + 0.15 * 3 = 6.75. Deviations from the mean 4 shrink by (3 * 0.7 - 1) / 2 = 0.55: -4 -> -2.2."""
    found = pulled({"a": 0.0, "b": 3.0, "c": 9.0}, 0.7)
    assert {name: pytest.approx(w[0].item()) for name, w in found.items()} == {
        "a": 1.8,
        "b": 3.45,
        "c": 6.75,
    }
    mean = torch.stack(list(found.values())).mean(0)
    torch.testing.assert_close(
        mean, torch.tensor([4.0, 8.0], dtype=torch.float64), rtol=0, atol=1e-12
    )
    for name, value in (("a", 0.0), ("b", 3.0), ("c", 9.0)):
        assert found[name][0].item() - 4 == pytest.approx(0.55 * (value - 4))


def test_lambda_one_is_local_and_one_over_n_the_plain_mean() -> None:
    values = {"a": 1.0, "b": 2.0, "c": 6.0}
    for name, w in pulled(values, 1.0).items():
        assert w[0].item() == values[name]
    for w in pulled(values, 1 / 3).values():
        torch.testing.assert_close(
            w, torch.tensor([3.0, 6.0], dtype=torch.float64), rtol=0, atol=1e-12
        )


def test_a_single_participant_keeps_its_own_and_counters_stay() -> None:
    assert pulled({"a": 5.0}, 0.2)["a"].tolist() == [5.0, 10.0]
    assert soft_pull(replies({"a": 4.0, "b": 8.0}), 0.5)["b"]["n"].item() == 8


def test_personal_models_with_lambda_one_are_trained_alone(classes: Toy) -> None:
    """The personal models of lambda = 1 are Local's, bit for bit; the global one is FedAvg's whatever lambda."""
    toy = replace(classes, epochs=2)
    alone, average = simulate(load("local"), toy, 3), simulate(load("fedavg"), toy, 3)
    outcome = simulate(load("fedsm", lam=1.0), toy, 3)
    for name in toy.names:
        assert bits(outcome.server["personal"][name]) == bits(alone.states[name]["weights"])
    assert bits(outcome.server["weights"]) == bits(average.server["weights"])


def test_an_absent_site_keeps_its_model_and_is_not_pulled_on(classes: Toy) -> None:
    outcome = simulate(load("fedsm"), classes, 2, [["a", "b", "c"], ["a", "b"]])
    assert bits(outcome.server["personal"]["c"]) == bits(outcome.history[1]["personal"]["c"])
    sent = {name: outcome.replies[name]["personal"] for name in ("a", "b")}
    key = "0.weight"
    wanted = 0.7 * sent["a"][key] + 0.3 * sent["b"][key]
    torch.testing.assert_close(outcome.server["personal"]["a"][key], wanted)


# The selector


def test_the_selector_takes_one_adam_step_by_the_mean_gradient() -> None:
    """Softmax regression from known weights: the gradient of the mean cross-entropy of label i over all images is
    (p - e_i) x averaged; Adam's first step is -lr g / (|g| + eps) whatever the batches."""
    toy = Toy(blobs({"a": 7, "b": 5}), classifier(), cross_entropy, sgd(0.1), batch_size=3)
    method = load("fedsm", selector_lr=0.25)
    outcome = simulate(method, toy, 1)
    start = outcome.history[0]["selector"]
    for number, name in enumerate(toy.names):
        x = toy.data[name][0]
        p = (x @ start["weight"].T + start["bias"]).softmax(1)
        error = p - nn.functional.one_hot(torch.full((len(x),), number), 2)
        gradient = error.T @ x / len(x)
        reply = outcome.replies[name]
        torch.testing.assert_close(reply["mean"]["weight"], 0.1 * gradient, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(
            reply["square"]["weight"], 0.001 * gradient**2, rtol=1e-4, atol=1e-9
        )
        step = -0.25 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(
            reply["selector"]["weight"], start["weight"] + step, rtol=1e-4, atol=1e-5
        )
    shares = {"a": 7 / 12, "b": 5 / 12}
    for group in ("selector", "mean", "square"):
        wanted = sum(
            share * outcome.replies[name][group]["weight"] for name, share in shares.items()
        )
        torch.testing.assert_close(outcome.server[group]["weight"], wanted)


def test_the_selector_learns_to_tell_sites_apart() -> None:
    """Two sites in opposite corners: after some rounds each image is routed to its own site's model."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(12) % 3
    data = {
        name: (torch.randn(12, 8, generator=generator) + shift, y)
        for name, shift in (("a", 4.0), ("b", -4.0))
    }
    toy = Toy(data, classifier(), cross_entropy, sgd(0.05))
    method = load("fedsm", selector_lr=0.1)
    outcome = simulate(method, toy, 12)
    with toy.networks.scope():
        model = method.global_predictor(toy.host(), outcome.server).eval()
        assert model.route(data["a"][0]).tolist() == [0] * 12
        assert model.route(data["b"][0]).tolist() == [1] * 12
        site, down = toy.site("b"), method.broadcast(toy.host(), outcome.server, "b")
        own = method.predictor(site, {}, down).eval()
        assert own.route(data["b"][0]).tolist() == [1] * 12
        assert own.route(data["a"][0]).tolist() == [-1] * 12, "a site has no other site's model"


def test_a_selector_with_batch_norm_takes_a_batch_of_one_image() -> None:
    """Three images in batches of two: the last has one, of which the deepest maps of a ResNet-20 are one number."""
    images = {name: (torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2])) for name in ("a", "b")}

    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())

    toy = Toy(images, network, cross_entropy, sgd(0.1), batch_size=2)
    outcome = simulate(load("fedsm", selector="resnet20"), toy)
    assert all(tensor.isfinite().all() for tensor in outcome.server["selector"].values())


# Routing


def constant(value: float) -> nn.Module:
    layer = nn.Conv2d(1, 1, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, value)
    return layer


class Fixed(nn.Module):
    """Logits that make site n confident by log(odds) where the first pixel is n."""

    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * nn.functional.one_hot(x[:, 0, 0, 0].long(), 3)


@pytest.mark.parametrize(
    ("threshold", "routes"), [(0.9, [0, 1, 2]), (0.91, [-1, -1, -1]), (1.0, [-1, -1, -1])]
)
def test_an_image_goes_where_the_selector_is_sure_enough(
    threshold: float, routes: list[int]
) -> None:
    """softmax of (3, 0, 0): e^3 / (e^3 + 2) = 0.9094, above 0.9 and below 0.91."""
    model = SuperModel(constant(-1), {n: constant(10.0 + n) for n in range(3)}, Fixed(), threshold)
    x = torch.arange(3.0).reshape(3, 1, 1, 1).expand(3, 1, 2, 2)
    assert model.route(x).tolist() == routes
    wanted = [10.0 + route if route >= 0 else -1.0 for route in routes]
    assert model(x)[:, 0, 1, 1].tolist() == wanted


@pytest.mark.parametrize("kind", ["trace", "export"])
def test_a_recorded_model_routes_every_image_anew(kind: str) -> None:
    """Recorded on images of site 0, it sends others to their own sites' models, or to the global one."""
    model = SuperModel(constant(-1), {0: constant(10.0), 2: constant(12.0)}, Fixed(), 0.9).eval()
    example = torch.zeros(2, 1, 2, 2)
    if kind == "trace":
        recorded: Any = torch.jit.trace(model, example)
    else:
        axes = ({0: torch.export.Dim("batch")},)
        recorded = torch.export.export(model, (example,), dynamic_shapes=axes).module()
    x = torch.tensor([2.0, 0.0, 1.0]).reshape(3, 1, 1, 1).expand(3, 1, 2, 2)
    assert recorded(x)[:, 0, 0, 0].tolist() == [12.0, 10.0, -1.0]
    assert torch.equal(recorded(x), model(x))
    assert torch.equal(recorded(x[:1]), model(x[:1])), "one image"


def test_volumes_have_a_selector_of_volumes() -> None:
    volumes = {
        name: (torch.rand(3, 1, 16, 16, 16), torch.randint(0, 2, (3, 1, 16, 16, 16)))
        for name in ("a", "b")
    }
    loss = lambda output, target: cross_entropy(output, target[:, 0])  # noqa: E731
    toy = Toy(volumes, lambda: build("unet8", 1, 2, 3), loss, sgd(0.1), batch_size=2)
    method = load("fedsm", threshold=0.0)
    outcome = simulate(method, toy, 1)
    assert outcome.server["selector"]["body.0.weight"].ndim == 5
    with toy.networks.scope():
        model = method.global_predictor(toy.host(), outcome.server).eval()
        assert model(volumes["a"][0]).shape == (3, 2, 16, 16, 16)
    assert judged(method, toy, outcome, "a")


def test_what_is_not_allowed() -> None:
    with pytest.raises(InputError, match="lam=1.2 for method 'fedsm'; lam is float >= 0 and <= 1"):
        load("fedsm", lam=1.2)
    with pytest.raises(InputError, match="selector=unet8"):
        load("fedsm", selector="unet8")
