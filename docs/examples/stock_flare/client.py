"""A site of a stock FLARE job: FLARE's Client API around medfl's client for a host that averages weights.

FLARE starts it at each site; `job.py` beside it makes the job. Three things keep it at what medfl's own server gives:

- A site is told the round: FLARE counts from 0 and medfl from 1, and the shuffling of a round is drawn from its number.
- A reply counts as many images as it is of. FLARE multiplies by NUM_STEPS_CURRENT_ROUND, whatever that counts.
- Numbers leave as float64, so that FLARE's sum is rounded once, at the sites; it adds in the order of arrival, which
  in float32 gives other last digits each time. Integers (BatchNorm's counters) travel as float64, too: torch does not
  add integers by fractions. The sites round them back.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nvflare.client as flare
import torch
from monai.fl.utils.constants import FlStatistics
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from medfl.runs import site_algo
from medfl.runs.plan import repeat
from medfl.runtimes import Federation
from medfl.runtimes.monai_fl.client import ROUND, MedflClientAlgo, exchange_object
from medfl.storage.run_folder import RunFolder


def site_of(name: str, options: argparse.Namespace) -> MedflClientAlgo:
    """Return the site: its share of a recorded run's images, or all images of a folder of its own."""
    if options.run:
        run, _ = RunFolder.existing(Path(options.run)).read_run()
        torch.set_num_threads(run.threads)
        plan = repeat(run)
        return MedflClientAlgo(
            Federation(plan.bundle, plan.method, plan.run), name, host="averaging"
        )
    requested = {"method": "fedavg", "data": options.data, "rounds": options.rounds}
    return site_algo(
        options.bundle, name, requested=requested, host="averaging", policy=options.policy
    )


def replied(site: MedflClientAlgo, received: FLModel) -> FLModel:
    """Score the global model, train it for one round, and return what leaves."""
    weights = {name: torch.as_tensor(value) for name, value in received.params.items()}
    said = exchange_object(weights, {ROUND: received.current_round + 1})
    metrics: Mapping[str, Any] = site.evaluate(said).metrics or {}
    site.train(said)
    reply = site.get_weights()
    return FLModel(
        params_type=ParamsType.FULL,
        params={name: tensor.double() for name, tensor in reply.weights.items()},
        metrics={name: value for name, value in metrics.items() if isinstance(value, float)},
        meta={"NUM_STEPS_CURRENT_ROUND": reply.statistics[FlStatistics.DATA_COUNT]},
    )


def main() -> None:
    """Answer FLARE's rounds until it ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", help="folder of a run of medfl, whose site of this name it is")
    parser.add_argument("--bundle", help="else: a shipped bundle's name or a folder")
    parser.add_argument("--data", help="folder of the site's own images")
    parser.add_argument("--rounds", type=int, help="of the job")
    parser.add_argument("--policy", help="the site's policy file")
    options = parser.parse_args()
    flare.init()
    site = site_of(flare.get_site_name(), options)
    site.initialize()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        flare.send(replied(site, received))
    site.finalize()


if __name__ == "__main__":
    main()
