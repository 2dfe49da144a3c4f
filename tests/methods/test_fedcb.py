"""FedCB: a frozen text classifier; numbers in brackets are the checks of the method's card (its maths: see
test_text_classifier)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods._parts.text_classifier import TextGaussians, TextHead, embeddings_of
from medfl.networks import build
from medfl.networks.heads import head
from medfl.runtimes.server.robust import with_effective_counts
from tests.support.options import numbers
from tests.support.toy import Toy, adam, bits, cross_entropy, prompts, run_record, sgd, simulate

CLASSES = ("p", "q", "r")
METHOD = load("fedcb")
EMBEDDINGS = prompts("minilm")


@pytest.fixture
def toy(classes: Toy) -> Toy:
    return classes.adapted(METHOD)


# Messages and state


def test_the_embeddings_are_sent_once_to_each_site(toy: Toy) -> None:
    """Check 15: in the first broadcast that a site gets, whenever that is."""
    cohorts = [["a"], ["a", "b"], ["b", "c"], ["a", "b", "c"]]
    sent = []
    for rounds in range(1, 5):
        outcome = simulate(METHOD, toy, rounds, cohorts)
        sent.append({name for name, message in outcome.down.items() if "text" in message})
        for name, message in outcome.down.items():
            if name in sent[-1]:
                assert bits(message["text"]) == bits({"embeddings": EMBEDDINGS})
            assert set(message.tensors) - {"text"} == {"weights"}
            assert not message.scalars
    assert sent == [{"a"}, {"b"}, {"c"}, set()]


def test_what_travels_each_round_is_body_and_projection(toy: Toy) -> None:
    """Check 15: no key of the classifier."""
    outcome = simulate(METHOD, toy, 2)
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        assert set(message.tensors) == {"weights"}
        assert set(message["weights"]) == set(toy.initial)
        assert message["weights"]["4.weight"].shape == (12, 6)
    assert {name for name in toy.initial if name.startswith("4.")} == {"4.weight", "4.bias"}


def test_bytes_are_those_of_the_card() -> None:
    """Checks 15, 16: ResNet-18, K = 8, D = 512: 45,795,232 bytes each way, 1,034,208 more than FedAvg; E once 4KMD."""
    task = Task("classification", tuple("abcdefgh"), lambda plm: torch.randn(8, 28, 512))
    with torch.random.fork_rng():
        network = build("resnet18", 3, 8)
        plain = sum(t.numel() * t.element_size() for t in network.state_dict().values())
        adapted = METHOD.adapt(network, task)
    size = sum(t.numel() * t.element_size() for t in adapted.state_dict().values())
    projection = sum(p.numel() for p in head(adapted).parameters())
    assert projection == 262_656
    assert sum(p.numel() for p in adapted.parameters()) - projection == 11_176_512
    layers = [m for m in adapted.modules() if isinstance(m, nn.BatchNorm2d)]
    assert (len(layers), sum(m.running_mean.numel() + m.running_var.numel() for m in layers)) == (
        20,
        9_600,
    )
    assert (plain, size, size - plain) == (44_761_024, 45_795_232, 4 * 513 * (512 - 8))
    embeddings = embeddings_of(adapted)
    assert embeddings.numel() * embeddings.element_size() == 4 * 8 * 28 * 512 == 458_752


def test_the_classifier_is_frozen(toy: Toy) -> None:
    """Check 11: after two rounds bitwise equal on all parties, outside parameters and optimisers; the rest moved."""
    outcome = simulate(METHOD, toy, 2)
    for state in outcome.states.values():
        assert bits(state) == bits({"embeddings": EMBEDDINGS})
    with toy.networks.scope():
        network = METHOD.global_predictor(toy.host(3), outcome.server)
        wanted = TextGaussians.of(EMBEDDINGS, 12.5, "full")
        assert bits([head(network).mean, head(network).spread]) == bits(
            [wanted.mean, wanted.spread]
        )
        tensors = {
            id(t) for t in (head(network).mean, head(network).spread, embeddings_of(network))
        }
        assert not tensors & {id(p) for p in network.parameters()}
        grouped = {id(p) for group in toy.optimizer(network).param_groups for p in group["params"]}
        assert not tensors & grouped
        assert grouped == {id(p) for p in network.parameters()}
    for name in ("4.weight", "4.bias", "0.weight"):
        assert not torch.equal(outcome.server["weights"][name], toy.initial[name])


def test_a_site_uses_the_embeddings_that_it_received(toy: Toy) -> None:
    with toy.networks.scope():
        server = METHOD.init_server(toy.host(), toy.networks.initial, {})
        down = METHOD.broadcast(toy.host(), server, "a")
    other = nn.functional.normalize(
        torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(5)), dim=2
    )
    replies = []
    for embeddings in (EMBEDDINGS, other):
        message = Message({"weights": down["weights"], "text": {"embeddings": embeddings}})
        with toy.networks.scope():
            state, reply = METHOD.local_update(toy.site("a"), {}, message)
        with toy.networks.scope():
            network = METHOD.predictor(toy.site("a"), state, Message({"weights": down["weights"]}))
            assert torch.equal(embeddings_of(network), embeddings)
        assert torch.equal(state["embeddings"], embeddings)
        replies.append(bits(reply))
    assert replies[0] != replies[1]


# Training and aggregation


def test_one_step_by_hand(classes: Toy) -> None:
    """One full batch, SGD of rate 0.1: w - 0.1 times the gradient of the mean bound, through h = normalise(W f + b)."""
    toy = replace(
        classes,
        network=lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)),
        batch_size=100,
    )
    toy = toy.adapted(METHOD)
    outcome = simulate(METHOD, toy)
    gaussians = TextGaussians.of(EMBEDDINGS, 12.5)
    for name, (x, y) in toy.data.items():
        w = {key: tensor.clone().requires_grad_() for key, tensor in toy.initial.items()}
        features = torch.relu(x @ w["0.weight"].T + w["0.bias"])
        h = nn.functional.normalize(features @ w["2.weight"].T + w["2.bias"], dim=1)
        logits = gaussians.logits(h)
        q = gaussians.quadratic(h).gather(1, y[:, None]).mean()
        (cross_entropy(logits, y) + 0.5 * 12.5**2 * q).backward()
        for key, tensor in w.items():
            wanted = (tensor - 0.1 * tensor.grad).detach()
            torch.testing.assert_close(
                outcome.replies[name]["weights"][key], wanted, rtol=1e-4, atol=1e-5
            )


def test_aggregation_by_samples_or_uniform(toy: Toy) -> None:
    """Check 14: N = (100, 300) gives (0.25, 0.75), statistics included; one site alone is reproduced bitwise."""
    outcome = simulate(METHOD, toy)

    def reply(value: float, samples: int) -> Message:
        weights = {key: torch.full_like(tensor, value) for key, tensor in toy.initial.items()}
        return Message({"weights": weights}, {"samples": samples})

    replies = {"a": reply(1.0, 100), "b": reply(5.0, 300)}
    for weighed, wanted in (
        (replies, 4.0),
        (with_effective_counts(replies, run_record(site_weights="uniform")), 3.0),
    ):
        with toy.networks.scope():
            server = METHOD.aggregate(toy.host(), outcome.history[0], weighed, 3)
        for key in ("0.weight", "1.running_mean", "1.running_var", "4.bias"):
            assert set(server["weights"][key].flatten().tolist()) == {wanted}
        assert server["informed"] == ["a", "b"]
    alone = simulate(METHOD, toy, 1, [["b"]])
    assert bits(alone.server["weights"]) == bits(dict(alone.replies["b"]["weights"]))


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_a_trainable_head_is_fedavg_bit_for_bit(classes: Toy, options: dict) -> None:
    method = load("fedcb", classifier="trainable")
    toy = replace(classes, optimizer=sgd(0.1, **options))
    ours, average = simulate(method, toy.adapted(method), 3), simulate(load("fedavg"), toy, 3)
    assert bits([ours.server, ours.replies, ours.states]) == bits(
        [average.server, average.replies, average.states]
    )


def test_a_random_frozen_head_never_moves(classes: Toy) -> None:
    method = load("fedcb", classifier="random_frozen")
    toy = replace(classes, optimizer=adam(0.01)).adapted(method)
    outcome = simulate(method, toy, 3)
    for name in ("4.weight", "4.bias"):
        assert bits(outcome.server["weights"][name]) == bits(toy.initial[name])
        assert all(
            bits(reply["weights"][name]) == bits(toy.initial[name])
            for reply in outcome.replies.values()
        )
    assert not torch.equal(outcome.server["weights"]["0.weight"], toy.initial["0.weight"])
    plain = simulate(load("fedavg"), replace(classes, optimizer=adam(0.01)))
    assert bits(toy.initial) == bits(dict(plain.history[0]["weights"])), (
        "the head starts as the network's own"
    )


def test_without_variance_the_loss_is_cross_entropy_over_the_means(classes: Toy) -> None:
    """text_mean, or no covariance: FedAvg with a frozen cosine-like head; the bound adds nothing."""
    method = load("fedcb", classifier="text_mean")
    toy = classes.adapted(method)
    ours = simulate(method, toy, 2)
    average = simulate(
        load("fedavg"), toy, 2
    )  # the same network, plain cross-entropy over its logits
    for name, tensor in ours.server["weights"].items():
        torch.testing.assert_close(tensor, average.server["weights"][name], rtol=1e-4, atol=1e-5)
    none = load("fedcb", covariance="none")
    assert bits(simulate(none, classes.adapted(none), 2).server) == bits(ours.server)
    assert bits(simulate(METHOD, classes.adapted(METHOD), 2).server) != bits(ours.server)


def test_it_learns(classes: Toy) -> None:
    for options in (
        {}, {"covariance": "diag"}, {"loss": "finite"}, {"classifier": "text_mean"}, {"classifier": "text_printed"},
    ):  # fmt: skip
        method = load("fedcb", options)
        toy = replace(classes, optimizer=adam(0.03), epochs=2).adapted(method)
        outcome = simulate(method, toy, 8)
        x, y = (torch.cat(parts) for parts in zip(*toy.data.values(), strict=True))
        with toy.networks.scope():
            network = method.global_predictor(toy.host(), outcome.server).eval()
            assert (network(x).argmax(1) == y).double().mean() > 0.8


# Options


def test_parts_of_the_prompts_are_drawn_from_the_seed_and_sent(classes: Toy) -> None:
    method = load("fedcb", prompt_fraction=0.6)
    first, again, other = (replace(classes, seed=seed).adapted(method) for seed in (0, 0, 1))
    sent = [simulate(method, toy).states["a"]["embeddings"] for toy in (first, again, other)]
    assert sent[0].shape == (3, 3, 12)
    assert torch.equal(sent[0], sent[1])
    assert not torch.equal(sent[0], sent[2])
    assert {tuple(row) for row in sent[0][1].tolist()} < {
        tuple(row) for row in EMBEDDINGS[1].tolist()
    }
    whole = classes.adapted(METHOD)
    assert bits(dict(first.networks.initial)) == bits(dict(whole.networks.initial)), (
        "the network starts the same"
    )


def test_options_reach_the_head() -> None:
    task = Task("classification", CLASSES, prompts)

    def made(**options: object) -> TextHead:
        return head(load("fedcb", **options).adapt(nn.Sequential(nn.Linear(8, 3)), task))

    assert made().tau == 12.5
    assert made(tau=7.5).gaussians.tau == 7.5
    assert made(covariance="diag").spread.shape == (3, 12)
    assert made().spread.shape == (3, 5, 12)
    assert torch.equal(made(swap="p,r").embeddings, EMBEDDINGS[[2, 1, 0]])
    torch.testing.assert_close(made(renormalise_mean=True).mean.norm(dim=1), torch.ones(3))
    assert made(raw_test_logits=True).unscaled_evaluation


def test_the_scale_of_test_logits_changes_no_decision(classes: Toy) -> None:
    """Check 13."""
    unscaled = load("fedcb", raw_test_logits=True)
    outputs = []
    for method in (METHOD, unscaled):
        toy = classes.adapted(method)
        outcome = simulate(method, toy, 2)
        with toy.networks.scope():
            outputs.append(
                method.global_predictor(toy.host(), outcome.server).eval()(toy.data["c"][0])
            )
    torch.testing.assert_close(outputs[0], 12.5 * outputs[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(outputs[0].argmax(1), outputs[1].argmax(1))


# Bad input


def test_bad_input() -> None:
    for options, text in (
        (
            {"prompt_fraction": 1.5},
            "prompt_fraction=1.5; a part of the prompts, above 0 and at most 1",
        ),
        ({"prompt_fraction": 0}, "prompt_fraction=0;"),
        ({"tau": 0}, "tau=0; an inverse temperature, above 0"),
        ({"tau": "inf"}, "tau=inf for method 'fedcb'; tau is float >= 0, finite"),
        ({"loss": "finite", "classifier": "trainable"}, "loss=finite with classifier=trainable"),
        (
            {"classifier": "fancy"},
            "classifier=fancy .*one of trainable, random_frozen, text_mean, text_distribution",
        ),
    ):
        with pytest.raises(InputError, match=text):
            load("fedcb", options)
    with pytest.raises(InputError, match="embeddings of 3 classes; the bundle has 2: p, q"):
        METHOD.adapt(nn.Sequential(nn.Linear(8, 2)), Task("classification", ("p", "q"), prompts))
    single = Task("classification", CLASSES, lambda plm: prompts(plm)[:, :1])
    with pytest.raises(InputError, match="one prompt a class"):
        METHOD.adapt(nn.Sequential(nn.Linear(8, 3)), single)
    with pytest.raises(InputError, match="head"):
        METHOD.adapt(nn.Sequential(nn.Linear(8, 5)), Task("classification", CLASSES, prompts))
    assert METHOD.tasks == ("classification",)


# Defaults


def test_the_cards_defaults_and_limits() -> None:
    assert numbers("fedcb") == {
        "tau": (12.5, 0.0), "prompt_fraction": (1.0, 0.0), "renormalise_mean": (False,), "raw_test_logits": (False,),
    }  # fmt: skip
    assert (METHOD.covariance, METHOD.loss, METHOD.classifier) == (
        "full",
        "surrogate",
        "text_distribution",
    )


def test_text_is_asked_for_where_the_head_is_built_from_it() -> None:
    wanted = {
        "text_distribution": "minilm",
        "text_mean": "minilm",
        "text_printed": "minilm",
        "trainable": "",
        "random_frozen": "",
    }
    assert {name: load("fedcb", classifier=name).language_model for name in wanted} == wanted
    assert load("fedcb", plm="bert").language_model == "bert"
