"""What each rule of `--aggregation` costs where nobody lies, and what it saves where one or two sites do.

Federated averaging on real images of sites of real, unequal sizes; liars are the sites in the middle by size, so that
neither the largest nor the smallest decides. A liar

    sign    sends its change with the sign turned, ten times as long,
    scale   sends its change a hundred times as long,
    labels  trains on labels in reversed order, honestly otherwise,
    count   says that it has 10^12 images, which the server refuses where numbers of images matter.

The rules are those of `--aggregation`, and share:F, the mean with `--max-share F`.

    python benchmarks/lying_sites.py --bundles pneumonia [--json | --markdown] [--rules mean,clip:auto] [--seeds 0 1 2]
    python benchmarks/lying_sites.py --bundles ham10000 [--data FOLDER] [--out DIR]

Pneumonia has six sites of given sizes, HAM10000 its four hospitals, of which the two largest are cut into two thirds
and a third, so that there are six here too and Krum fits; docs/results/few.py makes a folder with few images a class.

The score is the global model's balanced accuracy on everybody's test images after the last round, relative to the
mean without liars of the same seed; a run that ends without a model has 0. `--out` keeps the runs, and a second call
does only those that are missing.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import medfl
from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.methods import option
from medfl.methods.fedavg import FedAvg
from medfl.runtimes.server.robust import Aggregation

RULES = ("mean", "share:0.3", "clip:auto", "median", "trimmed:0.34", "krum:1", "multikrum:1")
ATTACKS = ("sign", "scale", "labels", "count")
SIZES = "counts:1241/250,395/80,336/68,225/45,82/17,44/9"
"""A tenth of the images of Fed-ISIC2019's six centres (Ogier du Terrail et al., 2022, FLamby)."""
FEDERATIONS: dict[str, dict[str, Any]] = {
    "pneumonia": {"partition": SIZES, "local_epochs": 1},
    "ham10000": {
        "cohort": 1.0,
        "local_epochs": 1,
        "lr": 0.003,
    },  # its partition is a file: `six_hospitals`
}
CONFIG = {"image_size": 28, "network": "small_cnn"}


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
            return super().local_update(
                replace(site, loss=lambda out, y: loss(out, last - y)), state, down
            )
        state, reply = super().local_update(site, state, down)
        if self.attack == "count":
            return state, Message(reply.tensors, {**reply.scalars, "samples": 1e12})
        factor = -10.0 if self.attack == "sign" else 100.0
        return state, Message(
            {"weights": _longer(down["weights"], reply["weights"], factor)}, reply.scalars
        )


METHOD = Lying


def _longer(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], factor: float
) -> dict[str, Any]:
    """Multiply a change; a variance stays one."""
    moved = {
        n: old + factor * (after[n] - old) if old.is_floating_point() else after[n]
        for n, old in before.items()
    }
    return {
        name: tensor.abs() if name.endswith("running_var") else tensor
        for name, tensor in moved.items()
    }


def six_hospitals(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the partition of HAM10000's hospitals of which the two largest are cut, a file in a folder."""
    file = out / "six-hospitals.csv"
    if not file.exists():
        one = {
            "partition": "centre",
            "cohort": 1.0,
            "rounds": 1,
            "local_epochs": 1,
            "data": options.data,
        }
        found = medfl.federate(
            "ham10000", config=CONFIG, requested=one, out=out / "hospitals", jobs=options.jobs
        )
        sites = json.loads((Path(found["folder"]) / "run.json").read_text())["partition"]["sites"]
        large = sorted(sites, key=lambda name: (len(sites[name]["train"]), name))[-2:]
        with file.open("w", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerow(["id", "site", "section"])
            for name, sections in sites.items():
                for section, ids in sections.items():
                    for i, ident in enumerate(ids):
                        part = ("-b" if i % 3 == 2 else "-a") if name in large else ""
                        rows.writerow([ident, name + part, section])
    return {"partition": f"file:{file}"}


def ran(
    out: Path,
    bundle: str,
    rule: str,
    seed: int,
    options: argparse.Namespace,
    lies: Mapping[str, str] | None,
) -> float:
    """Return the balanced accuracy of a run, which is done if it is not there; 0 where it ended without a model."""
    failed = out.with_name(out.name + ".failed")
    if failed.exists():
        return 0.0
    if not (out / "summary.json").exists():
        method, of_method = ("benchmarks.lying_sites", dict(lies)) if lies else ("fedavg", {})
        asked = {
            "method": method,
            "data": options.data,
            "rounds": options.rounds,
            "eval_every": options.rounds,
        }
        aggregation, most = ("mean", float(rule[6:])) if rule.startswith("share:") else (rule, None)
        asked |= {
            "aggregation": aggregation,
            "max_share": most,
            "seed": seed,
            **FEDERATIONS[bundle],
        }
        asked |= six_hospitals(out.parent, options) if bundle == "ham10000" else {}
        given: dict[str, Any] = {"requested": asked, "config": CONFIG, "options": of_method}
        if (out / "run.json").exists():
            given = {"requested": {"method": method}, "resume": True}
        least = Aggregation.parse(aggregation).least
        try:
            medfl.federate(
                None if "resume" in given else bundle,
                **given,
                min_replies=least,
                out=out,
                jobs=options.jobs,
            )
        except RunError as error:
            sys.stderr.write(f"{out.name}: {error}\n")
            failed.write_text(f"{error}\n")
            return 0.0
    return float(json.loads((out / "summary.json").read_text())["last"]["balanced_accuracy"])


def middle_sites(folder: Path, count: int) -> str:
    """Return the names of so many sites, neither the largest nor the smallest."""
    sites = json.loads((folder / "run.json").read_text())["partition"]["sites"]
    names = sorted(sites, key=lambda name: (len(sites[name]["train"]), name))
    first = (len(names) - count) // 2
    return " ".join(names[first : first + count])


def rows(out: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each rule and attack, over all seeds."""
    for bundle in options.bundles.split(","):
        honest = {seed: out / f"{bundle}-mean-0-seed{seed}" for seed in options.seeds}
        best = [ran(honest[seed], bundle, "mean", seed, options, None) for seed in options.seeds]
        for rule in options.rules.split(","):
            for count, attack in [
                (0, ""),
                *((n, attack) for n in options.liars for attack in ATTACKS),
            ]:
                name, reached = f"{bundle}-{rule}-{count}{attack}", []
                for seed, folder in honest.items():
                    lies = (
                        {"attack": attack, "liars": middle_sites(folder, count)} if count else None
                    )
                    kept = out / f"{name.replace(':', '_')}-seed{seed}"
                    reached.append(ran(kept, bundle, rule, seed, options, lies))
                yield {
                    "name": f"lying/{name}", "ratio": statistics.mean(reached) / statistics.mean(best),
                    "relative_to": "the mean without liars", "balanced_accuracy": statistics.mean(reached),
                    "by_seed": dict(zip(map(str, options.seeds), reached, strict=True)),
                    "bundle": bundle, "rule": rule, "liars": count, "attack": attack or "none",
                }  # fmt: skip


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return a markdown table a bundle: a row a rule, a column an attack; mean and sd over the seeds in percent."""
    lines: list[str] = []
    for bundle in dict.fromkeys(row["bundle"] for row in found):
        cells: dict[str, dict[str, str]] = {}
        for row in (row for row in found if row["bundle"] == bundle):
            values = [100 * value for value in row["by_seed"].values()]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            head = f"{row['liars']} {row['attack']}" if row["liars"] else "nobody lies"
            cells.setdefault(row["rule"], {})[head] = f"{statistics.mean(values):.1f}{spread}"
        heads = list(next(iter(cells.values())))
        lines += ["", f"| {bundle} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        lines += [
            f"| {rule} | {' | '.join(line[head] for head in heads)} |"
            for rule, line in cells.items()
        ]
    return "\n".join(lines[1:])


def parser() -> argparse.ArgumentParser:
    """Return what the command takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print a JSON list of rows")
    shown.add_argument("--markdown", action="store_true", help="print a table a bundle")
    parser.add_argument("--bundles", default=",".join(FEDERATIONS), help="default: %(default)s")
    parser.add_argument("--rules", default=",".join(RULES), help="default: %(default)s")
    parser.add_argument(
        "--liars", type=int, nargs="+", default=[1, 2], help="how many; default: 1 and 2"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--data", help="folder, or phantom; default: what is under $MEDFL_DATA")
    parser.add_argument(
        "--jobs", type=int, default=1, help="worker processes; default: %(default)s"
    )
    parser.add_argument("--out", type=Path, help="keep the runs here")
    return parser


def main() -> None:
    """Run the benchmark."""
    options = parser().parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the method lies
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        found = []
        for row in rows(out, options):
            found.append(row)
            if not options.json:
                line = f"{row['name']:40} {row['balanced_accuracy']:.3f}  {row['ratio']:.2f}"
                print(line, file=sys.stderr if options.markdown else sys.stdout, flush=True)
    if options.json:
        print(json.dumps(found))
    elif options.markdown:
        print(table(found))


if __name__ == "__main__":
    main()
