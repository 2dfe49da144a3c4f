"""Labels of a site that annotates only some structures or findings: the others are background, or unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medfl.core import InputError
from medfl.networks.deep_supervision import carried, carrying


@dataclass(frozen=True)
class AnnotatedClasses:
    """The annotated structures, a subset of those that a network distinguishes.

    Attributes:
        classes: their output channels, ascending, without the background's (0).
        count: number of output channels, K.
        exclusive: each pixel has one class (softmax), 0 is the background; otherwise each channel is binary (sigmoid).
    """

    classes: tuple[int, ...]
    count: int
    exclusive: bool = True

    @property
    def unannotated(self) -> tuple[int, ...]:
        """Channels of structures without annotation, and of the background if classes are exclusive."""
        return tuple(channel for channel in range(self.count) if channel not in self.classes)

    def named(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the channels of `marginal_logits`; () unless there is one name per channel."""
        if len(names) != self.count:
            return ()
        return (*names[: int(self.exclusive)], *(names[c] for c in self.classes))

    def marginal_logits(self, output: Any) -> Any:
        """Return logits of the annotated structures: (B, R, ...), from (B, K, ...), or from each of a list of such.

        Exclusive: channel 0 is the log-sum-exp of background and unannotated structures, whose softmax is the
        probability that a pixel is any of these (marginal); the annotated structures follow. Otherwise the unannotated
        channels are dropped.

        Raises:
            InputError: the output has a different number of channels.
        """
        if isinstance(output, list | tuple):
            return list(map(self.marginal_logits, output))

        stack = carried(output)
        if stack is not output:
            levels = list(map(self.marginal_logits, stack.unbind(1)))
            return carrying(torch.stack(levels, 1))
        if not isinstance(output, Tensor) or output.ndim < 3 or output.shape[1] != self.count:
            raise InputError(
                f"a network whose output is {list(getattr(output, 'shape', ())) or type(output).__name__}",
                f"with --site-labels it has {self.count} channels, one for each structure that the bundle names",
                "name in the bundle's metadata.json (channel_def) what each channel is",
            )

        channels = output.unbind(1)
        shown = [channels[c] for c in self.classes]
        if not self.exclusive:
            return torch.stack(shown, 1)

        # log of the probability of all others together, whichever of them it is
        return torch.stack(
            [torch.stack([channels[c] for c in self.unannotated], 1).logsumexp(1), *shown], 1
        )

    def renumbered(self, target: Tensor) -> Tensor:
        """Return masks renumbered to those channels: class indices (B, 1, ...) or (B, ...), or binary channels.

        Other structures in them become background.
        """
        if self._in_channels(target):
            shown = [target[:, c] for c in self.classes]
            return torch.stack([self._rest(target), *shown] if self.exclusive else shown, 1)
        return self._numbered(target, range(1, len(self.classes) + 1))

    def others_unknown(self, target: Tensor) -> Tensor:
        """Return findings (B, K) in floating point, NaN for those without annotation."""
        findings = torch.full_like(target, torch.nan, dtype=torch.get_default_dtype())
        annotated = list(self.classes)
        findings[:, annotated] = target[:, annotated].to(findings.dtype)
        return findings

    def others_as_background(self, target: Tensor) -> Tensor:
        """Return the masks with unannotated structures turned into background; class numbers are kept."""
        if self._in_channels(target):
            shown = torch.zeros_like(target)
            annotated = list(self.classes)
            shown[:, annotated] = target[:, annotated]
            if self.exclusive:
                shown[:, 0] = self._rest(target)
            return shown
        return self._numbered(target, self.classes)

    def _numbered(self, target: Tensor, numbers: Sequence[int]) -> Tensor:
        """Return class indices with these numbers in place of `classes`, 0 for others."""
        masks = torch.zeros_like(target)
        for value, number in zip(self.classes, numbers, strict=True):
            masks = torch.where(target == value, number, masks)
        return masks.to(target.dtype)

    def _rest(self, target: Tensor) -> Tensor:
        return target[:, list(self.unannotated)].amax(1)  # of the rest is what is of any of it

    def _in_channels(self, target: Tensor) -> bool:
        return target.ndim > 3 and self.count > 1 and target.shape[1] == self.count


@dataclass(frozen=True)
class PartialLoss:
    """A bundle's loss over the annotated structures or findings of a site; `naive` treats all others as absent."""

    loss: Callable[..., Tensor]
    known: AnnotatedClasses
    naive: bool = False

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss of a batch."""
        if target.ndim == 2:  # findings
            if self.naive:
                return self.loss(output, self.known.others_unknown(target).nan_to_num(0.0))
            return self.loss(output, self.known.others_unknown(target))

        if self.naive:
            return self.loss(output, self.known.others_as_background(target))
        return self.loss(self.known.marginal_logits(output), self.known.renumbered(target))
