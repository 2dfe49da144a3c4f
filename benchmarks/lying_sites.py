"""What each rule of `--aggregation` costs where nobody lies, and what it saves where one or two sites do.

Federated averaging on real images of sites of real, unequal sizes; liars are the sites in the middle by size, so that
neither the largest nor the smallest decides. A liar

    sign    sends its change with the sign turned, ten times as long,
    scale   sends its change a hundred times as long,
    labels  trains on labels in reversed order, honestly otherwise,
    count   says that it has 10^12 images, which the server refuses where numbers of images matter.

    python benchmarks/lying_sites.py [--json] [--bundles pneumonia,ham10000] [--rules mean,clip:auto] [--out DIR]

The score is the validated model's balanced accuracy on everybody's test images after the last round, relative to the
mean without liars. `--out` keeps the runs, and a second call does only those that are missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import medfl
from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.methods import option
from medfl.methods.fedavg import FedAvg

RULES = ("mean", "clip:auto", "median", "trimmed:0.34", "krum:1", "multikrum:1")
ATTACKS = ("sign", "scale", "labels", "count")
SIZES = "counts:1241/250,395/80,336/68,225/45,82/17,44/9"
"""A tenth of the images of Fed-ISIC2019's six centres (Ogier du Terrail et al., 2022, FLamby)."""
FEDERATIONS = {"pneumonia": {"partition": SIZES}, "ham10000": {"partition": "centre"}}


@dataclass(frozen=True)
class Lying(FedAvg):
    """Federated averaging in which some sites lie."""

    attack: str = option("sign", "what they do", choices=ATTACKS)
    liars: str = option("", "their names, joined by spaces")

    def local_update(self, site: Any, state: Any, down: Message) -> tuple[Any, Message]:
        """Train, and reply as a liar does."""
        if site.name not in self.liars.split():
            return super().local_update(site, state, down)
        if self.attack == "labels":
            last = len(site.task.classes) - 1
            loss = site.loss
            return super().local_update(replace(site, loss=lambda out, y: loss(out, last - y)), state, down)
        state, reply = super().local_update(site, state, down)
        if self.attack == "count":
            return state, Message(reply.tensors, {**reply.scalars, "samples": 1e12})
        factor = -10.0 if self.attack == "sign" else 100.0
        return state, Message({"weights": _longer(down["weights"], reply["weights"], factor)}, reply.scalars)


METHOD = Lying


def _longer(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], factor: float) -> dict[str, Any]:
    """Multiply a change; a variance stays one."""
    moved = {n: old + factor * (after[n] - old) if old.is_floating_point() else after[n] for n, old in before.items()}
    return {name: tensor.abs() if name.endswith("running_var") else tensor for name, tensor in moved.items()}


def ran(out: Path, bundle: str, rule: str, rounds: int, data: str | None, lies: Mapping[str, str] | None) -> float:
    """Return the balanced accuracy of a run, which is done if it is not there; 0 where it ended without a model."""
    if not (out / "summary.json").exists():
        method, options = ("benchmarks.lying_sites", dict(lies)) if lies else ("fedavg", {})
        try:
            requested = {"method": method, "data": data, "rounds": rounds, "aggregation": rule, **FEDERATIONS[bundle]}
            config = {"image_size": 28, "network": "small_cnn"}
            medfl.federate(bundle, options=options, config=config, requested=requested, min_replies=2, out=out)
        except RunError as error:
            sys.stderr.write(f"{out.name}: {error}\n")
            return 0.0
    return float(json.loads((out / "summary.json").read_text())["last"]["balanced_accuracy"])


def middle_sites(folder: Path, count: int) -> str:
    """Return the names of so many sites, neither the largest nor the smallest."""
    sites = json.loads((folder / "run.json").read_text())["partition"]["sites"]
    names = sorted(sites, key=lambda name: (len(sites[name]["train"]), name))
    first = (len(names) - count) // 2
    return " ".join(names[first : first + count])


def rows(out: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row a run; the first of each bundle is the mean without liars."""
    for bundle in options.bundles.split(","):
        honest = out / f"{bundle}-mean-0"
        best = ran(honest, bundle, "mean", options.rounds, options.data, None)
        for rule in options.rules.split(","):
            for count, attack in [(0, ""), *((n, attack) for n in options.liars for attack in ATTACKS)]:
                name = f"{bundle}-{rule}-{count}{attack}"
                lies = {"attack": attack, "liars": middle_sites(honest, count)} if count else None
                reached = ran(out / name.replace(":", "_"), bundle, rule, options.rounds, options.data, lies)
                yield {
                    "name": f"lying/{name}", "ratio": reached / best, "relative_to": "the mean without liars",
                    "balanced_accuracy": reached,
                }  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--bundles", default=",".join(FEDERATIONS), help="default: %(default)s")
    parser.add_argument("--rules", default=",".join(RULES), help="default: %(default)s")
    parser.add_argument("--liars", type=int, nargs="+", default=[1, 2], help="how many; default: 1 and 2")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--data", help="folder, or phantom; default: what is under $MEDFL_DATA")
    parser.add_argument("--out", type=Path, help="keep the runs here")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the method lies
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for row in rows(options.out or Path(folder), options):
            found.append(row)
            if not options.json:
                print(f"{row['name']:40} {row['balanced_accuracy']:.3f}  {row['ratio']:.2f}", flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
