"""Runs as MONAI bundles: what is written is the model that the run scored, in every format, and stands on its own."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import monai.bundle
import nibabel
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.cli.verbs import main
from medfl.core import release
from medfl.core.errors import InputError, RunError
from medfl.core.seeding import stream
from medfl.export import bundle_writer, checks as export_checks, formats as export_formats
from medfl.export.bundle_writer import _BundleWriter, _NetworkDefinition, export
from medfl.export.checks import problems
from medfl.export.formats import OnnxNetwork, parse_formats
from medfl.networks.heads import head
from medfl.policy.inspection import INFERENCE, inspect
from medfl.policy.policy import Policy
from medfl.runs.launch import federate
from medfl.runs.predict import predict
from medfl.starter import starter
from medfl.storage.files import load_weights, save_weights
from tests.support.programs import python_path
from tests.zoo.build import ZOO

ROOT = Path(__file__).parents[2]
CLASSES = datasets.get("mednist").classes
SMALL = {"network": "small_cnn", "image_size": 20}

pytestmark = [
    pytest.mark.xdist_group("exported runs"),
    pytest.mark.filterwarnings("ignore:.*no allow list.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("data") / "mednist", per_class=10, size=24
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The test images as files, which MONAI reads."""
    folder = tmp_path_factory.mktemp("pictures")
    with np.load(data / "mednist_24.npz") as file:
        for index, pixels in enumerate(file["test_images"]):
            Image.fromarray(pixels).save(folder / f"test_{index:06d}.png")
    return folder


def trained(
    folder: Path,
    data: Path,
    method: str,
    name: str = "mednist",
    config: Any = SMALL,
    **settings: Any,
) -> Path:
    options, requested = (
        settings.pop("options", {}),
        {"sites": 2, "rounds": 2, "partition": "iid", **settings},
    )
    save = datasets.get(name).task == "segmentation"
    requested |= {"method": method, "data": str(data)}
    federate(
        name, options=options, config=config, requested=requested, out=folder, jobs=1, save_predictions=save,
        command=f"medfl run {name} --data {data} --out {folder}",
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A FedAvg run."""
    return trained(tmp_path_factory.mktemp("plain") / "run", data, "fedavg")


@pytest.fixture(scope="module")
def textual(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A FedBM run, without its generator, which is no part of the model."""
    options = {"generator": False, "tau": 9.0}
    return trained(
        tmp_path_factory.mktemp("textual") / "run", data, "fedbm", rounds=1, options=options
    )


@pytest.fixture(scope="module")
def personal(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A FedRep run: every site has a head of its own."""
    return trained(tmp_path_factory.mktemp("personal") / "run", data, "fedrep", rounds=1)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, plain: Path) -> Path:
    """The FedAvg run as a bundle, in all formats."""
    folder = tmp_path_factory.mktemp("bundle") / "exported"
    export(plain, folder)
    return folder


@pytest.fixture
def copy(tmp_path: Path, bundle: Path) -> Path:
    """A bundle that may be spoilt."""
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def metadata(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "configs" / "metadata.json").read_text())


def config(folder: Path, file: str) -> dict[str, Any]:
    return yaml.safe_load((folder / "configs" / file).read_text())


def rows(file: Path) -> list[list[str]]:
    with file.open() as stream_:
        return list(csv.reader(stream_))


def recorded(run: Path, site: str = "") -> dict[str, list[float]]:
    """Probabilities of the run's predictions.csv, of a site's items or all."""
    header, *cases = rows(run / "predictions.csv")
    first = next(i for i, title in enumerate(header) if title.startswith("p_"))
    return {case[0]: [float(v) for v in case[first:]] for case in cases if site in ("", case[1])}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("MEDFL_DATA", raising=False)
    with stream(0, "export test"):
        yield tmp_path


def inferred(folder: Path, data: Path, out: Path, file: str = "inference.yaml") -> Path:
    """What MONAI writes, run in the bundle's folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        monai.bundle.run(
            config_file=f"configs/{file}", meta_file="configs/metadata.json", dataset_dir=str(data),
            output_dir=str(out), device="$torch.device('cpu')",
        )  # fmt: skip
    finally:
        os.chdir(before)
    return out


def probabilities(file: Path) -> dict[str, list[float]]:
    """Probabilities that MONAI wrote, by the id that the run has for an image."""
    header, *cases = rows(file)
    assert header == ["id", "prediction", *CLASSES]
    named = {key.removesuffix(".png"): [float(v) for v in values] for key, _, *values in cases}
    assert [best for _, best, *_ in cases] == [
        CLASSES[values.index(max(values))] for values in named.values()
    ]
    return named


def same(given: dict[str, list[float]], wanted: dict[str, list[float]]) -> bool:
    return all(given[key] == pytest.approx(wanted[key], abs=2e-6) for key in wanted)


# What the bundle does


def test_monai_reads_back_what_the_run_predicted(
    bundle: Path, plain: Path, pictures: Path, workplace: Path
) -> None:
    inferred(bundle, pictures, workplace / "out")
    given, wanted = probabilities(workplace / "out" / "predictions.csv"), recorded(plain)
    assert given.keys() >= wanted.keys()
    assert same(given, wanted)
    assert np.std(list(wanted.values()), axis=0).max() > 1e-3, "images are told apart"


def test_monai_and_medfl_predict_a_flat_folder_without_labels(
    bundle: Path, data: Path, workplace: Path
) -> None:
    (workplace / "new images").mkdir()
    with np.load(data / "mednist_24.npz") as file:
        for index, pixels in enumerate(file["test_images"][:5]):
            Image.fromarray(pixels).save(workplace / "new images" / f"Größe {index}.png")
    inferred(bundle, workplace / "new images", workplace / "out")
    told = predict(bundle, workplace / "new images", workplace / "ours")
    header, *cases = rows(workplace / "out" / "predictions.csv")
    ours, *own = rows(workplace / "ours" / "predictions.csv")
    assert header == ours == ["id", "prediction", *CLASSES]
    assert [case[:2] for case in cases] == [case[:2] for case in own]
    assert [case[0] for case in cases] == [f"Größe {index}.png" for index in range(5)]
    assert [float(v) for v in cases[0][2:]] == pytest.approx(
        [float(v) for v in own[0][2:]], abs=2e-6
    )
    assert told["data_source"] == "phantom"
    said = (bundle / "configs" / "inference.yaml").read_text()
    assert said.startswith("# What models/model.pt says of every image below dataset_dir")
    assert "medfl" not in said


def test_every_format_gives_what_the_network_gives(bundle: Path, plain: Path) -> None:
    """Measured again, on other images and with batches of other sizes than in the export."""
    network = Bundle("mednist", SMALL).network().eval()
    network.load_state_dict(load_weights(plain / "weights.safetensors"))
    scripted, session = (
        torch.jit.load(bundle / "models" / "model.ts"),
        OnnxNetwork(bundle / "models" / "model.onnx"),
    )
    for size in (1, 5):
        images = torch.randn(size, 1, 20, 20, generator=torch.Generator().manual_seed(size))
        with torch.no_grad():
            wanted = network(images)
            assert (scripted(images) - wanted).abs().max() <= 1e-5
            assert (session(images) - wanted).abs().max() <= 1e-4
    stated = metadata(bundle)["medfl"]["agreement"]
    assert {name: one["limit"] for name, one in stated.items()} == {
        "torchscript": 1e-5,
        "onnx": 1e-4,
    }
    assert all(
        one["probabilities"] <= one["limit"] and one["images"] == 8 for one in stated.values()
    )
    state = torch.load(bundle / "models" / "model.pt", weights_only=True)
    own = load_weights(bundle / "models" / "model.safetensors")
    assert all(
        torch.equal(state[name], tensor) and torch.equal(own[name], tensor)
        for name, tensor in own.items()
    )


def test_it_passes_its_checks_and_says_what_it_is(bundle: Path, plain: Path) -> None:
    assert problems(bundle) == []
    meta, summary = metadata(bundle), json.loads((plain / "summary.json").read_text())
    assert (meta["version"], list(meta["changelog"])) == ("0.2.0", ["0.2.0", "0.1.0"])
    assert "fedavg, 2 sites of a PHANTOM" in meta["changelog"]["0.2.0"]
    assert meta["eval_metrics"]["data"].startswith("PHANTOM")
    assert meta["eval_metrics"]["accuracy"] == pytest.approx(summary["last"]["accuracy"], abs=1e-6)
    assert meta["medfl"]["run_hash"] == summary["run_hash"]
    assert meta["network_data_format"]["inputs"]["image"]["spatial_shape"] == [20, 20]
    assert meta["pytorch_version"] == torch.__version__.partition("+")[0]
    readme = (bundle / "docs" / "README.md").read_text()
    assert readme.count("PHANTOM: images drawn by a program") == 2
    assert summary["run_hash"] in readme
    assert "not a medical device" in readme


def test_the_settings_of_the_run_are_in_its_configurations(bundle: Path) -> None:
    source = ROOT / "bundles" / "mednist" / "configs"
    for file in ("train.yaml", "inference.yaml"):
        content = config(bundle, f"medfl/{file}")
        assert (content["network_name"], content["image_size"]) == ("small_cnn", 20)
        changed = {"network", "image_size", "network_def", "initial_weights", "split", "inferer"}
        before = yaml.safe_load((source / file).read_text())
        assert {k: v for k, v in content.items() if k not in changed} == {
            k: v for k, v in before.items() if k not in changed
        }


def test_nothing_says_where_it_was_made_or_names_an_item(
    bundle: Path, plain: Path, data: Path
) -> None:
    items = json.loads((plain / "run.json").read_text())["partition"]["sites"]["site-1"]["train"]
    places = [str(plain.parent), str(data), str(Path.home()), "site-packages"]
    for file in (path for path in bundle.rglob("*") if path.is_file()):
        content = file.read_bytes()
        assert not [word for word in [*places, *items] if word.encode() in content], file


def test_a_site_accepts_it(copy: Path) -> None:
    """With the word for pickles; without any where model.pt and model.ts are left out."""
    assert inspect(copy, Policy(allow=frozenset(["pickle"]))).refusals == []
    for name in ("model.pt", "model.ts"):
        (copy / "models" / name).unlink()
    assert inspect(copy).refusals == []


def test_it_is_federated_again_from_its_weights(
    bundle: Path, plain: Path, data: Path, tmp_path: Path
) -> None:
    weights = load_weights(plain / "weights.safetensors")
    started = Bundle(str(bundle)).network().state_dict()
    assert all(torch.equal(started[name], tensor) for name, tensor in weights.items())
    with stream(1, "new"):
        anew = Bundle(str(bundle), {"initial_weights": None}).network().state_dict()
    assert not all(torch.equal(anew[name], tensor) for name, tensor in weights.items())
    requested = {
        "method": "fedavg",
        "data": str(data),
        "sites": 2,
        "rounds": 1,
        "partition": "iid",
        "lr": 1e-9,
    }
    federate(str(bundle), requested=requested, out=tmp_path / "run", jobs=1)
    after = load_weights(tmp_path / "run" / "weights.safetensors")
    name = next(name for name in weights if name.endswith("weight") and weights[name].ndim > 1)
    assert torch.allclose(after[name], weights[name], atol=1e-5), "hardly any learning rate"
    done = export(tmp_path / "run", tmp_path / "again", formats=())["bundles"][0]
    assert (done["version"], done["network"]) == ("0.3.0", "configuration")
    assert (
        config(tmp_path / "again", "medfl/train.yaml")["network_def"]["sha256"]
        == (done["files"]["models/model.safetensors"]["sha256"])
    )


# Methods that change the network


def test_a_classifier_of_text_is_in_the_weights(
    textual: Path, pictures: Path, workplace: Path
) -> None:
    """Without the bundle's embeddings MONAI gives what the run predicted: means and variances are weights now."""
    out = workplace / "bundle"
    done = export(textual, out, formats=("torchscript",))["bundles"][0]
    assert (done["network"], done["agreement"]["torchscript"]["how"]) == ("medfl", "traced")
    shutil.rmtree(out / "embeddings")
    inferred(out, pictures, workplace / "out")
    assert same(probabilities(workplace / "out" / "predictions.csv"), recorded(textual))
    assert "torch.jit.load" in config(out, "inference.yaml")["network_def"]
    definition = config(out, "medfl/inference.yaml")["network_def"]
    assert definition["_target_"] == "medfl.exported.network"
    assert definition["options"]["tau"] == 9.0
    assert release.DISTRIBUTION not in metadata(out)["required_packages_version"]
    assert (
        f"With medfl (`{release.pip_install()}`), which reads `configs/medfl/`"
        in (out / "docs" / "README.md").read_text()
    )
    layer: Any = head(Bundle(str(out)).network())
    assert torch.equal(layer.state_dict()["embeddings"], load_weights(out / "models" / "model.safetensors")[
        next(name for name in load_weights(out / "models" / "model.safetensors") if name.endswith("embeddings"))
    ])  # fmt: skip


def test_every_site_has_its_own_model(personal: Path, pictures: Path, workplace: Path) -> None:
    said: list[str] = []
    done = export(personal, workplace / "all", site="all", formats=(), say=said.append)["bundles"]
    assert [line for line in said if line.endswith(" left for 1 of 2 bundles")]
    assert [one["site"] for one in done] == ["site-1", "site-2"]
    assert all(one["predictions"]["largest_difference"] < 1e-5 for one in done)
    for one in done:
        out = inferred(Path(one["folder"]), pictures, workplace / one["site"])
        assert same(probabilities(out / "predictions.csv"), recorded(personal, one["site"]))
    heads = [load_weights(Path(one["folder"]) / "models" / "model.safetensors") for one in done]
    assert not all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    readme = (workplace / "all" / "site-2" / "docs" / "README.md").read_text()
    assert "the site *site-2*" in readme
    best = export(personal, workplace / "best", site="site-2", which="best", formats=())["bundles"][
        0
    ]
    assert best["eval_metrics"].keys() == {"data", "items"}, "no test score of it was recorded"


@pytest.mark.slow
def test_what_no_configuration_can_say_is_named_as_torchscript(
    data: Path, pictures: Path, workplace: Path
) -> None:
    """FedProto classifies by the nearest prototype, which is in no state dict."""
    run = trained(workplace / "run", data, "fedproto")
    done = export(run, workplace / "bundle", site="site-1", formats=())["bundles"][0]
    assert done["network"] == "torchscript"
    inferred(workplace / "bundle", pictures, workplace / "out")
    assert same(probabilities(workplace / "out" / "predictions.csv"), recorded(run, "site-1"))
    with pytest.raises(InputError, match="'pickle'"):
        inspect(workplace / "bundle", Policy()).require(INFERENCE)
    inspect(workplace / "bundle", Policy(allow=frozenset({"pickle"}))).require(INFERENCE)
    assert Bundle(str(workplace / "bundle")).network() is not None, (
        "what it trains is no TorchScript"
    )
    with pytest.raises(
        InputError, match="the best round's States of the sites are not kept; use --which last"
    ):
        export(run, workplace / "best", site="site-1", which="best", formats=("torchscript",))


# Runs and bundles that are not whole


def test_the_commands_that_resumed_a_run_say_no_places_either(plain: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(plain, tmp_path / "run"))
    document = json.loads((run / "run.json").read_text())
    told = {"round": 1, "versions": {}, "command": f"medfl run --resume --out {run}"}
    (run / "run.json").write_text(json.dumps({**document, "resumed": [told]}))
    export(run, tmp_path / "bundle", formats=())
    texts = [file.read_bytes() for file in (tmp_path / "bundle").rglob("*") if file.is_file()]
    assert any(b"medfl run --resume --out DIR" in text for text in texts)
    assert not any(str(run).encode() in text for text in texts)


def test_what_a_run_says_of_itself_is_text_in_the_readme(plain: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(plain, tmp_path / "run"))
    document = json.loads((run / "run.json").read_text())
    document["command"] = "medfl run 'a\n```\n<script>'"
    document["data"]["notes"] = [
        "<script>",
        "\x1b[31mred",
        "[x](javascript:a)",
        "# a\n# b",
        "\u202e",
    ]
    (run / "run.json").write_text(json.dumps(document))
    export(run, tmp_path / "bundle", formats=())
    text = (tmp_path / "bundle" / "docs" / "README.md").read_text()
    assert text.count("\n# ") == 0
    assert "\n<script" not in text
    assert "- &lt;script>\n- ?[31mred\n- [x]\\(javascript:a)\n- # a # b\n- ?\n" in text
    assert "medfl run 'a ``` <script>'" in text


def test_an_interrupted_run_is_exported_and_says_so(plain: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(plain, tmp_path / "run"))
    for name in ("summary.json", "weights.safetensors"):
        (run / name).unlink()
    said: list[str] = []
    done = export(run, tmp_path / "bundle", formats=(), say=said.append)["bundles"][0]
    assert not done["finished"]
    assert f"note: the run in {run} was interrupted: this is round 2 of 2" in said
    assert "the run was interrupted" in (tmp_path / "bundle" / "docs" / "README.md").read_text()
    weights = load_weights(plain / "weights.safetensors")
    assert all(
        torch.equal(t, weights[n])
        for n, t in load_weights(tmp_path / "bundle/models/model.safetensors").items()
    )
    assert all(
        key.startswith("validation_") for key in done["eval_metrics"].keys() - {"data", "items"}
    )


def test_the_best_round_is_the_one_that_was_kept(plain: Path, tmp_path: Path) -> None:
    done = export(plain, tmp_path / "bundle", which="best", formats=())["bundles"][0]
    summary = json.loads((plain / "summary.json").read_text())
    assert done["round"] == summary["best"]["round"]
    assert done["eval_metrics"]["accuracy"] == pytest.approx(summary["best"]["accuracy"], abs=1e-6)
    best = load_weights(plain / "best.safetensors")
    assert all(
        torch.equal(t, best[n])
        for n, t in load_weights(tmp_path / "bundle/models/model.safetensors").items()
    )


def test_sorted_columns_of_the_predictions_are_those_of_their_names(
    plain: Path, tmp_path: Path
) -> None:
    """A table that a spreadsheet program saved in another order is the same table."""
    run = Path(shutil.copytree(plain, tmp_path / "run"))
    table = pd.read_csv(run / "predictions.csv", dtype=str)
    table[sorted(table.columns, reverse=True)].to_csv(run / "predictions.csv", index=False)
    exported = export(run, tmp_path / "bundle", formats=())["bundles"][0]
    assert exported["predictions"]["items"] > 0
    assert exported["predictions"]["largest_difference"] < 1e-6


def test_other_weights_than_those_that_were_scored_are_refused(plain: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(plain, tmp_path / "run"))
    weights = load_weights(run / "weights.safetensors")
    save_weights(
        run / "weights.safetensors",
        {n: t * 2 if t.is_floating_point() else t for n, t in weights.items()},
    )
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(
        json.dumps({k: v for k, v in summary.items() if k != "weights_sha256"})
    )
    with pytest.raises(
        RunError,
        match=r"differs from the run's predictions.csv by .*: weights or images have changed",
    ):
        export(run, tmp_path / "bundle", formats=())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("which", "file"), [("last", "weights.safetensors"), ("best", "best.safetensors")]
)
def test_weights_that_are_missing_or_were_changed_are_refused(
    plain: Path, tmp_path: Path, which: str, file: str
) -> None:
    """One bit is seen, which no prediction shows."""
    run = Path(shutil.copytree(plain, tmp_path / "run"))
    weights = bytearray((run / file).read_bytes())
    weights[-4] ^= 1
    (run / file).write_bytes(weights)
    with pytest.raises(
        InputError, match=f"{file} is not as the run wrote it; its SHA-256 was .*; restore it"
    ):
        export(run, tmp_path / "bundle", which=which, formats=())
    (run / file).unlink()
    with pytest.raises(InputError, match=f"{file} is missing|has kept no best round"):
        export(run, tmp_path / "bundle", which=which, formats=())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.slow
def test_a_moved_phantom_is_drawn_again(plain: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(plain, tmp_path / "run"))
    document = json.loads((run / "run.json").read_text())
    document["data"]["folder"] = str(tmp_path / "gone")
    (run / "run.json").write_text(json.dumps(document))
    (run / "predictions.csv").unlink()
    export(run, tmp_path / "bundle", formats=())
    assert problems(tmp_path / "bundle") == []


def test_nothing_is_left_of_what_does_not_pass(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "medfl.export.bundle_writer.problems", lambda folder, data: ["LICENSE is missing"]
    )
    with pytest.raises(
        RunError, match="does not pass its checks: LICENSE is missing; nothing was kept"
    ):
        export(plain, tmp_path / "bundle", formats=())
    monkeypatch.setitem(export_formats.LIMITS, "torchscript", -1.0)
    with pytest.raises(
        RunError, match=r"model.ts differs from the network by .*; leave it out with --formats"
    ):
        export(plain, tmp_path / "bundle", formats=("torchscript",))
    monkeypatch.setattr(
        _BundleWriter,
        "_choose_definition",
        lambda self, network: _NetworkDefinition("torchscript", {}),
    )
    with pytest.raises(
        RunError,
        match="differs from the network by .*; it has no other form, so this model cannot be",
    ):
        export(plain, tmp_path / "bundle", formats=("torchscript",))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"site": "site-1"},
            "--site site-1 with method 'fedavg'; it has one model, the same for all; leave it out",
        ),
        (
            {"site": "nobody"},
            "--site nobody with method 'fedavg'; it has one model, the same for all; leave it out",
        ),
        ({"which": "first"}, "--which first; last or best; give --which last"),
        ({"data": "/nowhere"}, "/nowhere"),
    ],
)
def test_bad_requests_are_told_in_one_line(
    arguments: Any, said: str, plain: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as told:
        export(plain, tmp_path / "bundle", formats=(), **arguments)
    assert said in str(told.value)
    assert not list(tmp_path.iterdir())


def test_folders_that_are_no_runs_or_are_in_use(
    plain: Path, personal: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match=r"has no run.json; a folder that `medfl run` or `medfl compare` wrote"
    ):
        export(tmp_path, tmp_path / "bundle")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    with pytest.raises(
        InputError, match="exists and is not empty; a new or empty folder; give a new folder"
    ):
        export(plain, tmp_path / "used")
    with pytest.raises(
        InputError,
        match="'fedrep' has a model for each site and none for all; its sites are site-1, ",
    ):
        export(personal, tmp_path / "bundle", formats=())
    with pytest.raises(
        InputError, match="--site nobody; the sites of this run are site-1, site-2; choose one"
    ):
        export(personal, tmp_path / "bundle", formats=(), site="nobody")
    (tmp_path / "begun").mkdir()
    shutil.copyfile(plain / "run.json", tmp_path / "begun" / "run.json")
    with pytest.raises(
        InputError, match="has no weights yet; a model is there after the first round; let it train"
    ):
        export(tmp_path / "begun", tmp_path / "bundle", formats=())


def test_formats_are_a_list_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_formats("onnx, torchscript") == ("onnx", "torchscript")
    assert (parse_formats("none"), parse_formats(None)) == ((), None)
    with pytest.raises(
        InputError, match="--formats tensorrt; a list of torchscript, onnx, or none"
    ):
        parse_formats("tensorrt")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert parse_formats("torchscript") == ("torchscript",)
    with pytest.raises(
        InputError,
        match=r"without onnx, .*; pip install .medfl-monai\[export\].; install it, or use ",
    ):
        parse_formats("torchscript,onnx")


def test_at_its_defaults_an_export_writes_what_can_be_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the packages of ONNX, as in the README's installation, and where TorchScript cannot be written."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name.startswith("onnx") else found(name)
    )
    assert main(["export", str(plain), "--out", str(tmp_path / "bundle")]) == 0
    there = {path.name for path in (tmp_path / "bundle" / "models").iterdir()}
    assert there == {"model.pt", "model.safetensors", "model.ts"}
    readme = (tmp_path / "bundle/docs/README.md").read_text()
    assert "models/model.onnx is not there: it takes onnx, onnxruntime, onnxscript" in readme
    monkeypatch.setitem(export_formats.LIMITS, "torchscript", -1.0)
    (done,) = export(plain, tmp_path / "less")["bundles"]
    assert [note.partition(":")[0] for note in done["notes"]] == [
        "models/model.onnx is not there",
        "models/model.ts is not there",
        "MONAI alone cannot run it",
    ]
    assert not (tmp_path / "less/configs/inference.yaml").exists()
    assert metadata(tmp_path / "less")["required_packages_version"][release.DISTRIBUTION]


# The checks


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("docs/README.md", "## Tags", "## Words", "has no section 'Tags'"),
        ("docs/README.md", "not a medical device", "a device", "not a medical device"),
        (
            "docs/README.md",
            "## License",
            "from /home/someone/images\n\n## License",
            "/home/someone/images",
        ),
        ("docs/medfl.json", '"run": {', '"run": {"place": "~/images",', "~/images"),
        (
            "configs/metadata.json",
            '"version": "0.2.0"',
            '"version": "0.2.0a"',
            "version '0.2.0a' is not semantic",
        ),
        (
            "configs/metadata.json",
            '"version": "0.2.0"',
            '"version": "0.4.0"',
            "the changelog has no 0.4.0",
        ),
        ("configs/metadata.json", '"num_channels": 1', '"num_channels": 4', "verify_net_in_out"),
        ("configs/metadata.json", '"intended_use"', '"intended_usage"', ""),
        ("configs/metadata.json", '"authors"', '"author"', "verify_metadata"),
    ],
)
def test_a_flaw_is_found(file: str, old: str, new: str, said: str, copy: Path) -> None:
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1))
    found = problems(copy)
    assert (found == []) if not said else said in found[0]


def test_files_are_listed_with_their_hashes(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_checks, "LARGE", 50_000)
    assert any(
        "model.onnx has more than 25 MB and is not in large_files.yml" in one
        for one in problems(copy)
    )
    monkeypatch.undo()
    (copy / "models" / "extra.pt").write_bytes(b"")
    (copy / "models" / "model.ts").write_bytes(b"other")
    assert problems(copy) == [
        "metadata.json does not list models/extra.pt",
        "models/model.ts has another sha256 than metadata.json says",
    ]
    (copy / "LICENSE").unlink()
    assert problems(copy) == ["LICENSE is missing"]


def test_large_files_are_named_for_the_zoo(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medfl.export.bundle_writer.LARGE", 100_000)
    monkeypatch.setattr(export_checks, "LARGE", 100_000)
    done = export(plain, tmp_path / "bundle", formats=())["bundles"][0]
    listed = yaml.safe_load((tmp_path / "bundle" / "large_files.yml").read_text())["large_files"]
    stated = {one["path"]: one["hash_val"] for one in listed if one["path"].startswith("models/")}
    assert stated == {name: file["sha256"] for name, file in done["files"].items()}


# Slow: segmentation, foreign bundles, real commands


@pytest.mark.slow
def test_masks_in_two_dimensions_are_those_of_the_run(workplace: Path) -> None:
    data = datasets.write_phantom("lung_cxr", workplace / "data", per_class=10, size=32)
    config_ = {"network": "unet8", "image_size": 32}
    run = trained(
        workplace / "run",
        data,
        "fedavg",
        "lung_cxr",
        config_,
        rounds=2,
        local_epochs=4,
        batch_size=2,
        lr=0.005,
    )
    export(run, workplace / "bundle")
    inferred(workplace / "bundle", data / "images", workplace / "out")
    masks = {
        path.stem: np.asarray(Image.open(path)) for path in (run / "predictions").rglob("*.png")
    }
    written = {
        path.stem: np.asarray(Image.open(path)) for path in (workplace / "out").glob("*.png")
    }
    assert written.keys() == {path.stem for path in (data / "images").iterdir()} > masks.keys()
    differing = [np.mean(written[name] != mask) for name, mask in masks.items()]
    assert max(differing) == 0
    assert any(mask.any() for mask in masks.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # MONAI's tensors
def test_masks_in_three_dimensions_are_those_of_the_run(workplace: Path) -> None:
    data = datasets.write_phantom("hippocampus", workplace / "data", per_class=10, size=24)
    config_ = {"network": "unet8", "image_size": 32, "patch_size": [16, 32, 16]}
    run = trained(workplace / "run", data, "fedavg", "hippocampus", config_, rounds=1)
    done = export(run, workplace / "bundle")["bundles"][0]
    assert done["agreement"].keys() == {"torchscript", "onnx"}
    assert metadata(workplace / "bundle")["network_data_format"]["inputs"]["image"][
        "spatial_shape"
    ] == [16, 32, 16]
    inferred(workplace / "bundle", data / "imagesTr", workplace / "out")
    for path in (run / "predictions").rglob("*.nii.gz"):
        name = path.name.removesuffix(".nii.gz")
        ours = np.asarray(nibabel.load(path).dataobj)
        theirs = np.asarray(nibabel.load(workplace / "out" / f"{name}_seg.nii.gz").dataobj)
        assert np.array_equal(ours, theirs)


@pytest.mark.slow
def test_fedbm_with_its_generator_in_all_formats(
    data: Path, pictures: Path, workplace: Path
) -> None:
    options = {"g_start": 1, "g_iterations": 2, "g_batch": 4, "synthetic_batch": 2}
    run = trained(
        workplace / "run", data, "fedbm", config={**SMALL, "image_size": 16}, options=options
    )
    done = export(run, workplace / "bundle")["bundles"][0]
    assert done["agreement"]["onnx"]["probabilities"] <= 1e-4
    inferred(workplace / "bundle", pictures, workplace / "out")
    assert same(probabilities(workplace / "out" / "predictions.csv"), recorded(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["fedsm", "fedetf", "fedrod", "ditto", "pfedbayes", "pfedpm", "perfedavg", "moon", "ccvr"],
)
def test_methods_with_unusual_networks(
    method: str, data: Path, pictures: Path, workplace: Path
) -> None:
    """Each is the model that was scored: the export compares it with the run's predictions."""
    options = {"pfedbayes": {"draws": 3}, "fedetf": {"finetune_rounds": 1}}.get(method, {})
    run = trained(workplace / "run", data, method, options=options)
    judged = json.loads((run / "summary.json").read_text())["judged"]
    site = "site-1" if judged == "personal" else None
    done = export(run, workplace / "bundle", site=site, formats=("torchscript",))["bundles"][0]
    assert done["predictions"]["largest_difference"] < 2e-4
    inferred(workplace / "bundle", pictures, workplace / "out")
    assert same(probabilities(workplace / "out" / "predictions.csv"), recorded(run, site or ""))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedsm", "fedetf"])
def test_the_site_models_of_a_globally_judged_method(
    method: str, data: Path, pictures: Path, workplace: Path
) -> None:
    """The model that is read back is right as often as the run says that the site's is."""
    run = trained(
        workplace / "run",
        data,
        method,
        options={"finetune_rounds": 1} if method == "fedetf" else {},
    )
    export(run, workplace / "bundle", site="site-1", formats=("torchscript",))
    inferred(workplace / "bundle", pictures, workplace / "out")
    found, (header, *cases) = (
        probabilities(workplace / "out" / "predictions.csv"),
        rows(run / "predictions.csv"),
    )
    own = [dict(zip(header, case, strict=True)) for case in cases if case[1] == "site-1"]
    right = [found[case["id"]].index(max(found[case["id"]])) == int(case["label"]) for case in own]
    header, first, _ = rows(run / "sites.csv")
    assert sum(right) / len(own) == pytest.approx(
        float(dict(zip(header, first, strict=True))["personal_accuracy"])
    )
    with pytest.raises(InputError, match="the best round's States of the sites are not kept"):
        export(run, workplace / "best", site="site-1", which="best")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seg3d_decathlon_json", "cls2d_glob_yaml"])
def test_foreign_bundles(name: str, tmp_path: Path) -> None:
    zoo = ZOO[name](tmp_path)
    requested = {"sites": 2, "rounds": 1, "partition": "iid"}
    federate(str(zoo.path), config=zoo.overrides, requested=requested, out=tmp_path / "run", jobs=1)
    done = export(tmp_path / "run", tmp_path / "bundle", formats=("torchscript",))["bundles"][0]
    assert "The source bundle has no inference configuration" in done["notes"][0]
    where = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["folder"] or None
    assert problems(tmp_path / "bundle", where) == []
    again = {**zoo.overrides, **({"dataset_dir": where} if where else {})}
    state = torch.load(tmp_path / "bundle" / "models" / "model.pt", weights_only=True)
    weights = load_weights(tmp_path / "run" / "weights.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    network = Bundle(str(tmp_path / "bundle"), again).network()
    assert network.state_dict().keys() == weights.keys()


@pytest.mark.slow
def test_predictions_of_images_that_are_drawn_anew_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NuClick's, whose validation clicks at random: an item's draws are by its place, and only some are compared."""
    monkeypatch.setitem(bundle_writer._COUNT, "classification", 3)
    zoo = ZOO["cls2d_glob_yaml"](tmp_path)
    noise = "{'_target_': 'RandGaussianNoised', 'keys': 'image', 'prob': 1.0}"
    text = (zoo.path / zoo.config).read_text()
    assert 'transforms: "%train#deterministic_transforms"' in text
    noisy = text.replace(
        '"%train#deterministic_transforms"', f'["%train#deterministic_compose", {noise}]'
    )
    noisy += "\ntrain#deterministic_compose: {_target_: Compose, transforms: '$@train#deterministic_transforms'}\n"
    (zoo.path / zoo.config).write_text(noisy)
    requested = {"sites": 2, "rounds": 1, "partition": "iid"}
    federate(str(zoo.path), config=zoo.overrides, requested=requested, out=tmp_path / "run", jobs=1)
    assert (
        export(tmp_path / "run", tmp_path / "bundle", formats=())["bundles"][0]["predictions"]
        is None
    )


def command(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "monai.bundle", *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_real_command(copy: Path, plain: Path, pictures: Path) -> None:
    command(copy, "run", "--config_file", "configs/inference.yaml", f"--dataset_dir={pictures}")
    assert same(probabilities(copy / "output" / "predictions.csv"), recorded(plain))


@pytest.mark.slow
def test_a_bundle_for_own_images_predicts_new_ones_by_monai(
    real_data: Path, workplace: Path
) -> None:
    """From real cells in class folders to MONAI's predictions of a flat folder, the same as medfl's."""
    with zipfile.ZipFile(real_data / "wbc" / "images_dataset1.zip") as archive:
        with (real_data / "wbc" / "labels.csv").open() as file:
            kinds = {row["file"]: row["class"] for row in csv.DictReader(file)}
        taken = {
            kind: [n for n in archive.namelist() if kinds[n] == kind]
            for kind in ("lymphocyte", "neutrophil")
        }
        for kind, names in taken.items():
            for place, chosen in ((f"cells/{kind}", names[:20]), ("new cells", names[20:23])):
                (workplace / place).mkdir(parents=True, exist_ok=True)
                for name in chosen:
                    (workplace / place / name).write_bytes(archive.read(name))
    mine = starter.write(workplace / "mine", starter.survey(workplace / "cells"), size=32)
    requested = {"method": "fedavg", "data": str(workplace / "cells"), "sites": 2, "rounds": 1}
    federate(str(mine), requested=requested, out=workplace / "run", jobs=1)
    export(workplace / "run", workplace / "bundle", formats=())
    inferred(workplace / "bundle", workplace / "new cells", workplace / "out")
    predict(workplace / "run", workplace / "new cells", workplace / "ours")
    theirs, ours = (rows(workplace / place / "predictions.csv") for place in ("out", "ours"))
    assert theirs[0] == ours[0] == ["id", "prediction", "lymphocyte", "neutrophil"]
    assert [row[:2] for row in theirs] == [row[:2] for row in ours]
    numbers = [[float(value) for row in made[1:] for value in row[2:]] for made in (theirs, ours)]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-6)
    assert len(theirs) == 7
    assert inspect(workplace / "bundle").refusals == []
