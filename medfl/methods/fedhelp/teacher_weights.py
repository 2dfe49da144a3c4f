"""How much each teacher counts on each public item: FedHelp's alpha, learned or fixed.

FedHelp (Wang et al., KDD 2025) calls it a "learned contribution score" and gives no rule. `table` is the literal one:
a row of logits for each public item, alpha its softmax, trained by the gradient of eq. 1. That rule favours the
teacher which agrees with the student; `ce` trains the same table on -log t(y) instead, `gate` makes alpha of the
item's feature, `uniform` is 1/M.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from medfl.storage.files import State

RULES = ("table", "gate", "ce", "uniform")
_LEAST = 1e-12  # a teacher's zero has no logarithm


class Contribution:
    """The teachers' shares alpha (M, B) on the public items of a batch, and one step of their training."""

    def __init__(self, rule: str, state: Mapping[str, Tensor], teachers: int, lr: float) -> None:
        """Continue from what `state` returned before."""
        self.rule = rule
        self.teachers = teachers
        self.values = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
        self._optimizer: torch.optim.Optimizer | None = None

        if self.values:  # only the rows of a batch move: with dense moments of Adam others would drift
            kind: Any = torch.optim.Adam if rule == "gate" else torch.optim.SparseAdam
            self._optimizer = kind(list(self.values.values()), lr=lr)

    @staticmethod
    def start(rule: str, items: int, teachers: int, features: int) -> dict[str, Tensor]:
        """Return the first state: alpha = 1/M everywhere; nothing where nothing can be learned."""
        if teachers < 2 or rule == "uniform":
            return {}
        if rule == "gate":
            return {"weight": torch.zeros(teachers, features), "bias": torch.zeros(teachers)}
        return {"table": torch.zeros(items, teachers)}

    @property
    def state(self) -> State:
        """What survives the round."""
        return {name: tensor.detach().clone() for name, tensor in self.values.items()}

    def alpha(self, positions: Tensor, features: Tensor) -> Tensor:
        """Return alpha (M, B) for the items at positions (B,) with features (B, d), which are held constant."""
        if not self.values:
            return torch.full((self.teachers, len(positions)), 1 / self.teachers, device=features.device)
        if self.rule == "gate":
            logits = linear(features.detach().float(), self.values["weight"], self.values["bias"])
        else:
            logits = embedding(positions.to(features.device), self.values["table"], sparse=True)

        return logits.softmax(1).T

    def mix(self, positions: Tensor, features: Tensor, answers: Tensor, log_q: Tensor, y: Tensor) -> Tensor:
        """Return the teachers' mixture (B, C, ...), and train alpha by one step on what it was made of.

        Args:
            positions: (B,) of the public items.
            features: (B, d) of the student.
            answers: (M, B, C, ...) distributions.
            log_q: (B, C, ...) the student's log-probabilities; held constant: the mixture's gradient is alpha's alone.
            y: (B, ...) class indices, for the rule `ce`.
        """
        t = mixture(self.alpha(positions, features), answers)
        if self._optimizer is not None:
            nll = -t.clamp(min=_LEAST).log().gather(1, y[:, None])
            loss = nll.mean() if self.rule == "ce" else divergence_from(t, log_q.detach()).mean()

            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()

        return t.detach()


def mixture(alpha: Tensor, answers: Tensor) -> Tensor:
    """Return t = sum_m alpha^m T_m, (B, C, ...), of alpha (M, B) and distributions (M, B, C, ...)."""
    return (alpha.reshape(*alpha.shape, *[1] * (answers.ndim - 2)) * answers).sum(0)


def divergence_from(t: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(t || q) of each item or pixel, (B, ...), of t (B, C, ...) and log q; finite where t has zeros."""
    safe = t.clamp(min=_LEAST)
    return (safe * (safe.log() - log_q)).sum(1)


def distributions(answers: Tensor, segmentation: bool) -> Tensor:
    """Return teachers' answers as distributions (M, B, C, ...): a foreground logit l is [1 - sigma(l), sigma(l)]."""
    if not segmentation:
        return answers
    return torch.stack([(-answers).sigmoid(), answers.sigmoid()], 2)
