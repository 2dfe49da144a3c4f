"""A site and its local training loop."""

from __future__ import annotations

from medfl.training.loop import Feed, FitReport, GradientHook, Objective, autocast, fit, pull, summed
from medfl.training.site import Host, LocalSettings, Networks, Site, snapshot

__all__ = [
    "Feed", "FitReport", "GradientHook", "Host", "LocalSettings", "Networks", "Objective", "Site", "autocast", "fit",
    "pull", "snapshot", "summed",
]  # fmt: skip
