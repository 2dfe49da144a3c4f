"""Options of the methods that use public data; each is declared once here and taken by `same_option`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfl.core.errors import InputError
from medfl.data.public import Public
from medfl.methods.base import option
from medfl.training.site import Host, Site


@dataclass(frozen=True)
class PublicOptions:
    """What a user may say of the public data."""

    public: str = option("", "the public data: BUNDLE or BUNDLE:DIR; default: what the bundle's protocol names")
    public_section: str = option(
        "",
        "the public bundle's section that is taken; default: what its protocol says, else test",
        choices=("", "train", "validate", "test"),
    )
    public_items: int = option(
        0,
        "so many public items, classes balanced (a fixed draw); 0: what its protocol says, else all",
        minimum=0,
    )
    public_size: int = option(
        0, "side of the public images; 0: their bundle's own, in segmentation the sites' size", minimum=0
    )
    lift: str = option(
        "pseudo3d",
        "public images where the sites have volumes: repeat each along a third axis and average the output over it, "
        "or refuse",
        choices=("pseudo3d", "refuse"),
    )


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
