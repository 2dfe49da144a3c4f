"""The local loop against loops written out by hand, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import RunError
from medfl.core.seeding import stream
from medfl.storage.files import load_state, save_state
from medfl.training import site as training
from medfl.training.site import FitReport, Site, fit, pull, snapshot, summed
from tests.support.toy import (
    Toy,
    adam,
    bits,
    blobs,
    classifier,
    cross_entropy,
    half_square,
    linear,
    regression,
    sgd,
)

OPTIMIZERS = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, momentum=0.9),
    "decay": sgd(0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": adam(0.01),
}


def make(**changes) -> Toy:
    settings = {
        "network": classifier(),
        "loss": cross_entropy,
        "optimizer": sgd(0.1),
        "batch_size": 4,
        "epochs": 2,
    }
    return Toy(blobs({"a": 10}), **{**settings, **changes})


def by_hand(toy: Toy, site: Site, factor: float = 1.0) -> tuple[dict[str, Tensor], list[float]]:
    """Shuffle each epoch with the stream's generator, then zero, forward, backward, step."""
    x, y = toy.data[site.name]
    network = toy.networks.fresh().train()
    optimizer = toy.optimizer(network)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    losses = []
    with stream(site.seed, "local") as generator:
        for _ in range(toy.epochs):
            for chunk in torch.randperm(len(x), generator=generator).split(toy.batch_size):
                optimizer.zero_grad()
                loss = toy.loss(network(x[chunk]), y[chunk])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return snapshot(network), losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "network", [classifier(), classifier(norm=True, dropout=0.4)], ids=["plain", "norm-dropout"]
)
def test_it_is_the_plain_loop_bit_for_bit(optimizer, network) -> None:
    toy = make(optimizer=optimizer, network=network)
    site = toy.site("a")
    model = site.model(toy.initial)
    report = fit(model, site)
    expected, losses = by_hand(toy, site)
    assert bits(snapshot(model)) == bits(expected)
    assert report.steps == len(losses) == 6
    assert report.loss == pytest.approx(sum(losses) / 6, rel=1e-6)
    assert report.optimizer_state is None
    assert site.journal == [report]


def test_one_step_by_hand() -> None:
    """One item x = (1, 2, 0), y = 3, w = 0, f(w) = (w.x - y)^2 / 2.

    The gradient is (w.x - y) x = -3 (1, 2, 0); with rate 0.1 the new w is (0.3, 0.6, 0); the loss was 9 / 2.
    """
    data = {"a": (torch.tensor([[1.0, 2, 0]]).double(), torch.tensor([3.0]).double())}
    toy = Toy(data)
    site = toy.site("a")
    model = site.model({"weight": torch.zeros(1, 3).double()})
    report = fit(model, site)
    assert model.weight[0].tolist() == pytest.approx([0.3, 0.6, 0], abs=1e-15)
    assert (report.loss, report.steps) == (4.5, 1)


def test_the_learning_rate_is_multiplied() -> None:
    toy = make(optimizer=sgd(0.1, momentum=0.9), lr_decay=0.5)
    site = toy.site("a", 3)
    model = site.model(toy.initial)
    fit(model, site)
    assert bits(snapshot(model)) == bits(by_hand(toy, site, factor=0.25)[0])
    assert bits(snapshot(model)) != bits(by_hand(toy, site)[0])


def test_the_same_purpose_sees_the_same_batches_and_another_one_others() -> None:
    toy = make(network=classifier(dropout=0.5))
    site = toy.site("a")

    def seen(purpose: str) -> tuple[list, list]:
        batches: list[Tensor] = []

        def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            batches.append(x)
            return cross_entropy(model(x), y)

        torch.rand(7)  # the global state must not matter
        model = site.model(toy.initial)
        fit(model, site, objective=objective, purpose=purpose)
        return bits(batches), bits(snapshot(model))

    assert seen("one") == seen("one")
    assert seen("one")[0] != seen("two")[0]
    assert len(site.journal) == 4


def test_every_epoch_has_every_item_once_in_another_order() -> None:
    toy = make(epochs=3)
    seen: list[Tensor] = []

    def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(x)
        return cross_entropy(model(x), y)

    site = toy.site("a")
    fit(site.model(toy.initial), site, objective=objective)
    assert [len(x) for x in seen] == [4, 4, 2] * 3
    epochs = [torch.cat(seen[i : i + 3]) for i in (0, 3, 6)]
    assert all(
        torch.equal(epoch.sort(0).values, toy.data["a"][0].sort(0).values) for epoch in epochs
    )
    assert not torch.equal(epochs[0], epochs[1])


# Hooks


def test_the_hook_sees_this_steps_gradients_before_the_step() -> None:
    toy = make(epochs=1, batch_size=10)
    site = toy.site("a")
    model = site.model(toy.initial)
    weights_then: list = []

    def hook(parameters) -> None:
        assert [id(p) for p in parameters] == [id(p) for p in model.parameters()]
        weights_then.append(bits(snapshot(model)))
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)

    fit(model, site, gradient_hook=hook)
    assert weights_then == [bits(toy.initial)]
    expected = {name: t.add(torch.ones_like(t), alpha=-0.1) for name, t in toy.initial.items()}
    assert bits(snapshot(model)) == bits(expected)


def test_gradients_never_pile_up_not_even_of_parameters_the_optimiser_leaves_out() -> None:
    toy = make(
        optimizer=lambda network: torch.optim.SGD(network[4].parameters(), 0.0),
        batch_size=10,
        epochs=3,
    )
    site = toy.site("a")
    model = site.model(toy.initial)
    seen: list[Tensor] = []
    fit(model, site, gradient_hook=lambda parameters: seen.append(parameters[0].grad.clone()))
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(seen[2], seen[0])


def test_frozen_parameters_stay_and_are_not_shown_to_the_hook() -> None:
    toy = make()
    site = toy.site("a")
    model = site.model(toy.initial)
    model[0].requires_grad_(False)
    shown: list = []
    fit(model, site, gradient_hook=lambda parameters: shown.append(len(parameters)))
    assert set(shown) == {2}
    assert torch.equal(model[0].weight, toy.initial["0.weight"])
    assert not torch.equal(model[4].weight, toy.initial["4.weight"])


def test_pull_adds_the_gradient_of_the_squared_distance() -> None:
    """The gradient of (s/2) ||w - a||^2 is s (w - a); computed here by autograd in float64."""
    network = linear()
    anchor = {"weight": torch.tensor([[1.0, -2.0, 0.5]]).double()}
    hook = pull(network, anchor, 0.7)
    (0.35 * (network.weight - anchor["weight"]).square().sum()).backward()
    expected = network.weight.grad.clone() + 1
    network.weight.grad = torch.ones_like(network.weight)
    hook(list(network.parameters()))
    torch.testing.assert_close(network.weight.grad, expected, rtol=1e-15, atol=1e-15)


def test_pull_copies_its_anchor_and_skips_parameters_without_gradient() -> None:
    network = classifier()()
    hook = pull(network, dict(network.named_parameters()), 1.0)
    before = snapshot(network)
    with torch.no_grad():
        network[4].bias.add_(2)
    network[4].bias.grad = torch.zeros(3)
    hook(list(network.parameters()))
    torch.testing.assert_close(network[4].bias.grad, network[4].bias.detach() - before["4.bias"])
    assert network[0].weight.grad is None


def test_a_pull_of_strength_zero_keeps_every_bit() -> None:
    network = linear()
    hook = pull(network, {"weight": network.weight - 1}, 0.0)
    network.weight.grad = torch.tensor([[-0.0, 0.0, 1.0]]).double()
    before = bits(network.weight.grad)
    hook(list(network.parameters()))
    assert bits(network.weight.grad) == before


# Feeds


def noisy(seed: int = 0) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """A feed that doubles the inputs and draws two more tensors a step."""
    draws = torch.Generator().manual_seed(seed)
    return lambda x, y: (
        2 * x,
        y,
        torch.randn(x.shape, generator=draws),
        torch.rand(len(x), generator=draws),
    )


def with_noise(model: nn.Module, x: Tensor, y: Tensor, noise: Tensor, factors: Tensor) -> Tensor:
    return (factors * cross_entropy(model(x + noise), y, reduction="none")).mean()


def test_what_a_feed_adds_reaches_the_objective() -> None:
    """Against an objective that makes it of the plain batch itself."""
    site, again = make().site("a"), noisy()
    fed, written = site.model(make().initial), site.model(make().initial)
    report = fit(fed, site, objective=with_noise, feed=noisy())
    expected = fit(written, site, objective=lambda net, x, y: with_noise(net, *again(x, y)))
    assert bits(snapshot(fed)) == bits(snapshot(written))
    assert report == expected


def test_a_penalty_has_the_targets_of_a_batch_with_more_tensors() -> None:
    site, seen = make().site("a"), list[Tensor]()

    def penalty(features: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets)
        return 0 * features.sum()

    fit(
        site.model(make().initial),
        replace(site, penalty=penalty),
        objective=with_noise,
        feed=noisy(),
    )
    with stream(site.seed, "local") as generator:
        expected = [y for _ in range(2) for _, y in site.train.batches(4, generator)]
    assert bits(seen) == bits(expected)


# What a site adds to the loss


def test_a_penalty_is_added_to_the_loss_of_each_step() -> None:
    """Written out: 0.1 sum of the squared features of the items of class 1, where features are what enters the head."""
    toy = make(optimizer=sgd(0.1, momentum=0.9))

    def penalty(features: Tensor, targets: Tensor) -> Tensor:
        return 0.1 * features[targets == 1].square().sum()

    def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y) + penalty(model[:4](x), y)

    site = toy.site("a")
    added, written = site.model(toy.initial), site.model(toy.initial)
    report = fit(added, replace(site, penalty=penalty))
    expected = fit(written, site, objective=objective)
    torch.testing.assert_close(snapshot(added), snapshot(written))
    assert report.loss == pytest.approx(expected.loss)
    plain = site.model(toy.initial)
    assert fit(plain, site).loss < report.loss
    assert not any(module._forward_pre_hooks for module in added.modules())


def test_a_penalty_sees_the_first_pass_of_any_objective() -> None:
    """Two networks and two passes: the features are those of the trained network's first."""
    toy = make(batch_size=10, epochs=1)
    site = toy.site("a")
    model, reference = site.model(toy.initial), site.model(toy.initial)
    seen: list[Tensor] = []

    def objective(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(reference(5 * x) + network(x) + network(2 * x), y)

    def penalty(features: Tensor, targets: Tensor) -> Tensor:
        seen.extend([features.detach(), targets])
        return features.sum()

    inputs, targets = toy.data["a"]
    fit(model, replace(site, penalty=penalty), objective=objective)
    features, labels = seen
    before = toy.networks.fresh()[:4](inputs)
    torch.testing.assert_close(features.sort(0).values, before.sort(0).values)
    assert sorted(labels.tolist()) == sorted(targets.tolist())


def test_a_penalty_that_is_no_number_is_told() -> None:
    toy = make()
    site = replace(toy.site("a"), penalty=lambda features, targets: features.sum() / 0)
    with pytest.raises(RunError, match="the training loss is .* at step 1"):
        fit(site.model(toy.initial), site)


# Damage


@pytest.mark.parametrize(
    ("value", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")]
)
def test_a_loss_that_is_no_number_names_site_round_and_step(value: float, text: str) -> None:
    toy, calls = make(epochs=2), []

    def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        loss = cross_entropy(model(x), y)
        return loss * value if len(calls) == 5 else loss

    site = toy.site("a", 7)
    with pytest.raises(
        RunError, match=rf"site 'a', round 7: the training loss is {text} at step 5"
    ):
        fit(site.model(toy.initial), site, objective=objective)


def test_a_diverging_site_is_stopped_at_the_end_of_the_epoch() -> None:
    toy = Toy(regression({"a": 6}), optimizer=sgd(1e200), epochs=50)
    site = toy.site("a")
    calls: list[int] = []

    def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return half_square(model(x), y)

    with pytest.raises(RunError, match="at step"):
        fit(site.model(toy.initial), site, objective=objective)
    assert len(calls) < 5


# One sample


def test_a_last_batch_of_one_sample_passes_batch_norm() -> None:
    """BatchNorm1d cannot take one row: it uses its running statistics then, and trains on as before."""
    toy = Toy(blobs({"a": 5}), classifier(norm=True), cross_entropy, sgd(0.1), batch_size=4)
    site = toy.site("a")
    model = site.model(toy.initial)
    report = fit(model, site)
    assert report.steps == 2
    assert int(model[1].num_batches_tracked) == 1
    assert all(module.training for module in model.modules())
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_one_image_is_enough_for_batch_norm_over_its_pixels() -> None:
    """A single image has many values per channel: the layer works as in plain PyTorch, its statistics move."""

    def network() -> nn.Module:
        pixels, pooled = (
            [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)],
            [nn.AdaptiveAvgPool2d(1), nn.Flatten()],
        )
        return nn.Sequential(*pixels, *pooled, nn.BatchNorm1d(2), nn.Linear(2, 3))

    generator = torch.Generator().manual_seed(0)
    data = {"a": (torch.randn(3, 1, 8, 8, generator=generator), torch.tensor([0, 1, 2]))}
    toy = Toy(data, network, cross_entropy, sgd(0.1), batch_size=1)
    site = toy.site("a")
    model = site.model(toy.initial)
    fit(model, site)
    assert int(model[1].num_batches_tracked) == 3
    assert not torch.equal(model[1].running_mean, toy.initial["1.running_mean"])
    assert int(model[4].num_batches_tracked) == 0
    assert all(module.training for module in model.modules())


def test_layers_return_to_training_after_an_error_with_one_sample() -> None:
    toy = Toy(blobs({"a": 1}), classifier(norm=True), lambda output, target: 1 / 0, sgd(0.1))
    site = toy.site("a")
    model = site.model(toy.initial)
    with pytest.raises(ZeroDivisionError):
        fit(model, site)
    assert model[1].training
    assert not model[1]._forward_pre_hooks


# Optimiser state


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_continuing_the_optimiser_equals_one_long_run(optimizer, tmp_path) -> None:
    """Two calls of two epochs, the state saved between, equal four epochs (with one item the order is no matter)."""
    data = blobs({"a": 1})
    long, short = (Toy(data, classifier(), cross_entropy, optimizer, epochs=n) for n in (4, 2))
    expected = long.site("a").model(long.initial)
    fit(expected, long.site("a"))
    site = short.site("a")
    model = site.model(short.initial)
    first = fit(model, site, optimizer_state={})
    save_state(tmp_path / "state", first.optimizer_state)
    state = load_state(tmp_path / "state")
    fit(model, replace(site, journal=[]), optimizer_state=state)
    assert bits(snapshot(model)) == bits(snapshot(expected))
    assert bits(state) == bits(first.optimizer_state), "a State given must not be changed"


def test_without_its_state_the_optimiser_starts_afresh() -> None:
    toy = make(optimizer=sgd(0.1, momentum=0.9))
    site = toy.site("a")
    kept, fresh = site.model(toy.initial), site.model(toy.initial)
    state = fit(kept, site, optimizer_state={}).optimizer_state
    fit(fresh, site)
    assert bits(snapshot(kept)) == bits(snapshot(fresh))
    fit(kept, site, optimizer_state=state)
    fit(fresh, site)
    assert bits(snapshot(kept)) != bits(snapshot(fresh))


def test_mixed_precision_on_the_cpu_computes_in_bfloat16() -> None:
    outputs: list[torch.dtype] = []

    def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs.append((output := model(x)).dtype)
        return cross_entropy(output.float(), y)

    for amp in (False, True):
        toy = make(amp=amp, epochs=1)
        site = toy.site("a")
        model = site.model(toy.initial)
        assert fit(model, site, objective=objective).loss > 0
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert outputs == [torch.float32] * 3 + [torch.bfloat16] * 3


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> list[torch.amp.GradScaler]:
    """A scale of the loss at which float32 gradients overflow, as 2^16 does in float16 on a GPU."""
    made: list[torch.amp.GradScaler] = []

    def scaler(site: Site) -> torch.amp.GradScaler:
        made.append(torch.amp.GradScaler("cpu", init_scale=2.0**120))
        return made[-1]

    monkeypatch.setattr(training, "gradient_scaler", scaler)
    return made


def test_a_batch_whose_scaled_gradients_overflow_is_trained_on(overflowing, monkeypatch) -> None:
    """And the hook reads the gradients of the plain loop: a power of two takes nothing of a float32 away."""
    seen: list[list[Tensor]] = []
    results = []
    for amp in (True, False):
        toy = make(
            network=classifier(norm=True, dropout=0.4),
            loss=lambda z, y: 4096 * cross_entropy(z, y),
            optimizer=sgd(1e-4),
        )
        site = toy.site("a")
        if not amp:
            monkeypatch.undo()
        model, read = site.model(toy.initial), []
        report = fit(
            model, site, gradient_hook=lambda ps, read=read: read.extend(p.grad.clone() for p in ps)
        )
        seen.append(read)
        results.append((bits(snapshot(model)), report.steps, report.loss))
    assert overflowing[0].get_scale() < 2.0**120
    assert all(gradient.isfinite().all() for gradient in seen[0])
    assert bits(seen[0]) == bits(seen[1])
    assert results[0] == results[1]


def test_a_hook_reads_plain_gradients_of_parameters_that_the_optimiser_leaves_out_too(
    overflowing, monkeypatch
) -> None:
    def first_layer(network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(network.parameters())[:2], 1e-4)

    seen: list[list[Tensor]] = []
    for amp in (True, False):
        toy = make(optimizer=first_layer, epochs=1)
        if not amp:
            monkeypatch.undo()
        read: list[Tensor] = []
        fit(
            toy.site("a").model(toy.initial),
            toy.site("a"),
            gradient_hook=lambda ps, read=read: read.extend(p.grad.clone() for p in ps),
        )
        seen.append(read)
    assert len(overflowing) == 1
    assert len(seen[0]) > 2
    assert bits(seen[0]) == bits(seen[1])


def test_gradients_that_no_scale_makes_finite_end_the_run_by_name(overflowing) -> None:
    toy = make(loss=lambda output, y: (output * float("inf")).sum())
    site = toy.site("a")
    with pytest.raises(
        RunError, match=r"site 'a', round 1: gradients in float16 are not finite at any scale"
    ):
        fit(site.model(toy.initial), site)


def test_some_calls_together_are_all_their_steps_and_the_mean_over_these() -> None:
    nothing, some, more = (
        FitReport(0, float("nan")),
        FitReport(2, 1.0),
        FitReport(6, 3.0),
    )
    assert summed([nothing, some, more]) == FitReport(8, 2.5)
    assert math.isnan(summed([nothing]).loss)
    assert math.isnan(summed([]).loss)
