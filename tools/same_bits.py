"""Whether every method's small phantom runs are what they were at another commit: hash, weights, messages, predictions.

    python tools/same_bits.py REVISION [--methods a,b] [--out DIR]

The runs of REVISION are made from a checkout of it in a folder of its own, those of this tree from here, both with this
Python and on the same images, and are compared run by run. DIR keeps both tables as JSON, and REVISION's is not made
again where it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PHANTOMS = ROOT / "build" / "same_bits" / "phantoms"
"""Drawn once, by this tree: the images are the same for both, also where how they are drawn has changed."""
PUBLIC = {"public": f"mnist:{PHANTOMS / 'mnist'}"}
SCANS = {"network": "small_cnn", "image_size": 32}
OPTIONS: dict[str, dict[str, Any]] = {
    "ccvr": {"calibration_epochs": 1, "virtual": 10},
    "fccl": {**PUBLIC, "alignment": 40},
    "fedbm": {
        "g_start": 1,
        "g_every": 1,
        "g_iterations": 2,
        "g_batch": 8,
        "synthetic_batch": 4,
        "normalise": "half",
    },
    "fedhelp": {**PUBLIC, "large": "site-1", "large_network": "two_conv", "teachers": ""},
    "fedkemf": {**PUBLIC, "bodies": "two_conv,small_cnn,small_cnn"},
    "fedmd": {**PUBLIC, "alignment": 40},
    "pfedbayes": {"optimizer": "run", "zeta": 0.1},
}
SEGMENTATION = ("fedavg", "scaffold", "fedbn", "fedrep", "ditto")
_RUN = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from medfl import federate
asked = json.loads(sys.stdin.read())
for name, (bundle, method, options, config, requested) in asked["runs"].items():
    out = Path(asked["out"]) / name
    try:
        federate(bundle, options=options, config=config, requested={"method": method, **requested}, jobs=1, out=out)
    except Exception as error:
        print(json.dumps([name, {"error": f"{type(error).__name__}: {error}"}]), flush=True)
        continue
    summary = json.loads((out / "summary.json").read_text())
    found = {key: summary[key] for key in ("run_hash", "weights_sha256", "bytes_up", "bytes_down", "last")}
    found["predictions"] = (out / "predictions.csv").read_text() if (out / "predictions.csv").is_file() else None
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    found["rounds"] = [{k: v for k, v in one.items() if not k.startswith("seconds")} for one in rounds]
    print(json.dumps([name, found]), flush=True)
"""


def runs(names: list[str]) -> dict[str, list[Any]]:
    """Return name -> what `federate` is asked for."""
    small = {
        "data": str(PHANTOMS / "mednist"),
        "sites": 3,
        "partition": "dirichlet:1",
        "cohort": 0.67,
        "rounds": 2,
        "local_epochs": 1,
    }
    small |= {"batch_size": 16, "seed": 3}
    volumes = {
        **small,
        "data": str(PHANTOMS / "hippocampus"),
        "partition": "iid",
        "rounds": 1,
        "batch_size": 4,
    }
    made = {
        name: ["mednist", name, OPTIONS.get(name, {}), SCANS, small]
        for name in names
        if name != "condistfl"
    }
    if "condistfl" in names:
        partial = {"sites": 2, "cohort": 1.0, "site_labels": "site-1=anterior;site-2=posterior"}
        made["condistfl-volumes"] = ["hippocampus", "condistfl", {}, {}, {**volumes, **partial}]
    for name in [name for name in names if name in SEGMENTATION]:
        made[f"{name}-volumes"] = ["hippocampus", name, {}, {}, volumes]
    if "fedavg" in names:
        made["fedavg-int8"] = ["mednist", "fedavg", {}, SCANS, {**small, "messages": "int8"}]
        made["fedavg-median"] = ["mednist", "fedavg", {}, SCANS, {**small, "aggregation": "median"}]
        made["fedavg-topk"] = ["mednist", "fedavg", {}, SCANS, {**small, "messages": "topk:0.1"}]
    return made


def outcomes(tree: Path, asked: dict[str, list[Any]]) -> dict[str, Any]:
    """Make the runs with the code of a tree and return name -> what came out."""
    with tempfile.TemporaryDirectory() as out:
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        given = json.dumps({"runs": asked, "out": out})
        done = subprocess.run(
            [sys.executable, "-c", _RUN],
            input=given,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tree,
        )
    pairs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(pairs)


def main() -> int:
    """Compare this tree with a revision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", help="a commit")
    parser.add_argument("--methods", default="", help="names, comma-separated; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "same_bits", metavar="DIR")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from medfl import datasets, methods

    for name in ("mednist", "mnist", "hippocampus"):
        if not datasets.is_phantom(PHANTOMS / name):
            datasets.write_phantom(name, PHANTOMS / name)
    asked = runs(options.methods.split(",") if options.methods else list(methods.names()))
    options.out.mkdir(parents=True, exist_ok=True)
    known = options.out / f"{options.revision}.json"
    was = json.loads(known.read_text()) if known.is_file() else {}
    if asked.keys() - was.keys():
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            subprocess.run(
                ["git", "worktree", "add", "-q", "--detach", tree, options.revision],
                cwd=ROOT,
                check=True,
            )
            try:
                was |= outcomes(tree, {name: one for name, one in asked.items() if name not in was})
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
        known.write_text(json.dumps(was))
    now = outcomes(ROOT, asked)
    (options.out / "here.json").write_text(json.dumps(now))
    differ = [
        name
        for name in asked
        if now.get(name) != was.get(name) or "error" in now.get(name, {"error": ""})
    ]
    for name in differ:
        before, after = was.get(name, {"error": "nothing"}), now.get(name, {"error": "nothing"})
        for key in before.keys() | after.keys():
            if before.get(key) != after.get(key):
                print(f"{name}: {key}: {str(after.get(key))[:80]} was {str(before.get(key))[:80]}")
        if before == after:
            print(f"{name}: fails in both: {after['error'][:120]}")
    print(
        f"{len(asked) - len(differ)} of {len(asked)} runs are the same as at {options.revision}, {len(differ)} differ"
    )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
