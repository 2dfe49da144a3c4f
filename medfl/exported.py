"""The name under which exported bundles find their network."""

from medfl.export.network import network as network
