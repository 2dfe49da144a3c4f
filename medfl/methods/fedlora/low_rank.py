"""Low-rank adapters of a network's weights: W = W0 + s B A, with W the matrix (first dimension, all others).

A is (r, columns), B (rows, r); for a convolution's kernel (out, in, k, k) there are in k k columns. The tensor is
adapted rather than the layer, so kernels of any dimension, transposed and grouped ones, and the stacked projections of
`nn.MultiheadAttention` are all treated alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from medfl.core import RunError, Tensors, Weights, pick
from medfl.training import train_only

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Name of an adapted tensor -> its A and B."""

# Arithmetic


def with_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + s B A, in the shape of W."""
    return weight + (scale * (b @ a)).view_as(weight)


@torch.no_grad()
def merge_into(network: nn.Module, pairs: Pairs, scale: float) -> nn.Module:
    """Add the adapters' products to a network's weights, in place."""
    for name, (a, b) in pairs.items():
        weight = network.get_parameter(name)
        weight.copy_(with_product(weight, a, b, scale))
    return network


@torch.no_grad()
def add(network: nn.Module, changes: Weights) -> None:
    """Add matrices to the weights with these names, in place."""
    for name, change in changes.items():
        weight = network.get_parameter(name)
        weight.add_(change.view_as(weight))


def initial(matrix: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return A uniform within 1 / sqrt(columns), as in LoRA's code, and B = 0, with the matrix's dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    columns = matrix.shape[1]
    a = (2 * torch.rand(rank, columns, generator=generator) - 1) / columns**0.5
    return a.to(matrix), matrix.new_zeros(len(matrix), rank)


def mean_product(pairs: Mapping[str, tuple[Tensor, Tensor]], shares: Mapping[str, float]) -> Tensor:
    """Return sum_k p_k B_k A_k as the product of the stacked factors, of any ranks; float64."""
    b = torch.cat([shares[name] * pairs[name][1].double() for name in sorted(pairs)], 1)
    return b @ torch.cat([pairs[name][0].double() for name in sorted(pairs)])


def refactored(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A = V^T and B = U S of the largest singular values; if one is 0, A is not, so that it can still learn.

    Signs are such that the largest entry of each row of A is positive.
    """
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    a = v[:rank]
    b = u[:, :rank] * s[:rank]
    # A pair of singular vectors is unique up to a common sign, which libraries choose differently.
    sign = a.gather(1, a.abs().argmax(1, keepdim=True)).sign()
    return a * sign, b * sign.T


# In training


class _Adapter(nn.Module):
    """The parametrisation of one tensor."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, trains_a: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(a.clone(), requires_grad=trains_a)
        self.b = nn.Parameter(b.clone())
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return with_product(weight, self.a, self.b, self.scale)


@contextmanager
def adapting(
    model: nn.Module, pairs: Pairs, scale: float, whole: Collection[str], *, trains_a: bool
) -> Iterator[Pairs]:
    """Give a network adapters inside the block and train only them and `whole`; the base is not modified.

    Normalisation with running statistics that are not in `whole` uses these, and they are unchanged.

    Yields:
        a container with the trained factors when the block ends.
    """
    trained: Pairs = {}
    with train_only(model, whole), ExitStack() as stack:
        for name, layer in model.named_modules():
            tracks = isinstance(layer, _NormBase) and layer.track_running_stats
            if tracks and f"{name}.running_mean" not in whole:
                stack.callback(layer.train, layer.training)
                layer.eval()

        adapters = {}
        for name, (a, b) in pairs.items():
            adapter = _Adapter(a, b, scale, trains_a)
            adapters[name] = stack.enter_context(_adapted(model, name, adapter))

        yield trained
        # Before the stack is left, which removes the adapters.
        for name, adapter in adapters.items():
            trained[name] = (adapter.a.detach().clone(), adapter.b.detach().clone())


@contextmanager
def _adapted(model: nn.Module, name: str, adapter: _Adapter) -> Iterator[_Adapter]:
    """Register an adapter; at the end the layer has the same tensors in the same order as before."""
    prefix, _, leaf = name.rpartition(".")
    layer = model.get_submodule(prefix)
    order = list(layer._parameters)
    parametrize.register_parametrization(layer, leaf, adapter)

    try:
        yield adapter
    finally:
        parametrize.remove_parametrizations(layer, leaf, leave_parametrized=False)
        parameters = dict(layer._parameters)
        layer._parameters.clear()
        # Removing a parametrisation puts its tensor last: optimisers and hashes go by the order.
        layer._parameters.update(pick(parameters, order))


# In messages


def factor_name(name: str, factor: str, rank: int) -> str:
    """Return the name of a factor, "A" or "B", of a tensor's adapter; sites of one rank have the same names."""
    return f"{name}.lora_{factor}.{rank}"


def delta_name(name: str) -> str:
    """Return the name of the sum of a tensor's products."""
    return f"{name}.delta"


def named_factors(pairs: Pairs, factors: str) -> Tensors:
    """Return the factors A, B or both by name, in row-major layout as from a file: a product's bits depend on it."""
    tensors = {}
    for name, (a, b) in pairs.items():
        for factor in factors:
            tensor = a if factor == "A" else b
            tensors[factor_name(name, factor, len(a))] = tensor.contiguous()

    return tensors


def read_factor(tensors: Weights, name: str, factor: str, matrix: Tensor, rank: int) -> Tensor:
    """Return a factor of an adapter of a matrix.

    Raises:
        RunError: it is missing, or has another form.
    """
    tensor = tensors.get(factor_name(name, factor, rank))
    shape = (rank, matrix.shape[1]) if factor == "A" else (len(matrix), rank)
    if tensor is None or tensor.shape != shape or tensor.dtype != matrix.dtype:
        form = "missing"
        if tensor is not None:
            form = f"{tuple(tensor.shape)} {tensor.dtype}"

        raise RunError(
            f"'adapters/{factor_name(name, factor, rank)}' is {form}; expected {shape} {matrix.dtype}"
        )
    return tensor


def read_factors(
    tensors: Weights, matrices: Weights, factors: str, rank: int
) -> dict[str, Tensors]:
    """Return the factors in a reply: A, B or both for each matrix.

    Raises:
        RunError: one is missing or has another form, or there are others.
    """
    expected: set[str] = set()
    for name in matrices:
        expected.update(factor_name(name, factor, rank) for factor in factors)

    unknown = sorted(tensors.keys() - expected)
    if unknown:
        raise RunError(f"'adapters/{unknown[0]}' is no adapter of rank {rank} of this network")

    read = {}
    for name, matrix in matrices.items():
        read[name] = {f: read_factor(tensors, name, f, matrix, rank) for f in factors}

    return read


def truncated(tensor: Tensor, factor: str, rank: int) -> Tensor:
    """Return the first rows of A or columns of B."""
    if factor == "A":
        return tensor[:rank]

    return tensor[:, :rank].contiguous()


def padded(tensor: Tensor, factor: str, rank: int) -> Tensor:
    """Return a factor of a smaller rank, padded with zeros to this one."""
    lacking = rank - tensor.shape[factor == "B"]
    return nn.functional.pad(tensor, (0, 0, 0, lacking) if factor == "A" else (0, lacking))
