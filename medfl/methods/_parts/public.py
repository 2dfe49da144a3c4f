"""What methods that learn from public data share; their options are those of `extras.PublicData`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfl.core.errors import InputError
from medfl.data.public import Public
from medfl.methods.base import Group
from medfl.training.site import Host, Site

SCORES = (Group("scores", smaller=True), Group("positions", up=False))
"""What travels where sites answer to public items and the server says to which."""


def shared(owner: Site | Host) -> Public:
    """Return the public data of a site or of the server.

    Raises:
        InputError: there are none.
    """
    if owner.public is None:
        raise InputError("a run without public data", "this method learns from some", "add --set public=BUNDLE[:DIR]")
    return owner.public


@contextmanager
def untracked(network: nn.Module) -> Iterator[None]:
    """Run a network in training mode without moving BatchNorm's running statistics or counters."""
    layers = [module for module in network.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
