"""The name under which exported bundles find their network."""

from __future__ import annotations

from medfl.export.network import network as network
