"""CUDA graphs, which record a training step and replay it, and optimisers whose steps can be recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from medfl.core.importing import without_gc


def count_in_tensors(optimizer: Optimizer, varying_rates: bool) -> None:
    """Let an optimiser that has not stepped yet keep in tensors what differs from step to step or from round to round.

    So its steps can be repeated without Python. To be called when its learning rates are set.

    Args:
        optimizer: to be used inside `without_readback` from now on.
        varying_rates: whether learning rates change between rounds: as tensors they are no numbers of the step.
    """
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if varying_rates:
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # one parameter after the other takes numbers only
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]  # some steps are eager


@contextmanager
def without_readback(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimiser step inside the block without reading its tensors back.

    For that PyTorch has to take the step for one that it is compiling: outside of that a CPU's optimiser may not count
    in tensors, and SGD makes a number of its learning rate.
    """
    counted = [g["params"][0].device.type for g in optimizer.param_groups if g.get("capturable") and g["params"]]
    if "cpu" not in counted and not any(isinstance(g["lr"], Tensor) for g in optimizer.param_groups):
        yield
        return
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class CudaGraph:
    """A step as a CUDA graph; all graphs of a device share one pool of memory."""

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    _branch_streams: ClassVar[dict[torch.device, list[torch.cuda.Stream]]] = {}
    _pools: ClassVar[dict[torch.device, Any]] = {}
    _last: ClassVar[dict[torch.device, CudaGraph]] = {}  # a pool lives as long as one of its graphs does

    def __init__(self, device: torch.device) -> None:
        """Take a device `with_index`; warm-up and capture share a stream (libraries tie handles to one)."""
        self._device = device
        if self._device not in self._streams:
            self._streams[self._device] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pools[self._device] = torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()

    def prepare(self, optimizer: Optimizer, varying_rates: bool) -> None:
        """Let the optimiser keep its counters, and rates that vary, on the device."""
        count_in_tensors(optimizer, varying_rates)

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Run the eager steps before the capture on its stream."""
        stream, current = self._streams[self._device], torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        """Record a step, then do it by its first replay.

        Returns:
            The step's loss, in memory where each replay writes its own.

        Raises:
            RuntimeError: it cannot be recorded; the step was not done.
        """
        generator = torch.cuda.default_generators[self._device.index]
        before = generator.get_state()
        try:
            with self.warming(), without_gc():  # which could free device memory amid a capture
                self._graph.capture_begin(pool=self._pools[self._device], capture_error_mode="thread_local")
                try:
                    loss = step()
                except BaseException:
                    with suppress(RuntimeError):
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()
        except RuntimeError:
            fresh = torch.Generator(self._device)  # the old one may still count as captured
            fresh.set_state(before)
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
            raise
        self._last[self._device] = self
        self.replay()
        return loss

    def replay(self) -> None:
        """Repeat the recorded operations on the current stream."""
        self._graph.replay()

    @contextmanager
    def branch(self, index: int) -> Iterator[None]:
        """Run a block of a capture on a stream of its own, after all that the capture did before its branches."""
        streams = self._branch_streams.setdefault(self._device, [])
        while len(streams) <= index:
            streams.append(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        streams[index].wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(streams[index]):
            yield

    def join(self, count: int) -> None:
        """Let what follows in a capture wait for its branches, 0 to count - 1."""
        for stream in self._branch_streams[self._device][:count]:
            torch.cuda.current_stream(self._device).wait_stream(stream)


GRAPHS: dict[str, Callable[[torch.device], CudaGraph]] = {"cuda": CudaGraph}
"""Type of device -> what records steps there; on all others they run eagerly."""
