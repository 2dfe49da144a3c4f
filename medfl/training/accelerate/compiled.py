"""Networks compiled by `torch.compile` while they are trained.

Operations are fused and launched together: on a GPU by CUDA graphs, as with `mode="reduce-overhead"`. The order of some
sums changes, so the last bits differ from those of eager steps. It is intended for
GPUs; on a CPU the steps of a small CNN are slower (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from medfl.core import Document, RunError, as_text, root_cause

_ENABLED: ContextVar[bool] = ContextVar("compiling", default=False)
_MOST_VARIANTS = 256
"""Limit of compilations of one network's code; beyond it PyTorch would train eagerly, depending on history."""


@contextmanager
def compile_steps() -> Iterator[None]:
    """Let `fit` compile networks inside the block."""
    token = _ENABLED.set(True)
    try:
        yield
    finally:
        _ENABLED.reset(token)


class NetworkCalls:
    """How a network is called in the training steps of one visit: compiled for full batches, if that is enabled.

    Short batches stay eager, so that one compilation serves all sites whatever their number of items. So which steps
    are compiled never depends on what the process has trained before.
    """

    def __init__(self, network: nn.Module, batch_size: int, device: torch.device) -> None:
        self._network = network
        self._batch_size = batch_size
        self._device = device
        self._compiled: Callable[..., Any] | None = None

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Allow the steps inside the block to be compiled.

        Raises:
            RunError: the network cannot be compiled.
        """
        if not _ENABLED.get():
            yield
            return

        from torch import _dynamo  # takes seconds to import
        from torch._functorch import config as autograd_config

        self._network.compile(dynamic=False, options=_options(self._device))
        self._compiled = self._network._compiled_call_impl
        self._network._compiled_call_impl = None
        limits = {
            "recompile_limit": _MOST_VARIANTS,
            "accumulated_recompile_limit": 4 * _MOST_VARIANTS,
        }

        try:
            with (
                _dynamo.config.patch(limits),  # type: ignore[no-untyped-call]
                # the scaler of float16 gradients may repeat a backward pass
                autograd_config.patch(donated_buffer=False),  # type: ignore[no-untyped-call]
            ):
                yield
        except _dynamo.exc.TorchDynamoException as error:
            raise RunError(
                f"--compile: the network cannot be compiled: {as_text(root_cause(error)).splitlines()[0]}; "
                "run it without --compile"
            ) from error

    def step(self, inputs: object) -> AbstractContextManager[None]:
        """Return a context in which the network is called as fits the inputs (N, ...) of a batch."""
        if self._compiled and isinstance(inputs, Tensor) and len(inputs) >= self._batch_size:
            return self._compiled_calls()
        return nullcontext()

    @contextmanager
    def _compiled_calls(self) -> Iterator[None]:
        if self._device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        self._network._compiled_call_impl = self._compiled
        try:
            yield
        finally:
            self._network._compiled_call_impl = None


def _options(device: torch.device) -> Document:
    """Return the options of `torch.compile`; "triton.cudagraphs" is all that `mode="reduce-overhead"` sets."""
    return {
        "triton.cudagraphs": device.type == "cuda",
        "fallback_random": True,  # dropout draws the same numbers as in eager steps
        "compile_threads": 1,  # workers may not start processes
        # A pattern of PyTorch 2.8 to 2.14 loses the factor `alpha` of a product that is added to a tensor.
        "pattern_matcher": False,
    }
