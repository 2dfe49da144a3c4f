"""The number of plain gradient steps that an optimiser's local steps amount to (Wang et al. 2020, FedNova)."""

from __future__ import annotations

import torch
from torch import nn

from medfl.training import Site


def effective_steps(site: Site, model: nn.Module, steps: int, mu: float = 0.0) -> float:
    """Return ||a_k||_1 of FedNova.

    Measured as the distance, in learning rates, over which the site's optimiser moves a parameter whose loss has the
    gradient 1. Plain SGD gives `steps`, momentum rho the sum of c over the steps with c <- rho c + 1, a proximal term
    without momentum a <- a (1 - eta mu) + 1, Adam `steps` again. Weight decay is part of the gradient, so not included.

    Args:
        site: the first parameter group of its optimiser represents all.
        model: the network that was trained; its gradients are dropped, its parameters stay.
        steps: optimiser updates.
        mu: strength of a proximal term added by `pull`.
    """
    optimizer = site.settings.optimizer(model)
    optimizer.zero_grad()  # a parameter without gradient is not stepped
    # Starts at 0 and decreases with a rate of 1 per step, so that it ends at -a_k.
    probe = nn.Parameter(torch.zeros((), dtype=torch.float64, device=site.device))
    optimizer.add_param_group(
        {**optimizer.param_groups[0], "params": [probe], "lr": 1.0, "weight_decay": 0.0}
    )
    rate = site.learning_rate(model)

    for _ in range(steps):
        # The loss's gradient and the proximal term's, eta mu times the way from the start.
        probe.grad = 1 + rate * mu * probe.detach()
        optimizer.step()

    return -probe.item()
