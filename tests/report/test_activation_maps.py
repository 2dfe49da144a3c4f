"""The map of a network whose answer is known, and the networks that have none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.data.prepared import Shard, Stacked
from medfl.networks import build
from medfl.report.activation_maps import compute, last_convolution

CPU = torch.device("cpu")


class Corner(nn.Module):
    """The logit of class 1 is the sum of what a convolution finds bright; class 0 has none."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(1, 1, 3, padding=1, bias=False)
        self.look.weight.data.fill_(1 / 9)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.look(x)).mean((1, 2, 3))[:, None]


def shard(x: Tensor) -> Shard:
    items = [{"id": f"case-{i}"} for i in range(len(x))]
    return Shard.of(Stacked(items, x, torch.zeros(len(x), dtype=torch.int64)), range(len(x)))


@pytest.mark.parametrize("method", ["gradcam", "gradcam++"])
def test_a_map_shows_what_the_output_rests_on(method: str) -> None:
    x = torch.zeros(1, 1, 16, 16)
    x[..., 2:6, 9:13] = 1
    network = Corner().eval()
    (found,) = compute(network, shard(x), ("dark", "bright"), CPU, method=method)
    assert (found.target, found.layer) == ("bright", "look")
    assert found.map[3:5, 10:12].min() == pytest.approx(1)
    assert found.map[8:].max() == 0
    assert network.act.inplace  # the network itself is left as it was


def test_the_last_convolution_that_can_say_where_is_taken() -> None:
    network = build("resnet18", 3, 2).eval()
    assert last_convolution(network, torch.zeros(1, 3, 128, 128)).startswith("layer4")
    assert last_convolution(network, torch.zeros(1, 3, 64, 64)).startswith(
        "layer3"
    )  # layer 4 has 2 x 2


def test_volumes_have_maps_too() -> None:
    x = torch.rand(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    (found,) = compute(build("small_cnn", 1, 3, 3).eval(), shard(x), ("a", "b", "c"), CPU, target=2)
    assert found.map.shape == (16, 16, 16)
    assert found.target == "c"


def test_a_network_without_convolutions_is_refused() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2)).eval()
    with pytest.raises(InputError, match="a network with 0 convolutions"):
        compute(network, shard(torch.rand(1, 1, 8, 8)), ("a", "b"), CPU)


def test_another_method_is_refused() -> None:
    with pytest.raises(InputError, match="gradcam"):
        compute(Corner().eval(), shard(torch.rand(1, 1, 8, 8)), ("a", "b"), CPU, method="guess")
