"""Callbacks, called after each round of a run: the user's functions, `EarlyStopping`, `BestCheckpoint`.

A callback sees the round's metrics, those of all earlier rounds, and the weights; its only effect on the run is to end
it. It is called after the round is saved. When a killed run is resumed it is called again for the last saved round: one
that uses `RoundEnd.history` alone then decides the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from medfl.core.errors import InputError, RunError
from medfl.core.message import Tensors, Weights
from medfl.evaluation.metrics import higher_is_better
from medfl.storage.files import atomic_replace, save_weights


@dataclass(frozen=True, eq=False)
class RoundEnd:
    """A round that is over and saved.

    Attributes:
        round: its number, from 1.
        rounds: how many were asked for.
        metrics: name -> value on the validation items, of the model that the method is judged by; empty where this
            round was not evaluated.
        train_loss: mean of the sites' training losses.
        history: number and metrics of every evaluated round so far, this one included.
        key_metric: the metric by which the best round is chosen.
        folder: of the run.
    """

    round: int
    rounds: int
    metrics: Mapping[str, float]
    train_loss: float
    history: Sequence[tuple[int, Mapping[str, float]]]
    key_metric: str
    folder: Path
    _weights: Callable[[], Weights]

    @cached_property
    def weights(self) -> Tensors:
        """The server's weights as a state dict, copies on the CPU; empty where a method has none."""
        copies = {}
        for name, tensor in self._weights().items():
            if isinstance(tensor, Tensor):
                copies[name] = tensor.detach().cpu().clone()

        return copies

    def best(self, metric: str = "", min_delta: float = 0.0) -> tuple[int, float] | None:
        """Return number and value of the best round so far, the first of equals; None while it was undefined.

        Args:
            metric: "" for the key metric.
            min_delta: a round counts as better only if it improves on the best before it by more.

        Raises:
            InputError: no round can have this metric.
        """
        name = metric or self.key_metric
        scored = [(number, values[name]) for number, values in self.history if name in values]
        if not scored:
            # these alone are left out of a round that has other metrics
            if name in (self.key_metric, "auroc") or name.startswith("dice_"):
                return None

            metrics: set[str] = set()
            for _, values in self.history:
                metrics.update(values)

            listed = ", ".join(sorted(metrics)) or "none: eval_every is 0"
            raise InputError(f"metric {name!r}", f"the rounds have {listed}", "name one of these")

        if higher_is_better(name):
            sign = 1.0
        else:
            sign = -1.0

        best_entry = scored[0]
        for number, value in scored[1:]:
            if sign * (value - best_entry[1]) > min_delta:
                best_entry = number, value

        return best_entry


Callback = Callable[[RoundEnd], object]
"""Ends the run by returning True, or a text that says why."""


@dataclass(frozen=True)
class EarlyStopping:
    """End a run whose validation metric has not become better for some rounds.

    Attributes:
        patience: rounds since the best one, from 1; those whose metric is undefined do not count.
        metric: "" for the key metric.
        min_delta: by how much a round has to be better to count.
    """

    patience: int = 5
    metric: str = ""
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1 or self.min_delta < 0:
            call = f"EarlyStopping(patience={self.patience}, min_delta={self.min_delta})"
            raise InputError(call, "patience from 1, min_delta from 0", "change them")

    def __call__(self, ended: RoundEnd) -> str | None:
        """Return why the run ends, None while it goes on."""
        name = self.metric or ended.key_metric
        if ended.metrics:
            best = ended.best(self.metric, self.min_delta)
        else:
            best = None

        if best is None or name not in ended.metrics:
            return None

        waited = 0
        before = best[0]
        for number, values in ended.history:
            if number > best[0]:
                waited += (number - before) * (name in values)
                before = number

        if waited < self.patience:
            return None

        return f"{name} has not become better than {best[1]:.4g} of round {best[0]} for {waited} rounds"


@dataclass(frozen=True)
class BestCheckpoint:
    """Keep the weights of the best round so far in a file.

    Attributes:
        path: .safetensors, or .pt for `torch.load` and MONAI's CheckpointLoader.
        metric: "" for the key metric.
    """

    path: str | Path
    metric: str = ""

    def __post_init__(self) -> None:
        if Path(self.path).suffix not in (".safetensors", ".pt"):
            raise InputError(
                f"BestCheckpoint({str(self.path)!r})", "a file .safetensors or .pt", "name it so"
            )

    def __call__(self, ended: RoundEnd) -> None:
        """Write the weights if this round is the best."""
        if ended.metrics:
            best = ended.best(self.metric)
        else:
            best = None

        if best is None or best[0] != ended.round:
            return

        if not ended.weights:
            raise InputError(
                "BestCheckpoint with a method whose server has no weights",
                "best.safetensors in the run folder has those of the sites",
                "leave it out",
            )

        path = Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            save_weights(path, ended.weights)
        else:
            size = sum(tensor.nbytes for tensor in ended.weights.values())
            with atomic_replace(path, size) as temporary:
                torch.save(ended.weights, temporary)


def callback_names(callbacks: Sequence[Callback]) -> list[str]:
    """Return what a run's record says of its callbacks."""
    names = []
    for callback in callbacks:
        # an address would make the records of two equal runs differ
        plain = re.sub(r" at 0x[0-9a-f]+", "", repr(callback))
        names.append(str(getattr(callback, "__qualname__", "") or plain))

    return names


def asked_to_stop(callbacks: Sequence[Callback], ended: RoundEnd) -> str:
    """Call all callbacks, and return why the run ends, "" if it goes on.

    Raises:
        RunError: one fails; names it. The round is saved.
    """
    reasons = []
    for callback in callbacks:
        name = getattr(callback, "__qualname__", type(callback).__qualname__)
        try:
            answer = callback(ended)
        except InputError:
            raise  # says itself what the user is to change
        except Exception as error:  # whatever a function of the user's raises
            failure = f"{type(error).__name__}: {error}"
            raise RunError(
                f"callback {name} fails after round {ended.round}: {failure}; the round is kept"
            ) from error

        if answer is True:
            reasons.append(f"{name} asked for it")
        elif isinstance(answer, str) and answer:
            reasons.append(answer)

    return "; ".join(reasons)
