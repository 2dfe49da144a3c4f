"""Callbacks, called after each round of a run: the user's functions, `EarlyStopping`, `BestCheckpoint`.

A callback sees the round's metrics, those of all earlier rounds, and the weights; its only effect on the run is to
stop it. It is called after the round is saved. When a killed run is resumed, it is called again for the last saved
round, so a callback that uses only `RoundEnd.history` makes the same decisions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from medfl.core import InputError, RunError, Tensors, Weights, byte_count
from medfl.evaluation import direction
from medfl.storage import atomic_replace, save_weights

_UNDEFINED = {"mae": ("r2", "pearson"), "dice": ()}
"""Metric that tells a task -> metrics that one of its rounds may lack."""


@dataclass(frozen=True, eq=False)
class RoundEnd:
    """A completed and saved round.

    Attributes:
        round: its number, from 1.
        rounds: how many were requested.
        metrics: name -> value on the validation items, for the model that the method is judged by; empty if this
            round was not evaluated.
        train_loss: mean of the sites' training losses.
        history: number and metrics of every evaluated round so far, including this one.
        key_metric: the metric that selects the best round.
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
        """The server's weights as a state dict, copied to the CPU; empty if the method has none."""
        copies = {}
        for name, tensor in self._weights().items():
            if isinstance(tensor, Tensor):
                copies[name] = tensor.detach().cpu().clone()

        return copies

    def best(self, metric: str = "", min_delta: float = 0.0) -> tuple[int, float] | None:
        """Return number and value of the best round so far, the first of equals; None if no value was defined.

        Args:
            metric: "" for the key metric.
            min_delta: a round must improve on the previous best by more than this.

        Raises:
            InputError: this metric does not exist for any round.
        """
        name = metric or self.key_metric
        scored = []
        for number, values in self.history:
            if name in values:
                scored.append((number, values[name]))

        if not scored:
            metrics = set[str]().union(*(values for _, values in self.history))
            # only these may be missing from a round that has other metrics
            tasks = (names for metric, names in _UNDEFINED.items() if metric in metrics)
            undefined = next(tasks, ("auroc",))
            if name in (self.key_metric, *undefined) or name.startswith("dice_"):
                return None

            listed = ", ".join(sorted(metrics)) or "none: eval_every is 0"
            raise InputError(f"metric {name!r}", f"the rounds have {listed}", "name one of these")

        sign = direction(name)
        best_entry = scored[0]
        for number, value in scored[1:]:
            if sign * (value - best_entry[1]) > min_delta:
                best_entry = number, value

        return best_entry


Callback = Callable[[RoundEnd], object]
"""Ends the run by returning True or the reason as text."""


@dataclass(frozen=True)
class EarlyStopping:
    """End a run whose validation metric has not improved for some rounds.

    Attributes:
        patience: rounds since the best one, at least 1; rounds with an undefined metric do not count.
        metric: "" for the key metric.
        min_delta: minimum improvement for a round to count as better.
    """

    patience: int = 5
    metric: str = ""
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1 or self.min_delta < 0:
            raise InputError(
                f"EarlyStopping(patience={self.patience}, min_delta={self.min_delta})",
                "patience from 1, min_delta from 0",
                "change them",
            )

    def __call__(self, ended: RoundEnd) -> str | None:
        """Return why the run ends, None if it continues."""
        name = self.metric or ended.key_metric
        # the round was not evaluated, so there is nothing to decide
        if not ended.metrics:
            return None

        best = ended.best(self.metric, self.min_delta)
        if best is None or name not in ended.metrics:
            return None

        waited = 0
        before = best[0]
        for number, values in ended.history:
            if number > best[0]:
                # rounds, not evaluations: patience means the same for any `eval_every`
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
        if not ended.metrics:
            return

        best = ended.best(self.metric)
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
            size = byte_count(ended.weights)
            with atomic_replace(path, size) as temporary:
                torch.save(ended.weights, temporary)


def callback_names(callbacks: Sequence[Callback]) -> list[str]:
    """Return the names of callbacks for a run's record."""
    names = []
    for callback in callbacks:
        # an address would make the records of two identical runs differ
        plain = re.sub(r" at 0x[0-9a-f]+", "", repr(callback))
        names.append(str(getattr(callback, "__qualname__", "") or plain))

    return names


def asked_to_stop(callbacks: Sequence[Callback], ended: RoundEnd) -> str:
    """Call all callbacks, and return why the run ends, "" if it continues.

    Raises:
        RunError: a callback fails; names it. The round is saved.
    """
    reasons = []
    for callback in callbacks:
        name = getattr(callback, "__qualname__", type(callback).__qualname__)
        try:
            answer = callback(ended)
        except InputError:
            raise  # already tells the user what to change
        except Exception as error:  # a user's function may raise anything
            failure = f"{type(error).__name__}: {error}"
            raise RunError(
                f"callback {name} fails after round {ended.round}: {failure}; the round is kept"
            ) from error

        if answer is True:
            reasons.append(f"{name} asked for it")
        elif isinstance(answer, str) and answer:
            reasons.append(answer)

    return "; ".join(reasons)
