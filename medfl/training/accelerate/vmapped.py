"""One training step of several networks at once: each operation of a step done for all of them.

The operations of a step are noted while it is done once (`make_fx`), those of the backward pass and of the optimiser
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


_NUMBER_BY_NUMBER = (
    "add",
    "sub",
    "mul",
    "div",
    "addcmul",
    "addcdiv",
    "lerp",
    "sqrt",
    "neg",
    "reciprocal",
    "zero",
    "copy",
)
"""Operations on lists of tensors that may be done on the tensors of all networks as on those of one."""


class CannotBeNoted(RuntimeError):
    """A step does something that its operations do not tell."""


class CannotBeGrouped(RuntimeError):
    """A step does something that is done for one network at a time."""


def noted(step: Step, tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> GraphModule:
    """Do a step and return its operations, as a function of the tensors that it uses and of its batch.

    Args:
        step: the tensors of a batch -> its loss; changes `tensors` in place.
        tensors: all that it uses and that outlives it.
        batch: its arguments.

    Raises:
        CannotBeNoted: it draws random numbers, or uses other tensors.
    """

    def named(*given: Tensor) -> Tensor:
        return step(*given[len(tensors) :])

    try:
        made: GraphModule = make_fx(named, tracing_mode="real")(*tensors, *batch)
    except RuntimeError as error:
        raise CannotBeNoted(f"its operations cannot be noted: {str(error).splitlines()[0]}") from error
    for node in made.graph.nodes:
        made_of_numbers = {str(user.target).partition(".")[2].startswith("lift_fresh") for user in node.users}
        if node.op == "get_attr" and made_of_numbers != {True}:
            raise CannotBeNoted("it uses a tensor that is not seen from outside")
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CannotBeNoted(f"{node.target} draws random numbers")
    return made


class Grouped(Interpreter):
    """The operations of a step on the values of several networks.

    Args:
        operations: as `noted`.
        count: networks, K.
    """

    def __init__(self, operations: GraphModule, count: int) -> None:
        """Take the operations."""
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
                warnings.filterwarnings("ignore", "There is a performance drop")  # what is slow is not taken
                losses: Tensor = self.run(*tensors, *batch)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise CannotBeGrouped(str(error).splitlines()[0]) from error
        return losses

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a tensor that the step makes of a number, for all."""
        return self._repeated(super().get_attr(target, args, kwargs))  # type: ignore[no-untyped-call]

    def _repeated(self, value: Any) -> Any:
        return value.expand(self._count, *value.shape).clone() if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do one operation for all."""
        if not isinstance(target, torch._ops.OpOverload):
            return target(*args, **kwargs)  # takes a member of a tuple
        if target.namespace == "profiler":
            return None
        name = target._schema.name.partition("::")[2]
        if name.startswith("lift_fresh"):
            return args[0]  # `_repeated` has made it
        if name.startswith("_foreach_"):
            plain = name.removeprefix("_foreach_")
            if plain.rstrip("_") in _NUMBER_BY_NUMBER and _alike(args):
                return target(*args, **kwargs)
            return self._each(plain, args, kwargs)
        if "batch_norm" in name and not all(one.is_contiguous() for one in args if _of_channels(one)):
            raise CannotBeGrouped("running statistics that do not lie in one piece would not be updated")
        return self._mapped(target, args, kwargs)

    def _mapped(self, target: Any, args: Any, kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not places:
            return tree_map(self._repeated, target(*args, **kwargs))
        results: list[Any] = []

        def one(*tensors: Tensor) -> tuple[Tensor, ...]:
            for place, tensor in zip(places, tensors, strict=True):
                leaves[place] = tensor
            positional, named = tree_unflatten(leaves, form)
            flat, shape = tree_flatten(target(*positional, **named))
            results.extend((flat, shape))
            return tuple(leaf for leaf in flat if isinstance(leaf, Tensor))

        grouped = iter(torch.vmap(one, randomness="error")(*[leaves[place] for place in places]))
        flat, shape = results
        return tree_unflatten([next(grouped) if isinstance(leaf, Tensor) else leaf for leaf in flat], shape)

    def _each(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation on lists of tensors, as optimisers do them, on one tensor after the other."""
        operation = getattr(torch.ops.aten, name)
        length = next(len(argument) for argument in args if isinstance(argument, list | tuple))
        made = []
        for place in range(length):
            given = [argument[place] if isinstance(argument, list | tuple) else argument for argument in args]
            named = dict(kwargs)
            if name.startswith(("addcmul", "addcdiv")) and len(given) == 4:
                named["value"] = given.pop()
            made.append(self._mapped(operation, tuple(given), named))
        return None if name.endswith("_") else made


def _alike(args: Sequence[Any]) -> bool:
    """Tell whether lists have tensors of the same shapes at the same places, and the rest are numbers."""
    lists = [one for one in args if isinstance(one, list | tuple) and one and isinstance(one[0], Tensor)]
    if any(isinstance(one, Tensor) for one in args):
        return False
    return all(len({tensor.shape for tensor in together}) == 1 for together in zip(*lists, strict=True))


def _of_channels(value: Any) -> bool:
    """Tell whether this may be a running statistic of all networks, which `torch.vmap` updates only in one piece."""
    return isinstance(value, Tensor) and value.ndim == 2
