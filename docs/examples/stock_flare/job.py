"""A bundle trained by NVIDIA FLARE's own FedAvg recipe, in FLARE's simulator, beside the same run in medfl's.

FLARE's server knows nothing of medfl: it averages tensors. Its first model is a file of the run's initial weights; the
recipe asks for a module besides, of which it takes the class name only. See docs/deploy-operator.md.

    pip install 'medfl-monai[flare]'
    python docs/examples/stock_flare/job.py [--json] [--bundle mednist] [--config id=value ...] [--sites 2] [--rounds 2]
        [--out runs/stock_flare]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfl.core.errors import MedflError
from medfl.runs.launch import federate
from medfl.runs.plan import repeat
from medfl.runtimes import Federation
from medfl.storage.files import load_weights
from medfl.storage.places import require_unused
from medfl.storage.run_folder import RunFolder

CLIENT = Path(__file__).resolve().with_name("client.py")


def recipe(
    initial: Mapping[str, Tensor], folder: Path, arguments: str, sites: int, rounds: int
) -> Any:
    """Return FLARE's recipe, for `SimEnv`, `PocEnv`, `ProdEnv` or `export`.

    Args:
        initial: the weights of the first round.
        folder: where their file is written; the server reads it there.
        arguments: of `client.py`.
        sites: which all have to reply.
        rounds: of training.
    """
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.client.config import ExchangeFormat

    file = folder.resolve() / "initial.pt"
    torch.save(dict(initial), file)
    return FedAvgRecipe(
        name="stock", model={"class_path": "torch.nn.Identity", "args": {}}, initial_ckpt=str(file),
        min_clients=sites, num_rounds=rounds,
        train_script=str(CLIENT), train_args=arguments, server_expected_format=ExchangeFormat.PYTORCH,
    )  # fmt: skip


def executed(
    out: Path, bundle: str, config: Mapping[str, Any], requested: Mapping[str, Any]
) -> dict[str, Any]:
    """Run a federation in medfl's simulator and as a stock FLARE job, and return how their weights compare.

    Args:
        out: new folder.
        bundle: a shipped bundle's name or a folder.
        config: overrides of its configuration.
        requested: other settings by name, as for `federate`.
    """
    from nvflare.recipe import SimEnv

    require_unused(out)
    federate(
        bundle,
        config=config,
        requested={**requested, "method": "fedavg", "cohort": 1.0},
        out=out / "medfl",
    )
    run, _ = RunFolder.existing(out / "medfl").read_run()
    plan, sites = repeat(run), list(run.partition.sites)
    initial = Federation(plan.bundle, plan.method, plan.run).networks.initial
    made = recipe(initial, out, f"--run {(out / 'medfl').resolve()}", len(sites), run.rounds)
    made.execute(SimEnv(clients=sites, workspace_root=str(out / "flare")))
    (file,) = (out / "flare").rglob("FL_global_model.pt")
    final = torch.load(file, weights_only=True)["model"]
    expected = load_weights(out / "medfl" / "weights.safetensors")
    return {
        "bundle": run.bundle,
        "rounds": run.rounds,
        "samples": {name: len(items["train"]) for name, items in run.partition.sites.items()},
        "moved": _difference(expected, initial),
        "difference": _difference(final, expected),
        "model": str(file),
    }


def _difference(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> float:
    """Return the largest difference between numbers of two networks in the type of `those`; integers do not count."""
    floats = [name for name, tensor in those.items() if tensor.is_floating_point()]
    return max(
        float((these[name].to(those[name].dtype) - those[name]).abs().max()) for name in floats
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bundle", default="mednist", help="a shipped bundle's name or a folder (default: mednist)"
    )
    parser.add_argument(
        "--data", default="phantom", metavar="DIR", help="its images (default: drawn ones)"
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="ID=VALUE", help="as for medfl run"
    )
    parser.add_argument("--sites", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--rounds", type=int, default=2, metavar="R", help="default: 2")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/stock_flare"), metavar="DIR", help="new folder"
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")
    options = parser.parse_args(arguments)
    requested = {"data": options.data, "sites": options.sites, "rounds": options.rounds}
    config = dict(text.split("=", 1) for text in options.config)
    try:
        found = executed(options.out, options.bundle, config, requested)
    except MedflError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    lines = [f"{name}: {value}" for name, value in found.items()]
    sys.stdout.write(json.dumps(found) + "\n" if options.json else "\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
