"""FedHelp in segmentation: pixel weights, the proxy's mask, teachers' maps, and flat public images for volumes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax

from medfl import methods
from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.task import Task
from medfl.data.batch_transforms import BatchRecipe, Crop
from medfl.data.prepared import Augmented, Shard
from medfl.methods._parts.public import untracked
from medfl.methods.fedhelp.lesson import Lesson
from medfl.methods.fedhelp.pixel_weights import Border, beta, class_balance
from medfl.networks.heads import features_and_output
from medfl.training import fit
from tests.methods.test_segmentation_contract import federation, segmenting
from tests.support.toy import Toy, bits, simulate


def toy(dims: int) -> Toy:
    return segmenting(federation(dims))


def lesson(dims: int, **options: object) -> tuple[Lesson, torch.nn.Module, Toy]:
    made = toy(dims)
    method, site = (
        methods.load("fedhelp", {"large": "a", "mask_loss": "weighted", **options}),
        made.site("b"),
    )
    network = site.model(made.initial)
    return Lesson(method, site, method.init_site(site), network), network, made


@pytest.mark.parametrize("dims", [2, 3])
def test_the_public_loss_of_masks_by_hand(dims: int) -> None:
    """Mean over pixels of beta (CE + 0.1 KL); in volumes each image is repeated and the logits averaged (pseudo3d)."""
    one, _, _ = lesson(dims)
    twin, network, made = lesson(dims)
    taken = twin.items(made.site("b"))(2)
    x, y, positions, _ = taken
    if dims == 3:
        x = x[..., None].expand(*x.shape, 16)
    with untracked(network):
        features, _ = features_and_output(network, x)
    z = twin.head(features)
    z = z.mean(-1) if dims == 3 else z
    foreground = made.public.answers[0][positions].float().sigmoid()
    t = torch.stack([1 - foreground, foreground], 1)
    balance = class_balance([made.public.at(torch.arange(5))[1]], 2)
    weight = beta(y[:, 0], balance, Border())
    kl = (t * (t.log() - log_softmax(z, 1))).sum(1)
    expected = (weight * (cross_entropy(z, y[:, 0], reduction="none") + 0.1 * kl)).mean()
    torch.testing.assert_close(one.loss(*taken), expected, rtol=1e-5, atol=1e-5)


def test_a_small_site_without_public_data_trains_on_weighted_pixels() -> None:
    """Its loss is FedAvg's, bit for bit, or with `mask_loss=weighted` the mean of beta CE."""
    made = toy(2)
    site, down = made.site("b"), Message({"weights": made.initial})
    plain = methods.load("fedhelp", large="a", lambda_j=0)
    _, reply = plain.local_update(site, plain.init_site(site), down)
    _, expected = methods.load("fedavg").local_update(made.site("b"), {}, down)
    assert bits(reply) == bits(expected)
    weighted = methods.load("fedhelp", large="a", lambda_j=0, mask_loss="weighted")
    balance = weighted.init_site(site)["balance"]
    x, y = made.data["b"]
    torch.testing.assert_close(balance, class_balance([y], 2))
    loss = weighted._loss(site, balance)
    z = made.network()(x)
    by_hand = (
        beta(y[:, 0], balance, Border()) * cross_entropy(z, y[:, 0], reduction="none")
    ).mean()
    torch.testing.assert_close(loss(z, y), by_hand)


@pytest.mark.parametrize("schedule", ["joint", "alternate"])
def test_a_large_site_trains_on_weighted_pixels(schedule: str) -> None:
    """Without what the two networks say to each other the large one learns by the mean of beta CE alone."""
    made = toy(2)
    method = methods.load(
        "fedhelp", large="a", lambda_f=0, lambda_b=0, schedule=schedule, mask_loss="weighted"
    )
    site, down = made.site("a"), Message({"weights": made.initial})
    balance, network = class_balance([made.data["a"][1]], 2), made.site("a").network()
    state, _ = method.local_update(site, method.init_site(site), down)

    def by_hand(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (
            beta(y[:, 0], balance, Border()) * cross_entropy(net(x), y[:, 0], reduction="none")
        ).mean()

    fit(network, made.site("a"), objective=by_hand)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(state["weights"][name], tensor)
    assert bits(state["weights"]) != bits(made.initial)


def test_the_balance_is_that_of_whole_masks() -> None:
    """Whatever patches training draws of them; bits as without random transforms."""
    made = toy(2)
    site, method = (
        made.site("b"),
        methods.load("fedhelp", large="a", lambda_j=0, mask_loss="weighted"),
    )
    kept = site.train.prepared
    patches = Augmented(kept.items, kept, BatchRecipe((Crop(("image", "label"), (4, 4)),), True))
    drawn = replace(site, train=Shard(patches, site.train.indices))
    assert next(drawn.train.batches(1))[1].shape[2:] == (4, 4)
    assert bits(method.init_site(drawn)["balance"]) == bits(method.init_site(site)["balance"])


def test_the_backward_part_is_the_proxys_mask() -> None:
    """|Omega| = 1: CE of the large network against the argmax of the proxy, without beta."""
    method = methods.load("fedhelp", large="a")
    generator = torch.Generator().manual_seed(0)
    z, z_proxy = (torch.randn(2, 2, 4, 4, generator=generator) for _ in range(2))
    zero = lambda z, y: z.new_zeros(())  # noqa: E731
    expected = 0.2 * cross_entropy(z, z_proxy.argmax(1))
    torch.testing.assert_close(method._large_loss(zero, z, z_proxy, None), expected)


def test_a_private_mask_with_other_classes_than_the_public_one() -> None:
    """psi has its own outputs; several public structures with a teacher are refused."""
    made = toy(2)
    made.public = replace(made.public, task=Task("segmentation", ("background", "one", "two")))
    site, method = made.site("b"), methods.load("fedhelp", large="a")
    with pytest.raises(InputError, match="public masks with 3 classes"):
        method.check(site)
    made.public = replace(made.public, answers=())
    method.check(made.site("b"))
    state = method.init_site(made.site("b"))
    assert state["public_head"]["weight"].shape[0] == 3
    outcome = simulate(method, made, 1)
    assert all(t.isfinite().all() for t in outcome.states["b"]["weights"].values())
