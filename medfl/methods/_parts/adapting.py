"""Training of low-rank adapters: a network has them for the length of a block, as parametrisations of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from medfl.methods._parts.low_rank import Pairs, with_product
from medfl.training import train_only


class _Adapter(nn.Module):
    """The parametrisation of one tensor."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, trains_a: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a.clone(), requires_grad=trains_a), nn.Parameter(b.clone())
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return with_product(weight, self.a, self.b, self.scale)


@contextmanager
def adapting(
    model: nn.Module, pairs: Pairs, scale: float, whole: Collection[str], *, trains_a: bool
) -> Iterator[Pairs]:
    """Give a network adapters inside the block and train nothing beside them but `whole`; the base is not written to.

    Normalisation with running statistics that are not among `whole` goes by these, and they stay as they are.

    Yields:
        what holds the trained factors when the block ends.
    """
    trained: Pairs = {}
    with train_only(model, whole), ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, _NormBase) and f"{name}.running_mean" not in whole and layer.track_running_stats:
                stack.callback(layer.train, layer.training)
                layer.eval()
        adapters = {
            name: stack.enter_context(_adapted(model, name, _Adapter(a, b, scale, trains_a)))
            for name, (a, b) in pairs.items()
        }
        yield trained
        trained |= {name: (each.a.detach().clone(), each.b.detach().clone()) for name, each in adapters.items()}


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
        layer._parameters.update({one: parameters[one] for one in order})
