"""The same federation in medfl, NVIDIA FLARE's simulator, Flower's simulation and a plain PyTorch script.

FedAvg over 10 sites x 60 phantom images of 28x28 in 8 classes, batch 8, SGD 0.01, one local epoch, the same images at
the same sites and the same initial weights, one torch thread a process, no evaluation. Each system runs as a program of
its own, twice: with 1 round and with 1 + N. The difference gives the seconds of a round after the first, the rest of
the short run is start-up: interpreter, imports, data, the first round's extra work, saving. The accuracy of each
system's final weights on the pooled test images is in the row, so that nobody is fast by doing something else.

    pip install 'medfl-monai[bench,flare]'
    python benchmarks/peers.py [--json] [--rounds 5] [--repeats 3] [--networks small_cnn,resnet18] [--systems ...]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flare_client import Problem, train
from safetensors.torch import load_file, save_file

SITES, IMAGES, SEED = 10, 60, 0
SYSTEMS = ("script", "medfl", "medfl-2", "medfl-2-compiled", "flower", "flare")
TITLES = {
    "script": "plain PyTorch script", "medfl": "medfl, --jobs 1", "medfl-2": "medfl, --jobs 2",
    "medfl-2-compiled": "medfl, --jobs 2 --compile",
    "flower": "Flower's simulation (Ray), one core a client", "flare": "NVIDIA FLARE's simulator, ten threads",
}  # fmt: skip


def prepare(folder: Path, network: str) -> None:
    """Write images, initial weights and the partition that all systems share."""
    from medfl import datasets, networks
    from medfl.bundle.bundle import Bundle
    from medfl.training.network_pool import Networks

    data = datasets.write_phantom("pbc", folder / "data", per_class=120, size=28)
    items = datasets.datalist("pbc", data, "train")[: SITES * IMAGES]
    sites = {str(item["id"]): f"site-{index % SITES + 1}" for index, item in enumerate(items)}
    (folder / "sites.csv").write_text(
        "id,site\n" + "\n".join(f"{k},{v}" for k, v in sites.items()) + "\n"
    )
    bundle = Bundle("pbc", {"dataset_dir": str(data), "image_size": 28})
    arrays: dict[str, Any] = {}
    train_set, test_set = bundle.prepared("train"), bundle.prepared("test")
    for site in sorted(set(sites.values())):
        chosen = torch.tensor(
            [i for i, item in enumerate(train_set.items) if sites.get(str(item["id"])) == site]
        )
        x, y = next(train_set.batches(chosen, len(chosen), None))
        arrays |= {f"{site}/x": np.asarray(x), f"{site}/y": np.asarray(y)}
    x, y = next(test_set.batches(torch.arange(len(test_set)), len(test_set), None))
    np.savez(folder / "problem.npz", test_x=np.asarray(x), test_y=np.asarray(y), **arrays)
    pool = Networks(lambda: networks.build(network, 3, 8), SEED, torch.device("cpu"))
    save_file(dict(pool.initial), folder / "initial.safetensors")
    (folder / "problem.json").write_text(json.dumps({"network": network, "classes": 8}))


# Each system as a program: reads the folder, trains for some rounds, writes final.safetensors


def run_script(folder: Path, rounds: int) -> None:
    """Train without a framework."""
    problem = Problem(folder)
    weights = problem.initial()
    for round_ in range(1, rounds + 1):
        replies = [train(problem, site, weights, round_) for site in problem.sites]
        weights = {
            name: sum(reply[name] for reply in replies) / len(replies)
            if tensor.is_floating_point()
            else replies[0][name]
            for name, tensor in weights.items()
        }
    save_file(weights, folder / "final.safetensors")


def run_medfl(folder: Path, rounds: int, jobs: int, compile_: bool) -> None:
    """Train with medfl."""
    from medfl import federate

    requested = {
        "data": str(folder / "data"), "partition": f"file:{folder / 'sites.csv'}", "rounds": rounds, "local_epochs": 1,
        "batch_size": 8, "lr": 0.01, "eval_every": 0, "cohort": 1.0, "lr_decay": 1.0, "seed": SEED,
        "compile": compile_,
    }  # fmt: skip
    sgd = {
        "_target_": "torch.optim.SGD",
        "params": "$@network_def.parameters()",
        "lr": "@learning_rate",
    }
    network = json.loads((folder / "problem.json").read_text())["network"]
    config = {"network": network, "optimizer": sgd, "image_size": 28}
    with tempfile.TemporaryDirectory() as out:
        federate("pbc", config=config, requested=requested, jobs=jobs, out=Path(out) / "run")
        (folder / "final.safetensors").write_bytes(
            (Path(out) / "run" / "weights.safetensors").read_bytes()
        )


def run_flower(folder: Path, rounds: int) -> None:
    """Train with Flower's simulation engine, a client a core at a time."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def fit(message: Message, context: Context) -> Message:
        problem = Problem(folder)
        site = problem.sites[int(context.node_config["partition-id"])]
        weights = message.content["arrays"].to_torch_state_dict()
        round_ = int(message.content["config"]["server-round"])
        trained = train(problem, site, weights, round_)
        metrics = MetricRecord({"num-examples": len(problem.arrays[f"{site}/y"])})
        return Message(
            RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message
        )

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=SITES, min_available_nodes=SITES)
        initial = ArrayRecord(Problem(folder).initial())
        result = strategy.start(grid, initial, num_rounds=rounds, train_config=ConfigRecord({}))
        save_file(dict(result.arrays.to_torch_state_dict()), folder / "final.safetensors")

    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"include_dashboard": False},
    }
    run_simulation(server, client, num_supernodes=SITES, backend_config=resources)


def run_flare(folder: Path, rounds: int) -> None:
    """Train with FLARE's simulator, a thread and a process a client, so that no process starts anew each round."""
    from flare_client import Net
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.client.config import ExchangeFormat
    from nvflare.recipe import SimEnv

    recipe = FedAvgRecipe(
        min_clients=SITES,
        num_rounds=rounds,
        model=Net(str(folder)),
        train_script=str(Path(__file__).with_name("flare_client.py")),
        train_args=str(folder),
        server_expected_format=ExchangeFormat.PYTORCH,
    )
    run = recipe.execute(
        SimEnv(num_clients=SITES, num_threads=SITES, workspace_root=str(folder / f"flare-{rounds}"))
    )
    (found,) = Path(run.get_result()).rglob("FL_global_model.pt")
    weights = torch.load(found, weights_only=True)
    save_file(
        {k: torch.as_tensor(v) for k, v in weights["model"].items()}, folder / "final.safetensors"
    )


def child(system: str, folder: Path, rounds: int) -> None:
    """Run one system in this process."""
    torch.set_num_threads(1)
    if system.startswith("medfl"):
        run_medfl(folder, rounds, 2 if "-2" in system else 1, system.endswith("compiled"))
    else:
        {"script": run_script, "flower": run_flower, "flare": run_flare}[system](folder, rounds)


# Timing


def seconds(system: str, folder: Path, rounds: int) -> float:
    """Return the wall clock of one run as a program."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_DEDUP_LOGS": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    here = str(Path(__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
    command = [
        sys.executable,
        __file__,
        "--child",
        system,
        "--folder",
        str(folder),
        "--rounds",
        str(rounds),
    ]
    (folder / "final.safetensors").unlink(missing_ok=True)
    started = time.perf_counter()
    with (folder / f"{system}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        code = process.wait()
    took = time.perf_counter() - started
    with suppress(ProcessLookupError):  # what a simulator leaves behind would slow the next one
        os.killpg(process.pid, signal.SIGKILL)
    if code or not (folder / "final.safetensors").is_file():
        tail = (folder / f"{system}.log").read_text()[-2000:]
        raise RuntimeError(f"{system} ended with {code}:\n{tail}")
    return took


def judged(folder: Path) -> tuple[float, float]:
    """Return the accuracy of the final weights on the pooled test images, and their loss on the training images.

    The loss tells better than the accuracy whether systems have trained the same: of 8 classes none is right as long as
    all logits are nearly equal.
    """
    problem = Problem(folder)
    network, arrays = problem.network().eval(), problem.arrays
    network.load_state_dict({k: v for k, v in load_file(folder / "final.safetensors").items()})
    with torch.no_grad():
        output = network(torch.from_numpy(arrays["test_x"]))
        x, y = (
            np.concatenate([arrays[f"{site}/{name}"] for site in problem.sites])
            for name in ("x", "y")
        )
        loss = torch.nn.functional.cross_entropy(
            network(torch.from_numpy(x)), torch.from_numpy(y).long()
        )
    return float((output.argmax(1).numpy() == arrays["test_y"]).mean()), float(loss)


def compare(
    network: str, systems: list[str], folder: Path, rounds: int, repeats: int
) -> list[dict[str, object]]:
    """Time all systems in turn, so that a busy moment hits them alike."""
    folder.mkdir()
    prepare(folder, network)
    rounds_of: dict[str, list[float]] = {system: [] for system in systems}
    starts: dict[str, list[float]] = {system: [] for system in systems}
    right: dict[str, tuple[float, float]] = {}
    for _ in range(repeats):
        for system in systems:
            short = seconds(system, folder, 1)
            rounds_of[system].append((seconds(system, folder, 1 + rounds) - short) / rounds)
            starts[system].append(short - rounds_of[system][-1])
            right[system] = judged(folder)
    base = statistics.median(rounds_of[systems[0]])
    return [
        {
            "name": f"peers/{network}/{system}",
            "ratio": statistics.median(rounds_of[system]) / base,
            "relative_to": TITLES[systems[0]],
            "system": TITLES[system],
            "seconds_per_round": statistics.median(rounds_of[system]),
            "seconds_per_round_min": min(rounds_of[system]),
            "seconds_per_round_max": max(rounds_of[system]),
            "start_seconds": statistics.median(starts[system]),
            "test_accuracy": right[system][0],
            "train_loss": right[system][1],
        }
        for system in systems
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--networks", default="small_cnn,resnet18")
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}; the first is 1"
    )
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder, options.rounds)
        return
    systems, rows = options.systems.split(","), []
    with tempfile.TemporaryDirectory() as folder:
        for network in options.networks.split(","):
            rows += compare(
                network, systems, Path(folder) / network, options.rounds, options.repeats
            )
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        spread = f"({row['seconds_per_round_min']:.3f} to {row['seconds_per_round_max']:.3f})"
        print(
            f"{row['name']:<26} ratio {row['ratio']:.3f}  {row['seconds_per_round']:.3f} s a round {spread}  "
            f"start {row['start_seconds']:.1f} s  accuracy {row['test_accuracy']:.3f}  loss {row['train_loss']:.4f}"
        )


if __name__ == "__main__":
    main()
