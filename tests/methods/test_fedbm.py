"""FedBM: the diagonal text classifier and the generator; numbers in brackets are the checks of the method's card.

The maths of the classifier is in test_text_classifier, that of the generator's losses in networks/test_generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from medfl.errors import InputError
from medfl.message import Message
from medfl.methods import load
from medfl.methods.fedbm import FedBM
from medfl.networks import build
from medfl.networks.generator import Augmentation, Generator, diversity_loss, statistics_gap
from medfl.networks.heads import features_and_output, frozen, head
from medfl.runtimes.federation import Federation
from medfl.seeding import derive
from medfl.storage import load_state, save_state
from medfl.task import Task
from medfl.text_classifier import Gaussians, embeddings_of
from medfl.training import fit
from tests.helpers import Outcome, Toy, ToyBundle, adam, bits, cross_entropy, prompts, run_record, sgd, simulate

QUICK = {"g_every": 1, "g_start": 1, "g_iterations": 2, "g_batch": 6, "synthetic_batch": 4, "normalise": "half"}
EMBEDDINGS = prompts("minilm")


def quick(**options: object) -> FedBM:
    return load("fedbm", {**QUICK, **options})


def images(counts: dict[str, int], size: int = 16, channels: int = 1) -> dict[str, tuple[Tensor, Tensor]]:
    """Grey squares whose brightness is their class, with noise."""
    draws = torch.Generator().manual_seed(0)
    data = {}
    for name, count in counts.items():
        y = torch.arange(count) % 3
        noise = 0.3 * torch.randn(count, channels, size, size, generator=draws)
        data[name] = (noise + (y - 1.0)[:, None, None, None], y)
    return data


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def federation(method: FedBM, **changes: object) -> Toy:
    values: dict = {"optimizer": sgd(0.05, momentum=0.9), "batch_size": 4, **changes}
    return Toy(images({"a": 9, "b": 6, "c": 11}), network, cross_entropy, **values).adapted(method)


def run(method: FedBM, rounds: int, cohorts: Sequence[Sequence[str]] | None = None, **changes: object) -> Outcome:
    return simulate(method, federation(method, **changes), rounds, cohorts)


# Reductions


def test_without_generator_it_is_diagonal_fedcb_bit_for_bit(classes: Toy) -> None:
    """Check 17; and so is every round before the generator's first training, in which others do not matter."""
    diagonal = load("fedcb", covariance="diag")
    reference = run(diagonal, 3)
    off = run(quick(generator=False), 3)
    assert bits([off.server["weights"], off.replies]) == bits([reference.server["weights"], reference.replies])
    later = run(quick(g_start=3), 3)
    assert bits([later.server["weights"], later.replies]) == bits([reference.server["weights"], reference.replies])
    assert later.server["version"] == 1
    default = run(load("fedbm"), 4)
    assert bits(default.server["weights"]) == bits(run(diagonal, 4).server["weights"])
    assert (default.server["version"], default.server["generator"]) == (0, {})
    vectors = load("fedbm", generator=False)
    ours, theirs = (simulate(m, classes.adapted(m), 2).server["weights"] for m in (vectors, diagonal))
    assert bits(ours) == bits(theirs)


def test_a_trainable_head_without_generator_is_fedavg_bit_for_bit() -> None:
    ours, average = run(quick(classifier="trainable", generator=False), 3), run(load("fedavg"), 3)
    assert bits([ours.server["weights"], ours.replies]) == bits([average.server["weights"], average.replies])


def test_synthetic_images_change_training_from_the_round_after() -> None:
    reference = run(load("fedcb", covariance="diag"), 2)
    mixed = run(quick(), 2)
    assert bits(mixed.history[1]["weights"]) == bits(reference.history[1]["weights"])
    assert bits(mixed.server["weights"]) != bits(reference.server["weights"])


# Messages and schedule


def test_messages() -> None:
    """E once; the generator only where the site's copy is stale; weights each round; replies as FedAvg's."""
    method = quick(g_every=2, g_start=2)  # trained after rounds 2 and 4
    cohorts = [["a"], ["a", "b"], ["a"], ["a", "c"], ["a", "b"], ["c"]]
    sent = []
    for rounds in range(1, 7):
        outcome = run(method, rounds, cohorts)
        sent.append(
            {
                name: sorted(set(m.tensors) - {"weights"}) + ([int(m.scalars["version"])] if m.scalars else [])
                for name, m in outcome.down.items()
            }
        )
        for reply in outcome.replies.values():
            assert (set(reply.tensors), set(reply.scalars)) == ({"weights"}, {"samples"})
    assert sent == [
        {"a": ["text"]},
        {"a": [], "b": ["text"]},
        {"a": ["generator", 1]},
        {"a": [], "c": ["generator", "text", 1]},
        {"a": ["generator", 2], "b": ["generator", 2]},
        {"c": ["generator", 2]},
    ]
    assert {name: state.get("version") for name, state in outcome.states.items()} == {"a": 2, "b": 2, "c": 2}
    assert outcome.server["informed"] == {"a": 2, "b": 2, "c": 2}


def test_a_generator_message_is_as_large_as_the_cards() -> None:
    """19,036,980 bytes of tensors with D = 512 and three channels of 128 x 128; uploads carry none of it."""
    method = load("fedbm")
    weights = {"w": torch.zeros(1)}
    with torch.device("meta"):
        generator = Generator(512, 3, 128, 128).state_dict()
    server = {"weights": weights, "informed": {"a": 0}, "version": 1, "generator": generator, "image": [3, 128, 128]}
    message = method.broadcast(None, server, "a")
    assert sum(t.numel() * t.element_size() for t in message["generator"].values()) == 19_036_980
    assert message.scalars == {"version": 1, "channels": 3, "height": 128, "width": 128}


def test_schedule() -> None:
    """Check 15: R = 200, cycle 5: 40 trainings, of which 39 are of use; version in round r is floor((r - 1) / 5)."""
    trained: list[int] = []

    class Recording(FedBM):
        def _train_generator(self, host, server, draws):
            trained.append(host.round)
            return {"x": torch.zeros(1)}

    def versions(method: FedBM, rounds: int) -> list[int]:
        trained.clear()
        toy = federation(method)
        with toy.networks.scope():
            introductions = {name: method.introduce(toy.site(name, 0)) for name in toy.names}
            server = method.init_server(toy.host(0), toy.networks.initial, introductions)
        seen = []
        for round_ in range(1, rounds + 1):
            seen.append(server["version"])
            with toy.networks.scope():
                host = replace(toy.host(), round=round_)
                replies = {"a": Message({"weights": server["weights"]}, {"samples": 1})}
                server = method.aggregate(host, server, replies, 3)
        return seen

    assert versions(Recording(), 200) == [(r - 1) // 5 for r in range(1, 201)]
    assert trained == list(range(5, 201, 5))
    assert len([r for r in trained if r < 200]) == 39
    assert versions(Recording(g_every=1, g_start=0), 3) == [1, 2, 3]
    assert trained == [0, 1, 2, 3]
    assert versions(Recording(g_every=3, g_start=2), 6) == [0, 0, 1, 1, 1, 2]


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
        report = fit(model, site, objective=method.mixed(site, state, objective))
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
        fit(site.model(outcome.server["weights"]), site, objective=method.mixed(site, state, objective))
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
    assert all(x.abs().max() <= 1 for x, _ in rows), "of a sigmoid, normalised by mean and deviation 0.5"
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
    z = Gaussians.of(EMBEDDINGS, 12.5, "full").draw(labels, draws)
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
            seen.append((bits(dict(teacher.state_dict())), [p.grad for p in teacher.parameters()], teacher.training))
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
    assert loss(lambda_div=0, lambda_dis=0, semantic_loss="surrogate") == pytest.approx(full, rel=1e-6)
    assert full > semantic
    diversity = diversity_loss(x, z, labels, 3).item()
    assert loss(lambda_div=2, lambda_dis=0) == pytest.approx(semantic + 2 * diversity, rel=1e-5)
    with statistics_gap(teacher) as gaps:
        teacher(x)
    assert len(gaps) == 1
    assert loss(lambda_div=0, lambda_dis=3) == pytest.approx(semantic + 3 * gaps[0].item(), rel=1e-5)
    head(teacher).unscaled_evaluation = True
    assert loss(lambda_div=0, lambda_dis=0) == pytest.approx(semantic, rel=1e-6), "tau also where tests leave it out"


def test_the_diversity_loss_sees_images_before_augmentation() -> None:
    toy = federation(quick())
    teacher, z, labels = _teacher(quick(), toy.initial, toy), torch.randn(4, 12), torch.zeros(4, dtype=torch.int64)
    x = torch.rand(4, 1, 16, 16)
    with_it, without = (
        quick(lambda_div=weight, lambda_dis=0).generator_loss(teacher, x, z, labels, lambda v: 0 * v).item()
        for weight in (1000, 0)
    )
    assert with_it - without == pytest.approx(1000 * diversity_loss(x, z, labels, 3).item(), rel=1e-5)


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
        quick(lambda_div=0, lambda_dis=d).generator_loss(teacher, x, z, labels, lambda v: v).item() for d in (0, 1)
    )
    assert more - plain == pytest.approx(float(torch.stack(gaps).sum()), rel=1e-4)
    assert not any(m._forward_pre_hooks for m in teacher.modules())


def test_generated_images_come_to_be_seen_as_their_class() -> None:
    """80 steps against a trained teacher: the generator learns what the teacher takes for each class."""
    method = quick(g_start=8, g_every=100, g_iterations=80, g_batch=16, g_lr=5e-3, lambda_div=0.0)
    toy = federation(method, optimizer=adam(0.02), epochs=2)
    outcome = simulate(method, toy, 8)
    generator = Generator(12, 1, 16, 16)
    generator.load_state_dict(outcome.server["generator"])
    labels = torch.arange(60) % 3
    z = Gaussians.of(EMBEDDINGS, 12.5).draw(labels, torch.Generator().manual_seed(9))
    with torch.no_grad(), toy.networks.scope():
        teacher = _teacher(method, outcome.server["weights"], toy)
        x, y = toy.data["c"]
        assert (teacher(x).argmax(1) == y).double().mean() > 0.9
        seen = teacher((generator.eval()(z) - 0.5) / 0.5).argmax(1)
    assert (seen == labels).double().mean() > 0.8


# Conditions


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
    outcome = run(quick(**options), 2)
    assert outcome.server["generator"]["linear.weight"].shape == (128, dimension)
    assert all(torch.isfinite(t).all() for t in outcome.server["weights"].values())


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


def test_the_classifier_is_diagonal_and_frozen() -> None:
    """Check 9."""
    method = quick()
    toy = federation(method)
    outcome = simulate(method, toy, 2)
    with toy.networks.scope():
        model = method.global_predictor(toy.host(), outcome.server)
        wanted = Gaussians.of(EMBEDDINGS, 12.5, "diag")
        assert bits([head(model).mean, head(model).spread]) == bits([wanted.mean, wanted.spread])
        assert wanted.spread.shape == (3, 12)
        assert bits(embeddings_of(model)) == bits(EMBEDDINGS)
        assert {n for n, _ in model.named_parameters()} == set(toy.initial) - {
            n for n in toy.initial if "running" in n or "num_batches" in n
        }
    assert all(bits(state["embeddings"]) == bits(EMBEDDINGS) for state in outcome.states.values())
    assert all(set(reply["weights"]) == set(toy.initial) for reply in outcome.replies.values())


def test_aggregation() -> None:
    """Check 18: (100, 300) gives (0.25, 0.75), statistics included; sites that were not selected have no influence."""
    method = quick(generator=False)
    toy = federation(method)

    def reply(value: float, samples: int) -> Message:
        return Message(
            {"weights": {k: torch.full_like(t, value) for k, t in toy.initial.items()}}, {"samples": samples}
        )

    server = simulate(method, toy, 0).server
    for weights, wanted in (("samples", 4.0), ("uniform", 3.0)):
        with toy.networks.scope():
            after = replace(method, weights=weights).aggregate(
                toy.host(), server, {"b": reply(5.0, 300), "a": reply(1.0, 100)}, 3
            )
        assert all(
            set(after["weights"][k].flatten().tolist()) == {wanted} for k in ("0.weight", "1.running_var", "5.bias")
        )


# States, wire and repetition, with the generator on (the contract tests run without images)


def test_it_repeats_over_the_wire_and_continues_from_files(tmp_path: Path) -> None:
    method = quick()
    toy = federation(method, optimizer=adam(0.01))
    reference = simulate(method, toy, 3)
    wired = simulate(method, replace(toy), 3, wire=True)
    assert bits([wired.server, wired.states]) == bits([reference.server, reference.states])
    for message in [*reference.down.values(), *reference.replies.values()]:
        assert message.num_bytes == len(message.encode())
    two = simulate(method, toy, 2)
    save_state(tmp_path / "server", two.server)
    states, replies = {}, {}
    server = load_state(tmp_path / "server")
    fresh = replace(toy)
    for name in toy.names:
        save_state(tmp_path / name, two.states[name])
        with fresh.networks.scope():
            down = method.broadcast(fresh.host(3), server, name)
            states[name], replies[name] = method.local_update(fresh.site(name, 3), load_state(tmp_path / name), down)
    with fresh.networks.scope():
        turned = dict(reversed(replies.items()))
        assert bits(method.aggregate(fresh.host(3), server, turned, 3)) == bits(reference.server)
    assert bits(states) == bits(reference.states)


def test_it_changes_nothing_that_it_is_given() -> None:
    method = quick(keep_optimizer=True)
    toy = federation(method, optimizer=adam(0.01))
    two, three = simulate(method, toy, 2), simulate(method, toy, 3)
    kept = bits([two.server, two.states, dict(toy.networks.initial)])
    for name in toy.names:
        with toy.networks.scope():
            down = method.broadcast(toy.host(3), two.server, name)
            state, reply = method.local_update(toy.site(name, 3), two.states[name], down)
            assert bits([state, reply]) == bits([three.states[name], three.replies[name]])
            method.predictor(toy.site(name, 3), two.states[name], down)
    with toy.networks.scope():
        method.aggregate(toy.host(3), two.server, three.replies, 3)
    assert bits([two.server, two.states, dict(toy.networks.initial)]) == kept


def test_one_sample_and_an_empty_site_are_fine() -> None:
    method = quick()
    toy = replace(federation(method), data=images({"a": 1, "b": 5}))
    outcome = simulate(method, toy, 2)
    assert all(torch.isfinite(t).all() for t in outcome.server["weights"].values())
    site = toy.site("a")
    empty = replace(site, train=replace(site.train, indices=site.train.indices[:0]))
    assert not method.introduce(empty).scalars


# Bad input


def test_bad_input(classes: Toy) -> None:
    method = load("fedbm")
    with pytest.raises(InputError, match=r"site 'a' has items of shape \(8,\); .*; set generator=false"):
        simulate(method, classes.adapted(method), 1)
    toy = federation(method)
    for size, text in ((28, "images of 28 x 28 pixels; .* image_size=32"), (8, "images of 8 x 8 pixels")):
        with pytest.raises(InputError, match=text):
            simulate(method, replace(toy, data=images({"a": 4, "b": 4}, size)), 1)
    told = {name: Message(scalars={"channels": 1, "height": n, "width": n}) for name, n in (("a", 16), ("b", 32))}
    with pytest.raises(InputError, match=r"site 'b' has images of shape \[1, 32, 32\], site 'a' of \[1, 16, 16\]"):
        method.init_server(toy.host(), toy.networks.initial, told)
    with pytest.raises(InputError, match=r"has items of shape \(8,\)"):
        Federation(ToyBundle(), method, run_record(method="fedbm"))
    for size in (28, 8):
        with pytest.raises(InputError, match="multiples of 16"):
            method.check(replace(toy, data=images({"a": 4}, size)).site("a"))
    method.check(toy.site("a"))
    with pytest.raises(InputError, match="prompt_fraction=2"):
        load("fedbm", prompt_fraction=2)
    with pytest.raises(InputError, match="no site has a training image"):
        method.init_server(toy.host(), toy.networks.initial, {"a": Message()})
    assert method.tasks == ("classification",)
