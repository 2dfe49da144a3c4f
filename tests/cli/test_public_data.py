"""Runs with public data and teachers, as a user meets them: FedHelp and what it is compared with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast

import pytest
import torch

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.bundle.open import WithData
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.core.run import PublicRecord
from medfl.methods import load
from medfl.networks import build
from medfl.runs.plan import Request, make_plan
from medfl.runs.public_data import PublicPlan, chosen_items, plan_public, read_public
from medfl.runs.teachers.answers import Teacher
from medfl.storage.files import load_weights
from medfl.storage.places import cache_folder
from tests.support.sweeps import mostly_slow
from tests.zoo.build import ZOO

SMALL = (
    "--config",
    "network=small_cnn",
    "--config",
    "image_size=16",
    "--batch-size",
    8,
    "--jobs",
    1,
)


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty grey images of six classes, the sites' own."""
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=16
    )


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey digits, the public ones."""
    return datasets.write_phantom(
        "mnist", tmp_path_factory.mktemp("digits") / "data", per_class=10, size=28
    )


@pytest.fixture(scope="module")
def teacher(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was trained on the training section of the public bundle."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    command = [
        "run",
        "mnist",
        "--data",
        digits,
        "--method",
        "central",
        "--rounds",
        1,
        "--out",
        out,
        *SMALL,
    ]
    assert cli.main([*map(str, command)]) == 0
    return out


def run(scans: Path, out: Path, *arguments: object, method: str = "fedhelp") -> int:
    large = (
        ("--set", "large=site-1", "--set", "large_network=two_conv") if method == "fedhelp" else ()
    )
    command = [
        "run",
        "mednist",
        "--data",
        scans,
        "--method",
        method,
        *large,
        "--partition",
        "iid",
        "--sites",
        3,
    ]
    rest = ["--rounds", 2, "--local-epochs", 1, "--out", out, *SMALL, *arguments]
    return cli.main([*map(str, [*command, *rest])])


def document(out: Path, name: str = "summary.json") -> dict:
    return json.loads((out / name).read_text())


@pytest.mark.slow
def test_fedhelp_runs_with_a_trained_run_as_its_teacher(
    scans: Path, digits: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, public = (
        tmp_path / "run",
        ("--set", f"public=mnist:{digits}", "--set", f"teachers=run:{teacher}"),
    )
    assert run(scans, out, *public) == 0
    told = capsys.readouterr()
    large = len(build("two_conv", 1, 6).state_dict())
    assert f"8 tensors leave each site, 0 to {large} stay" in told.err + told.out
    assert "teacher: run:" in told.err + told.out
    last = told.out.splitlines()[-1]
    assert last.startswith("PHANTOM data: ")
    assert "PHANTOM public data: mnist, teachers: run:" in last
    summary, record = document(out), document(out, "run.json")
    assert summary["public"]["data_source"] == "phantom"
    assert summary["public"]["teachers"] == [f"run:{teacher}"]
    assert record["public"]["items"] == summary["public"]["items"] > 10
    assert "Teachers, asked once" in (out / "report.html").read_text()
    small = Bundle("mednist", {"network": "small_cnn", "image_size": 16}).network()
    parameters = sum(
        tensor.numel() * tensor.element_size() for tensor in small.state_dict().values()
    )
    assert parameters <= summary["bytes_up"] / 6 < parameters + 1500, (
        "small networks travel, and their names"
    )
    assert set(load_weights(out / "weights.safetensors")) == set(small.state_dict())

    # the same again: from the record, resumed, with other places of the same data, and asked nothing twice
    answers = sorted(cache_folder("answers").glob("*.json"))
    queries = [json.loads(path.read_text())["pass"]["queries"] for path in answers]
    assert cli.main(["run", "--from", str(out / "run.json"), "--out", str(tmp_path / "again")]) == 0
    moved = tmp_path / "elsewhere"
    digits_copy, teacher_copy = moved / "digits", moved / "teacher"
    for source, target in ((digits, digits_copy), (teacher, teacher_copy)):
        for path in source.rglob("*"):
            if path.is_file():
                (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                (target / path.relative_to(source)).write_bytes(path.read_bytes())
    other = (
        "--set",
        f"public=mnist:{digits_copy}",
        "--set",
        f"teachers=run:{teacher_copy}",
        "--rounds",
        1,
    )
    assert run(scans, tmp_path / "moved", *other) == 0
    assert cli.main(["run", "--resume", "--out", str(tmp_path / "moved"), "--rounds", "2"]) == 0
    for name in ("again", "moved"):
        assert document(tmp_path / name)["weights_sha256"] == summary["weights_sha256"]
    assert document(tmp_path / "again")["run_hash"] == summary["run_hash"]
    assert document(tmp_path / "moved")["run_hash"] == summary["run_hash"]
    assert [json.loads(path.read_text())["pass"]["queries"] for path in answers] == queries


def test_other_public_data_are_another_run(scans: Path, digits: Path) -> None:
    config = {"network": "small_cnn", "image_size": 16}
    options = {"large": "site-1", "large_network": "two_conv", "public": f"mnist:{digits}"}
    divided = {"data": str(scans), "partition": "iid", "sites": 3}
    hashes = set()
    for more in ({}, {"public_items": 20}, {"public_size": 20}):
        request = Request("mednist", "fedhelp", {**options, **more}, config, **divided)
        run = make_plan(request).run
        hashes.add(run.run_hash)
        if "public_items" in more:
            assert run.public is not None
            assert run.public.items == 20

    assert len(hashes) == 3


@pytest.mark.parametrize("method", mostly_slow(("fedmd", "fccl", "fedkemf"), ("fedkemf",)))
def test_the_methods_that_it_is_compared_with_run(
    scans: Path, digits: Path, tmp_path: Path, method: str
) -> None:
    bodies = ("--set", "bodies=two_conv,small_cnn", "--set", f"public=mnist:{digits}")
    assert run(scans, tmp_path / "run", *bodies, method=method) == 0
    assert document(tmp_path / "run")["status"] == "finished"


def test_jobs_and_a_cohort_change_no_bit(scans: Path, digits: Path, tmp_path: Path) -> None:
    for jobs in (1, 2):
        assert (
            run(
                scans,
                tmp_path / str(jobs),
                "--set",
                f"public=mnist:{digits}",
                "--cohort",
                0.7,
                "--jobs",
                jobs,
            )
            == 0
        )
    assert document(tmp_path / "1")["weights_sha256"] == document(tmp_path / "2")["weights_sha256"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "'fedhelp' on bundle 'mednist' without public data"),
        (
            ("--set", "public=lung_cxr:phantom"),
            "a segmentation task, for bundle 'mednist', a classification task",
        ),
        (("--set", "public=nosuch"), "nosuch"),
        (
            ("--set", "public=mnist:phantom", "--set", "public_items=999999"),
            "999999 public items; this section has",
        ),
        (
            ("--set", "public=mnist:phantom", "--set", "teachers=nobody"),
            "teacher 'nobody'; teachers are clip-vit-l14",
        ),
        (
            ("--set", "public=mnist:phantom", "--set", "large=site-9"),
            "'site-9'; sites are site-1, site-2, site-3",
        ),
        (("--set", "public=mnist:phantom", "--set", "large_network=nosuch"), "network 'nosuch'"),
        (("--set", "public=mnist:phantom", "--set", "large=site-1,site-2,site-3"), "no small site"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    scans: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(scans, tmp_path / "run", *arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert said in last
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_other_classes_is_refused(
    scans: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = ("--set", "public=fmnist:phantom", "--set", f"teachers=run:{teacher}")
    assert run(scans, tmp_path / "run", *public) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert "classes" in last


# Which items


def test_a_choice_of_items_is_balanced_and_always_the_same() -> None:
    items = [{"id": str(i), "label": 0 if i < 40 else 1 + i % 2} for i in range(60)]
    chosen = chosen_items(items, 33)
    labels = [items[i]["label"] for i in chosen]
    assert sorted(labels.count(label) for label in range(3)) == [10, 10, 13]
    assert chosen == chosen_items(items, 33)
    assert list(chosen) == sorted(set(chosen))
    assert chosen_items(items, 0) == tuple(range(60))
    torch.manual_seed(5)  # noqa: TID251 (whatever state the global stream is in)
    assert chosen == chosen_items(items, 33)


def test_the_text_of_public_data() -> None:
    assert read_public("cifar100") == ("cifar100", None)
    assert read_public("cifar100:/data/c") == ("cifar100", "/data/c")


def test_flat_public_images_for_volumes_are_lifted_or_refused() -> None:
    bundle = Bundle("ixi_brain")
    options = {
        "public": "skin_lesion:phantom", "public_section": "", "public_items": 0, "public_size": 0, "lift": "pseudo3d",
    }  # fmt: skip
    method = load("fedhelp")
    found = plan_public(method, options, bundle, "cpu", say=str)
    assert (found.depth, found.record.config["image_size"], found.section) == (16, 48, "train")
    assert any("repeated 16 times" in note for note in found.notes(bundle, {}))
    with pytest.raises(Exception, match="lift=refuse takes data of equal dimensions only"):
        plan_public(method, {**options, "lift": "refuse"}, bundle, "cpu", say=str)
    with pytest.raises(Exception, match="volumes are not cut into slices"):
        plan_public(
            method, {**options, "public": "ixi_brain:phantom"}, Bundle("lung_cxr"), "cpu", say=str
        )
    public = found.prepare()
    x, y = public.at(torch.tensor([0, 1]))
    assert x.shape == (2, 1, 48, 48)
    assert y.shape == (2, 1, 48, 48)
    assert public.task.classes == ("background", "lesion")


def test_public_items_of_the_sites_own_bundle_are_told() -> None:
    bundle = Bundle("mnist")
    options = {
        "public": "mnist:phantom", "public_section": "", "public_items": 0, "public_size": 0, "lift": "pseudo3d",
    }  # fmt: skip
    found = plan_public(load("fedmd"), options, bundle, "cpu", say=str)
    items = found.opened.bundle.items("test")
    notes = found.notes(bundle, {"test": items})
    assert any(
        f"{len(items)} OF THE PUBLIC ITEMS ARE ALSO ITEMS OF THE SITES" in note for note in notes
    )
    assert not any("ALSO ITEMS" in note for note in found.notes(bundle, {"train": [{"id": "x"}]}))


# Bundles that are not ours

OPTIONS = {"public_section": "", "public_items": 4, "public_size": 0, "lift": "pseudo3d"}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Grey images of three classes with random training transforms, opened without overrides."""
    record = ZOO["cls2d_glob_yaml"](tmp_path)
    file = record.path / "configs" / "train.yaml"
    for key, value in record.overrides.items():
        file.write_text(re.sub(rf"(?m)^{key}: .*$", f"{key}: {value}", file.read_text()))
    return record.path


def test_colours_become_grey_for_sites_of_a_bundle_that_is_not_ours(foreign: Path) -> None:
    options = {**OPTIONS, "public": "cifar10:phantom"}
    found = plan_public(
        load("fedmd"),
        options,
        Bundle(str(foreign), {"dataset_dir": str(foreign.parent / "MiniNIST")}),
        "cpu",
        say=str,
    )
    assert found.channels == 1
    assert found.prepare().at(torch.tensor([0, 3]))[0].shape == (2, 1, 32, 32)


def test_public_items_stand_still_as_teachers_see_them(foreign: Path) -> None:
    options = {
        **OPTIONS,
        "public": f"{foreign}:{foreign.parent / 'MiniNIST'}",
        "public_section": "train",
        "public_items": 0,
    }
    found = plan_public(load("fedmd"), options, Bundle("mnist"), "cpu", say=str)
    x, _ = found.prepare().at(torch.arange(6))
    moving = found.opened.bundle.prepared("train")
    assert torch.equal(x, next(moving.deterministic().batches(torch.arange(6), 6, None))[0])
    assert not torch.equal(x, next(moving.batches(torch.arange(6), 6, None))[0])


def test_patches_of_public_images_are_no_questions_to_a_teacher_of_masks(
    tmp_path: Path,
) -> None:
    record = ZOO["seg3d_multilabel_json"](tmp_path)
    bundle = Bundle(str(record.path), record.overrides)
    opened = WithData(bundle, "", "bundle", ())
    plan = PublicPlan(opened, "train", (0,), (cast(Teacher, None),), 0, 0, cast(PublicRecord, None))
    with pytest.raises(
        InputError,
        match=r"section train: patches \(.*\) of images \(.*\); teachers segment whole images",
    ):
        plan.prepare()


def test_public_volumes_are_whole_where_the_sites_are_smaller_than_a_patch(tmp_path: Path) -> None:
    """The public bundle's own patch of 24 x 40 x 24 voxels is larger than the sites' volumes."""
    for name in ("sites", "public"):
        datasets.write_phantom("hippocampus", tmp_path / name, per_class=12, size=16)

    command = (
        f"run hippocampus --data {tmp_path / 'sites'} --sites 2 --rounds 1 --local-epochs 1 --jobs 1 --method fedhelp "
        "--config image_size=[16,24,16] --config patch_size=null --set large=site-1 --set large_network=unet8 "
        f"--set public=hippocampus:{tmp_path / 'public'} --set public_section=train --set lambda_r=0"
    )
    assert cli.main([*command.split(), "--out", str(tmp_path / "run")]) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())["public"]
    assert record["config"]["image_size"] == [16, 24, 16]
    assert record["config"]["patch_size"] is None
