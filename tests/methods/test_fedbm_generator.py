"""FedBM's generator at work: in a site's step, in training by the server, with all conditions and classifiers.

Numbers in brackets are the checks of the method's card; the network, its augmentation and its losses are in
networks/test_generator.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.core.seeding import derive, stream
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods._parts.text_classifier import TextGaussians
from medfl.methods.fedbm import FedBM
from medfl.networks import build
from medfl.networks.generator import Augmentation, Generator, diversity_loss, statistics_gap
from medfl.networks.heads import features_and_output, frozen, head
from medfl.training.site import fit
from tests.support.grey_squares import EMBEDDINGS, QUICK, federation, quick, run
from tests.support.toy import Toy, adam, bits, cross_entropy, prompts, sgd, simulate

# The site's step


def test_a_step_is_one_forward_of_real_and_synthetic_images() -> None:
    """Check 16: B = 8, G = 16: 24 rows, the mean of 24 losses; BatchNorm's statistics follow the mixed batch."""
    method = quick(synthetic_batch=16)
    toy = federation(method, batch_size=8, optimizer=sgd(0.0))
    toy.data = {"a": tuple(part[:8] for part in toy.data["a"])}
    outcome = simulate(method, toy, 1)
    state = {**outcome.states["a"], "generator": outcome.server["generator"], "version": 1}
    state |= dict(zip(("channels", "height", "width"), outcome.server["image"], strict=True))
    rows, losses = [], []

    def objective(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        rows.append((x.clone(), y.clone()))
        features, _ = features_and_output(net, x)
        each = head(net).gaussians.surrogate(head(net).unit(features), y)
        losses.append(each.detach())
        return each.mean()

    site = toy.site("a", 2)
    with toy.networks.scope():
        model = site.model(outcome.server["weights"])
        report = fit(model, site, objective=objective, feed=method.mixing(site, state))
        counter = int(model[1].num_batches_tracked)
    (x, y), start = rows[0], outcome.server["weights"]
    assert x.shape == (24, 1, 16, 16)
    assert sorted(y[:8].tolist()) == sorted(toy.data["a"][1].tolist())
    assert report.loss == pytest.approx(losses[0].mean().item(), rel=1e-6)
    assert losses[0].shape == (24,)
    assert counter == int(start["1.num_batches_tracked"]) + 1, "one forward pass"
    before = nn.functional.conv2d(x, start["0.weight"], start["0.bias"], 2, 1)
    mean = 0.9 * start["1.running_mean"] + 0.1 * before.mean((0, 2, 3))
    torch.testing.assert_close(model[1].running_mean, mean)


def _synthetic(method: FedBM, epochs: int = 1, round_: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Collect the synthetic rows of each step of site c."""
    toy = federation(method, epochs=epochs)
    outcome = simulate(method, toy, 1)
    state = {**outcome.states["c"], "generator": outcome.server["generator"], "version": 1}
    state |= dict(zip(("channels", "height", "width"), outcome.server["image"], strict=True))
    kept = bits(state)
    rows: list[tuple[Tensor, Tensor]] = []

    def objective(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert not x.requires_grad
        real = len(x) - method.synthetic_batch
        rows.append((x[real:].clone(), y[real:].clone()))
        return net(x).square().mean()

    site = toy.site("c", round_)
    with toy.networks.scope():
        fit(
            site.model(outcome.server["weights"]),
            site,
            objective=objective,
            feed=method.mixing(site, state),
        )
    assert bits(state) == kept, "check 11: the site's generator is used, never changed"
    return rows


def test_synthetic_images_are_fresh_each_step_of_all_classes_and_of_the_generator() -> None:
    """Check 11; labels uniform over all classes, also those that a site lacks."""
    method = quick(synthetic_batch=64)
    rows = _synthetic(method)
    labels = torch.cat([y for _, y in rows])
    assert len(rows) == 3
    assert len(labels) == 192
    assert set(labels.tolist()) == {0, 1, 2}
    assert 40 < min(torch.bincount(labels)) <= max(torch.bincount(labels)) < 90
    assert all(x.abs().max() <= 1 for x, _ in rows), (
        "of a sigmoid, normalised by mean and deviation 0.5"
    )
    assert not torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(rows[0][0], _synthetic(method)[0][0])
    assert not torch.equal(rows[0][0], _synthetic(method, round_=3)[0][0])


def test_a_pool_per_round_is_the_same_in_every_local_epoch() -> None:
    method = quick(synthetic_batch=5, pool_per_round=True)
    rows = _synthetic(method, epochs=2)
    assert len(rows) == 6
    assert bits(rows[:3]) == bits(rows[3:])
    assert not torch.equal(rows[0][0], rows[1][0])
    fresh = _synthetic(quick(synthetic_batch=5), epochs=2)
    assert bits(fresh[:3]) == bits(rows[:3])
    assert bits(fresh[3:]) != bits(rows[3:])


def test_a_pool_begins_again_after_each_pass_of_four_steps_and_no_sooner() -> None:
    method = quick(synthetic_batch=5, pool_per_round=True)
    site, state = federation(method).site("c", 2), run(method, 2).states["c"]
    site = replace(site, settings=replace(site.settings, batch_size=2))
    site = replace(site, train=replace(site.train, indices=torch.arange(7)))
    mix, x, y = method.mixing(site, state), torch.zeros(1, 1, 16, 16), torch.zeros(1).long()
    made = [mix(x, y)[0][1:] for _ in range(9)]
    assert bits(made[:4]) == bits(made[4:8])
    assert torch.equal(made[8], made[0])
    assert len({str(bits([one])) for one in made}) == 4


def test_what_is_mixed_in_is_the_generator_in_evaluation_mode() -> None:
    """Rebuilt from the parts: draws from the site's own stream, running statistics, no gradient."""
    method = quick()
    rows = _synthetic(method)
    outcome = run(method, 1)
    generator = Generator(12, 1, 16, 16)
    generator.load_state_dict(outcome.server["generator"])
    generator.eval()
    site = federation(method).site("c", 2)
    draws = torch.Generator().manual_seed(derive(site.seed, "synthetic"))
    labels = torch.randint(3, (4,), generator=draws)
    z = TextGaussians.of(EMBEDDINGS, 12.5, "full").draw(labels, draws)
    with torch.no_grad():
        expected = Augmentation((0.5,), (0.5,))(generator(z), draws)
    assert torch.equal(rows[0][0], expected)
    assert torch.equal(rows[0][1], labels)
    with torch.no_grad():
        assert not torch.equal(generator.train()(z), generator.eval()(z))


# The server's step


def _teacher(method: FedBM, weights: dict[str, Tensor], toy: Toy) -> nn.Module:
    return frozen(toy.host().model(weights))


def test_the_generator_step_leaves_the_global_model_untouched() -> None:
    """Check 10: weights, running statistics and counters bitwise equal, no gradients; the generator moves."""
    method, seen = quick(), []
    toy = federation(method)

    class Watching(FedBM):
        def generator_loss(self, teacher, images, z, labels, augment):
            loss = super().generator_loss(teacher, images, z, labels, augment)
            seen.append(
                (
                    bits(dict(teacher.state_dict())),
                    [p.grad for p in teacher.parameters()],
                    teacher.training,
                )
            )
            assert not any(p.requires_grad for p in teacher.parameters())
            assert images.requires_grad
            assert not z.requires_grad
            return loss

    watching = Watching(**{**QUICK, "g_iterations": 3})
    outcome = simulate(watching, toy, 1)
    average = simulate(load("fedcb", covariance="diag"), toy, 1)
    kept = bits(outcome.server["weights"])
    assert kept == bits(average.server["weights"])
    assert len(seen) == 3
    for state, gradients, training in seen:
        assert state == kept
        assert gradients == [None] * len(gradients)
        assert not training
    longer = simulate(quick(g_iterations=4), toy, 1).server["generator"]
    for name in ("linear.weight", "body.0.weight", "body.1.running_mean", "body.19.bias"):
        assert not torch.equal(longer[name], outcome.server["generator"][name])
    assert int(longer["body.1.num_batches_tracked"]) == 4, "train mode"


def test_training_starts_from_the_last_generator_with_a_fresh_adam() -> None:
    """The first Adam step moves every weight by the rate, whatever came before."""
    method = quick(g_iterations=1, g_lr=1e-3)
    outcome = run(method, 3)
    generators = [state["generator"] for state in outcome.history[1:]]
    for before, after in zip(generators, generators[1:], strict=False):
        moved = (after["linear.weight"] - before["linear.weight"]).abs()
        assert moved.max() < 1.01e-3
        assert moved.median() > 0.9e-3


def test_the_generator_loss_is_the_sum_of_its_parts() -> None:
    """Eq. 10; check 17: without diversity and distance it is L_sem, the cross-entropy of tau-scaled logits."""
    toy = federation(quick())
    teacher = _teacher(quick(), toy.initial, toy)
    draws = torch.Generator().manual_seed(0)
    x = torch.rand(6, 1, 16, 16, generator=draws)
    z, labels = torch.randn(6, 12, generator=draws), torch.tensor([0, 1, 2, 0, 0, 1])

    def same(values: Tensor) -> Tensor:
        return values

    def loss(**options: object) -> float:
        return quick(**options).generator_loss(teacher, x, z, labels, same).item()

    semantic = cross_entropy(teacher(x), labels).item()
    assert loss(lambda_div=0, lambda_dis=0) == pytest.approx(semantic, rel=1e-6)
    features, _ = features_and_output(teacher, x)
    full = head(teacher).gaussians.surrogate(head(teacher).unit(features), labels).mean().item()
    assert loss(lambda_div=0, lambda_dis=0, semantic_loss="surrogate") == pytest.approx(
        full, rel=1e-6
    )
    assert full > semantic
    diversity = diversity_loss(x, z, labels, 3).item()
    assert loss(lambda_div=2, lambda_dis=0) == pytest.approx(semantic + 2 * diversity, rel=1e-5)
    with statistics_gap(teacher) as gaps:
        teacher(x)
    assert len(gaps) == 1
    assert loss(lambda_div=0, lambda_dis=3) == pytest.approx(
        semantic + 3 * gaps[0].item(), rel=1e-5
    )
    head(teacher).unscaled_evaluation = True
    assert loss(lambda_div=0, lambda_dis=0) == pytest.approx(semantic, rel=1e-6), (
        "tau also where tests leave it out"
    )


def test_the_diversity_loss_sees_images_before_augmentation() -> None:
    toy = federation(quick())
    teacher, z, labels = (
        _teacher(quick(), toy.initial, toy),
        torch.randn(4, 12),
        torch.zeros(4, dtype=torch.int64),
    )
    x = torch.rand(4, 1, 16, 16)
    with_it, without = (
        quick(lambda_div=weight, lambda_dis=0)
        .generator_loss(teacher, x, z, labels, lambda v: 0 * v)
        .item()
        for weight in (1000, 0)
    )
    assert with_it - without == pytest.approx(
        1000 * diversity_loss(x, z, labels, 3).item(), rel=1e-5
    )


def test_a_resnet18_has_20_layers_in_the_distance() -> None:
    """Check 13, through the method: L_dis hooks are removed after each call."""
    task = Task("classification", ("p", "q", "r"), prompts)
    with torch.random.fork_rng():
        teacher = frozen(quick().adapt(build("resnet18", 1, 3), task))
    x, z, labels = torch.rand(3, 1, 32, 32), torch.randn(3, 12), torch.arange(3)
    with statistics_gap(teacher) as gaps:
        teacher(x)
    assert len(gaps) == 20
    plain, more = (
        quick(lambda_div=0, lambda_dis=d).generator_loss(teacher, x, z, labels, lambda v: v).item()
        for d in (0, 1)
    )
    assert more - plain == pytest.approx(float(torch.stack(gaps).sum()), rel=1e-4)
    assert not any(m._forward_pre_hooks for m in teacher.modules())


@pytest.mark.slow
def test_generated_images_come_to_be_seen_as_their_class() -> None:
    """80 steps against a trained teacher: the generator learns what the teacher takes for each class."""
    method = quick(g_start=8, g_every=100, g_iterations=80, g_batch=16, g_lr=5e-3, lambda_div=0.0)
    toy = federation(method, optimizer=adam(0.02), epochs=2)
    outcome = simulate(method, toy, 8)
    generator = Generator(12, 1, 16, 16)
    generator.load_state_dict(outcome.server["generator"])
    labels = torch.arange(60) % 3
    z = TextGaussians.of(EMBEDDINGS, 12.5).draw(labels, torch.Generator().manual_seed(9))
    with torch.no_grad(), toy.networks.scope():
        teacher = _teacher(method, outcome.server["weights"], toy)
        x, y = toy.data["c"]
        assert (teacher(x).argmax(1) == y).double().mean() > 0.9
        seen = teacher((generator.eval()(z) - 0.5) / 0.5).argmax(1)
    assert (seen == labels).double().mean() > 0.7


# Conditions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dimension"),
    [
        ({}, 12),
        ({"condition": "noise"}, 12),
        ({"condition": "noise+onehot"}, 15),
        ({"z_covariance": "diag"}, 12),
    ],
)
def test_conditions(options: dict, dimension: int) -> None:
    """A run with each learns: at its best round the model tells the three brightnesses apart."""
    method = quick(g_every=2, synthetic_batch=2, **options)
    toy = federation(method, optimizer=adam(0.02), epochs=2)
    outcome = simulate(method, toy, 8)
    assert outcome.server["generator"]["linear.weight"].shape == (128, dimension)
    assert outcome.server["version"] == 4
    x, y = (torch.cat(parts) for parts in zip(*toy.data.values(), strict=True))
    right = []
    for server in outcome.history[2:]:
        with toy.networks.scope(), torch.no_grad():
            network = method.global_predictor(toy.host(), server).eval()
            right.append((network(x).argmax(1) == y).double().mean().item())
    assert max(right) > 0.9


def test_noise_knows_no_label_and_onehot_does() -> None:
    """noise: z ~ N(0, I) and y independent of it; noise+onehot: the same z with the label's unit vector behind it."""
    labels = torch.arange(3000) % 3
    draws = torch.Generator()
    for kind in ("noise", "noise+onehot"):
        z = (
            quick(condition=kind)
            ._source(Task(), EMBEDDINGS, draws.manual_seed(0))
            .conditions(labels)
        )
        noise = z[:, :12]
        assert (noise.T.cov() - torch.eye(12)).abs().max() < 0.1
        assert max(noise[labels == c].mean(0).abs().max() for c in range(3)) < 0.12
        assert torch.equal(
            z[:, 12:], nn.functional.one_hot(labels, 3).float()[:, : z.shape[1] - 12]
        )
    concept = quick()._source(Task(), EMBEDDINGS, draws.manual_seed(0)).conditions(labels)
    assert torch.equal(torch.cdist(concept, EMBEDDINGS.mean(1)).argmin(1), labels)


@pytest.mark.parametrize("classifier", ["trainable", "random_frozen", "text_mean"])
def test_the_generator_works_with_every_classifier(classifier: str) -> None:
    """Ablation without the text classifier: L_sem is the plain cross-entropy of that head; z still comes from text."""
    method = quick(classifier=classifier)
    toy = federation(method)
    outcome = simulate(method, toy, 2)
    reference = simulate(replace(method, generator=False), toy, 2)
    assert bits(outcome.history[1]["weights"]) == bits(reference.history[1]["weights"])
    assert bits(outcome.server["weights"]) != bits(reference.server["weights"])
    moved = not torch.equal(outcome.server["weights"]["5.weight"], toy.initial["5.weight"])
    assert moved is (classifier != "random_frozen")
    assert bits(outcome.states["a"]["embeddings"]) == bits(EMBEDDINGS)


# Where z, augmentations and draws come from


@pytest.mark.parametrize(("covariance", "off_diagonal"), [("full", True), ("diag", False)])
def test_the_covariance_of_z(covariance: str, off_diagonal: bool) -> None:
    """Sigma_y + 1e-4 I, or its diagonal."""
    embeddings = torch.tensor([[[1.0, 0, 0], [0, 1, 0]], [[0, 0.6, 0.8], [0, 0.8, 0.6]]])
    source = quick(z_covariance=covariance)._source(
        Task(), embeddings, torch.Generator().manual_seed(0)
    )
    z = source.conditions(torch.zeros(40_000, dtype=torch.int64))
    expected = torch.cov(embeddings[0].T)
    assert expected[0, 1] == -0.5
    expected = (expected if off_diagonal else expected.diag().diag()) + 1e-4 * torch.eye(3)
    torch.testing.assert_close(torch.cov(z.T), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(("augment", "crops"), [("batch", 1), ("image", 20)])
def test_one_crop_for_all_images_or_for_each(augment: str, crops: int) -> None:
    """At the server, which draws places, and at a site."""
    source = quick(augment=augment)._source(Task(), EMBEDDINGS, torch.Generator().manual_seed(0))
    places = source.positions(20, [1, 16, 16], torch.device("cpu"))
    assert len(places) == crops
    image = torch.arange(256.0).reshape(1, 1, 16, 16).expand(20, 1, 16, 16)
    assert (len({bits(row) for row in source.augment(image)}) > 1) is (crops > 1)


def test_each_training_of_the_generator_has_draws_of_its_own() -> None:
    """On the stream "generator" of the server in that round."""
    method = quick(g_start=0)
    toy = federation(method)
    with toy.networks.scope():
        introductions = {name: method.introduce(toy.site(name, 0)) for name in toy.names}
        server = quick(g_start=9).init_server(toy.host(0), toy.networks.initial, introductions)
        made = {}
        for round_ in (1, 2):
            host = toy.host(round_)
            made[round_] = method._with_generator(host, server, round_)["generator"]
            with stream(host.seed, "generator") as draws:
                assert bits(method._train_generator(host, server, draws)) == bits(made[round_])
    assert bits(made[1]) != bits(made[2])
