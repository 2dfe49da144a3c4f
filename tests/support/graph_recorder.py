"""A stand-in for a CUDA graph on the CPU: what a replay repeats, and above all what it does not.

It records the operations of a step with their tensors and repeats them on the same tensors: an operation that makes
something writes over what it made when it was recorded, one in place acts again, a view stays the view that it is.
Numbers that Python passed are those of the recorded step, and random ones are drawn anew: as with a CUDA graph. Unlike
it, all tensors of a step live as long as the recording does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from medfl.training.accelerate import capture as capturing
from medfl.training.accelerate import recordings
from medfl.training.accelerate.cuda_graphs import count_in_tensors
from medfl.training.loop import FitReport, fit
from medfl.training.site import Site, snapshot
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, sgd


class Recorder:
    """`medfl.training.accelerate.cuda_graphs.CudaGraph` on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.listener = _Listener()
        self.replays = 0

    def prepare(self, optimizer: Optimizer, varying_rates: bool) -> None:
        """Keep rates that vary in tensors; counters, which a CPU reads back, stay what they are."""
        if varying_rates:
            count_in_tensors(optimizer, varying_rates)

    def warming(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        with self.listener:
            return step()

    def branch(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self, count: int) -> None:
        """Nothing: operations come one after the other."""

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for operation in self.listener.operations:
                _repeat(*operation)


class _Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace != "profiler":
            self.operations.append((func, _kept(args), _kept(kwargs or {}), _kept(made)))
        return made


def _kept(tree: Any) -> Any:
    """Copy the lists, which their owners may change, and of the tensors where they are: a recording knows memory."""
    if isinstance(tree, Tensor):
        return tree.detach()
    if isinstance(tree, dict):
        return {key: _kept(value) for key, value in tree.items()}
    return type(tree)(map(_kept, tree)) if type(tree) in (list, tuple) else tree


def _repeat(func: Any, args: Any, kwargs: Any, made: Any) -> None:
    returns = func._schema.returns
    if returns and all(one.alias_info is not None and not one.alias_info.is_write for one in returns):
        return  # views
    again = func(*args, **kwargs)
    pairs = zip(_listed(made), _listed(again), strict=True)
    for place, (old, new) in enumerate(pairs):
        alias = returns[min(place, len(returns) - 1)].alias_info
        if isinstance(old, Tensor) and alias is None:
            old.copy_(new)


def _listed(made: Any) -> list[Any]:
    return [] if made is None else list(made) if isinstance(made, list | tuple) else [made]


# Training with it


def installed(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Let steps be captured on the CPU where `allowed`, forget what other tests found, and collect the recorders."""
    made: list[Recorder] = []

    def graph(device: torch.device) -> Recorder:
        made.append(Recorder(device))
        return made[-1]

    monkeypatch.setitem(capturing.GRAPHS, "cpu", graph)
    monkeypatch.setattr(capturing, "MIN_STEPS", 5)
    monkeypatch.setattr(capturing, "_VERDICTS", capturing.Verdicts())
    monkeypatch.setattr(recordings, "_RECORDINGS", OrderedDict())
    monkeypatch.setattr(capturing, "_FAILED", {})
    return made


def make(**changes: Any) -> Toy:
    """One site of 18 items, four batches of 4 and a last one of 2 an epoch."""
    network = classifier(norm=True, dropout=0.4)
    settings = {"network": network, "loss": cross_entropy, "optimizer": sgd(0.1), "batch_size": 4, "epochs": 3}
    return Toy(blobs({"a": 18}), **{**settings, **changes})


Arguments = Callable[[nn.Module], dict[str, Any]]


def trained(toy: Toy, capture: bool, arguments: Arguments, site: Site | None) -> tuple[FitReport, Any]:
    site = site or toy.site("a")
    model = site.model(toy.initial)
    with capturing.capture_steps(capture):
        report = fit(model, site, **arguments(model))
    return report, bits([snapshot(model), report.optimizer_state or {}, report.steps]) + [report.loss]


def compared(toy: Toy, arguments: Arguments = lambda model: {}, site: Site | None = None) -> FitReport:
    """Train once eagerly and once with captures, compare all bits, and return the second report."""
    _, eager = trained(toy, False, arguments, site)
    report, captured = trained(toy, True, arguments, site)
    assert captured == eager
    return report


def of(objective: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Arguments:
    """Return the arguments of `fit` with an objective."""
    return lambda model: {"objective": objective}
