"""Where the time of a run goes: PyTorch's profiler around the parts of a run, as a table and a trace for a viewer.

`torch.profiler.record_function` names the parts; it costs next to nothing unless a `PartsProfile` is recording.
Perfetto and chrome://tracing open the trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch._C._autograd import _enable_profiler
from torch._C._profiler import RecordScope
from torch.autograd import profiler
from torch.profiler import record_function

DATA = "data"  # the name that `Shard.batches` gives to making a batch
TRAINING = "training"
OPTIMISER = "optimiser"
AGGREGATION = "aggregation"
EVALUATION = "evaluation"
MESSAGES = "messages"
CHECKPOINT = "checkpoint"
OTHER = "other"
PARTS = (DATA, TRAINING, OPTIMISER, AGGREGATION, EVALUATION, MESSAGES, CHECKPOINT, OTHER)


class PartsProfile(profiler.profile):
    """PyTorch's profiler, recording only the named parts, not the operators called within them.

    A run calls millions of operators: recording them takes longer than the training, and no viewer opens the trace.

    Args:
        enabled: if false, nothing is recorded.
    """

    def __init__(self, enabled: bool) -> None:
        super().__init__(enabled, use_kineto=True)

    def _start_trace(self) -> None:
        # The C++ profiler can select which kinds of ranges to record, but the Python class does not expose that.
        enable = partial(_enable_profiler, scopes={RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        with patch.object(profiler, "_enable_profiler", enable):
            super()._start_trace()  # type: ignore[no-untyped-call]

    def seconds(self) -> dict[str, float]:
        """Return part -> seconds, excluding nested parts, so that they add up to the wall clock."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for average in self.key_averages():  # type: ignore[no-untyped-call]
            part = average.key
            if part.startswith("Optimizer.step"):  # named by PyTorch
                part = OPTIMISER
            elif part.startswith("Optimizer.zero_grad"):
                part = TRAINING
            elif part not in seconds:
                part = OTHER

            seconds[part] += average.self_cpu_time_total / 1e6

        return seconds

    def parts_table(self) -> str:
        """Return the table shown at the end of a run."""
        seconds = self.seconds()
        wall = sum(seconds.values())
        rule = "─" * 32
        lines = ["where the time went      seconds", rule]
        for part, value in [*seconds.items(), ("wall clock", wall)]:
            if part == "wall clock":
                lines.append(rule)
            if value:
                lines.append(f"{part:<16}{value:>16.3f} {value / wall:>5.0%}")

        return "\n".join(lines)


@contextmanager
def during(part: str) -> Iterator[None]:
    """Record the block as a part of the run, a round ("round 3") or a visit to a site, if a profile is recording."""
    _wait_for_gpu()
    with record_function(part):
        yield
        _wait_for_gpu()


def _wait_for_gpu() -> None:
    """Wait for the GPU, so that its work counts for the part that requested it."""
    if torch.autograd._profiler_enabled() and torch.cuda.is_available():  # type: ignore[attr-defined]
        torch.cuda.synchronize()
