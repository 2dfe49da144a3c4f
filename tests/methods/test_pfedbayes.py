"""pFedBayes against its equations, in float64 where they are exact."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call

from medfl.core.errors import InputError
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods.pfedbayes import Averaged, Gaussian, divergence, gaussian_names
from medfl.networks import build
from medfl.training.site import Site, snapshot
from tests.support.toy import (
    Toy,
    adam,
    bits,
    blobs,
    classifier,
    cross_entropy,
    judged,
    quadratic,
    sgd,
    simulate,
)

METHOD = load("pfedbayes")
NORM = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def softplus(rho: Tensor) -> Tensor:
    return (1 + rho.exp()).log()


# The divergence


def random_moments(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, 3), (5,))
    mu = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    sigma = [
        torch.rand(shape, generator=generator, dtype=torch.float64).add(0.2).requires_grad_()
        for shape in shapes
    ]
    return mu, sigma


def test_the_divergence_is_that_of_gaussians_and_its_gradients_are_known() -> None:
    """d/d mu_w = (mu_w - mu_q) / sigma_w^2, d/d sigma_w = 1 / sigma_w - (sigma_q^2 + (mu_q - mu_w)^2) / sigma_w^3."""
    q, w = random_moments(0), random_moments(1)
    value = divergence(q, w)
    known = sum(
        kl_divergence(Normal(*one), Normal(*other)).sum()
        for one, other in zip(zip(*q, strict=True), zip(*w, strict=True), strict=True)
    )
    close(value, known)
    assert value > 1
    mu, sigma = (torch.autograd.grad(value, part, retain_graph=True) for part in w)
    for i in range(2):
        (mu_q, sigma_q), (mu_w, sigma_w) = (q[0][i], q[1][i]), (w[0][i], w[1][i])
        close(mu[i], (mu_w - mu_q) / sigma_w**2)
        close(sigma[i], 1 / sigma_w - (sigma_q**2 + (mu_q - mu_w) ** 2) / sigma_w**3, 1e-10)


def test_of_a_distribution_from_itself_it_is_zero_and_flat() -> None:
    q, w = random_moments(0), random_moments(0)
    value = divergence(q, w)
    assert value.item() == 0
    for gradient in torch.autograd.grad(value, [*q[0], *q[1], *w[0], *w[1]]):
        close(gradient, torch.zeros_like(gradient), 1e-15)


def test_a_divergence_by_hand() -> None:
    """q = N(1, 1), w = N(3, 2^2): log 2 + (1 + 4) / 8 - 1/2 = log 2 + 1/8."""
    q, w = (
        ([torch.tensor([m]).double()], [torch.tensor([s]).double()])
        for m, s in ((1.0, 1.0), (3.0, 2.0))
    )
    assert divergence(q, w).item() == pytest.approx(math.log(2) + 0.125, abs=1e-15)


# The distribution


@pytest.mark.parametrize(("rho", "sigma"), [(-3.0, 0.0486), (-2.5, 0.0789)])
def test_weights_are_drawn_anew_with_deviation_sigma(rho: float, sigma: float) -> None:
    network = nn.Linear(50, 40).double()
    q = Gaussian(
        network,
        {n: torch.full_like(p, rho) for n, p in network.named_parameters()},
        torch.Generator(),
    )
    drawn = torch.stack([q.drawn()["weight"].detach() for _ in range(20)])  # 40,000 numbers
    apart = drawn - network.weight.detach()
    assert apart.std().item() == pytest.approx(sigma, rel=0.02)
    assert apart.mean().item() == pytest.approx(0, abs=sigma / 50)
    assert abs(torch.corrcoef(apart[:2].flatten(1))[0, 1].item()) < 0.1, "each draw is another one"
    x = torch.ones(1, 50).double()
    assert not torch.equal(q(x), q(x))


def test_convolutions_are_gaussian_and_normalisation_is_not() -> None:
    """ResNet-20 of 8 classes: 269,592 parameters, 1,376 of them BatchNorm's; a U-Net of volumes alike."""
    network = build("resnet20", 3, 8)
    sizes = {name: p.numel() for name, p in network.named_parameters()}
    chosen = gaussian_names(network)
    assert (sum(sizes.values()), sum(sizes[name] for name in chosen)) == (269_592, 269_592 - 1_376)
    unet = build("unet8", 1, 2, 3)
    chosen = gaussian_names(unet)
    for name, module in unet.named_modules():
        own = {f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)}
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            assert own <= set(chosen)
        elif isinstance(module, nn.BatchNorm3d):
            assert own
            assert not own & set(chosen)


def test_frozen_parameters_have_values() -> None:
    network = classifier(norm=True)()
    network[0].requires_grad_(False)
    assert gaussian_names(network) == ["4.weight", "4.bias"]


# A site's round


def walk(
    toy: Toy, site: Site, q: dict, w: dict, rate: float, zeta: float, inner: int, decay: float
) -> None:
    """Walk a round of full batches with the gradients written out; q and w are {"mu": (1, 3), "rho": (1, 3)}."""
    a, b = quadratic(*toy.data[site.name])
    scale = zeta / site.num_samples
    with stream(site.seed, "weights") as noise:
        for _ in range(toy.epochs):
            for _ in range(inner):
                eps = torch.randn(1, 3, generator=noise, dtype=torch.float64)
                sigma_q, sigma_w = softplus(q["rho"]), softplus(w["rho"])
                slope = (a @ (q["mu"] + sigma_q * eps)[0] - b)[
                    None
                ]  # of the loss, at the drawn weights
                mu = slope + scale * (q["mu"] - w["mu"]) / sigma_w**2 + decay * q["mu"]
                sigma = slope * eps + scale * (sigma_q / sigma_w**2 - 1 / sigma_q)
                q["rho"] = q["rho"] - rate * sigma * q["rho"].sigmoid()  # d sigma / d rho
                q["mu"] = q["mu"] - rate * mu
            apart, sigma_q, sigma_w = q["mu"] - w["mu"], softplus(q["rho"]), softplus(w["rho"])
            sigma = scale * (1 / sigma_w - (sigma_q**2 + apart**2) / sigma_w**3)
            w["mu"] = w["mu"] + rate * scale * apart / sigma_w**2
            w["rho"] = w["rho"] - rate * sigma * w["rho"].sigmoid()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_two_rounds_with_the_gradients_written_out(lines: Toy, decay: float) -> None:
    """q_i goes on in round 2, w_i starts from the server's; only mu of q_i has weight decay; the rate decays."""
    toy = replace(lines, epochs=3, optimizer=sgd(0.02, weight_decay=decay), lr_decay=0.5)
    method = load("pfedbayes", optimizer="run", rho=-1.0, zeta=2.0, inner_steps=2)
    start = {"mu": toy.initial["weight"], "rho": torch.full((1, 3), -1.0).double()}
    common, own = dict(start), {name: dict(start) for name in toy.names}
    for round_ in (1, 2):
        outcome, sent = simulate(method, toy, round_), []
        for name in toy.names:
            w = dict(common)
            walk(
                toy, toy.site(name, round_), own[name], w, 0.02 * 0.5 ** (round_ - 1), 2.0, 2, decay
            )
            close(outcome.states[name]["personal"]["weight"], own[name]["mu"])
            close(outcome.states[name]["rho"]["weight"], own[name]["rho"])
            close(outcome.replies[name]["weights"]["weight"], w["mu"])
            close(outcome.replies[name]["rho"]["weight"], w["rho"])
            sent.append(w)
        common = {key: torch.stack([w[key] for w in sent]).mean(0) for key in common}
        close(outcome.server["weights"]["weight"], common["mu"])
        close(outcome.server["rho"]["weight"], common["rho"])
    assert (common["mu"] - start["mu"]).abs().min() > 1e-3


def test_adam_is_the_papers_at_the_runs_rate(classes: Toy) -> None:
    toy = replace(classes, lr_decay=0.5)
    papers = simulate(METHOD, replace(toy, optimizer=sgd(0.01, momentum=0.9, weight_decay=0.1)), 2)
    same = simulate(load("pfedbayes", optimizer="run"), replace(toy, optimizer=adam(0.01)), 2)
    other = simulate(METHOD, replace(toy, optimizer=sgd(0.02)), 2)
    assert (
        bits([papers.server, papers.states])
        == bits([same.server, same.states])
        != bits([other.server, other.states])
    )


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_without_zeta_and_sigma_it_is_local_training_bit_for_bit(
    classes: Toy, settings: dict
) -> None:
    """With BatchNorm, dropout and short batches; log(1 + e^-200) is 0 in float32. w and rho never move."""
    toy = replace(classes, optimizer=sgd(0.1, **settings), epochs=2)
    method = load("pfedbayes", zeta=0.0, rho=-200.0, inner_steps=1, optimizer="run")
    outcome, local = simulate(method, toy, 3), simulate(load("local"), toy, 3)
    for name in toy.names:
        assert bits(outcome.states[name]["personal"]) == bits(local.states[name]["weights"])
        assert bits(judged(method, toy, outcome, name)) == bits(local.states[name]["weights"])
        assert all((rho == -200).all() for rho in outcome.states[name]["rho"].values())
        reply = outcome.replies[name]
        for key in set(toy.initial) - NORM:
            assert torch.allclose(reply["weights"][key], toy.initial[key], rtol=1e-6, atol=0)
            assert torch.allclose(reply["rho"][key], torch.tensor(-200.0), rtol=1e-6)
    noisy = simulate(load("pfedbayes", zeta=0.0, inner_steps=1, optimizer="run"), toy, 3)
    assert bits(noisy.states["a"]["personal"]) != bits(local.states["a"]["weights"])


def test_a_strong_zeta_holds_q_at_w(lines: Toy) -> None:
    """Where only the divergence counts both stay together, however far the data would pull q_i."""
    toy = replace(lines, epochs=30, optimizer=sgd(0.001))
    apart = {}
    for zeta in (0.0, 1e4):
        outcome = simulate(load("pfedbayes", zeta=zeta), toy)
        apart[zeta] = [
            (outcome.states[name]["personal"]["weight"] - reply["weights"]["weight"]).norm().item()
            for name, reply in outcome.replies.items()
        ]
    assert max(apart[1e4]) < min(apart[0.0]) / 20


def test_each_batch_comes_several_times_each_with_weights_of_its_own(lines: Toy) -> None:
    passes: list[tuple[Tensor, Tensor]] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        passes.append((target, output.detach()))
        return lines.loss(output, target)

    still = sgd(0.0)
    toy = replace(lines, batch_size=6, loss=loss, optimizer=still)
    simulate(load("pfedbayes", inner_steps=3, optimizer="run"), toy, cohorts=[["d"]])
    assert len(passes) == 12
    for start in range(0, 12, 3):
        (one, first), (two, second), _ = passes[start : start + 3]
        assert torch.equal(one, two)
        assert not torch.equal(first, second)
    assert len({str(bits(target)) for target, _ in passes}) == 4


# Normalisation layers


def test_normalisation_has_values_of_two_sets(classes: Toy) -> None:
    """q_i keeps its own from round to round; the reply carries them, w has their plain mean, whatever beta."""
    method = load("pfedbayes", beta=0.5)
    first, second = simulate(method, classes, 1), simulate(method, classes, 2)
    assert set(second.server["rho"]) == set(classes.initial) - NORM
    for outcome in (first, second):
        for key in sorted(NORM):
            sent = [outcome.replies[name]["weights"][key] for name in classes.names]
            assert bits(sent) == bits(
                [outcome.states[name]["personal"][key] for name in classes.names]
            )
            stacked = torch.stack(sent)
            wanted = stacked.max() if key.endswith("tracked") else stacked.mean(0)
            torch.testing.assert_close(outcome.server["weights"][key], wanted)
    for name in classes.names:
        for key in ("1.running_mean", "1.weight"):
            assert bits(first.states[name]["personal"][key]) != bits(first.server["weights"][key])
    still = simulate(load("pfedbayes", optimizer="run"), replace(classes, optimizer=sgd(0.0)), 2)
    counted = [
        still.states[name]["personal"]["1.num_batches_tracked"].item() for name in classes.names
    ]
    assert counted == [20, 20, 30], (
        "two rounds of two, two and three batches, five passes each; one of one item less"
    )


# The server


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_servers_step(lines: Toy, beta: float, weights: str) -> None:
    method = load("pfedbayes", beta=beta, weights=weights)
    outcome = simulate(
        method, replace(lines, optimizer=sgd(0.01)), 2, [["a", "b", "c", "d"], ["a", "c"]]
    )
    for group in ("weights", "rho"):
        a, c = (outcome.replies[name][group]["weight"] for name in "ac")
        mean = (a + c) / 2 if weights == "uniform" else (6 * a + 18 * c) / 24
        close(
            outcome.server[group]["weight"],
            (1 - beta) * outcome.history[1][group]["weight"] + beta * mean,
        )


def test_twice_the_parameters_travel(classes: Toy) -> None:
    """mu with all that has a value, and rho of every Gaussian weight; what is sent is w_i, not q_i."""
    outcome = simulate(METHOD, classes, 2)
    for message in [*outcome.replies.values(), *outcome.down.values()]:
        assert set(message.tensors) == {"weights", "rho"}
        assert set(message["weights"]) == set(classes.initial)
        assert set(message["rho"]) == set(classes.initial) - NORM
    for name in classes.names:
        reply, state = outcome.replies[name], outcome.states[name]
        assert bits(reply["weights"]["0.weight"]) != bits(state["personal"]["0.weight"])
        assert bits(reply["rho"]["0.weight"]) != bits(state["rho"]["0.weight"])


def test_a_shared_parameter_is_one_gaussian_under_all_its_names() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.two.weight = self.one.weight
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))

    toy = Toy(blobs({"a": 6, "b": 6}), Shared, cross_entropy, sgd(0.05))
    outcome = simulate(load("pfedbayes", beta=0.5), toy)
    assert "two.weight" not in outcome.server["rho"]
    for weights in (
        outcome.server["weights"],
        *(reply["weights"] for reply in outcome.replies.values()),
    ):
        assert (
            bits(weights["one.weight"])
            == bits(weights["two.weight"])
            != bits(toy.initial["one.weight"])
        )


# What stays and what is judged


def test_q_stays_at_its_site_and_its_mean_is_judged(classes: Toy) -> None:
    first, second = (simulate(METHOD, classes, rounds, [["a", "b"], ["b"]]) for rounds in (1, 2))
    assert bits(second.states["a"]) == bits(first.states["a"])
    assert bits(second.states["b"]) != bits(first.states["b"])
    for name in ("a", "b"):
        assert bits(judged(METHOD, classes, second, name)) == bits(second.states[name]["personal"])
    assert bits(judged(METHOD, classes, second, "c")) == bits(second.server["weights"]), (
        "c never took part"
    )
    assert METHOD.judged == "personal"
    with classes.networks.scope():
        network = METHOD.global_predictor(classes.host(), second.server)
        assert bits(dict(network.state_dict())) == bits(second.server["weights"])


def test_a_late_site_starts_from_the_w_that_it_receives(classes: Toy) -> None:
    """With rate 0 its distribution is the one received, to the last bit."""
    toy = replace(classes, optimizer=sgd(0.01))
    outcome = simulate(METHOD, toy, 1, [["a", "b"]])
    down = METHOD.broadcast(toy.host(2), outcome.server, "c")
    still = replace(toy, optimizer=sgd(0.0))
    with still.networks.scope():
        state, _ = METHOD.local_update(still.site("c", 2), {}, down)
    for key in set(toy.initial) - NORM:
        assert (
            bits(state["personal"][key])
            == bits(outcome.server["weights"][key])
            != bits(toy.initial[key])
        )
        assert bits(state["rho"][key]) == bits(outcome.server["rho"][key])


def test_the_mean_softmax_of_draws(classes: Toy) -> None:
    method, x = load("pfedbayes", draws=10), classes.data["a"][0]
    outcome = simulate(method, classes, 2)
    state, site = outcome.states["a"], classes.site("a")
    with classes.networks.scope():
        network = classes.networks.lease(state["personal"]).eval()
        total = torch.zeros(len(x), 3)
        with stream(site.seed, "draws") as noise:
            for _ in range(10):
                weights = {}
                for name in sorted(state["rho"]):
                    eps = torch.randn(state["rho"][name].shape, generator=noise)
                    weights[name] = state["personal"][name] + softplus(state["rho"][name]) * eps
                total += functional_call(network, weights, (x,)).softmax(1) / 10
        predictor = method.predictor(site, state, outcome.down["a"]).eval()
        with torch.no_grad():
            found, again = predictor(x), predictor(x)
            mean = METHOD.predictor(site, state, outcome.down["a"]).eval()(x).softmax(1)
    torch.testing.assert_close(found.softmax(1), total.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(found, again)
    assert (found.softmax(1) - mean).abs().max() > 1e-3
    torch.testing.assert_close(found.exp().sum(1), torch.ones(len(x)))


def test_draws_without_deviation_are_the_mean_network_also_for_maps() -> None:
    network = build("unet8", 1, 3, 2).eval()
    x = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    draws = [{name: dict(network.named_parameters())[name] for name in gaussian_names(network)}] * 4
    with torch.no_grad():
        torch.testing.assert_close(
            Averaged(network, draws)(x), network(x).log_softmax(1), rtol=1e-4, atol=1e-5
        )


def test_the_mean_probability_of_a_single_output() -> None:
    """Biases ln 3 and -ln 3, weight 0: probabilities 3/4 and 1/4 of class 1, then 3/4 and 3/4; logits 0 and ln 3."""
    network = nn.Linear(2, 1)
    three = math.log(3)
    for biases, logit in (((three, -three), 0.0), ((three, three), three)):
        draws = [{"weight": torch.zeros(1, 2), "bias": torch.tensor([bias])} for bias in biases]
        found = Averaged(network, draws)(torch.ones(4, 2))
        assert found.shape == (4, 1)
        torch.testing.assert_close(found, torch.full((4, 1), logit))


def test_draws_are_refused_where_there_are_no_classes(classes: Toy) -> None:
    site = replace(classes.site("a"), task=Task("other"))
    METHOD.check(site)
    with pytest.raises(
        InputError, match="draws=3 for method 'pfedbayes' on a task without classes"
    ):
        load("pfedbayes", draws=3).check(site)


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning"
)  # of the number of outputs, which is the same for all
def test_draws_can_be_recorded(classes: Toy) -> None:
    """As TorchScript; and beside the mean weights nothing is in the state dict."""
    method, x = load("pfedbayes", draws=2), classes.data["a"][0]
    outcome = simulate(method, classes)
    with classes.networks.scope(), torch.no_grad():
        predictor = method.predictor(
            classes.site("a"), outcome.states["a"], outcome.down["a"]
        ).eval()
        assert list(predictor.state_dict()) == [f"network.{name}" for name in classes.initial]
        recorded: Any = torch.jit.trace(predictor, x[:2])
        assert torch.equal(recorded(x), predictor(x))


# As a whole


def test_with_mixed_precision_it_stays_finite(classes: Toy) -> None:
    toy = replace(classes, amp=True, optimizer=sgd(0.01))
    outcome = simulate(METHOD, toy, 2)
    for tensors in (*outcome.server.values(), *(s["rho"] for s in outcome.states.values())):
        assert all(
            t.isfinite().all() and t.dtype in (torch.float32, torch.int64) for t in tensors.values()
        )


def test_sites_part_from_each_other() -> None:
    """Two sites with opposite labels: each mean serves its own data."""
    x, y = blobs({"a": 60})["a"]
    toy = Toy(
        {"a": (x, y), "b": (x, 2 - y)},
        classifier(),
        cross_entropy,
        sgd(0.01),
        epochs=2,
        batch_size=20,
    )
    outcome = simulate(load("pfedbayes", zeta=0.1), toy, 8)
    for name, other in (("a", "b"), ("b", "a")):
        with toy.networks.scope():
            losses = [
                cross_entropy(
                    toy.site(name).model(outcome.states[one]["personal"])(x), toy.data[name][1]
                ).item()
                for one in (name, other)
            ]
        assert losses[0] < 0.5 < 1.5 < losses[1]


def test_a_layer_with_several_names_keeps_its_mean() -> None:
    """MONAI's DynUNet has each layer in two places: a pass with drawn weights leaves the mean in both."""
    layer = nn.Linear(3, 3)
    tied = nn.Linear(3, 3)
    tied.weight = layer.weight
    network = nn.Sequential(layer, nn.Sequential(layer, tied))
    before = snapshot(network)
    names = gaussian_names(network)
    rho = {name: torch.zeros_like(before[name]) for name in names}
    q = Gaussian(network, rho, torch.Generator().manual_seed(0))
    output = q(torch.ones(1, 3))
    assert bits(snapshot(network)) == bits(before)

    q.noise.manual_seed(0)
    drawn = q.drawn()
    x = torch.ones(1, 3)
    for bias in ("0.bias", "0.bias", "1.1.bias"):
        x = x @ drawn["0.weight"].T + drawn[bias]

    torch.testing.assert_close(output, x)
