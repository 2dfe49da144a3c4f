"""Local training in phases, each on a part of the network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from medfl.training import FitReport, Site, fit, train_only, trainable


def fit_part(
    model: nn.Module,
    site: Site,
    names: Collection[str],
    purpose: str,
    *,
    epochs: int,
    rate: float | None = None,
) -> FitReport:
    """Train the named parameters for some epochs; all others, and the buffers of their layers, are unchanged.

    Uses plain SGD with the learning rate `rate` in all rounds, or without it the site's optimiser.
    """
    settings = replace(site.settings, epochs=epochs)
    if rate is not None:

        def sgd(network: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(trainable(network).values(), rate)

        settings = replace(settings, optimizer=sgd, lr_factor=1.0, rates=None)
    with train_only(model, names, restore_buffers=True):
        return fit(model, replace(site, settings=settings), purpose=purpose)
