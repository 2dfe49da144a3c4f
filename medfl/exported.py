"""The name by which exported bundles know their network."""

from __future__ import annotations

from medfl.export.network import network as network
