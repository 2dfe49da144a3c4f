"""Max pooling that is faster: the same numbers, bit for bit, forwards and backwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from medfl import datasets
from medfl.networks import build
from medfl.runs.launch import federate
from medfl.runtimes import federation
from medfl.training.accelerate import max_pool
from medfl.training.accelerate.max_pool import use_fast_max_pool, use_torch_max_pool

LAYERS: list[tuple[str, Callable[..., nn.Module], tuple[int, ...], dict[str, Any]]] = [
    ("2x2", nn.MaxPool2d, (4, 32, 28, 28), {"kernel_size": 2}),
    ("odd", nn.MaxPool2d, (4, 32, 29, 27), {"kernel_size": 2}),
    ("ceil", nn.MaxPool2d, (4, 32, 29, 27), {"kernel_size": 2, "ceil_mode": True}),
    ("overlapping", nn.MaxPool2d, (4, 64, 20, 20), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("dilated", nn.MaxPool2d, (4, 64, 20, 20), {"kernel_size": (3, 2), "stride": (1, 2), "dilation": 2}),
]


def _both(make: Callable[..., nn.Module], settings: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    plain = make(**settings)
    return plain, use_fast_max_pool(copy.deepcopy(plain))


def _images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).relu()  # zeros: windows with several largest


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the images that took the faster way."""
    sizes: list[int] = []
    inner = max_pool._MaxPoolFunction.apply

    def noted(x: Tensor, *rest: Any) -> Any:
        sizes.append(x.numel())
        return inner(x, *rest)

    monkeypatch.setattr(max_pool._MaxPoolFunction, "apply", noted)
    return sizes


@pytest.mark.parametrize(("make", "shape", "settings"), [layer[1:] for layer in LAYERS], ids=[la[0] for la in LAYERS])
def test_pooled_images_and_gradients_are_the_same_bit_for_bit(
    make: Callable[..., nn.Module], shape: tuple[int, ...], settings: dict[str, Any], used: list[int]
) -> None:
    plain, faster = _both(make, settings)
    given = [_images(*shape).requires_grad_() for _ in range(2)]
    made = [layer(x) for layer, x in zip((plain, faster), given, strict=True)]
    gradient = torch.randn(made[0].shape, generator=torch.Generator().manual_seed(5))
    for pooled in made:
        pooled.backward(gradient)
    assert used, "the layer took the plain way"
    assert torch.equal(made[0], made[1])
    assert made[1].is_contiguous()
    first, second = (x.grad for x in given)
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert second.is_contiguous()


def test_what_is_not_a_number_stays_so() -> None:
    plain, faster = _both(nn.MaxPool2d, {"kernel_size": 2})
    x = _images(4, 32, 28, 28)
    x[1, 3, 4, 4], x[2, 0, 0, 0], x[0, 0, 6, 6] = float("nan"), float("-inf"), float("inf")
    assert torch.equal(plain(x).nan_to_num(7.0), faster(x).nan_to_num(7.0))


def test_second_derivatives_pass_through() -> None:
    plain, faster = _both(nn.MaxPool2d, {"kernel_size": 2})
    found = []
    for layer in (plain, faster):
        x = _images(4, 32, 28, 28).requires_grad_()
        (first,) = torch.autograd.grad((layer(x) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x)
        found.append(second)
    assert torch.equal(*found)
    assert found[0].abs().sum() > 0


@pytest.mark.parametrize(
    "x",
    [
        _images(2, 32, 8, 8),
        _images(32, 64, 64),
        _images(4, 4, 160, 160),
        _images(4, 32, 28, 28).double(),
        _images(4, 32, 28, 28).bfloat16(),
        _images(4, 32, 28, 28).contiguous(memory_format=torch.channels_last),
    ],
    ids=["small", "one image", "few channels", "float64", "bfloat16", "channels last"],
)
def test_images_that_gain_nothing_take_the_plain_way(x: Tensor, used: list[int]) -> None:
    plain, faster = _both(nn.MaxPool2d, {"kernel_size": 2})
    assert torch.equal(plain(x), faster(x))
    assert plain(x).stride() == faster(x).stride()
    assert not used


def test_layers_that_return_places_or_are_of_another_class_stay() -> None:
    class Own(nn.MaxPool2d):
        """Somebody's own."""

    assert type(use_fast_max_pool(Own(2))) is Own
    assert type(use_fast_max_pool(nn.MaxPool3d(2))) is nn.MaxPool3d
    plain, faster = _both(nn.MaxPool2d, {"kernel_size": 2, "return_indices": True})
    x = _images(4, 32, 28, 28)
    assert all(torch.equal(a, b) for a, b in zip(plain(x), faster(x), strict=True))


def test_a_network_keeps_its_names_and_values() -> None:
    network = build("small_cnn", 3, 8, 2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    after = use_fast_max_pool(network).state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert nn.MaxPool2d not in map(type, network.modules())
    assert nn.MaxPool2d in map(type, use_torch_max_pool(network).modules())


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom("mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=32)


def test_a_traced_layer_is_the_plain_one() -> None:
    plain, faster = _both(nn.MaxPool2d, {"kernel_size": 2})
    x = _images(4, 32, 28, 28)
    traced = torch.jit.trace(faster, x)  # type: ignore[no-untyped-call]
    exported = torch.export.export(faster, (x,)).module()
    assert torch.equal(traced(x), plain(x))
    assert torch.equal(exported(x), plain(x))
    assert "aten::max_pool" in str(traced.inlined_graph)


def test_a_run_gives_the_weights_that_it_gives_with_plain_pooling(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: list[int]
) -> None:
    def weights(name: str) -> dict[str, Tensor]:
        requested = {"data": str(scans), "rounds": 1, "batch_size": 16, "seed": 4}
        config = {"network": "small_cnn", "image_size": 32}
        federate("mednist", config=config, requested=requested, out=tmp_path / name, jobs=1)
        return load_file(tmp_path / name / "weights.safetensors")

    faster = weights("faster")
    assert used
    monkeypatch.setattr(federation, "use_fast_max_pool", lambda network: network)
    count = len(used)
    plain = weights("plain")
    assert len(used) == count
    assert faster.keys() == plain.keys()
    assert all(torch.equal(faster[name], plain[name]) for name in plain)
