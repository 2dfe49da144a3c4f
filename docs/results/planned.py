"""A planned bundle beside the fixed one, trained for the same seconds of one thread; called again it goes on.

    OMP_NUM_THREADS=1 python docs/results/planned.py [lungs] [hippocampus] [oasis]

The settings, fixed before a test image was scored:

- Data: `data/SET-small`, made by smaller.py: lungs (`covid_cxr_lungs`, 69 radiographs of 50 patients, a quarter of 256
  pixels), hippocampus (`msd_hippocampus`, 174 volumes, half: 2 mm), OASIS (`oasis_tissue`, 23 scans of 20 people, half:
  4 mm). At their own resolution a step of a bundle planned for 1 GB took 5 s of a thread (lungs) or 14 s (hippocampus),
  validation counted: nothing would be learned. Lungs and OASIS have cases.csv with the patient, lungs also the centre.
- Bundles: fixed is `medfl new --no-plan`, planned is `medfl plan --memory 0.5`, the least there is, for all three sets.
- FedAvg, seeds 0, 1 and 2; lungs at their four centres, volumes at three sites drawn at random. Test images are those
  of medfl's own split, the same for both bundles. No early stopping; the weights of the last round are scored.
- Each bundle's own learning rate, batch size and local epochs.
- Rounds: 240 s by the processor's seconds of training in round 2 of a trial with seed 100, which ends before a test
  image is scored; at least one. So both train for the same time, whatever their steps are.
- Metrics: mean Dice and HD95 of the test images; the difference of runs with the same seed, with its 95 % interval.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS = 240
TRIAL_SEED = 100
SEEDS = (0, 1, 2)
KINDS = ("planned", "fixed")


@dataclass(frozen=True)
class Data:
    """One set: names of its classes, and how it is divided."""

    classes: str
    sites: int
    partition: str

    @property
    def flags(self) -> list[str]:
        """Return the flags of a run."""
        drawn = ["--sites", str(self.sites)] if self.partition == "iid" else []
        return [*drawn, "--partition", self.partition]


SETS = {
    "lungs": Data("lungs", 4, "centre"),
    "hippocampus": Data("anterior,posterior", 3, "iid"),
    "oasis": Data("csf,grey,white", 3, "iid"),
}


class Enough(Exception):
    """The trial has been long enough."""


def called(words: Sequence[str]) -> None:
    """Run a command of medfl."""
    from medfl.cli import main as medfl

    if code := medfl(list(words)):
        raise SystemExit(code)


def make(name: str) -> None:
    """Write both bundles of a set."""
    data = SETS[name]
    folder = f"data/{name}-small"
    pairs = ["--images", f"{folder}/images", "--masks", f"{folder}/masks"]
    pairs += ["--classes", data.classes]
    fixed = Path(f"bundles/{name}-fixed")
    if not fixed.exists():
        called(["new", str(fixed), *pairs, "--no-plan"])

    planned = Path(f"bundles/{name}-planned")
    if not planned.exists():
        limits = ["--memory", "0.5", "--sites", str(data.sites)]
        called(["plan", *pairs, *limits, "--out", str(planned)])


def fitting(seconds: float) -> int:
    """Return the rounds of a run whose round takes so many seconds of training."""
    return max(1, round(SECONDS / seconds))


def rounds_of(name: str, kind: str) -> int:
    """Return the rounds of a bundle's runs, after a trial if there has been none."""
    import medfl

    path = Path(f"trials/{name}-{kind}.json")
    if path.exists():
        return int(json.loads(path.read_text())["rounds"])

    def watch(ended: medfl.RoundEnd) -> None:
        if ended.round == 2:
            raise Enough

    data = SETS[name]
    out = Path(f"trials/{name}-{kind}-{int(time.time())}")
    try:
        medfl.run(
            f"bundles/{name}-{kind}",
            "fedavg",
            data=f"data/{name}-small",
            partition=data.partition,
            sites=data.sites if data.partition == "iid" else None,
            rounds=3,
            seed=TRIAL_SEED,
            patience=0,
            jobs=1,
            callbacks=[watch],
            out=str(out),
        )
    except medfl.RunError as error:
        if "Enough" not in str(error):
            raise

    entries = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    seconds = [entry["seconds_train"] for entry in entries]
    rounds = fitting(seconds[-1])
    path.write_text(json.dumps({"rounds": rounds, "seconds_train": seconds}))
    return rounds


def main(names: Sequence[str]) -> None:
    """Make the bundles, try them, and run what is missing, seed by seed."""
    time.perf_counter = time.process_time  # the machine does other work too
    Path("trials").mkdir(exist_ok=True)
    chosen = list(names) or list(SETS)
    for name in chosen:
        make(name)

    for seed in SEEDS:
        for name in chosen:
            for kind in KINDS:
                out = Path(f"runs/{name}-{kind}-{seed}")
                if (out / "summary.json").exists():
                    continue

                words = ["run", f"bundles/{name}-{kind}", "--data", f"data/{name}-small"]
                words += ["--method", "fedavg", *SETS[name].flags, "--seed", str(seed)]
                words += ["--rounds", str(rounds_of(name, kind)), "--patience", "0"]
                words += ["--eval-every", "0", "--jobs", "1", "--no-sandbox"]
                words += ["--save-predictions", "--quiet", "--out", str(out)]
                called([*words, *(["--resume"] if (out / "run.json").exists() else [])])


if __name__ == "__main__":
    main(sys.argv[1:])
