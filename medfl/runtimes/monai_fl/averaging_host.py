"""Which runs a host can serve that averages weights and knows of no method."""

from __future__ import annotations

from medfl import methods
from medfl.core.errors import InputError
from medfl.runtimes.federation import Federation


def refuse_other_servers(federation: Federation) -> None:
    """Raise an InputError if averaging weights is not all that the run's server does."""
    run = federation.run
    if not methods.has_fedavg_server(federation.method):
        raise InputError(
            f"method {run.method!r} with a plain averaging host",
            "such a host does for methods that keep FedAvg's server half (medfl methods)",
            "use one of these, or medfl's own server",
        )
    if not federation.messages.lossless:
        raise InputError(
            f"--messages {run.messages} with a plain averaging host", "it takes lossless ones", "leave it out"
        )
    if run.site_weights != "samples":
        raise InputError(
            f"--site-weights {run.site_weights} with a plain averaging host", "it weighs by samples", "leave it out"
        )
    if not federation.aggregation.is_mean:
        raise InputError(
            f"--aggregation {run.aggregation} with a plain averaging host", "it takes the mean", "leave it out"
        )
