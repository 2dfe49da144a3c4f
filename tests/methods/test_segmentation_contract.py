"""Every method that says it supports segmentation trains 2D and 3D U-Nets; the others refuse in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from monai.losses import DiceCELoss
from torch import nn

from medfl import methods
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.networks import build
from tests.support.sweeps import FEW, mostly_slow
from tests.support.toy import Data, Toy, bits, judged, sgd, simulate

SEGMENTING = [
    name for name in methods.names() if "segmentation" in methods.method_class(name).tasks
]
SETTINGS = {
    "fedrep": {"head_epochs": 1, "finetune_epochs": 1},
    "fedbabu": {"finetune_epochs": 1},
    "pfedbayes": {"zeta": 0.1},
    "fedhelp": {"large": "a"},
}


def discs(dims: int, size: int = 16) -> Data:
    """Two sites whose images show a bright block on a grey ground that is another at each site."""
    generator = torch.Generator().manual_seed(dims)
    data = {}
    for offset, name in enumerate("ab"):
        shape = (4, 1, *[size] * dims)
        mask = torch.zeros(shape, dtype=torch.int64)
        mask[(slice(None), slice(None), *[slice(4, 12)] * dims)] = 1
        data[name] = (mask + 0.3 * torch.randn(shape, generator=generator) - offset, mask)
    return data


def public_rings(dims: int, count: int = 5, size: int = 16) -> Public:
    """Flat images of dark rings with a teacher's logits; sites with volumes see each repeated along a third axis."""
    generator = torch.Generator().manual_seed(dims)
    mask = torch.zeros(count, 1, size, size, dtype=torch.int64)
    mask[..., 3:13, 3:13] = 1
    mask[..., 6:10, 6:10] = 0
    x = 0.5 * torch.randn(mask.shape, generator=generator) - mask
    answer = (4 * mask[:, 0] - 2 + torch.randn(count, size, size, generator=generator)).half()
    shard = Shard.of(Stacked([{"id": f"public{i}"} for i in range(count)], x, mask), range(count))
    return Public(
        "toy-rings",
        shard,
        Task("segmentation", ("background", "ring")),
        (answer,),
        size if dims == 3 else 0,
    )


def federation(dims: int) -> Toy:
    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    network = lambda: build("unet8", 1, 2, dims)  # noqa: E731
    return Toy(discs(dims), network, loss, sgd(0.05), batch_size=2, public=public_rings(dims))


def segmenting(toy: Toy) -> Toy:
    """The same federation whose sites know that they segment."""
    site: Callable = toy.site

    def of_masks(name: str, round_: int = 1):
        return replace(site(name, round_), task=Task("segmentation", ()))

    toy.site = of_masks
    return toy


def test_the_task_agnostic_methods_support_segmentation() -> None:
    wanted = "local central fedavg fedprox scaffold fedbn ditto fednova feddyn feddc moon fedrep fedper fedbabu fedsm"
    wanted += " perfedavg pfedme pfedbayes fedgh proxyfl fedmd fccl fedkemf fedhelp"
    assert set(wanted.split()) <= set(SEGMENTING)
    prototypes = {
        "fedproto",
        "fedmr",
        "pfedpm",
        "fedcb",
        "fedbm",
        "fedetf",
        "fednh",
        "fedrod",
        "ccvr",
        "fedproc",
    }
    assert not prototypes & set(SEGMENTING)


@pytest.mark.parametrize("name", [name for name in FEW if name in SEGMENTING])
def test_two_rounds_lower_the_loss_on_images(name: str) -> None:
    """The others train on images in product/test_devices.py."""
    two_rounds_lower_the_loss(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(SEGMENTING))
def test_two_rounds_lower_the_loss_on_volumes(name: str) -> None:
    two_rounds_lower_the_loss(name, 3)


def two_rounds_lower_the_loss(name: str, dims: int) -> None:
    method, toy = methods.load(name, SETTINGS.get(name, {})), segmenting(federation(dims))
    outcome = simulate(method, toy, 2)
    if dims == 3:  # of images product/test_devices.py shows it
        again = simulate(method, segmenting(federation(dims)), 2)
        assert bits([outcome.server, outcome.states]) == bits([again.server, again.states])
    participants = ["central"] if method.pools_data else toy.names
    for site in participants:
        weights = judged(method, toy, outcome, site)
        assert all(torch.isfinite(t).all() for t in weights.values())
        before, after = (
            loss_of(method, toy, state, site) for state in (simulate(method, toy, 0), outcome)
        )
        assert after < before


def loss_of(method: methods.Method, toy: Toy, outcome: object, name: str) -> float:
    """The loss of the network that a site is judged by, over its images, with statistics of the batch."""
    with toy.networks.scope():
        site, down = toy.site(name), method.broadcast(toy.host(), outcome.server, name)
        network: nn.Module = method.predictor(
            site, outcome.states.get(name) or method.init_site(site), down
        )
        x, y = next(site.train.batches(8))
        return float(toy.loss(network.train()(x), y).detach())
