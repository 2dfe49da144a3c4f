"""Central: the data of all sites pooled in one place. Breaks privacy; only an upper reference.

One participant named "central" trains on the union for the same number of epochs. Its optimiser, including the
momentum, persists over the whole run (`keep_optimizer`), or is rebuilt every round for step parity with the federated
methods.
"""

from __future__ import annotations

from dataclasses import dataclass

from medfl.core import Message
from medfl.methods.base import Method, option
from medfl.storage import State
from medfl.training import Site, fit, snapshot


@dataclass(frozen=True)
class Central(Method):
    """Pooled training: the upper reference."""

    keep_optimizer: bool = option(
        True, "keep one optimiser over the whole run instead of a fresh one every round"
    )

    paper = "reference: pooled data"
    pools_data = True

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train on the pooled data, continuing the optimiser."""
        model = site.model(down["weights"])
        after = {}
        if self.keep_optimizer:
            report = fit(model, site, optimizer_state=state.get("optimizer", {}))
            after = {"optimizer": report.optimizer_state}
        else:
            fit(model, site)

        return after, site.reply(snapshot(model))


METHOD = Central
