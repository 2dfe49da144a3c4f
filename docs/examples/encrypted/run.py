"""FedAvg whose server adds ciphertexts, on this machine, beside the same run in medfl's simulator.

Provisions a FLARE federation with keys for homomorphic encryption, starts a server and the sites as processes of their
own with TLS on 127.0.0.1, trains a shipped bundle on drawn images, compares the mean that a site decrypts at the end
with the simulator's, and says what the server had, how large it was and how long it took. See
docs/deploy-encryption.md.

    pip install 'medfl-monai[flare,encryption]'
    python docs/examples/encrypted/run.py [--json] [--method fedavg] [--network small_cnn] [--sites 2] [--rounds 2]
        [--out runs/encrypted]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from medfl import methods
from medfl.core.errors import InputError, MedflError, RunError
from medfl.core.release import pip_install
from medfl.flare.files import participants
from medfl.flare.job import require_flare
from medfl.flare.poc import prepare, running
from medfl.flare.wire import wire_names
from medfl.runs.launch import federate
from medfl.storage.files import load_weights
from medfl.storage.places import require_unused
from medfl.storage.run_folder import RunFolder

HERE = Path(__file__).resolve().parent
PLAIN, ENCRYPTED, FEDERATION, WITNESSED = "plain", "encrypted", "federation", "server.jsonl"
"""In the output folder: the simulator's run, that of FLARE, its kits and processes, and what the server had."""


def executed(
    out: Path,
    bundle: str,
    config: Mapping[str, Any],
    requested: Mapping[str, Any],
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Run a federation in the simulator and encrypted on FLARE, and return how they compare.

    Args:
        out: new folder.
        bundle: a shipped bundle's name.
        config: overrides of its configuration.
        requested: other settings by name, as for `federate`.
        say: where lines for the user go.

    Raises:
        InputError: FLARE or TenSEAL is not installed, or the settings are not allowed.
        RunError: FLARE ended without a result; names the folder of its logs.
    """
    require_flare()
    if find_spec("tenseal") is None:
        raise InputError("encrypted averages", "they need TenSEAL", pip_install("encryption"))
    import tenseal  # type: ignore[import-untyped]
    from encrypted_server import NEEDED, SERVER_KEYS, SITE_KEYS, job
    from encrypted_site import MEAN, RULES, SITES, EncryptedSite

    require_unused(out)
    if not methods.has_fedavg_server(methods.method_class(requested["method"])):
        raise InputError(
            f"method {requested['method']!r} encrypted",
            "methods that keep FedAvg's server half",
            "see medfl methods",
        )
    summary = federate(bundle, config=config, requested=requested, out=out / PLAIN, jobs=1)
    say(f"the simulator: {out / PLAIN}")
    folder = RunFolder.create(out / ENCRYPTED)
    run, about = RunFolder.existing(out / PLAIN).read_run()
    folder.write_run(run, {key: value for key, value in about.items() if key != "run_hash"})
    clients = list(wire_names(participants(run)).values())
    witnessed = folder.path.resolve() / WITNESSED
    executor = EncryptedSite(str(folder.path.resolve()), os.getcwd())
    made = job(run, folder.path / "run.json", clients, executor, witnessed)
    made.export_job(str(folder.path))
    allowed = [*NEEDED, f"{EncryptedSite.__module__}.{EncryptedSite.__name__}"]
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": str(run.threads)}
    federation = (out / FEDERATION).resolve()
    kits = prepare(federation, clients, allowed, "--he")
    for name in clients:
        (kits / name / "local" / "privacy.json").write_text(json.dumps(RULES, indent=1))
    with running(federation, **environment) as session:
        say(f"a FLARE server and {len(clients)} sites are up")
        number = session.submit_job(str(folder.path / made.name))
        status = ""
        while not status.startswith("FINISHED"):
            time.sleep(0.5)
            status = str(session.get_job_meta(number).get("status"))
        logs = {}
        for name in clients:
            logs[name] = (kits / name / "poc_console.log").read_text(errors="replace")
        keys = {"server": SERVER_KEYS, **dict.fromkeys(clients, SITE_KEYS)}
        contexts = {
            n: tenseal.context_from((kits / n / file).read_bytes()) for n, file in keys.items()
        }
    found = [folder.path / SITES / MEAN.format(name) for name in run.partition.sites]
    if not status.endswith("COMPLETED") or not all(path.is_file() for path in found):
        raise RunError(f"NVIDIA FLARE ended with {status}; its output is in {federation}")
    means = [load_weights(path) for path in found]
    plain = load_weights(out / PLAIN / "weights.safetensors")
    return {
        "bundle": bundle,
        "method": run.method,
        "rounds": run.rounds,
        "samples": {name: len(items["train"]) for name, items in run.partition.sites.items()},
        "difference": _difference(means[0], plain),
        "largest_weight": max(
            float(t.abs().max()) for t in means[0].values() if t.is_floating_point()
        ),
        "sites_agree": all(_difference(means[0], mean) == 0.0 for mean in means),
        "seconds_simulator": summary["seconds"],
        "secret_key_at": [name for name, context in contexts.items() if context.has_secret_key()],
        **_seconds(logs),
        **_sizes(witnessed),
    }


def _difference(mean: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference between numbers of two networks; integers, which are not averaged, do not count."""
    floats = [name for name, tensor in mean.items() if tensor.is_floating_point()]
    return max(float((mean[name].double() - plain[name].double()).abs().max()) for name in floats)


def _sizes(witnessed: Path) -> dict[str, Any]:
    """Return what the witness at the server wrote down: kinds of values, and bytes a site and round."""
    lines = [json.loads(line) for line in witnessed.read_text().splitlines()]
    came = [line for line in lines if line["direction"] == "came" and line["numbers"]]
    down = [line["bytes"] for line in lines if line["direction"] == "went" and line["bytes"]]
    kinds: dict[str, Counter[str]] = {"came": Counter(), "went": Counter()}
    for line in lines:
        kinds[line["direction"]].update(line["kinds"])
    plain = 4 * came[0]["numbers"]
    return {
        "numbers": came[0]["numbers"],
        "plain_bytes": plain,
        "up_bytes": statistics.mean(line["bytes"] for line in came),
        "down_bytes": statistics.mean(down),
        "secret_keys": sum(line["secret_keys"] for line in lines),
        "kinds": {direction: dict(sorted(counts.items())) for direction, counts in kinds.items()},
        "open": {
            d: sorted({name for line in lines if line["direction"] == d for name in line["open"]})
            for d in kinds
        },
    }


def _seconds(logs: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds that FLARE's filters say they took, the median over sites and rounds."""
    lines = "\n".join(logs.values())
    return {
        f"seconds_{name}": statistics.median(
            float(took) for took in re.findall(rf"{word} time for .* (\S+) seconds", lines)
        )
        for name, word in (("encrypt", "Encryption"), ("decrypt", "Decryption"))
    }


def text(found: Mapping[str, Any]) -> str:
    """Return the result as lines."""
    plain, up, down = (found[f"{name}_bytes"] for name in ("plain", "up", "down"))
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["kinds"]["came"].items())
    lines = [
        f"{found['bundle']}, {found['method']}, {found['rounds']} rounds, "
        + ", ".join(f"{name}: {samples} images" for name, samples in found["samples"].items()),
        f"{found['numbers']} numbers a site and round: {plain / 1e6:.2f} MB plain, {up / 1e6:.2f} MB up encrypted "
        f"({up / plain:.1f} times), {down / 1e6:.2f} MB down ({down / plain:.1f} times)",
        f"encrypt {found['seconds_encrypt']:.3f} s, decrypt {found['seconds_decrypt']:.3f} s",
        f"largest difference of the decrypted mean from the simulator's: {found['difference']:.1e} "
        f"(largest weight {found['largest_weight']:.2f})",
        f"what came to the server: {kinds}; secret keys with it: {found['secret_keys']}",
        f"numbers in the open among it: {', '.join(found['open']['came'])}",
        f"the secret key is at {', '.join(found['secret_key_at'])}",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bundle", default="pneumonia", help="a shipped bundle of 2D images (default: pneumonia)"
    )
    parser.add_argument(
        "--method", default="fedavg", help="one that keeps FedAvg's server half (default: fedavg)"
    )
    parser.add_argument("--network", default="small_cnn", help="default: small_cnn")
    parser.add_argument("--sites", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--rounds", type=int, default=2, metavar="R", help="default: 2")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/encrypted"), metavar="DIR", help="new folder"
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")
    options = parser.parse_args(arguments)
    requested = {
        "method": options.method, "data": "phantom", "sites": options.sites, "rounds": options.rounds, "cohort": 1.0,
        "local_epochs": 1,
    }  # fmt: skip

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    try:
        found = executed(options.out, options.bundle, {"network": options.network}, requested, say)
    except MedflError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{json.dumps(found) if options.json else text(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
