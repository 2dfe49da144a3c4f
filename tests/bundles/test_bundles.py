"""The shipped bundles: MONAI's own checks pass, offline, and their documents say what the data sets say."""

from __future__ import annotations

import copy
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import monai.bundle
import nibabel
import numpy as np
import pytest
import torch
import yaml
from monai.utils import set_determinism
from PIL import Image
from sklearn.metrics import roc_auc_score

from medfl import datasets, networks
from medfl.bundle import files as bundle_files
from medfl.bundle.bundle import Bundle, shipped
from medfl.bundle.protocol import options_for, resolved
from medfl.core.errors import InputError
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.datasets import own as own_data
from medfl.methods import load
from medfl.networks.heads import feature_size
from medfl.problem.described import tensor_described
from medfl.problem.tasks import KINDS
from tests.support.cohorts import small_cohorts
from tests.support.packaged import packaged_files
from tests.support.programs import python_path
from tests.support.sweeps import mostly_slow

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "bundles"
SCHEMA = ROOT / "medfl" / "export" / "schemas" / "bundle_metadata.json"
FOLDERS = {path.parents[1].name: path.parents[1] for path in BUNDLES.glob("**/configs/train.yaml")}
NAMES = sorted(FOLDERS)

pytestmark = [
    pytest.mark.filterwarnings("ignore:No hash value provided:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*no allow list.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]
every_bundle = pytest.mark.parametrize("name", NAMES)
FEW = ("chest_xray14", "cifar10", "ham10000", "hippocampus", "lung_cxr", "mednist")
"""Colour and grey, classes, findings and masks, volumes."""


def segments(name: str) -> bool:
    return datasets.get(name).task == "segmentation"


def small_network(name: str) -> str:
    return "unet8" if segments(name) else "small_cnn"


def spatial_dims(name: str) -> int:
    return config(name, "train.yaml")["network_def"].get("spatial_dims", 2)


def small(name: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {"image_size": 24}
    if spatial_dims(name) == 3:
        sizes = {"image_size": [16, 16, 16]}
        if segments(name):
            sizes = {"image_size": 32, "patch_size": [16, 32, 16]}
    return {"network_name": small_network(name), **sizes}


def metadata(name: str) -> dict[str, Any]:
    return json.loads((FOLDERS[name] / "configs" / "metadata.json").read_text())


def config(name: str, file: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDERS[name] / "configs" / file).read_text())


def readme(name: str) -> str:
    return (FOLDERS[name] / "docs" / "README.md").read_text()


def facts(name: str) -> dict[str, str]:
    return dict(
        re.findall(r"^\| (Source|Licence|Centres|Images) \| (.*) \|$", readme(name), re.MULTILINE)
    )


def count_tables(name: str) -> list[dict[str, dict[str, int]]]:
    """Return the README's count tables: row -> column -> number."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", readme(name).partition("## Counts")[2], re.MULTILINE):
        header, _, *rows = (
            [cell.strip() for cell in line.strip("| ").split("|")] for line in block.splitlines()
        )
        tables.append(
            {row[0]: dict(zip(header[1:], map(int, row[1:]), strict=True)) for row in rows}
        )
    return tables


@pytest.fixture(scope="session")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return small_cohorts(tmp_path_factory)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder to write into, no data folder, and no trace of what a bundle's `initialize` seeds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEDFL_DATA", raising=False)
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    with stream(0, "bundle test"):
        yield tmp_path
        set_determinism(None)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags


def test_every_data_set_has_its_bundle() -> None:
    assert tuple(NAMES) == datasets.names()


def test_families_are_found_by_the_names_of_their_bundles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`natural` is no bundle, cifar10 in it is one; so it is where they are installed."""
    assert shipped() == tuple(NAMES)
    assert Bundle("cifar10").root == BUNDLES / "natural" / "cifar10"
    assert Bundle(str(BUNDLES / "natural" / "cifar10")).dataset == "cifar10"
    with pytest.raises(
        InputError,
        match="bundle 'natural'; shipped bundles are bone_age, brain_age, brain_tissue, chest_xray14",
    ):
        Bundle("natural")
    installed = tmp_path / "medfl" / "shipped"
    shutil.copytree(BUNDLES / "natural" / "mnist", installed / "natural" / "mnist")
    assert not Bundle(str(installed / "natural" / "mnist")).dataset
    monkeypatch.setattr(bundle_files, "shipped_root", lambda: installed)
    assert shipped() == ("mnist",)
    assert Bundle("mnist").root.is_relative_to(tmp_path)
    assert Bundle("mnist").dataset == "mnist"


def test_every_file_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package `medfl.shipped` has all files of each bundle where they lie in bundles/, and nothing else."""
    installed = packaged_files(monkeypatch)
    shipped_files = {path for path in installed if path.parts[:2] == ("medfl", "shipped")}
    written = {"models", "output"}
    wanted = set()
    for root in [*FOLDERS.values(), BUNDLES / "medsam_teacher"]:
        files = [
            path
            for path in root.rglob("*")
            if path.is_file() and path.relative_to(root).parts[0] not in written
        ]
        wanted |= {Path("medfl/shipped", path.relative_to(BUNDLES)) for path in files}
    assert shipped_files == wanted


@every_bundle
def test_it_is_configuration_only(name: str) -> None:
    files = {
        str(path.relative_to(FOLDERS[name])) for path in FOLDERS[name].rglob("*") if path.is_file()
    }
    written = {"models/model.pt", "models/model.ts", "output/predictions.csv", "output/metrics.csv"}
    stems = ("metadata.json", "train.yaml", "evaluate.yaml", "inference.yaml", "federated.yaml")
    documents = {"docs/README.md", "docs/data_license.txt", "LICENSE"}
    if datasets.get(name).task == "classification":
        documents |= {"embeddings/minilm.safetensors"}
    assert files - written == {f"configs/{stem}" for stem in stems} | documents
    licence = (FOLDERS[name] / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


MANDATORY = [
    *("version", "monai_version", "pytorch_version", "numpy_version", "required_packages_version"),
    *("task", "description", "authors", "copyright", "network_data_format"),
    *(
        "network_data_format/inputs",
        "network_data_format/inputs/image",
        "network_data_format/outputs/pred",
    ),
    *(
        f"network_data_format/inputs/image/{key}"
        for key in ("type", "format", "modality", "num_channels", "dtype")
    ),
    *(
        f"network_data_format/outputs/pred/{key}"
        for key in ("spatial_shape", "value_range", "channel_def")
    ),
    "network_data_format/inputs/image/is_patch_data",
]
WRONG = [
    ("version", "one"),
    ("version", 1),
    ("required_packages_version", ["torch"]),
    ("task", ""),
    ("references", "a paper"),
    ("changelog", {}),
    ("network_data_format/inputs/image/num_channels", "3"),
    ("network_data_format/inputs/image/num_channels", 0),
    ("network_data_format/inputs/image/spatial_shape", 128),
    ("network_data_format/inputs/image/value_range", [0]),
    ("network_data_format/inputs/image/is_patch_data", "false"),
    ("network_data_format/inputs/image/dtype", "float33"),
    ("network_data_format/outputs/pred/channel_def", {"zero": "nevus"}),
    ("network_data_format/outputs/pred/channel_def", {"0": 1}),
]


@pytest.mark.parametrize(("path", "value"), [*((path, None) for path in MANDATORY), *WRONG])
def test_schema_refuses(path: str, value: object, tmp_path: Path) -> None:
    content = copy.deepcopy(metadata("ham10000"))
    *above, key = path.split("/")
    place = content
    for step in above:
        place = place[step]
    if value is None:
        del place[key]
    else:
        place[key] = value
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="Failed validating"):
        monai.bundle.verify_metadata(
            meta_file=str(tmp_path / "metadata.json"), filepath=str(SCHEMA)
        )


@every_bundle
def test_metadata_says_what_the_data_set_and_the_configurations_say(name: str) -> None:
    meta, data = metadata(name), datasets.get(name)
    image, pred = (
        meta["network_data_format"]["inputs"]["image"],
        meta["network_data_format"]["outputs"]["pred"],
    )
    assert list(pred["channel_def"].values()) == list(data.classes)
    assert list(pred["channel_def"]) == [str(i) for i in range(pred["num_channels"])]
    assert meta["data_source"] == data.source
    assert meta["version"] in meta["changelog"]
    assert meta["intended_use"].startswith("Research only")
    train, inference = config(name, "train.yaml"), config(name, "inference.yaml")
    for content in (train, inference):
        assert (content["in_channels"], content["num_classes"]) == (
            image["num_channels"],
            pred["num_channels"],
        )
        shape = content.get("patch_size") or content["image_size"]
        assert image["spatial_shape"] == (shape if isinstance(shape, list) else [shape] * 2)
        assert len(image["channel_def"]) == image["num_channels"]
    own = {
        "preprocessing",
        "dataset",
        "dataloader",
        "inferer",
        "postprocessing",
        "handlers",
        "evaluator",
        "run",
    }
    own |= {"imports"}
    assert set(train["imports"]) <= set(inference["imports"])
    assert {
        key: value for key, value in inference.items() if key not in own
    }.items() <= train.items()
    assert inference["preprocessing"]["transforms"] == train["train"]["deterministic_transforms"]
    reader = train["train"]["deterministic_transforms"][0]
    assert reader.get("convert", False) == (
        data.mixed_channels or data.channels != train["in_channels"]
    )
    assert train["split"] is None or train["split"] in data.splits


# Optimiser, momentum and weight decay, as the papers of the protocols give them.
OPTIMISERS = {
    "FedBM": ("Adam", 0, 0),
    "FedHelp": ("Adam", 0, 1e-4),
    "FedMR": ("SGD", 0.9, 1e-5),
    "pFedPM": ("SGD", 0.5, 0),
    "ours": ("Adam", 0, 0),
}
# Sites, cohort, local epochs, rounds, batch, rate, decay, as the data table and settings of the paper give them; of a
# bundle that is not named here nothing more is asked than that its protocol fits it.
PROTOCOLS = {
    "oct_c8": ("FedBM", 12, 0.5, 2, 200, 8, 0.01, 0.99, "dirichlet:0.05", "resnet18", 128),
    "kvasir_v2": ("FedBM", 10, 0.5, 2, 200, 8, 0.01, 0.99, "dirichlet:0.05", "resnet18", 128),
    "ham10000": ("FedBM", 10, 0.5, 1, 200, 8, 0.01, 0.99, "dirichlet:0.05", "resnet18", 128),
    "pbc": ("FedBM", 12, 0.5, 10, 50, 8, 0.01, 0.99, "dirichlet:0.05", "resnet18", 128),
    "femnist": ("FedBM", 35, 0.1, 5, 200, 8, 0.01, 0.99, "centre", "resnet18", 32),
    "isic19": ("FedHelp", 6, 1.0, 5, 100, 16, 0.001, 1.0, "centre", "resnet20", 200),
    "pneumonia": ("FedHelp", 6, 1.0, 5, 100, 16, 0.001, 1.0, "dirichlet:0.5", "resnet20", 28),
    "fmnist": ("FedMR", 10, 1.0, 10, 100, 128, 0.01, 1.0, "classes:3", "resnet18s", 28),
    "svhn": ("FedMR", 10, 1.0, 10, 100, 128, 0.01, 1.0, "classes:3", "resnet18s", 32),
    "cifar10": ("FedMR", 10, 1.0, 10, 100, 128, 0.01, 1.0, "classes:3", "resnet18s", 32),
    "cifar100": ("FedMR", 10, 1.0, 10, 400, 128, 0.01, 1.0, "classes:10", "wrn28_10", 32),
    "mnist": ("pFedPM", 20, 1.0, 1, 100, 10, 0.01, 1.0, "classes:3", "two_conv", 28),
    "nct_crc": ("ours", 6, 1.0, 1, 20, 32, 0.001, 1.0, "dirichlet:0.5", "resnet20", 224),
    "mednist": ("ours", 6, 1.0, 1, 20, 16, 0.001, 1.0, "dirichlet:0.5", "small_cnn", 64),
    "lung_cxr": ("ours", 4, 1.0, 5, 30, 8, 0.001, 1.0, "centre", "unet16", 128),
    "skin_lesion": ("ours", 4, 1.0, 1, 20, 8, 0.001, 1.0, "centre", "unet16", 128),
    "hippocampus": ("ours", 4, 1.0, 2, 30, 4, 0.001, 1.0, "iid", "unet8", None),
    "ixi_brain": ("FedHelp", 3, 1.0, 5, 100, 2, 0.001, 1.0, "centre", "unet8", [48, 60, 48]),
    "brain_tissue": ("ours", 3, 1.0, 5, 30, 2, 0.001, 1.0, "iid", "unet8", None),
}


@every_bundle
def test_protocol_fits_the_bundle(name: str) -> None:
    content, train = config(name, "federated.yaml"), config(name, "train.yaml")
    task = datasets.get(name).task
    assert (content["task"], content["key_metric"]) == (task, KINDS[task].key_metric)
    assert train["network_name"] in networks.names()
    for mine, central in (
        ("split", "split"),
        ("lr", "learning_rate"),
        ("batch_size", "batch_size"),
    ):
        assert content[mine] == train[central]
    for method, options in content["methods"].items():
        load(method, options)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocol(name: str) -> None:
    content, train = config(name, "federated.yaml"), config(name, "train.yaml")
    source, *numbers, network, size = PROTOCOLS[name]
    keys = (
        "sites",
        "cohort",
        "local_epochs",
        "rounds",
        "batch_size",
        "lr",
        "lr_decay",
        "partition",
    )
    assert [content[key] for key in keys] == numbers
    assert content["protocol"].startswith(source)
    assert (train["network_name"], train["image_size"]) == (network, size)
    assert content["methods"].get("fedprox") == ({"mu": 0.001} if source == "FedBM" else None)
    if source == "FedBM":
        tau, distance, synthetic = {"oct_c8": (17.5, 0.1, 16), "kvasir_v2": (12.5, 1.0, 32)}.get(
            name, (12.5, 0.1, 16)
        )
        assert content["methods"]["fedcb"] == {"tau": tau}
        ours = {"tau": tau, "lambda_dis": distance, "synthetic_batch": synthetic}
        assert content["methods"]["fedbm"] == ours
    kind, *values = OPTIMISERS[source]
    assert train["optimizer"]["_target_"] == f"torch.optim.{kind}"
    assert [float(train["optimizer"].get(key, 0)) for key in ("momentum", "weight_decay")] == values
    drawn = name in ("isic19", "cifar10", "cifar100") or spatial_dims(name) == 3
    assert bool(train["train"]["random_transforms"]) == drawn


# Sites, cohort, partition of the presets that are rows of FedMR's tables: P sites of C classes, at most ten a round.
ROWS = {
    "fmnist": {"p5c2": (5, 2), "p10c2": (10, 2), "p10c5": (10, 5)},
    "svhn": {"p5c2": (5, 2), "p10c2": (10, 2), "p10c5": (10, 5)},
    "cifar10": {
        "p5c2": (5, 2),
        "p10c2": (10, 2),
        "p10c5": (10, 5),
        "p50c3": (50, 3),
        "p100c3": (100, 3),
    },
    "cifar100": {
        "p10c20": (10, 20),
        "p10c30": (10, 30),
        "p10c50": (10, 50),
        "p50c10": (50, 10),
        "p100c10": (100, 10),
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_presets_of_fedmr(name: str) -> None:
    content = config(name, "federated.yaml")
    for preset, (sites, classes) in ROWS[name].items():
        found = resolved(name, content, [preset])
        assert (found["sites"], found["partition"]) == (sites, f"classes:{classes}")
        assert found["cohort"] * sites == min(sites, 10)
    assert resolved(name, content, ["iid"])["partition"] == "dirichlet:100000"
    assert set(content["presets"]) - {"pfedpm", "paper"} == {*ROWS[name], "iid"}


def test_presets_of_pfedpm() -> None:
    content = config("mnist", "federated.yaml")
    for ways in (3, 4, 5):
        assert resolved("mnist", content, [f"n{ways}"])["partition"] == f"shots:{ways},100,2"
    bodies = resolved("mnist", content, ["n3", "mh"])["methods"]["pfedpm"]["bodies"].split(",")
    assert [
        sum(p.numel() for p in networks.build(body, 1, 10).parameters()) for body in bodies
    ] == [
        19738,
        21840,
        23942,
    ]
    found = resolved("cifar10", config("cifar10", "federated.yaml"), ["pfedpm"])
    assert [
        found[key]
        for key in ("sites", "partition", "rounds", "local_epochs", "batch_size", "cohort")
    ] == [*(20, "shots:3,100,1", 250, 1, 10, 1.0)]
    assert load("pfedpm", found["methods"]["pfedpm"]).lam == 0.1
    optimizer = Bundle("cifar10", found["config"]).optimizer(
        Bundle("cifar10", found["config"]).network()
    )
    assert (optimizer.defaults["momentum"], optimizer.defaults["weight_decay"]) == (0.5, 0)


@pytest.mark.parametrize(
    "name", ["ham10000", "isic19", "kvasir_v2", "mednist", "nct_crc", "oct_c8", "pbc", "pneumonia"]
)
def test_medical_presets_of_pfedpm(name: str) -> None:
    """The card's default for any backbone: pooled features, then a linear layer to d = 64 with ReLU."""
    found = resolved(name, config(name, "federated.yaml"), ["pfedpm"])
    method = load("pfedpm", options_for(found, "pfedpm"))
    assert method.feature_size == 64
    bundle = Bundle(name, found["config"])
    classes = tuple(f"class {i}" for i in range(bundle.get("num_classes")))
    network = method.adapt(bundle.network(), Task("classification", classes))
    assert feature_size(network) == 64


@every_bundle
def test_readme_and_licence_say_what_the_data_set_says(name: str) -> None:
    data, found = datasets.get(name), facts(name)
    assert found["Source"] == data.source
    assert found["Licence"] == f"{data.licence}; see `data_license.txt`"
    assert found["Centres"].split(", ") == list(data.centres)
    assert readme(name).startswith(f"# {metadata(name)['name']}\n")
    assert "Research only" in readme(name)
    licence = (FOLDERS[name] / "docs" / "data_license.txt").read_text()
    short = re.match(r"CC [A-Z-]+ [\d.]+", data.licence)
    assert short is None or f"({short[0]})" in licence
    if short is None:
        assert "Read the terms" in licence or "read it" in licence


@every_bundle
def test_readme_counts_add_up(name: str) -> None:
    total = int(re.findall(r"\d+", facts(name)["Images"])[-1 if name == "mednist" else 0])
    for table in count_tables(name):
        assert table["all"]["all"] == total
        for column, value in table["all"].items():
            assert sum(row[column] for key, row in table.items() if key != "all") == value
        for row in table.values():
            assert (
                len(row) == 1
                or sum(value for key, value in row.items() if key != "all") == row["all"]
            )
        keys = [
            *([] if "test" in table else table),
            *next(iter(table.values())),
        ]  # a section may have a class's name
        labels = [key for key in keys if key in datasets.get(name).classes]
        assert labels in ([], list(datasets.get(name).classes))


@pytest.mark.parametrize("name", ["ham10000", "pneumonia", "mednist"])
def test_readme_counts_are_those_of_the_images(name: str, real_data: Path) -> None:
    classes, table = datasets.get(name).classes, count_tables(name)[0]
    found = datasets.sections(name, real_data)
    by_centre = "rosendahl" in table
    counts: Counter[tuple[str, str]] = Counter()
    for section, items in found.items():
        counts.update(
            (item["centre"] if by_centre else section, classes[item["label"]]) for item in items
        )
    for row, cells in table.items():
        if row != "all":
            assert {kind: counts[row, kind] for kind in classes} == {
                kind: cells[kind] for kind in classes
            }
    assert counts.total() == table["all"]["all"]


def test_isic_counts_are_those_of_the_published_table(real_data: Path) -> None:
    data = datasets.get("isic19")
    with (real_data / "flamby_meta" / "isic2019_train_test_split.csv").open() as file:
        rows = list(csv.DictReader(file))
    counts = Counter(
        (data.centres[int(row["center"])], data.classes[int(row["target"])]) for row in rows
    )
    table = count_tables("isic19")[0]
    assert all(
        counts[centre, kind] == table[centre][kind]
        for centre in data.centres
        for kind in data.classes
    )
    folds = Counter(row["fold"] for row in rows)
    assert all(str(folds[fold]) in readme("isic19") for fold in ("train", "test"))


@pytest.mark.parametrize("name", ["ham10000", "isic19"])
def test_counts_agree_with_the_data_folders_own_readme(name: str, real_data: Path) -> None:
    text = (real_data / "README.md").read_text()
    for centre, row in count_tables(name)[0].items():
        if name == "ham10000":
            assert (
                "| ".join(("\n", f"{centre} ", *(f"{value} " for value in row.values()))) in text
            ), centre
        elif centre != "all":
            train_and_test = re.search(
                rf"^\| \d \| (?:HAM )?{centre} \| (\d+) \| (\d+) \|", text, re.MULTILINE
            )
            assert train_and_test is not None
            assert sum(map(int, train_and_test.groups())) == row["all"]


@pytest.mark.parametrize("name", mostly_slow(NAMES, ("ham10000", "hippocampus", "lung_cxr")))
def test_export_to_torchscript(name: str, workplace: Path) -> None:
    configs = FOLDERS[name] / "configs"
    content = config(name, "inference.yaml")
    arguments = (content[key] for key in ("network_name", "in_channels", "num_classes"))
    network = networks.build(*arguments, spatial_dims(name))
    network.eval()
    torch.save(network.state_dict(), "model.pt")
    monai.bundle.ckpt_export(
        net_id="network_def",
        filepath="model.ts",
        ckpt_file="model.pt",
        meta_file=str(configs / "metadata.json"),
        config_file=str(configs / "inference.yaml"),
    )
    images = torch.rand(2, content["in_channels"], *[32] * spatial_dims(name))
    assert torch.allclose(torch.jit.load("model.ts")(images), network(images), atol=1e-5)


def run(name: str, files: list[str], **overrides: object) -> None:
    configs = FOLDERS[name] / "configs"
    monai.bundle.run(
        config_file=[str(configs / file) for file in files],
        meta_file=str(configs / "metadata.json"),
        **overrides,
    )


METRICS = {
    "classification": {"balanced_accuracy", "accuracy"},
    "multilabel": {"auroc"},
    "regression": {"mae", "rmse"},
    "segmentation": {"dice"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(NAMES, FEW))
def test_central_training_test_and_inference(name: str, workplace: Path) -> None:
    folder = datasets.write_phantom(name, workplace / "phantom", per_class=10, size=24)
    changes = {"dataset_dir": str(folder), "device": "$torch.device('cpu')", **small(name)}
    run(name, ["train.yaml"], max_epochs=1, **changes)
    weights = torch.load("models/model.pt", weights_only=True)
    content = config(name, "train.yaml")
    numbers = content["in_channels"], content["num_classes"], spatial_dims(name)
    network = networks.build(small_network(name), *numbers)
    network.load_state_dict(weights)

    run(name, ["train.yaml", "evaluate.yaml"], **changes)
    scores = dict(line.split(",") for line in Path("output/metrics.csv").read_text().splitlines())
    assert scores.keys() == METRICS[datasets.get(name).task]

    run(name, ["inference.yaml"], **changes)
    items = datasets.datalist(name, folder, "test", content["split"])
    if segments(name):
        (check_masks if spatial_dims(name) == 2 else check_volumes)(items, float(scores["dice"]))
        return
    with Path("output/predictions.csv").open() as file:
        rows = {key: [float(value) for value in values] for key, *values in csv.reader(file)}
    assert rows.keys() == {item["id"] for item in items}
    if datasets.get(name).task != "classification":
        truth = np.array([item["label"] for item in items])
        check_rows(np.array([rows[item["id"]] for item in items]), truth, scores)
        return
    assert all(
        len(row) == content["num_classes"] and sum(row) == pytest.approx(1, abs=1e-5)
        for row in rows.values()
    )
    right = [rows[item["id"]].index(max(rows[item["id"]])) == item["label"] for item in items]
    assert float(scores["accuracy"]) == pytest.approx(sum(right) / len(right), abs=1e-4)


def check_rows(predicted: np.ndarray, truth: np.ndarray, scores: dict[str, str]) -> None:
    """Predictions (N, K) are probabilities of findings or numbers in their unit, and scored as by scikit-learn."""
    assert predicted.shape == truth.shape
    if "auroc" in scores:
        assert ((predicted > 0) & (predicted < 1)).all()
        assert float(scores["auroc"]) == pytest.approx(roc_auc_score(truth, predicted), abs=1e-4)
    else:
        errors = np.abs(predicted - truth)
        assert float(scores["mae"]) == pytest.approx(errors.mean(), rel=1e-4)
        assert float(scores["rmse"]) == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-4)


REGRESSING = [name for name in NAMES if datasets.get(name).task == "regression"]


@pytest.mark.parametrize("name", REGRESSING)
def test_numbers_are_standardised_as_metadata_says(name: str) -> None:
    """By what scores are brought back to their unit, the data's targets are brought from it."""
    described = tensor_described(metadata(name), "outputs", "pred")
    train = config(name, "train.yaml")
    assert described["mean"] == [train["target_mean"]]
    assert described["sd"] == [train["target_sd"]]
    assert described["unit"] in described["channel_def"]["0"] or described["unit"] in readme(name)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if not segments(name) and spatial_dims(name) == 2]
)
def test_inference_takes_images_without_ids(name: str, workplace: Path) -> None:
    """Images of two folders may have the same name: each has its row."""
    content = config(name, "inference.yaml")
    channels = datasets.get(name).channels
    items = [{"image": f"{folder}/1.png"} for folder in "ab"]
    for number, item in enumerate(items):
        Path(item["image"]).parent.mkdir()
        Image.new({1: "L", 3: "RGB"}[channels], (24, 24), (90 * number,) * channels).save(
            item["image"]
        )
    Path("models").mkdir()
    network = networks.build("small_cnn", content["in_channels"], content["num_classes"])
    torch.save(network.state_dict(), "models/model.pt")
    changes = {"dataset_dir": ".", "device": "$torch.device('cpu')", **small(name)}
    run(name, ["inference.yaml"], **{"dataset#data": items}, **changes)
    with Path("output/predictions.csv").open() as file:
        assert [row[0] for row in csv.reader(file)] == ["a/1.png", "b/1.png"]


def check_masks(items: list[datasets.Item], dice: float) -> None:
    """Each image has a predicted mask in its file's own size, about as good as in the grid of the network."""
    assert {path.stem for path in Path("output").glob("*.png")} == {item["id"] for item in items}
    scores = []
    for item in items:
        _, reference, shape = datasets.read_pair(item["image"], str(item["label"]))
        predicted = datasets.read_pixels(f"output/{item['id']}.png")[..., 0]
        assert predicted.shape == shape
        assert set(predicted.ravel().tolist()) <= {0, 255}
        scores.append(
            2
            * ((predicted > 0) & (reference > 0)).sum()
            / ((predicted > 0).sum() + reference.sum())
        )
    assert sum(scores) / len(scores) == pytest.approx(dice, abs=0.05)


def check_volumes(items: list[datasets.Item], dice: float) -> None:
    """Each volume has a predicted mask of its file's shape and affine, as good as in the grid of the network."""
    scores = []
    for item in items:
        image, label = (nibabel.load(str(item[key])) for key in ("image", "label"))
        below = os.path.relpath(item["image"], own_data.above(items)).removesuffix(".nii.gz")
        predicted = nibabel.load(f"output/{below}_seg.nii.gz")
        assert predicted.shape == image.shape
        assert np.allclose(predicted.affine, image.affine, atol=1e-6)
        assert predicted.get_data_dtype() == np.uint8
        ours, theirs = (np.asarray(volume.dataobj) for volume in (predicted, label))
        pairs = [(ours == kind, theirs == kind) for kind in np.unique(theirs)[1:]]
        scores.append(np.mean([2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in pairs]))
    assert len(list(Path("output").rglob("*.nii.gz"))) == len(items)
    assert np.mean(scores) == pytest.approx(dice, abs=0.05)


@pytest.mark.slow
@every_bundle
def test_properties_that_monai_asks_for(
    name: str, phantoms: dict[str, Path], workplace: Path
) -> None:
    configs = FOLDERS[name] / "configs"
    for kind, *files in (
        ("train", "train.yaml"),
        ("train", "train.yaml", "evaluate.yaml"),
        ("infer", "inference.yaml"),
    ):
        workflow = monai.bundle.ConfigWorkflow(
            config_file=[str(configs / file) for file in files],
            meta_file=str(configs / "metadata.json"),
            workflow_type=kind,
            logging_file=False,
            dataset_dir=str(phantoms[name]),
            network_name=small_network(name),
        )
        workflow.initialize()
        assert workflow.check_properties() == []


def command(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "monai.bundle", *arguments],
        cwd=FOLDERS[name],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def training_command(name: str, folder: Path) -> None:
    data = datasets.write_phantom(name, folder / "phantom", per_class=10, size=24)
    places = (f"--dataset_dir={data}", f"--output_dir={folder}", f"--ckpt_dir={folder}")
    changes = (f"--{key}={value}" for key, value in {"max_epochs": 1, **small(name)}.items())
    command(name, "run", "--config_file", "configs/train.yaml", *places, *changes)
    assert (folder / "model.pt").is_file()


@pytest.mark.slow
def test_the_real_training_command_on_volumes(tmp_path: Path) -> None:
    training_command("hippocampus", tmp_path)


@pytest.mark.slow
def test_the_real_commands(tmp_path: Path) -> None:
    """What they do is called in this process for several bundles, above; a program of its own adds the imports."""
    name = "cifar10"
    meta = ("--meta_file", "configs/metadata.json")
    training_command(name, tmp_path)
    files = ("--filepath", str(tmp_path / "model.ts"), "--ckpt_file", str(tmp_path / "model.pt"))
    of = (
        "--net_id",
        "network_def",
        "--config_file",
        "configs/inference.yaml",
        "--network_name",
        small_network(name),
    )
    command(name, "ckpt_export", *files, *meta, *of)
    assert torch.jit.load(tmp_path / "model.ts") is not None
