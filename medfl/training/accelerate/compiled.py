"""A training step compiled by TorchInductor: its operations fused, its memory planned, Python left out.

The operations of the whole step, those of the backward pass and of the optimiser among them, are traced once
(`medfl.training.accelerate.vmapped.trace_step`) and compiled as one function of the tensors that it uses and of its
batch. So the function serves every site and round whose steps have the same code, numbers and shapes; its arithmetic is
that of the step, the order of some sums is not. It pays where launching operations is a large part of a step, as in
small networks; compiled convolutions of large ones can be slower (docs/performance.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from medfl.training.accelerate.recordings import VisitMemory, relocated
from medfl.training.accelerate.vmapped import CannotBeTraced, Step, trace_step

# TorchInductor's patterns make addmm of a product that is added to a tensor and lose its factor (`alpha`): PyTorch 2.14
# trains a linear layer by plain SGD, or with weight decay, with a rate of 1. See pytorch/pytorch#167313 for its kin.
_INDUCTOR = {"compile_threads": 1, "pattern_matcher": False}

CompiledStep = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(tensors that the step uses, its batch) -> loss; changes the former in place."""

_MAX_STEPS = 64
_STEPS: OrderedDict[Hashable, CompiledStep | CannotBeTraced] = OrderedDict()
_ENABLED: ContextVar[bool] = ContextVar("compiling", default=False)


@contextmanager
def compile_steps() -> Iterator[None]:
    """Let `fit` compile its steps inside the block."""
    token = _ENABLED.set(True)
    try:
        yield
    finally:
        _ENABLED.reset(token)


def compile_enabled() -> bool:
    """Return whether steps are to be compiled."""
    return _ENABLED.get()


def compile_step(step: Step, tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> CompiledStep:
    """Compile a step, given as to `trace_step`; it is done once, on these tensors.

    Raises:
        CannotBeTraced: its operations cannot be traced or compiled; says why.
    """
    from torch import _inductor  # takes seconds to import

    operations = trace_step(step, tensors, batch)
    try:
        with torch.no_grad(), _inductor.config.patch(_INDUCTOR):  # type: ignore[no-untyped-call]
            function = _inductor.compile(operations, [value.detach() for value in (*tensors, *batch)])
    except Exception as error:  # of the compiler, or of whatever else is not there
        raise CannotBeTraced(f"it cannot be compiled: {type(error).__name__}: {str(error).splitlines()[0]}") from error

    def compiled(tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            result = function(*[value.detach() for value in (*tensors, *batch)])
        loss: Tensor = result if isinstance(result, Tensor) else result[0]
        return loss

    return compiled


def compile_for_visit(key: Hashable, step: Step, memory: VisitMemory, batch: Sequence[Tensor]) -> Step:
    """Return the step of a visit, compiled now or for another visit with the same key; raises as `compile_step`."""
    key = (key, memory.layout)
    if key not in _STEPS:
        try:
            if len(memory.blocks) < len(memory.tensors):
                raise CannotBeTraced("two of its tensors share memory")
            with relocated(memory, [block.clone() for block in memory.blocks]):
                _STEPS[key] = compile_step(step, memory.tensors, batch)
        except CannotBeTraced as error:
            _STEPS[key] = error
    _STEPS.move_to_end(key)
    while len(_STEPS) > _MAX_STEPS:
        _STEPS.popitem(last=False)
    compiled = _STEPS[key]
    if isinstance(compiled, CannotBeTraced):
        raise compiled
    return lambda *batch: compiled(memory.tensors, batch)
