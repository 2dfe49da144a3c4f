"""Sites that annotate some structures only: what is refused, what each trains on and is scored by, and the laws."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medfl import datasets, methods
from medfl.bundle.bundle import Bundle
from medfl.bundle.protocol import resolved
from medfl.core.errors import InputError
from medfl.core.run import Run
from medfl.data.known_labels import AnnotatedClasses
from medfl.flare.offer import offer
from medfl.runs.launch import federate, site_algo
from medfl.runs.plan import Request, make_plan
from medfl.runs.result import load_run
from medfl.runtimes.federation import Federation
from medfl.runtimes.site_labels import check

LABELS = "site-1=anterior;site-2=posterior"
CONFIG = {"network": "unet8", "patch_size": [16, 16, 16]}


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "phantom"
    return datasets.write_phantom("hippocampus", folder, per_class=10, size=20)


def requested(phantom: Path, **changes: Any) -> dict[str, Any]:
    return {
        "method": "fedavg", "data": str(phantom), "sites": 2, "partition": "iid", "rounds": 2, "local_epochs": 1,
        "batch_size": 2, "lr": 0.01, "site_labels": LABELS, "metrics": "dice", **changes,
    }  # fmt: skip


def run(phantom: Path, out: Path, **changes: Any) -> dict[str, Any]:
    how = {name: changes.pop(name) for name in ("jobs", "resume", "runtime") if name in changes}
    return federate(
        "hippocampus", config=CONFIG, requested=requested(phantom, **changes), out=out, **how
    )


def federation(phantom: Path, **changes: Any) -> Federation:
    plan = make_plan(Request("hippocampus", config=CONFIG, **requested(phantom, **changes)))
    return Federation(plan.bundle, plan.method, plan.run)


@pytest.fixture(scope="module")
def reference(phantom: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(phantom, tmp_path_factory.mktemp("runs") / "reference")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "site-1=liver",
            r"label 'liver' of site 'site-1'; the names of the bundle are anterior, posterior; ",
        ),
        ("site-1=background", r"label 'background' of site 'site-1'; the names"),
        ("north=anterior", r"--site-labels north=...; the sites of the run are site-1, site-2; "),
        (
            "site-1",
            r"--site-labels site-1; SITE=NAME,NAME;SITE=NAME, each site and each of its names once; ",
        ),
        ("site-1=anterior;site-1=posterior", r"--site-labels .*; each site|SITE=NAME"),
    ],
)
def test_labels_that_are_none_of_the_classes_are_refused_in_one_line(
    phantom: Path, tmp_path: Path, given: str, text: str
) -> None:
    with pytest.raises(InputError, match=text) as caught:
        run(phantom, tmp_path / "run", site_labels=given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_classes_and_pooled_images_are_refused(phantom: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--site-labels with a classification task"):
        check("site-1=CXR", Bundle("mednist"), methods.load("fedavg"), ["site-1"])
    with pytest.raises(InputError, match="--site-labels with a method that pools the images"):
        run(phantom, tmp_path / "run", method="central")


def test_the_federation_s_file_says_it_of_each_site() -> None:
    found = resolved(
        "x", {"sites": {"north": {"labels": ["liver", "left kidney"]}, "south": {"labels": "auto"}}}
    )
    assert (found["sites"], found["site_labels"]) == (2, "north=liver,left kidney;south=auto")
    assert resolved("x", {"sites": 3})["site_labels"] == ""
    for sites in ({"north": {"label": ["liver"]}}, {"north": {"labels": []}}, {"north": ["liver"]}):
        with pytest.raises(
            InputError,
            match="of site 'north' in the federated.yaml of bundle 'x'; of a site it says",
        ):
            resolved("x", {"sites": sites})


def test_only_a_run_that_uses_it_has_another_hash(phantom: Path) -> None:
    plain = make_plan(
        Request("hippocampus", config=CONFIG, **requested(phantom, site_labels=""))
    ).run
    assert not {"site_labels", "partial_loss"} & plain.to_dict().keys()
    used = replace(plain, site_labels=LABELS)
    assert len({one.run_hash for one in (plain, used, replace(used, partial_loss="naive"))}) == 3
    assert Run.from_dict(json.loads(json.dumps(used.to_dict()))) == used


def test_a_site_that_annotates_everything_is_as_any(phantom: Path) -> None:
    whole = federation(phantom, site_labels="site-1=posterior,anterior;site-2=auto")
    assert not whole.known
    assert whole.site("site-1", 1).loss is whole.bundle.loss


def test_auto_takes_what_the_training_masks_show(
    phantom: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = federation(phantom, site_labels="site-1=auto;site-2=auto")
    values = made.sections["train"]
    original = type(values).batches

    def batches(self: Any, *given: Any) -> Any:
        return ((x, torch.where(y == 1, 0, y)) for x, y in original(self, *given))

    monkeypatch.setattr(type(values), "batches", batches)
    assert federation(phantom, site_labels="site-1=auto").known == {
        "site-1": AnnotatedClasses((2,), 3)
    }
    monkeypatch.setattr(
        type(values), "batches", lambda *given: ((x, 0 * y) for x, y in original(*given))
    )
    with pytest.raises(InputError, match=r"site-1=auto, none of its \d+ training labels shows one"):
        federation(phantom, site_labels="site-1=auto")


def test_what_a_site_does_not_annotate_is_not_scored_against_it(
    reference: Mapping[str, Any],
) -> None:
    folder = Path(str(reference["folder"]))
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        own, other = (
            ("anterior", "posterior") if row["site"] == "site-1" else ("posterior", "anterior")
        )
        assert row[f"dice_{own}"] == row["dice"]
        assert row[f"dice_{other}"] == ""
    cases = {name: entry["cases"] for name, entry in reference["last"]["classes"].items()}
    assert sum(cases.values()) == len(rows)
    assert reference["labels"] == {"site-1": ["anterior"], "site-2": ["posterior"]}
    assert "site-1: anterior; site-2: posterior." in (folder / "report.html").read_text()


def test_the_naive_loss_and_the_marginal_one_are_two(phantom: Path) -> None:
    marginal, naive = (
        federation(phantom, partial_loss=one).site("site-1", 1) for one in ("marginal", "naive")
    )
    x, y = next(marginal.train.batches(1))
    z = torch.randn(1, 3, *y.shape[2:], generator=torch.Generator().manual_seed(0))
    hidden = torch.where(y == 1, y, 0)
    assert (
        naive.loss(z, y).item() == naive.loss.loss(z, hidden).item() != marginal.loss(z, y).item()
    )


def same(found: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    assert [found[name] for name in ("run_hash", "weights_sha256")] == [
        reference[name] for name in ("run_hash", "weights_sha256")
    ]
    tables = [
        (Path(str(one["folder"])) / "predictions.csv").read_text() for one in (found, reference)
    ]
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_a_pause_changes_nothing(
    phantom: Path, reference: Mapping[str, Any], tmp_path: Path
) -> None:
    run(phantom, tmp_path / "paused", rounds=1)
    same(run(phantom, tmp_path / "paused", resume=True), reference)


def test_a_finished_run_is_scored_again_alike(reference: Mapping[str, Any]) -> None:
    folder = Path(str(reference["folder"]))
    with (folder / "predictions.csv").open() as file:
        rows = {row["id"]: float(row["dice"]) for row in csv.DictReader(file)}
    again = {str(row["id"]): row["dice"] for row in load_run(folder).predict(section="test")}
    assert again == pytest.approx(rows)


@pytest.mark.slow
def test_workers_and_monai_fl_change_nothing(
    phantom: Path, reference: Mapping[str, Any], tmp_path: Path
) -> None:
    same(run(phantom, tmp_path / "workers", jobs=2), reference)
    same(run(phantom, tmp_path / "monai", runtime="monai-fl"), reference)


@pytest.mark.slow
def test_the_same_weights_on_flare(
    phantom: Path, reference: Mapping[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("nvflare")
    same(run(phantom, tmp_path / "flare", runtime="flare"), reference)


def test_a_loss_that_cannot_leave_a_channel_out_is_refused(phantom: Path) -> None:
    made = federation(phantom)
    vars(made.bundle)["loss"] = torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    with pytest.raises(InputError, match="over whose structures the bundle's loss fails"):
        Federation(made.bundle, methods.load("fedavg"), made.run, prepared=made.sections)


def test_a_job_and_a_site_of_monai_fl_carry_it(phantom: Path) -> None:
    pytest.importorskip("nvflare")
    asked = {"site_labels": "north=anterior;south=auto", "method": "fedavg"}
    assert (
        offer("hippocampus", ["north", "south"], requested=asked, rehearsal=True).site_labels
        == asked["site_labels"]
    )
    with pytest.raises(InputError, match="--site-labels north=...; the sites of the run are east"):
        offer("hippocampus", ["east"], requested=asked, rehearsal=True)
    algo = site_algo(
        "hippocampus", "north", config=CONFIG, requested={**asked, "data": str(phantom)}
    )
    algo.initialize()
    assert algo._ready().facts == {"labels": [1]}
    assert algo.get_weights().statistics["labels"] == [1]
