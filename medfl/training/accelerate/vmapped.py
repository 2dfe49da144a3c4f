"""One training step of several networks at once: each operation of a step done for all of them.

The operations of a step are traced while it is done once (`make_fx`), those of the backward pass and of the optimiser
among them, and repeated on tensors that hold the values of all networks, one operation after the other by `torch.vmap`:
the convolutions of K networks become one with K groups, and the sums of K optimisers one. The arithmetic of each
network is the same as alone; the order of some sums is not, so the last bits differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Step = Callable[..., Tensor]
"""The tensors of a batch -> its loss, detached; trains the network on the way."""

_ELEMENTWISE = (
    "add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp", "sqrt", "neg", "reciprocal", "zero", "copy",
)  # fmt: skip
"""Operations on lists of tensors that may be done on the tensors of all networks as on those of one."""


class CannotBeTraced(RuntimeError):
    """A step does something that its operations do not tell."""


class CannotBeGrouped(RuntimeError):
    """A step does something that is done for one network at a time."""


def trace_step(step: Step, tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> GraphModule:
    """Do a step and return its operations, as a function of the tensors that it uses and of its batch.

    Args:
        step: the tensors of a batch -> its loss; changes `tensors` in place.
        tensors: all that it uses and that outlives it.
        batch: its arguments.

    Raises:
        CannotBeTraced: it draws random numbers, or uses other tensors.
    """
    try:
        of_all = make_fx(lambda *arguments: step(*arguments[len(tensors) :]), tracing_mode="real")
        operations: GraphModule = of_all(*tensors, *batch)
    except RuntimeError as error:
        raise CannotBeTraced(f"its operations cannot be traced: {str(error).splitlines()[0]}") from error
    for node in operations.graph.nodes:
        lifted = {str(user.target).partition(".")[2].startswith("lift_fresh") for user in node.users}
        if node.op == "get_attr" and lifted != {True}:  # a tensor that the step does not make of a number
            raise CannotBeTraced("it uses a tensor that is not seen from outside")
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CannotBeTraced(f"{node.target} draws random numbers")
    return operations


class GroupedStep(Interpreter):
    """The operations of a step, from `trace_step`, on the values of several networks."""

    def __init__(self, operations: GraphModule, count: int) -> None:
        super().__init__(operations)  # type: ignore[no-untyped-call]
        self._count = count

    def __call__(self, tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> Tensor:
        """Do the step of all networks.

        Args:
            tensors: (K, ...) each; changed in place.
            batch: (K, ...) each.

        Returns:
            the losses (K,).

        Raises:
            CannotBeGrouped: an operation cannot be done for several at once.
        """
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # a slow way is not chosen
                losses: Tensor = self.run(*tensors, *batch)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise CannotBeGrouped(str(error).splitlines()[0]) from error
        return losses

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a tensor that the step makes of a number, for all networks."""
        return self._repeated(super().get_attr(target, args, kwargs))  # type: ignore[no-untyped-call]

    def _repeated(self, value: Any) -> Any:
        return value.expand(self._count, *value.shape).clone() if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do one operation for all networks."""
        if not isinstance(target, torch._ops.OpOverload):
            return target(*args, **kwargs)  # takes a member of a tuple
        if target.namespace == "profiler":
            return None
        name = target._schema.name.partition("::")[2]
        if name.startswith("lift_fresh"):
            return args[0]  # `_repeated` has made it
        if name.startswith("_foreach_"):
            plain = name.removeprefix("_foreach_")
            if plain.rstrip("_") in _ELEMENTWISE and _same_shapes(args):
                return target(*args, **kwargs)
            return self._each(plain, args, kwargs)
        # What may be running statistics of all networks, which `torch.vmap` updates only in one piece.
        by_channel = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim == 2]
        if "batch_norm" in name and not all(arg.is_contiguous() for arg in by_channel):
            raise CannotBeGrouped("running statistics that do not lie in one piece would not be updated")
        return self._vmapped(target, args, kwargs)

    def _vmapped(self, target: Any, args: Any, kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not indices:
            return tree_map(self._repeated, target(*args, **kwargs))
        result: list[Any] = []

        def of_one_network(*tensors: Tensor) -> tuple[Tensor, ...]:
            for index, tensor in zip(indices, tensors, strict=True):
                leaves[index] = tensor
            positional, named = tree_unflatten(leaves, form)
            flat, shape = tree_flatten(target(*positional, **named))
            result.extend((flat, shape))
            return tuple(leaf for leaf in flat if isinstance(leaf, Tensor))

        grouped = iter(torch.vmap(of_one_network, randomness="error")(*[leaves[index] for index in indices]))
        flat, shape = result
        return tree_unflatten([next(grouped) if isinstance(leaf, Tensor) else leaf for leaf in flat], shape)

    def _each(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation on lists of tensors, as optimisers do them, on one tensor after the other."""
        operation = getattr(torch.ops.aten, name)
        length = next(len(arg) for arg in args if isinstance(arg, list | tuple))
        results = []
        for index in range(length):
            positional = [arg[index] if isinstance(arg, list | tuple) else arg for arg in args]
            named = dict(kwargs)
            if name.startswith(("addcmul", "addcdiv")) and len(positional) == 4:
                named["value"] = positional.pop()
            results.append(self._vmapped(operation, tuple(positional), named))
        return None if name.endswith("_") else results


def _same_shapes(args: Sequence[Any]) -> bool:
    """Return whether lists have tensors of the same shapes at the same places, and the rest are numbers."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
    if any(isinstance(arg, Tensor) for arg in args):
        return False
    return all(len({tensor.shape for tensor in row}) == 1 for row in zip(*lists, strict=True))
