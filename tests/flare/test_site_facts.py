"""What a site of a FLARE job says of its own data in its own file: it counts, and the server learns it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("nvflare")

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError, RunError
from medfl.core.run import Run
from medfl.flare import site_facts
from medfl.flare.offer import offer
from medfl.flare.server import FlareWorkers
from medfl.flare.site_config import SiteConfig, check_declared_data, open_server
from medfl.flare.wire import Payload
from medfl.report import write_report
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.storage.files import load_state
from medfl.storage.run_folder import RunFolder
from tests.flare.test_own import SITES, executed, together
from tests.support.toy import bits

OWN = {"north": ("anterior",), "south": ("auto",)}


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drawn scans; the masks of the second site show the posterior part alone."""
    place = tmp_path_factory.mktemp("scans")
    made = {
        name: datasets.write_phantom("hippocampus", place / name, per_class=10, size=20, seed=i)
        for i, name in enumerate(SITES)
    }
    for file in made["south"].glob("labels*/*.nii.gz"):
        image = nibabel.load(file)
        mask = np.asarray(image.dataobj)
        nibabel.save(
            nibabel.Nifti1Image(np.where(mask == 1, 0, mask), image.affine, image.header), file
        )
    return made


def offered(labels: str) -> Run:
    asked = {"method": "fedavg", "rounds": 1, "local_epochs": 1, "batch_size": 2, "metrics": "dice"}
    config = {"network": "unet8", "patch_size": [16, 16, 16]}
    return offer(
        "hippocampus",
        SITES,
        config=config,
        requested={**asked, "site_labels": labels},
        rehearsal=True,
    )


def config(scans: dict[str, Path], name: str) -> SiteConfig:
    permits = ("network", "patch_size")
    return SiteConfig("hippocampus", "unused", str(scans[name]), permits=permits, labels=OWN[name])


@pytest.mark.slow
def test_law1_a_site_s_own_word_counts_and_the_server_reports_it(
    scans: dict[str, Path], tmp_path: Path
) -> None:
    """The job is wrong about one site and knows nothing of the other; the weights are those of a run that is right."""
    lines: list[str] = []
    server = SiteConfig("hippocampus", str(tmp_path))
    far, _ = executed(
        tmp_path / "apart", offered("north=posterior"), scans, server, config, lines.append
    )
    made = together(
        offered("north=anterior;south=posterior"),
        scans,
        lambda *given: replace(config(*given), labels=()),
    )
    near = RunFolder.create(tmp_path / "together")
    near.write_run(made.run, {})
    summary = Simulator(Execution(made, near)).execute()
    found = [
        load_state(next((folder.path / "state").glob("*1-server.safetensors")))
        for folder in (far, near)
    ]
    assert bits(found[0]) == bits(found[1])
    known = {"north": ["anterior"], "south": ["posterior"]}
    assert (
        json.loads((far.path / "summary.json").read_text())["labels"] == summary["labels"] == known
    )
    record = json.loads((far.path / "state" / "manifest.json").read_text())["record"]
    assert record["facts"] == {name: {"labels": names} for name, names in known.items()}
    far.write_run(made.run, {"task": "segmentation", "key_metric": "dice", "runtime": "flare"})
    assert "north: anterior; south: posterior." in write_report(far.path).read_text()
    note = "note: the job says --site-labels north=posterior; the site itself says anterior, which counts"
    assert lines == [
        note, "site 'north' says that its masks show anterior", "site 'south' says that its masks show posterior",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "bundle", "text"),
    [
        (
            {"labels": ("anteror",)},
            "hippocampus",
            r"label 'anteror' of site 'north'; .*; did you mean anterior\?",
        ),
        (
            {"labels": ("background",)},
            "hippocampus",
            "label 'background' of site 'north'; the names of the bundle",
        ),
        (
            {"labels": ("cat",)},
            "mednist",
            "--site-labels with a classification task; it is for findings",
        ),
        (
            {"channels": ("T1",)},
            "ham10000",
            "channel 'T1' of site 'north'; the channels of the bundle's images are red",
        ),
        (
            {"channels": ("0",)},
            "pneumonia",
            "--site-channels with images of 1 channel; two or more",
        ),
    ],
)
def test_what_the_bundle_does_not_have_is_refused_before_flare_starts(
    changes: dict[str, tuple[str, ...]], bundle: str, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        check_declared_data(SiteConfig(bundle, "unused", **changes), Bundle(bundle), "north")
    check_declared_data(SiteConfig(bundle, "unused"), Bundle(bundle), "north")


@pytest.fixture(scope="module")
def workers() -> FlareWorkers:
    server = open_server(offered(""), SiteConfig("hippocampus", "unused"))
    return FlareWorkers(server, None, simulated=False)  # type: ignore[arg-type]


def told(**tensors: Tensor) -> Payload:
    return Payload({f"site/{name}": tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(found) for found in ([], [0], [3], [-1], [2, 1], [1, 1], [[1]], [1.0], 1)]
    + [torch.ones(9).long()],
)
def test_a_server_takes_nothing_but_positions_of_the_bundle(
    workers: FlareWorkers, tensor: Tensor
) -> None:
    with pytest.raises(
        RunError, match="its labels are not ascending positions among the 2 of the bundle"
    ):
        workers._check_facts("north", told(labels=tensor))
    with pytest.raises(
        RunError, match="it tells of its 'name'; of its data a site tells labels, channels"
    ):
        workers._check_facts("north", told(name=tensor))
    assert not workers.facts


def test_what_a_site_told_first_stays(workers: FlareWorkers) -> None:
    workers._check_facts("north", told(labels=torch.tensor([2])))
    workers._check_facts("north", told(labels=torch.tensor([2])))
    for other, text in (
        ({"labels": torch.tensor([1])}, "its masks show anterior"),
        ({}, "nothing"),
    ):
        with pytest.raises(
            RunError,
            match=f"it tells of its data: {text}; at first it told: its masks show posterior",
        ):
            workers._check_facts("north", told(**other))
    assert workers.facts == {"north": {"labels": ["posterior"]}}


def test_a_summary_has_the_sites_that_lack_something() -> None:
    bundle = Bundle("ham10000")
    facts = {"b": {"channels": ["red"]}, "a": {"channels": ["red", "green", "blue"]}}
    assert site_facts.by_kind(facts, {}, bundle) == {"channels": {"b": ["red"]}}
    whole = {"north": {"labels": ["anterior", "posterior"]}}
    said = {"labels": {"north": ["anterior"], "south": ["posterior"]}}
    assert site_facts.by_kind(whole, said, Bundle("hippocampus")) == {
        "labels": {"south": ["posterior"]}
    }
