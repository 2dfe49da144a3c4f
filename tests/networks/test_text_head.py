"""The head built from text, and which embeddings it is built from; the mathematics is in test_text_classifier."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medfl.core.errors import InputError
from medfl.core.task import Task
from medfl.methods._parts.text_classifier import (
    TextHead,
    adapt,
    check,
    embeddings_for,
    embeddings_of,
    finite_loss,
    install,
    select,
    swapped,
    text_objective,
)
from medfl.networks import build
from medfl.networks.heads import head
from tests.support.embeddings import structured, unit

# The head


def network() -> nn.Module:
    return build("small_cnn", 1, 3)


def made(**settings: object) -> nn.Module:
    values: dict = {
        "classifier": "text_distribution",
        "covariance": "full",
        "tau": 12.5,
        **settings,
    }
    return adapt(network(), structured(0.3, classes=3).float(), **values)


def test_the_head_projects_normalises_and_keeps_its_place() -> None:
    model = made()
    before = network().state_dict()
    assert set(model.state_dict()) == set(before), "statistics are outside the state dict"
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in network().named_parameters()}
    assert model.fc.weight.shape == (32, 72)
    h = model.fc.unit(torch.randn(5, 72))
    torch.testing.assert_close(h.norm(dim=1), torch.ones(5))
    x = torch.rand(4, 1, 16, 16)
    assert model(x).shape == (4, 3)
    torch.testing.assert_close(
        embeddings_of(model), structured(0.3, classes=3).float(), rtol=0, atol=0
    )


def test_the_objective_is_the_mean_bound() -> None:
    model, x, y = made(), torch.rand(4, 1, 16, 16), torch.tensor([0, 2, 1, 1])
    h = model.fc.unit(model.body(x).flatten(1))
    wanted = model.fc.gaussians.surrogate(h, y).mean()
    assert torch.equal(text_objective()(model, x, y), wanted)
    assert torch.equal(text_objective()(model, x, y[:, None]), wanted)
    assert torch.equal(text_objective()(model, x, nn.functional.one_hot(y, 3).float()), wanted)
    wanted = finite_loss(h, y, embeddings_of(model), 12.5).mean()
    assert torch.equal(text_objective(finite=True)(model, x, y), wanted)


def test_test_logits_without_tau_are_for_evaluation_only() -> None:
    model, x = made(unscaled_evaluation=True), torch.rand(2, 1, 16, 16)
    trained = model.train()(x)
    torch.testing.assert_close(model.eval()(x) * 12.5, trained)


def test_mixed_precision_does_not_blur_the_logits() -> None:
    model, x, y = made(), torch.rand(4, 1, 16, 16), torch.tensor([0, 2, 1, 1])
    with torch.autocast("cpu", torch.bfloat16):
        h = model.fc.unit(torch.randn(4, 72))
        assert h.dtype == model.fc.gaussians.logits(h).dtype == torch.float32
        assert text_objective()(model, x, y).dtype == torch.float32
    torch.testing.assert_close(h.norm(dim=1), torch.ones(4))


def test_installed_embeddings_change_the_classifier() -> None:
    model, x = made(), torch.rand(2, 1, 16, 16)
    before = model(x)
    other = structured(0.3, seed=9, classes=3).float()
    install(head(model), other)
    assert torch.equal(embeddings_of(model), other)
    assert not torch.allclose(model(x), before)
    torch.testing.assert_close(model.fc.mean, other.mean(1))


@pytest.mark.parametrize(
    ("classifier", "trainable"), [("trainable", True), ("random_frozen", False)]
)
def test_other_heads_are_the_networks_own(classifier: str, trainable: bool) -> None:
    model = made(classifier=classifier)
    assert type(head(model)) is nn.Linear
    assert all(p.requires_grad is trainable for p in head(model).parameters())
    assert embeddings_of(model).shape == (3, 24, 32)


def test_text_mean_has_no_spread() -> None:
    model = made(classifier="text_mean")
    assert isinstance(head(model), TextHead)
    assert model.fc.spread is None
    unscaled = made(classifier="text_mean", renormalise=True)
    torch.testing.assert_close(unscaled.fc.mean.norm(dim=1), torch.ones(3))
    assert (model.fc.mean.norm(dim=1) < 0.99).all(), "means of unit vectors are shorter"


def test_a_distribution_needs_two_prompts() -> None:
    single = structured(0.3, classes=3)[:, :1]
    with pytest.raises(
        InputError, match="one prompt a class with classifier=text_distribution; .*; add prompts"
    ):
        adapt(network(), single, classifier="text_distribution", covariance="diag", tau=12.5)
    adapt(network(), single, classifier="text_mean", covariance="diag", tau=12.5)


# Which embeddings


def test_parts_of_the_prompts_are_nested() -> None:
    """FedCB Table 4: 7, 14, 21 and 28 of 28 prompts."""
    embeddings = unit(3, 28, 16)
    parts = []
    for fraction in (0.25, 0.5, 0.75, 1.0):
        torch.default_generator.manual_seed(5)
        parts.append(select(embeddings, fraction))
    assert [part.shape[1] for part in parts] == [7, 14, 21, 28]
    assert torch.equal(parts[-1], embeddings)
    for small, large in zip(parts, parts[1:], strict=False):
        assert {tuple(row) for row in small[0].tolist()} < {tuple(row) for row in large[0].tolist()}
    torch.default_generator.manual_seed(6)
    assert not torch.equal(select(embeddings, 0.25), parts[0])


def test_two_classes_may_be_swapped() -> None:
    embeddings, classes = unit(3, 4, 8), ("DR", "MH", "NORMAL")
    assert torch.equal(swapped(embeddings, classes, ""), embeddings)
    assert torch.equal(swapped(embeddings, classes, "MH, DR"), embeddings[[1, 0, 2]])
    for wrong in ("DR", "DR,MH,NORMAL", "DR,AMD"):
        with pytest.raises(InputError, match="swap=.*two of the classes DR, MH, NORMAL"):
            swapped(embeddings, classes, wrong)


def test_classes_must_differ_and_be_as_many() -> None:
    """FedCB 12: "A" and "a" are one text to an uncased tokenizer."""
    embeddings = unit(3, 4, 8)
    check(embeddings, ("x", "y", "z"))
    with pytest.raises(InputError, match="embeddings of 3 classes; the bundle has 2: x, y"):
        check(embeddings, ("x", "y"))
    embeddings[2] = embeddings[0] + 1e-6
    with pytest.raises(InputError, match="classes 'A' and 'a' have the same text"):
        check(embeddings, ("A", "b", "a"))


def test_a_task_without_text_is_told() -> None:
    with pytest.raises(InputError, match="ships none"):
        embeddings_for(Task("classification", ("a", "b")), "minilm", 1.0, "")
