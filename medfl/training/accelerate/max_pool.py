"""Max pooling on the CPU, several times as fast and bit for bit the same.

PyTorch pools contiguous images one number after the other, images with the channels last many numbers at a time. Which
number of a window is the largest does not depend on the order of the memory, so the pooled images and the places of the
largest ones are computed with the channels last and handed on contiguous; the gradient goes back by PyTorch's own way.
In a small network plain pooling is a large part of a training step (benchmarks/local_step.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_LEAST_CHANNELS, _LEAST_SIZE = 8, 2**16  # below these nothing is gained
_FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


class _Pooled(torch.autograd.Function):
    """Pool contiguous images: (x, sizes...) -> (pooled images, places of the largest), both contiguous."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dims: int, *sizes: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        turned = x.contiguous(memory_format=_FORMATS[dims])
        operation = torch.ops.aten.max_pool2d_with_indices if dims == 2 else torch.ops.aten.max_pool3d_with_indices
        pooled, places = operation(turned, *sizes)
        return pooled.contiguous(), places.contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.dims, *ctx.sizes = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        aten = torch.ops.aten
        x, places = ctx.saved_tensors
        back = aten.max_pool2d_with_indices_backward if ctx.dims == 2 else aten.max_pool3d_with_indices_backward
        return back(gradient.contiguous(), x, *ctx.sizes, places), None, *[None for _ in ctx.sizes]


def _tuple(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


def _gains(x: Tensor, dims: int) -> bool:
    """Tell whether images are such that another order of the memory pays: plain float32 ones on the CPU."""
    if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling():
        return False  # first of all: what is traced has sizes that are no numbers
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.ndim == dims + 2
        and x.shape[1] >= _LEAST_CHANNELS
        and x.numel() >= _LEAST_SIZE
        and x.is_contiguous()
    )


class _Faster:
    """What a pooling layer does in the place of its own `forward`."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return the pooled images; (B, C, H, W[, D]) -> the same with smaller sides."""
        dims = 2 if isinstance(self, nn.MaxPool2d) else 3
        if self.return_indices or not _gains(x, dims):
            plain: Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        stride = self.kernel_size if self.stride is None else self.stride
        sizes = [_tuple(value, dims) for value in (self.kernel_size, stride, self.padding, self.dilation)]
        pooled: Tensor = _Pooled.apply(x, dims, *sizes, self.ceil_mode)[0]  # type: ignore[no-untyped-call]
        return pooled


class _MaxPool2d(_Faster, nn.MaxPool2d): ...


class _MaxPool3d(_Faster, nn.MaxPool3d): ...


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.MaxPool2d: _MaxPool2d, nn.MaxPool3d: _MaxPool3d}


def pooling_faster(network: nn.Module) -> nn.Module:
    """Let the max-pooling layers of a network be fast on the CPU, and return the network.

    Layers of a class of their own stay what they are. No tensor of the network gets another name or value.
    """
    for module in network.modules():
        module.__class__ = _KINDS.get(type(module), type(module))
    return network


def pooling_plain(network: nn.Module) -> nn.Module:
    """Give the layers of a network, which is to be written down, PyTorch's own classes back, and return the network."""
    plain = {faster: kind for kind, faster in _KINDS.items()}
    for module in network.modules():
        module.__class__ = plain.get(type(module), type(module))
    return network
