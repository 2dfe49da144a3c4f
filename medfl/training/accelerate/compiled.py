"""A training step compiled by TorchInductor: its operations fused, its memory planned, Python left out.

The operations of the whole step, those of the backward pass and of the optimiser among them, are noted once
(`medfl.training.accelerate.vmapped.noted`) and compiled as one function of the tensors that it uses and of its batch.
So the function serves every site and round whose steps have the same code, numbers and shapes; its arithmetic is that
of the step, the order of some sums is not. It pays where launching operations is a large part of a step, as in small
networks; compiled convolutions of large ones can be slower (docs/performance.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from medfl.training.accelerate.recordings import Home, moved
from medfl.training.accelerate.vmapped import CannotBeNoted, Step, noted

Compiled = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(tensors that the step uses, its batch) -> loss; changes the former in place."""

_MOST = 64
_KEPT: OrderedDict[Hashable, Compiled | CannotBeNoted] = OrderedDict()
_ALLOWED: ContextVar[bool] = ContextVar("compiling", default=False)


@contextmanager
def compiling() -> Iterator[None]:
    """Let `fit` compile its steps inside the block."""
    token = _ALLOWED.set(True)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def wanted() -> bool:
    """Tell whether steps are to be compiled."""
    return _ALLOWED.get()


def compiled(step: Step, tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> Compiled:
    """Compile a step; it is done once, on these tensors.

    Args:
        step: the tensors of a batch -> its loss; changes `tensors` in place.
        tensors: all that it uses and that outlives it.
        batch: its arguments.

    Raises:
        CannotBeNoted: its operations cannot be noted or compiled; says why.
    """
    from torch import _inductor  # takes seconds to import

    operations = noted(step, tensors, batch)
    try:
        with torch.no_grad(), _inductor.config.patch(compile_threads=1):  # type: ignore[no-untyped-call]
            function = _inductor.compile(operations, [value.detach() for value in (*tensors, *batch)])
    except Exception as error:  # of the compiler, or of whatever else is not there
        raise CannotBeNoted(f"it cannot be compiled: {type(error).__name__}: {str(error).splitlines()[0]}") from error

    def done(tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            made = function(*[value.detach() for value in (*tensors, *batch)])
        loss: Tensor = made if isinstance(made, Tensor) else made[0]
        return loss

    return done


def of_visit(key: Hashable, step: Step, home: Home, batch: Sequence[Tensor]) -> Step:
    """Return the step of a visit, compiled now or for another visit with the same key.

    Raises:
        CannotBeNoted: as `compiled`.
    """
    name = (key, home.layout)
    if name not in _KEPT:
        try:
            if len(home.parts) < len(home.tensors):
                raise CannotBeNoted("two of its tensors share memory")
            with moved(home, [part.clone() for part in home.parts]):
                _KEPT[name] = compiled(step, home.tensors, batch)
        except CannotBeNoted as error:
            _KEPT[name] = error
    _KEPT.move_to_end(name)
    while len(_KEPT) > _MOST:
        _KEPT.popitem(last=False)
    found = _KEPT[name]
    if isinstance(found, CannotBeNoted):
        raise found
    return lambda *batch: found(home.tensors, batch)
