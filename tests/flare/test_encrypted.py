"""Encrypted averages on FLARE (docs/examples/encrypted): what leaves a site, what the server has, what comes out."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare")
pytest.importorskip(
    "tenseal", reason="homomorphic encryption needs TenSEAL: pip install 'medfl-monai[encryption]'"
)

import tenseal as ts
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants

from medfl import datasets, methods
from medfl.core.errors import InputError, RunError
from medfl.core.run import Run
from medfl.storage.files import load_weights
from tests.flare.test_own import SITES, executed, offer
from tests.support.programs import python_path

pytestmark = [
    pytest.mark.flare,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # FLARE's own
]

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "encrypted"
TOLERANCE = 1e-4
"""Of a number of the mean after two rounds; docs/deploy-encryption.md says so. The noise of CKKS is drawn anew
each time, and the second round's training carries it on: 1e-6 to 1e-5 were seen."""


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules."""
    sys.path.insert(0, str(EXAMPLE))
    import encrypted_server
    import encrypted_site
    import run

    yield SimpleNamespace(site=encrypted_site, server=encrypted_server, run=run)
    sys.path.remove(str(EXAMPLE))
    for name in ("encrypted_server", "encrypted_site", "run"):
        del sys.modules[name]


def keys() -> tuple[Any, Any]:
    """Contexts as FLARE's HEBuilder makes them: of a site, of the server."""
    made = ts.context(
        ts.SCHEME_TYPE.CKKS,
        8192,
        coeff_mod_bit_sizes=[60, 40, 40],
        encryption_type=ts.ENCRYPTION_TYPE.SYMMETRIC,
    )
    made.generate_relin_keys()
    made.global_scale = 2**40
    parts = {"save_galois_keys": False, "save_relin_keys": True}
    site, server = (
        made.serialize(save_public_key=own, save_secret_key=own, **parts) for own in (True, False)
    )
    return ts.context_from(site), ts.context_from(server)


# One vector


def test_tensors_come_back_from_the_vector_and_integers_stay(example: SimpleNamespace) -> None:
    weights = {"b": torch.randn(2, 3), "a": torch.randn(4).double(), "count": torch.tensor(7)}
    vector = example.site.packed(weights)
    assert vector.shape == (10,)
    found = example.site.unpacked(
        list(vector), {**weights, "a": torch.zeros(4).double(), "b": torch.zeros(2, 3)}
    )
    assert found.keys() == weights.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in weights.items()
    )


@pytest.mark.parametrize("value", [2.0**18 * 1.01, -(2.0**30), float("nan"), float("inf")])
def test_numbers_that_the_keys_cannot_carry_do_not_leave(
    example: SimpleNamespace, value: float
) -> None:
    with pytest.raises(RunError, match="the largest weight is"):
        example.site.packed({"w": torch.tensor([1.0, value])})


def test_the_keys_carry_the_largest_number_and_not_its_double(example: SimpleNamespace) -> None:
    site, _ = keys()
    for factor, right in ((1, True), (2, False)):
        value = np.full(4096, example.site.MOST * factor)
        mean = np.array(
            (
                (ts.ckks_vector(site, value * 30) + ts.ckks_vector(site, value * 10)) * (1 / 40)
            ).decrypt()
        )
        assert bool(np.abs(mean / value - 1).max() < 1e-6) is right


def test_a_mean_of_another_length_is_refused(example: SimpleNamespace) -> None:
    with pytest.raises(RunError, match=r"a mean of \(5,\) numbers arrived; expected \(4,\)"):
        example.site.unpacked([0.0] * 5, {"w": torch.zeros(4)})


# What the server sees


def test_the_witness_tells_ciphertexts_from_numbers_and_sees_a_secret_key(
    example: SimpleNamespace,
) -> None:
    site, server = keys()
    sealed = ts.ckks_vector_from(server, ts.ckks_vector(site, [1.0, 2.0]).serialize())
    found = example.server.seen(
        DXO(DataKind.WEIGHTS, {"weights": sealed}, {"steps": 3}).to_shareable()
    )
    assert (found["kinds"]["CKKSVector"], found["numbers"], found["secret_keys"]) == (1, 2, 0)
    assert found["open"] == ["steps"]
    assert found["bytes"] > 100_000
    assert example.server.seen({"x": [ts.ckks_vector(site, [1.0])]})["secret_keys"] == 1
    plain = example.server.seen(DXO(DataKind.WEIGHTS, {"weights": np.ones(2)}).to_shareable())
    assert (plain["kinds"]["ndarray"], plain["numbers"]) == (1, 0)
    context = FLContext()
    context.set_prop("told", 0.5, private=False, sticky=False)
    assert example.server.seen({"peer": context})["open"][0] == "told"


def test_a_job_says_nothing_of_encryption_and_ships_no_code(
    example: SimpleNamespace, tmp_path: Path
) -> None:
    carried = tmp_path / "run.json"
    carried.write_text("{}")
    made = example.server.job(
        offer(), carried, SITES, example.site.RemoteEncryptedSite(), tmp_path / "log"
    )
    made.export_job(str(tmp_path))
    files = sorted(path.name for path in (tmp_path / made.name).rglob("*") if path.is_file())
    assert files == ["config_fed_client.json", "config_fed_server.json", "meta.json", "run.json"]
    (client,) = (tmp_path / made.name).rglob("config_fed_client.json")
    assert not {"task_data_filters", "task_result_filters"} & {
        k for k, v in json.loads(client.read_text()).items() if v
    }


# A site with images of its own, without FLARE's processes


def context(run: Run, name: str, place: Path, data: Path) -> FLContext:
    """What FLARE tells an executor: the job's folder and the kit's."""
    (place / "app" / "config").mkdir(parents=True)
    (place / "app" / "config" / "run.json").write_text(
        json.dumps({**run.to_dict(), "run_hash": run.run_hash})
    )
    (place / "medfl.yaml").write_text(
        json.dumps(
            {
                "bundle": "mednist",
                "data": str(data),
                "folder": "own",
                "permits": ["network", "image_size"],
            }
        )
    )
    workspace = SimpleNamespace(
        get_app_dir=lambda _: str(place / "app"), get_site_config_dir=lambda: str(place)
    )
    made = FLContext()
    for key, value in (
        (ReservedKey.ENGINE, SimpleNamespace(get_workspace=lambda: workspace)),
        (ReservedKey.RUN_NUM, "job"),
        (ReservedKey.IDENTITY_NAME, name),
    ):
        made.set_prop(key, value, private=True, sticky=False)
    return made


def asked(task: str, mean: Any, round_: int = 0) -> tuple[str, Shareable]:
    question = DXO(DataKind.WEIGHTS, {} if mean is None else {"weights": mean}).to_shareable()
    question.set_header(AppConstants.CURRENT_ROUND, round_)
    return task, question


def test_sites_behind_a_plain_mean_give_fedavg_and_keep_the_last_mean(
    example: SimpleNamespace, tmp_path: Path
) -> None:
    run = offer()
    scans = {
        name: datasets.write_phantom(
            "mednist", tmp_path / name / "scans", per_class=10 + 2 * i, size=16, seed=i
        )
        for i, name in enumerate(SITES)
    }
    contexts = {name: context(run, name, tmp_path / name, scans[name]) for name in SITES}
    sites = {name: example.site.RemoteEncryptedSite() for name in SITES}
    mean: Any = None
    for round_ in range(run.rounds):
        told = [
            from_shareable(s.execute(*asked("train", mean, round_), contexts[n], Signal()))
            for n, s in sites.items()
        ]
        assert all(list(dxo.data) == ["weights"] and len(dxo.meta) == 1 for dxo in told)
        samples = [dxo.get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND) for dxo in told]
        mean = list(
            sum(n * dxo.data["weights"] for n, dxo in zip(samples, told, strict=True))
            / sum(samples)
        )
    folder, _ = executed(tmp_path / "run", run, scans)
    plain = load_weights(folder.path / "weights.safetensors")
    for name, site in sites.items():
        metrics = from_shareable(site.execute(*asked("validate", mean), contexts[name], Signal()))
        assert metrics.data_kind == DataKind.METRICS
        assert 0 <= metrics.data["accuracy"] <= 1
        kept = load_weights(tmp_path / name / "own" / f"{name}.mean.safetensors")
        assert kept.keys() == plain.keys()
        assert max(float((kept[key] - plain[key]).abs().max()) for key in plain) < 1e-6


def test_a_site_refuses_what_an_average_is_not_enough_for(
    example: SimpleNamespace, tmp_path: Path
) -> None:
    data = datasets.write_phantom("mednist", tmp_path / "scans", per_class=10, size=16)
    site, told = (
        example.site.RemoteEncryptedSite(),
        context(offer("scaffold"), "north", tmp_path / "kit", data),
    )
    assert (
        site.execute(*asked("train", None), told, Signal()).get_return_code()
        == ReturnCode.EXECUTION_EXCEPTION
    )
    assert (
        site.execute(*asked("submit_model", None), told, Signal()).get_return_code()
        == ReturnCode.TASK_UNKNOWN
    )
    assert not methods.has_fedavg_server(methods.method_class("scaffold"))
    with pytest.raises(InputError, match="method 'scaffold' encrypted"):
        example.run.executed(tmp_path / "out", "mednist", {}, {"method": "scaffold"}, str)


# The federation


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_with_ciphertexts_only_gives_the_simulator_s_mean(
    example: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    data = datasets.write_phantom("pneumonia", tmp_path / "data", per_class=20, size=16)
    out, config = tmp_path / "out", {"network": "small_cnn", "image_size": 16}
    requested = {
        "method": "fedavg", "data": str(data), "sites": 2, "partition": "iid", "cohort": 1.0, "rounds": 2,
        "local_epochs": 1, "batch_size": 8,
    }  # fmt: skip
    found = example.run.executed(out, "pneumonia", config, requested, str)
    assert found["difference"] < TOLERANCE
    assert found["largest_weight"] > 0.1
    assert found["sites_agree"]
    # What the server's process had: a ciphertext from each site and round, and no number but these.
    assert (found["secret_key_at"], found["secret_keys"]) == (["site-1", "site-2"], 0)
    assert found["kinds"]["came"]["CKKSVector"] == 4
    assert not {"ndarray", "Tensor", "bytes"} & found["kinds"]["came"].keys()
    metrics = {"accuracy", "balanced_accuracy", "f1_macro", "auroc", "loss"}
    assert set(found["open"]["came"]) <= {
        MetaKey.NUM_STEPS_CURRENT_ROUND, "contribution_round", "last_connect_time", *metrics
    }  # fmt: skip
    assert not {"ndarray", "Tensor", "CKKSVector"} & found["kinds"]["went"].keys()
    assert set(found["open"]["went"]) <= {
        "contribution_round", "current_round", "num_rounds", "timeout", "__msg_root_ttl__"
    }  # fmt: skip
    assert found["numbers"] == 60506
    # What it keeps: the mean, which a site's keys open and its own do not.
    (stored,) = out.glob("federation/**/jobs-storage/*/workspace")
    with zipfile.ZipFile(stored) as archive:
        file = "app_server/FL_global_model.pt"
        model = torch.load(io.BytesIO(archive.read(file)), weights_only=True)["model"]
        every = b"".join(archive.read(name) for name in archive.namelist())
    assert list(model) == ["weights"]
    kits = out / "federation" / "workspace" / "example_project" / "prod_00"
    server = ts.context_from((kits / "server" / example.server.SERVER_KEYS).read_bytes())
    with pytest.raises(ValueError, match="secret_key"):
        ts.ckks_vector_from(server, model["weights"]).decrypt()
    site = ts.context_from((kits / "site-1" / example.server.SITE_KEYS).read_bytes())
    mean = load_weights(out / "encrypted" / "sites" / "site-1.mean.safetensors")
    opened = np.array(ts.ckks_vector_from(site, model["weights"]).decrypt())
    assert np.array_equal(opened.astype(np.float32), example.site.packed(mean).astype(np.float32))
    for weights in (mean, load_weights(out / "plain" / "weights.safetensors")):
        assert all(tensor.numpy().tobytes() not in every for tensor in weights.values())
    assert "17." in example.run.text(found)
    assert capsys.readouterr().out == ""
