"""Pseudo-labels: the strongly changed view that they are learned on, their loss, and the teacher that follows.

The view has other intensities and a part cut out, and may be mirrored. Nothing else is moved, so the label of a pixel
stays where it is. All draws are of the CPU, a row an image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from medfl.core.errors import InputError


def strong_view(x: Tensor, strength: float, mirror: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images (B, C, H, W[, D]) changed, and where nothing was cut out, (B, H, W[, D]) of 0 and 1.

    With m and s the mean and deviation of an image and u_i uniform in -1 to 1, it becomes
    m + (1 + 0.5 u_1)(x - m) + 0.5 s u_2 + 0.25 s |u_3| n, n normal, where 0.5 and 0.25 are times `strength`; then a box
    with a quarter to half of each side takes the value m.

    Args:
        x: the images.
        strength: of the change of intensities; 0 leaves them.
        mirror: turn half of the images around their last axis.
        generator: of all draws.
    """
    count, sides = len(x), x.shape[2:]
    u = torch.rand(count, 4 + 2 * len(sides), generator=generator)
    normal = torch.randn(x.shape, generator=generator).to(x)
    one = (count, *[1] * (x.ndim - 1))
    each = [(2 * column - 1).reshape(one).to(x) for column in u[:, :3].T]
    flat = x.flatten(1)
    mean, deviation = flat.mean(1).reshape(one), flat.std(1, correction=0).reshape(one)
    gain, shift, noise = (strength * part * term for part, term in zip((0.5, 0.5, 0.25), each, strict=True))
    view = mean + (1 + gain) * (x - mean) + deviation * (shift + noise.abs() * normal)
    seen = _outside_a_box(u[:, 4:], sides).to(x)
    view = torch.where(seen.unsqueeze(1) > 0, view, mean)
    if mirror:
        view = torch.where(u[:, 3].reshape(one).to(x) < 0.5, view.flip(-1), view)
    return view, seen


def _outside_a_box(u: Tensor, sides: torch.Size) -> Tensor:
    """Return (B, *sides): 0 in a box drawn by u (B, 2 * axes) in 0 to 1, 1 elsewhere."""
    inside = torch.full((len(u), *sides), float(bool(sides)))
    for axis, side in enumerate(sides):
        length = (side * (0.25 + 0.25 * u[:, 2 * axis])).round()
        start = ((side - length) * u[:, 2 * axis + 1]).round()
        coordinates = torch.arange(side).expand(len(u), -1)
        within = (coordinates >= start[:, None]) & (coordinates < (start + length)[:, None])
        inside = inside * within.reshape(len(u), *[1] * axis, side, *[1] * (len(sides) - axis - 1))
    return 1 - inside


def masked_cross_entropy(model: nn.Module, x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    """Return the mean over images, or pixels, of the cross-entropy with probabilities y (B, K, ...), times `keep`."""
    return (cross_entropy(class_logits(model, x).float(), y, reduction="none") * keep).mean()


def class_logits(model: nn.Module, x: Any) -> Tensor:
    """Return logits (B, K, ...), K = 2 of a network with one output: 0 and that one.

    Raises:
        InputError: its output is no such tensor.
    """
    output = model(x)
    if not isinstance(output, Tensor) or output.ndim < 2:
        raise InputError(
            f"a network whose output is a {type(output).__name__}",
            "pseudo-labels need one tensor with a channel for each class",
            "leave deep supervision out, or take another network",
        )
    return output if output.shape[1] > 1 else pad(output, (*[0, 0] * (output.ndim - 2), 1, 0))


def ema_update(teacher: nn.Module, model: nn.Module, decay: float) -> None:
    """Move a teacher's parameters to decay * its own + (1 - decay) * the model's."""
    with torch.no_grad():
        for mean, newest in zip(teacher.parameters(), model.parameters(), strict=True):
            mean.lerp_(newest, 1 - decay)
