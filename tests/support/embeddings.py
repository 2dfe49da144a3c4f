"""Made-up prompt embeddings for tests, float64 and of unit length."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def unit(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return nn.functional.normalize(
        torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1
    )


def structured(
    spread: float, seed: int = 0, classes: int = 5, prompts: int = 24, size: int = 32
) -> Tensor:
    """E = normalise(b + 0.7 c_k + s (p_m + 0.5 n_km)): a common direction, classes, templates and their interplay."""
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, size, generator=draws, dtype=torch.float64)

    raw = (
        normal()
        + 0.7 * normal(classes, 1)
        + spread * (normal(1, prompts) + 0.5 * normal(classes, prompts))
    )
    return nn.functional.normalize(raw, dim=-1)
