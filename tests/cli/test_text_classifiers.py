"""Classifiers built from text, as a user meets them on the command line: bad input, resuming, what travels."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from medfl import datasets, methods
from medfl.bundle.bundle import Bundle
from medfl.bundle.text_embeddings import Embeddings
from medfl.cli import verbs as cli
from medfl.core.message import Message
from medfl.methods.fedbm import FedBM
from medfl.networks.generator import Generator
from medfl.problem import problem
from medfl.problem.prompts import read_text
from medfl.storage.files import load_state, load_weights
from tests.support.toy import bits
from tests.zoo.build import ZOO

SMALL = (
    "--config", "network=small_cnn", "--config", "image_size=32", "--rounds", "1", "--sites", "2", "--partition", "iid",
    "--cohort", "1", "--local-epochs", "1", "--batch-size", "8", "--jobs", "1",
)  # fmt: skip
QUICK = ("--set", "g_iterations=2", "--set", "g_batch=4", "--set", "synthetic_batch=2")
CLASSES = "AbdomenCT, BreastMRI, CXR, ChestCT, Hand, HeadCT"

Refused = Callable[..., str]
Text = dict[str, Any]


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty grey images of six classes."""
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=32
    )


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, scans: Path) -> Refused:
    """Run a method on a bundle: exit code 2, one line with three parts, no traceback, nothing written."""

    def run(name: str | Path, method: str, *arguments: object, data: Path | None = scans) -> str:
        before = sorted(tmp_path.rglob("*"))
        where = (
            ["--data", str(data), *SMALL]
            if data
            else ["--sites", "2", "--partition", "iid", "--jobs", "1"]
        )
        command = [
            "run",
            str(name),
            "--method",
            method,
            *where,
            *map(str, arguments),
            "--out",
            str(tmp_path / "out"),
        ]
        assert cli.main(command) == 2
        stdout, stderr = capsys.readouterr()
        *_, last = stderr.splitlines()
        assert last.startswith("error: ")
        assert stderr.count("error: ") == 1
        assert last.count("; ") == 2
        assert "Traceback" not in stderr
        assert stdout == ""
        assert sorted(tmp_path.rglob("*")) == before
        return last.removeprefix("error: ")

    return run


def _edited(folder: Path, edit: Callable[[Text], object]) -> Path:
    """Copy a bundle of ours into a folder of the user's and edit the text in its federated configuration."""
    mine = Path(shutil.copytree(Bundle("mednist").root, folder / "mine"))
    path = mine / "configs" / "federated.yaml"
    content = yaml.safe_load(path.read_text())
    edit(content["text"])
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return mine


# Concepts and prompts


@pytest.mark.parametrize("method", ["fedcb", "fedbm"])
@pytest.mark.parametrize(
    ("edit", "given", "advice"),
    [
        (
            lambda c: {k: c[k] for k in reversed(c)},
            "HeadCT, Hand, ChestCT, CXR, BreastMRI, AbdomenCT",
            "bring them",
        ),
        (
            lambda c: {k: c[k] for k in c if k != "CXR"},
            "AbdomenCT, BreastMRI, ChestCT, Hand, HeadCT",
            "add CXR",
        ),
        (lambda c: {**c, "Foot": "foot radiograph"}, f"{CLASSES}, Foot", "drop Foot"),
        (
            lambda c: {k if k != "Hand" else "hand": c[k] for k in c},
            CLASSES.replace("Hand", "hand"),
            "add Hand and",
        ),
    ],
)
def test_concepts_of_other_classes_or_in_another_order(
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    edit: Any,
    given: str,
    advice: str,
) -> None:
    """Both lists are named, before an image is prepared."""
    monkeypatch.setattr(problem, "prepare", _only_the_trial(problem.prepare))
    mine = _edited(tmp_path, lambda text: text.update(concepts=edit(text["concepts"])))
    line = refused(mine, method)
    assert line.startswith(f"{mine}/configs/federated.yaml: text concepts are given for {given}; ")
    assert f"; the bundle's classes are, in label order, {CLASSES}; {advice}" in line


def _only_the_trial(prepare: Any) -> Any:
    """Let the one item be read that shows what kind of task a foreign bundle is, no more."""

    def once(items: list[Any], *arguments: Any, **named: Any) -> Any:
        assert len(items) == 1, "images were prepared before the text was looked at"
        return prepare(items, *arguments, **named)

    return once


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda t: t.update(concepts=list(t["concepts"].values())), f"has a list of concepts; it has .* {CLASSES};"),
        (lambda t: t["concepts"].update(CXR=None), "the text concept of class 'CXR' is None; every class is put"),
        (lambda t: t["concepts"].update(CXR="head CT"), "classes 'CXR' and 'HeadCT' have the same text concept"),
        (lambda t: t.pop("prompts"), "the key 'text' has among its prompts null; prompts are a list of groups"),
        (lambda t: t["prompts"][0].pop("nouns"), "prompts are a list of groups, each with frames: .* and nouns: "),
        (lambda t: t["prompts"].append(t["prompts"][0]), "prompt 'an image of {concept}.' comes 2 times"),
        (lambda t: t["prompts"][0].update(frames=["{noun}."]), "prompt 'image.'; a prompt names {concept} once"),
    ],
)  # fmt: skip
def test_text_of_another_form(refused: Refused, tmp_path: Path, edit: Any, text: str) -> None:
    line = refused(_edited(tmp_path, edit), "fedcb")
    assert re.search(text, line), line


def test_a_bundle_without_text(refused: Refused, tmp_path: Path) -> None:
    mine = _edited(tmp_path, lambda text: None)
    path = mine / "configs" / "federated.yaml"
    path.write_text(
        yaml.safe_dump({k: v for k, v in yaml.safe_load(path.read_text()).items() if k != "text"})
    )
    for method in ("fedcb", "fedbm"):
        assert f"{path} has no key 'text'; " in refused(mine, method)


@pytest.mark.parametrize("method", ["fedcb", "fedbm"])
def test_fewer_than_two_prompts(refused: Refused, tmp_path: Path, method: str) -> None:
    """One of the bundle's 24 by prompt_fraction, or a bundle that has one prompt and its embeddings."""
    told = "one prompt a class with classifier=text_distribution; a distribution needs two prompts or more; add prompts"
    assert refused("mednist", method, "--set", "prompt_fraction=0.04").startswith(told)
    one = [{"frames": ["{a noun} of {concept}."], "nouns": ["an image"]}]
    mine = _edited(tmp_path, lambda text: text.update(prompts=one))
    node = yaml.safe_load((mine / "configs" / "federated.yaml").read_text())["text"]
    values = Bundle("mednist").embeddings("minilm")[:, :1]
    Embeddings(values, "minilm", "0" * 64, read_text(node, CLASSES.split(", "), "")).save(
        mine / "embeddings" / "minilm.safetensors"
    )
    assert refused(mine, method).startswith(told)


# Embeddings


@pytest.mark.parametrize("method", ["fedcb", "fedbm"])
def test_embeddings_made_for_other_classes(refused: Refused, tmp_path: Path, method: str) -> None:
    other = Bundle("pbc").root / "embeddings" / "minilm.safetensors"
    line = refused("mednist", method, "--set", f"plm={other}")
    assert line.startswith(f"{other}: made for other classes: 'basophil', ")
    assert "'platelet' (8 of 8); the bundle has 'abdominal CT', 'breast MRI', " in line
    assert line.endswith("make another: medfl concepts BUNDLE --plm minilm --out FILE.safetensors")
    mine = _edited(tmp_path, lambda text: text["concepts"].update(Hand="human hand"))
    own = mine / "embeddings" / "minilm.safetensors"
    assert refused(mine, method) == (
        f"{own}: made for other classes: 'hand radiograph' (1 of 6); the bundle has 'human hand' (1 of 6); "
        f"make it anew: medfl concepts BUNDLE --plm minilm --out {own}"
    )


def test_embeddings_that_are_not_there_or_no_embeddings(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    assert f"{path} is not a file of text embeddings (there is no plain file" in refused(
        "mednist", "fedcb", "--set", f"plm={path}"
    )
    path.write_bytes(b"nonsense" * 9)
    assert f"{path} is not a file of text embeddings" in refused(
        "mednist", "fedcb", "--set", f"plm={path}"
    )
    assert "language model 'gpt9'; known ones are minilm, bert" in refused(
        "mednist", "fedcb", "--set", "plm=gpt9"
    )


# Options and images


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        ("fedcb", ("tau=0",), "tau=0; an inverse temperature, above 0; take for example tau=12.5"),
        ("fedbm", ("tau=0",), "tau=0; an inverse temperature, above 0; take for example tau=12.5"),
        ("fedbm", ("prompt_fraction=0",), "prompt_fraction=0; a part of the prompts, above 0 and at most 1"),
        ("fedcb", ("loss=finite", "classifier=trainable"), "loss=finite with classifier=trainable; eq. 1 is over"),
        ("fedcb", ("swap=DR,MH",), f"swap=DR,MH; two of the classes {CLASSES}; "),
        ("fedbm", ("condition=text",), "condition=text for method 'fedbm'; condition is one of concept, noise"),
        ("fedbm", ("normalise=0,0,0/1,1,1",), "normalise=0,0,0/1,1,1 for images of 1 channel; it has means for 3"),
        ("fedbm", ("normalise=quarter",), "normalise=quarter; read, imagenet, half, none or MEAN/SD"),
        ("fednh", ("rho=2",), "rho=2 for method 'fednh'; rho is float >= 0 and <= 1"),
        ("fedetf", ("dimension=3",), "dimension=3 for method 'fedetf' with 6 classes; a simplex of K classes"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(
    refused: Refused, method: str, options: tuple[str, ...], text: str
) -> None:
    assert refused(
        "mednist", method, *(part for one in options for part in ("--set", one))
    ).startswith(text)


@pytest.mark.parametrize(("size", "advice"), [(28, 32), (40, 32), (8, 16)])
def test_images_that_the_generator_cannot_make(refused: Refused, size: int, advice: int) -> None:
    """With g_start=5 as in the protocol it would fail after five rounds; it is told before the first."""
    assert refused("mednist", "fedbm", "--config", f"image_size={size}") == (
        f"images of {size} x {size} pixels; the generator makes sides that are multiples of 16; "
        f"take --config image_size={advice}, or --set generator=false"
    )


@pytest.mark.parametrize(
    "method", ["fedcb", "fedbm", "fedrod", "fednh", "fedetf", "ccvr", "fedproto"]
)
def test_a_segmentation_bundle(refused: Refused, tmp_path: Path, method: str) -> None:
    zoo = ZOO["seg2d_csv_flat"](tmp_path)
    overrides = [
        part for key, value in zoo.overrides.items() for part in ("--config", f"{key}={value}")
    ]
    line = refused(zoo.path, method, *overrides, data=None)
    assert line.startswith(
        f"method '{method}' on bundle 'seg2d_csv_flat', a segmentation task; it supports "
    )
    assert "classification" in line


# Runs


def _run(scans: Path, out: Path, *arguments: str, method: str = "fedbm", code: int = 0) -> None:
    quick = QUICK if method == "fedbm" else ()
    command = [
        "run",
        "mednist",
        "--method",
        method,
        "--data",
        str(scans),
        *SMALL,
        *quick,
        *arguments,
    ]
    assert cli.main([*command, "--quiet", "--out", str(out)]) == code


def _summary(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return document


@pytest.mark.slow
def test_fedbm_goes_on_bit_for_bit_after_an_interruption(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after its sites trained in round 3, with all that survives a round: a generator and its version, pools of
    images, optimisers, a learning rate counted in epochs over all rounds."""
    settings = (
        "--rounds", "4", "--local-epochs", "2", "--set", "g_start=0", "--set", "g_every=2", "--decay-per", "epoch",
        "--keep-optimizer", "--set", "pool_per_round=true", "--eval-every", "0",
    )  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _run(scans, whole, *settings)

    class Stopped(FedBM):
        def aggregate(self, host, server, replies, num_sites):
            if host.round == 3:
                raise KeyboardInterrupt
            return super().aggregate(host, server, replies, num_sites)

    with monkeypatch.context() as patch:
        patch.setattr("medfl.methods.fedbm.METHOD", Stopped)
        methods.method_class.cache_clear()
        _run(scans, cut, *settings, code=130)
    methods.method_class.cache_clear()
    assert json.loads((cut / "state" / "manifest.json").read_text())["round"] == 2
    assert cli.main(["run", "--resume", "--out", str(cut), "--jobs", "1", "--quiet"]) == 0
    assert _summary(cut)["weights_sha256"] == _summary(whole)["weights_sha256"]
    files = sorted(path.name for path in (whole / "state").glob("000004-s*.safetensors"))
    states = [{name: load_state(out / "state" / name) for name in files} for out in (whole, cut)]
    assert bits(states[0]) == bits(states[1])
    server, *sites = (
        states[0][name] for name in sorted(files, key=lambda name: "server" not in name)
    )
    assert (server["version"], len(sites)) == (3, 2)
    assert server["generator"].keys() == sites[0]["generator"].keys()
    assert all(site["version"] == 2 and site["optimizers"] for site in sites)


def test_bytes_of_each_round_are_the_cards(scans: Path, tmp_path: Path) -> None:
    """Sections 1 and 9: W_fe each way each round, E = 4 K M D bytes once, the generator after it was trained.

    small_cnn has 72 features and its head becomes 73 D numbers, D = 384; K = 6, M = 24, images of 1 x 32 x 32. The
    generator is trained after round 1 and after round 3: it is sent in rounds 2 and 4.
    """
    out = tmp_path / "run"
    _run(
        scans, out, "--rounds", "4", "--set", "g_start=1", "--set", "g_every=2", "--eval-every", "0"
    )
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    weights = load_weights(out / "weights.safetensors")
    w_fe = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    plain = sum(
        p.numel()
        for p in Bundle("mednist", {"network": "small_cnn", "image_size": 32})
        .network()
        .parameters()
    )
    assert w_fe == 4 * (plain + 73 * (384 - 6))
    embeddings, generator = torch.zeros(6, 24, 384), Generator(384, 1, 32, 32).state_dict()
    assert embeddings.numel() * embeddings.element_size() == 4 * 6 * 24 * 384
    shape = {"version": 1, "channels": 1, "height": 32, "width": 32}
    first = Message({"weights": weights, "text": {"embeddings": embeddings}})
    stale = Message({"weights": weights, "generator": generator}, shape)
    up = Message({"weights": weights}, {"samples": 21})
    down = [first, stale, Message({"weights": weights}), stale]
    assert [entry["bytes_down"] for entry in rounds] == [
        2 * len(message.encode()) for message in down
    ]
    assert [entry["bytes_up"] for entry in rounds] == [2 * len(up.encode())] * 4
    told = Message(scalars={axis: 1 for axis in ("channels", "height", "width")})
    assert _summary(out)["bytes_up"] == sum(entry["bytes_up"] for entry in rounds) + 2 * len(
        told.encode()
    )


@pytest.mark.parametrize("method", ["fedcb", "fedbm"])
def test_the_classifier_is_in_no_file_of_weights(scans: Path, tmp_path: Path, method: str) -> None:
    _run(scans, tmp_path / "out", method=method)
    names = set(Bundle("mednist", {"network": "small_cnn"}).network().state_dict())
    for file in ("weights.safetensors", "best.safetensors"):
        assert set(load_weights(tmp_path / "out" / file)) == names
