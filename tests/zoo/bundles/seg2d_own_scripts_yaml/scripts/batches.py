"""How a batch of this bundle becomes network input and target."""

from __future__ import annotations

from typing import Any

import torch


def scan_and_mask(
    batch: dict[str, torch.Tensor],
    device: torch.device | str | None = None,
    non_blocking: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `scan` and `mask`, each (B, 1, H, W), on `device`."""
    scan = batch["scan"].to(device=device, non_blocking=non_blocking, **kwargs)
    return scan, batch["mask"].to(device=device, non_blocking=non_blocking, **kwargs)
