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
    fitting = {
        f"--messages {run.messages}": (federation.compression.lossless, "it takes lossless ones"),
        f"--site-weights {run.site_weights}": (run.site_weights == "samples", "it weighs by samples"),
        f"--max-share {run.max_share}": (run.max_share is None, "it has no cap on shares"),
        f"--aggregation {run.aggregation}": (federation.aggregation.is_mean, "it takes the mean"),
    }
    for given, (fits, taken) in fitting.items():
        if not fits:
            raise InputError(f"{given} with a plain averaging host", taken, "leave it out")
