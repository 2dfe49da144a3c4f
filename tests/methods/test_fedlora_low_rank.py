"""Adapters of layers of every kind: what they compute, what they leave as it was, the networks that they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from monai.networks.nets import SwinUNETR
from torch import Tensor, nn

from medfl.methods import load
from medfl.methods.fedlora.adapters import matrices, whole_tensor_names
from medfl.methods.fedlora.low_rank import Pairs, adapting, merge_into, refactored
from tests.support.toy import Toy, bits, cross_entropy, sgd, simulate


class Attending(nn.Module):
    """PyTorch's own attention, whose three projections are one tensor of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attn(x, x, x, need_weights=False)[0])


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), (3, 4)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 1)), (3, 2, 5, 5)),
    "grouped": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 1)),
        (3, 4, 5, 5),
    ),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.Conv3d(4, 2, 1)), (3, 2, 4, 4, 4)),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 3, 2, 2), nn.Conv2d(3, 2, 1)),
        (3, 4, 3, 3),
    ),
    "attention": (Attending, (3, 5, 4)),
}


def filled(found: dict[str, Tensor], rank: int = 2) -> Pairs:
    torch.manual_seed(1)
    return {
        name: (torch.randn(rank, m.shape[1]), torch.randn(len(m), rank))
        for name, m in found.items()
    }


@pytest.mark.parametrize("kind", LAYERS)
def test_adapted_and_merged_networks_are_the_same_and_gradients_are_the_chain_rule_s(
    kind: str,
) -> None:
    """dL/dB = s G A', dL/dA = s B' G with G the gradient of the whole matrix."""
    build, shape = LAYERS[kind]
    network, x = build(), torch.randn(shape)
    before, order = bits(network.state_dict()), list(network.state_dict())
    found = matrices(network, "", whole_tensor_names(network, "head"))
    pairs = filled(found)
    assert found
    with adapting(network, pairs, 0.5, (), trains_a=True):
        y = network(x)
        y.square().sum().backward()
        grads = {
            name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None
        }
    assert len(grads) == 2 * len(found), "nothing else has a gradient"
    assert (bits(network.state_dict()), list(network.state_dict())) == (before, order)
    assert all(
        type(layer).__module__.startswith(("torch.nn.modules", __name__))
        for layer in network.modules()
    )
    merged = merge_into(network, pairs, 0.5)
    torch.testing.assert_close(merged(x), y, rtol=1e-5, atol=1e-5)
    merged.zero_grad()
    merged(x).square().sum().backward()
    for name, (a, b) in pairs.items():
        gradient = merged.get_parameter(name).grad.flatten(1)  # type: ignore[union-attr]
        prefix, _, key = name.rpartition(".")
        of_a, of_b = (grads[f"{prefix}.parametrizations.{key}.0.{factor}"] for factor in "ab")
        torch.testing.assert_close(of_b, 0.5 * gradient @ a.T, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(of_a, 0.5 * b.T @ gradient, rtol=1e-4, atol=1e-3)


def test_batch_norm_of_the_base_goes_by_its_statistics_and_they_stay() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = bits(network.state_dict())
    with adapting(network, {}, 1.0, (), trains_a=True):
        network(torch.randn(8, 3) + 5)
    assert bits(network.state_dict()) == before
    assert network[1].training
    with adapting(network, {}, 1.0, whole_tensor_names(network, "norm"), trains_a=True):
        network(torch.randn(8, 3) + 5)
    assert bits(network.state_dict()) != before
    untracked = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with adapting(untracked, {}, 1.0, (), trains_a=True):
        assert untracked[1].training


def test_a_tensor_of_two_layers_gets_no_adapter_and_is_whole_under_both_names() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    network[2].weight = network[0].weight
    assert list(matrices(network, "")) == ["1.weight", "3.weight"]
    assert whole_tensor_names(network, "2") == {"0.weight", "2.weight", "2.bias"}


def test_a_direction_without_a_singular_value_can_still_learn() -> None:
    a, b = refactored(torch.diag(torch.tensor([4.0, 0, 1])), 3)
    torch.testing.assert_close(b @ a, torch.diag(torch.tensor([4.0, 0, 1])).double())
    torch.testing.assert_close(a @ a.T, torch.eye(3).double())


def test_peft_computes_the_same_where_it_has_such_a_layer() -> None:
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    network, x = (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(36, 3)),
        torch.randn(2, 2, 5, 5),
    )
    pairs = filled(matrices(network, ""))
    with adapting(network, pairs, 0.5, (), trains_a=True):
        ours = network(x)
    config = peft.LoraConfig(r=2, lora_alpha=1, target_modules=["0", "2"])
    theirs = peft.inject_adapter_in_model(config, network)
    for name, (a, b) in pairs.items():
        layer = theirs.get_submodule(name.removesuffix(".weight"))
        for own, factor in ((layer.lora_A.default, a), (layer.lora_B.default, b)):
            own.weight.data = factor.reshape(own.weight.shape)
    torch.testing.assert_close(theirs(x), ours, rtol=1e-5, atol=1e-5)


# The networks that it is for


def swin() -> nn.Module:
    pytest.importorskip("einops", reason="SwinUNETR needs the package einops")
    return SwinUNETR(
        1, 2, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), feature_size=12, spatial_dims=2
    )


class Encoded(nn.Module):
    """An image encoder under a head of one convolution."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.image_encoder, self.head = encoder, nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.image_encoder(x)
        return nn.functional.interpolate(
            self.head(getattr(features, "last_hidden_state", features)), x.shape[-2:]
        )


def sam() -> nn.Module:
    """The encoder of the package segment_anything at toy width."""
    package = pytest.importorskip(
        "segment_anything.modeling", reason="the package segment_anything is not installed"
    )
    settings: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
    }
    return Encoded(
        package.ImageEncoderViT(
            **settings, out_chans=8, in_chans=1, window_size=2, global_attn_indexes=(1,)
        )
    )


def medsam() -> nn.Module:
    """The same as transformers has it, with which medfl reads MedSAM."""
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "mlp_dim": 32,
    }
    config = transformers.SamVisionConfig(
        **settings, num_channels=1, image_size=32, patch_size=8, output_channels=8, window_size=2,
        global_attn_indexes=[1], num_pos_feats=4, initializer_range=0.1,
    )  # fmt: skip
    return Encoded(transformers.models.sam.modeling_sam.SamVisionEncoder(config))


@pytest.mark.parametrize(("build", "count"), [(swin, 8), (sam, 4), (medsam, 4)])
def test_attention_projections_of_transformers_learn_in_a_federation(
    build: Any, count: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    side = 64 if build is swin else 32
    x = torch.randn(2, 1, side, side, generator=generator)
    data = {name: (x + i, (x[:, 0] > 0).long()) for i, name in enumerate("ab")}
    method = load("fedlora", layers="attn.qkv,attn.proj", rank=2, share="svd")
    toy = Toy(data, build, cross_entropy, sgd(0.5))
    with toy.networks.scope():
        found = method.matrices(toy.networks.fresh())
    outcome = simulate(method, toy, 2)
    with toy.networks.scope():
        network = method.global_predictor(toy.host(), outcome.server)
        after = network.state_dict()  # type: ignore[union-attr]
        changed = {
            name for name, tensor in after.items() if bits(tensor) != bits(toy.initial[name])
        }
    assert len(found) == count
    assert changed == {*found, *method.whole(toy.network())}
    numbers = sum(t.numel() for t in outcome.replies["a"].flat().values())
    assert numbers < sum(t.numel() for t in toy.initial.values()) / 4
