"""The rules by which MONAI's model zoo takes a bundle (its CONTRIBUTING.md and ci/), as far as they hold offline.

Not here: the properties that MONAI asks for and TorchScript, which `test_bundles.py` has. A bundle comes without
weights; the zoo lets such ones pass (`exclude_verify_preferred_files_list`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.bundle
import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from medfl.core.seeding import stream
from medfl.export.checks import LARGE, SCHEMA

BUNDLES = Path(__file__).parents[2] / "bundles"
FOLDERS = {
    path.parents[1].name: path.parents[1] for path in BUNDLES.glob("**/configs/metadata.json")
}
FROZEN = "medsam_teacher"
"""For inference only; its network needs the weights of others."""
TRAINED = sorted(FOLDERS.keys() - {FROZEN})
OTHERWISE_CALLED = {"kvasir_v2": "kvasir"}
"""The zoo's index takes what follows `_v` in a name for a version; the data set is called so."""
SECTIONS = (
    "Authors",
    "Tags",
    "Model Description",
    "Data",
    "Preprocessing",
    "Performance",
    "References",
    "License",
)
PERSONAL = re.compile(r"(?:~/|/(?:home|root|Users|tmp|mnt|media|scratch)/)\w")

pytestmark = [
    pytest.mark.filterwarnings("ignore:No hash value provided:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*no allow list.*:UserWarning"),
]
Rule = Callable[[str, Path], None]
RULES: dict[str, Rule] = {}
OF_TRAINED: dict[str, Rule] = {}


def rule(text: str, table: dict[str, Rule] = RULES) -> Callable[[Rule], Rule]:
    def listed(function: Rule) -> Rule:
        table[text] = function
        return function

    return listed


def metadata(root: Path) -> dict[str, Any]:
    return json.loads((root / "configs" / "metadata.json").read_text())


def config(root: Path, stem: str) -> dict[str, Any]:
    return yaml.safe_load((root / "configs" / f"{stem}.yaml").read_text())


@rule("necessary files")
def _(name: str, root: Path) -> None:
    for file in ("configs/metadata.json", "LICENSE", "configs/inference.yaml", "docs/README.md"):
        assert (root / file).is_file(), file
    assert name == FROZEN or (root / "docs" / "data_license.txt").is_file()


@rule("no large file, and none that is compiled or pickled")
def _(name: str, root: Path) -> None:
    for path in (path for path in root.rglob("*") if path.is_file()):
        assert path.stat().st_size <= LARGE, path
        assert path.suffix not in (".py", ".pt", ".pth", ".pkl", ".ts", ".onnx"), path


@rule("a name that its index can cut into name and version")
def _(name: str, root: Path) -> None:
    assert "_v" not in OTHERWISE_CALLED.get(name, name)
    assert ("_v" in name) == (name in OTHERWISE_CALLED)
    assert metadata(root)["name"]


@rule("a semantic version with a line in the changelog")
def _(name: str, root: Path) -> None:
    meta = metadata(root)
    assert re.fullmatch(r"\d+\.\d+\.\d+", meta["version"])
    assert meta["changelog"][meta["version"]]


@rule("requirements that pip can read")
def _(name: str, root: Path) -> None:
    meta = metadata(root)
    named = {
        "monai": meta["monai_version"],
        "torch": meta["pytorch_version"],
        "numpy": meta["numpy_version"],
    }
    assert "optional_packages_version" not in meta, "the old name"
    for package, version in {**named, **meta["required_packages_version"]}.items():
        line = f"{package}{version}" if version[0] in "<>=" else f"{package}=={version}"
        assert Requirement(line).specifier.contains(
            Version(version.lstrip("<>=")), prereleases=True
        )


@rule("metadata by the schema")
def _(name: str, root: Path) -> None:
    assert re.fullmatch(
        r"https://github.com/Project-MONAI/\S+/meta_schema_\d{8}.json", metadata(root)["schema"]
    )
    monai.bundle.verify_metadata(
        meta_file=str(root / "configs" / "metadata.json"), filepath=str(SCHEMA)
    )


@rule("keys of the inference configuration")
def _(name: str, root: Path) -> None:
    content = config(root, "inference")
    needed = {
        "bundle_root",
        "device",
        "dataset_dir",
        "output_dir",
        "network_def",
        "network",
        "inferer",
        "evaluator",
    }
    assert needed <= content.keys()
    assert content["network"] == "$@network_def.to(@device)"
    assert content["evaluator"]["network"] == "@network"


@rule("no path of a person's machine")
def _(name: str, root: Path) -> None:
    for path in (
        path for path in root.rglob("*") if path.suffix in (".yaml", ".json", ".md", ".txt")
    ):
        assert not PERSONAL.search(path.read_text()), path


@rule("keys of the training configuration", OF_TRAINED)
def _(name: str, root: Path) -> None:
    content = config(root, "train")
    assert {
        "bundle_root",
        "device",
        "dataset_dir",
        "output_dir",
        "network_def",
        "network",
        "val_interval",
    } <= set(content)
    assert {"trainer", "dataset", "handlers", "preprocessing", "inferer"} <= content["train"].keys()
    assert {"max_epochs", "network"} <= content["train"]["trainer"].keys()
    assert "data" in content["train"]["dataset"]
    parts = {
        "evaluator",
        "dataset",
        "handlers",
        "preprocessing",
        "postprocessing",
        "inferer",
        "key_metric",
    }
    assert parts <= content["validate"].keys()
    assert "data" in content["validate"]["dataset"]
    engines = content["train"]["trainer"], content["validate"]["evaluator"]
    assert [engine["network"] for engine in engines] == ["@network"] * 2
    (validation,) = [
        h for h in content["train"]["handlers"] if h["_target_"] == "ValidationHandler"
    ]
    assert validation["interval"] == "@val_interval"


@rule("the sections of the README's template")
def _(name: str, root: Path) -> None:
    text = (root / "docs" / "README.md").read_text()
    assert [section for section in SECTIONS if f"\n## {section}\n" not in text] == []
    assert metadata(root)["authors"] in text
    assert "not a medical device" in " ".join(text.split())
    assert all(f"- {reference}" in text for reference in metadata(root)["references"])


@rule("the preprocessing that the README names", OF_TRAINED)
def _(name: str, root: Path) -> None:
    text, train = (root / "docs" / "README.md").read_text(), config(root, "train")["train"]
    steps = re.findall(r"`(\w+d)`", text.partition("## Preprocessing\n")[2].partition("\n## ")[0])
    configured = [*train["deterministic_transforms"], *train["random_transforms"]]
    assert steps == [step["_target_"].rpartition(".")[2] for step in configured]


@rule("what goes into the network and comes out of it", OF_TRAINED)
def _(name: str, root: Path) -> None:
    with stream(0, "net in out"):
        monai.bundle.verify_net_in_out(
            net_id="network_def", meta_file=str(root / "configs" / "metadata.json"), bundle_root=str(root),
            config_file=str(root / "configs" / "inference.yaml"), device="cpu",
        )  # fmt: skip


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_every_bundle_keeps_the_zoo_s_rules(name: str, text: str) -> None:
    RULES[text](name, FOLDERS[name])


@pytest.mark.parametrize("text", OF_TRAINED)
@pytest.mark.parametrize("name", TRAINED)
def test_every_bundle_that_trains_does(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEDFL_DATA", raising=False)
    OF_TRAINED[text](name, FOLDERS[name])


def test_a_bundle_that_breaks_them_is_found(tmp_path: Path) -> None:
    """Each rule looks: of a folder with hardly anything in it most are broken."""
    (tmp_path / "configs").mkdir()
    broken = {"version": "one", "changelog": {}, "schema": "x", "name": ""}
    (tmp_path / "configs" / "metadata.json").write_text(json.dumps(broken))
    (tmp_path / "configs" / "inference.yaml").write_text(
        "dataset_dir: /home/somebody/data\nnetwork: resnet18\n"
    )
    (tmp_path / "configs" / "train.yaml").write_text("network: resnet18\ntrain: {}\n")
    torch.save({}, tmp_path / "model.pt")
    for holds in (*RULES.values(), *OF_TRAINED.values()):
        with pytest.raises(Exception):  # noqa: B017, PT011 (of MONAI's, or an assertion)
            holds("kvasir_v3", tmp_path)
