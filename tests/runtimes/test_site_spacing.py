"""`medfl plan --per-site spacing` and `--site-spacing`: each site's volumes have the spacing of its own cases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import NormalizeIntensity, Spacing, SpatialPad

import medfl
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.data.fingerprint import Fingerprint
from medfl.flare.offer import offer
from medfl.problem.fingerprint import gather
from medfl.runs.launch import Shared, federate
from medfl.runs.plan import Request, make_plan
from medfl.runtimes.federation import Federation
from medfl.starter import starter
from medfl.starter.plan import plan
from medfl.starter.survey import Survey

ASKED: dict[str, Any] = {
    "sites": 2, "partition": "centre", "rounds": 1, "local_epochs": 1, "device": "cpu",
}  # fmt: skip
OWN = {"site-1": (1.5, 1, 1), "site-2": (2, 1, 1)}


@pytest.fixture(scope="module", autouse=True)
def narrow() -> Iterator[None]:
    """A quarter of a plan's filters: spacings are looked at, and a network takes most of a test's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medfl.starter.plan._FILTERS", 8)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve balls in noise, of 1.5 mm at the first site's scanner and 2 mm at the second's, along one axis."""
    root = tmp_path_factory.mktemp("spacings")
    draws = np.random.default_rng(0)
    rows = ["file,centre"]
    for index in range(12):
        shape = (14 + index % 3, 16, 15)
        distance = np.linalg.norm(np.indices(shape) - np.reshape((7, 8, 7), (3, 1, 1, 1)), axis=0)
        mask = (distance < 5).astype(np.uint8)
        image = (100 * mask + draws.normal(50, 9, shape)).astype(np.float32)
        affine = np.diag([(1.5, 2)[index % 2], 1, 1, 1])
        for name, voxels in (("images", image), ("masks", mask)):
            path = root / name / f"c{index:02}.nii.gz"
            path.parent.mkdir(exist_ok=True)
            nib.save(nib.Nifti1Image(voxels, affine), path)

        rows.append(f"images/c{index:02}.nii.gz,site-{1 + index % 2}")

    (root / "cases.csv").write_text("\n".join(rows) + "\n")
    return root


def planned(folder: Path, out: Path, **per_site: str) -> Path:
    files = sorted((folder / "images").iterdir())
    cases = [(str(file), str(folder / "masks" / file.name)) for file in files]
    empty = Fingerprint("volumes", 1, "images", "masks", {1: "ball"})
    sites = {f"site-{1 + index}": gather(empty, cases[index::2], 0) for index in range(2)}
    return starter.write(out, Survey.of_plan(plan(sites, 0.5, **per_site), 2))


@pytest.fixture(scope="module")
def bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan in which each site has the cases of one scanner."""
    return planned(folder, tmp_path_factory.mktemp("plans") / "own", per_site="spacing")


@pytest.fixture(scope="module")
def pooled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(folder, tmp_path_factory.mktemp("plans") / "own")


def test_the_plan_says_which_spacing_each_site_gets_and_why(bundle: Path) -> None:
    text = (bundle / "docs/plan.json").read_text()
    choices = {choice["choice"]: choice for choice in json.loads(text)["choices"]}
    for site, spacing in OWN.items():
        assert choices[f"spacing of {site}"]["value"] == pytest.approx(spacing, rel=0.045)
        assert choices[f"spacing of {site}"]["because"].startswith("median")


def test_each_site_trains_and_validates_on_volumes_of_its_own_spacing(
    bundle: Path, folder: Path
) -> None:
    made_plan = make_plan(Request(str(bundle), data=str(folder), **ASKED))
    made = Federation(made_plan.bundle, made_plan.method, made_plan.run)
    own = json.loads((bundle / "docs/plan.json").read_text())["choices"]
    spacing = {choice["choice"].removeprefix("spacing of "): choice["value"] for choice in own}
    assert made_plan.run.site_spacing == ";".join(
        f"{site}={'x'.join(map(str, spacing[site]))}" for site in OWN
    )
    assert "resample to mm of their own" in " ".join(made_plan.notes)
    for site in OWN:
        for section in ("train", "validate", "test"):
            shard = made.shard(site, section).deterministic(uncropped=True)
            assert len(shard) or section != "train"
            for ident, (x, y) in zip(shard.ids, shard.batches(1), strict=True):
                file = nib.load(next((folder / "images").glob(f"{Path(ident).name}*")))
                image = MetaTensor(np.asarray(file.dataobj)[None], affine=file.affine)
                image = Spacing(spacing[site], mode="bilinear")(image)
                image = NormalizeIntensity(channel_wise=True)(image)
                if section == "train":
                    image = SpatialPad(made_plan.bundle.get("patch_size"))(image)

                expected = image.as_tensor()
                assert x.shape[2:] == y.shape[2:] == expected.shape[1:]
                torch.testing.assert_close(x[0], expected)


def test_scores_and_predictions_are_on_the_files_grid(
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    requested = {**ASKED, "say": str, "jobs": 1}
    run = medfl.run(bundle, data=folder, out=tmp_path / "run", **requested)
    recorded = json.loads((tmp_path / "run/run.json").read_text())
    assert recorded["site_spacing"].startswith("site-1=1.")
    for row in run.predict():
        name = next((folder / "masks").glob(f"{Path(row['id']).name}*"))
        truth = np.asarray(nib.load(name).dataobj) == 1
        found = row["mask"] == 1
        assert found.shape == truth.shape
        dice = 2 * (found & truth).sum() / (found.sum() + truth.sum())
        assert row["dice"] == pytest.approx(dice, abs=1e-6)


def test_law1_monai_fl_gives_the_same_bits(bundle: Path, folder: Path, tmp_path: Path) -> None:
    runs = {}
    for runtime in ("simulator", "monai-fl"):
        requested = {**ASKED, "data": str(folder)}
        runs[runtime] = federate(
            str(bundle), requested=requested, out=tmp_path / runtime, runtime=runtime, jobs=1
        )

    assert runs["simulator"]["run_hash"] == runs["monai-fl"]["run_hash"]
    assert runs["simulator"]["weights_sha256"] == runs["monai-fl"]["weights_sha256"]
    assert runs["simulator"]["last"] == runs["monai-fl"]["last"]
    assert "validation_dice_largest" in runs["simulator"]["last"]["classes"]["ball"]


def test_without_the_flag_nothing_changes(bundle: Path, pooled: Path, folder: Path) -> None:
    """Neither configuration nor record has a word of it, and runs of one spacing and of several share no images."""
    for name in ("train", "evaluate", "inference"):
        path = f"configs/{name}.yaml"
        assert (bundle / path).read_text() == (pooled / path).read_text()

    assert "sites: 2\n" in (pooled / "configs/federated.yaml").read_text()
    made_plan = make_plan(Request(str(pooled), data=str(folder), **ASKED))
    assert "site_spacing" not in made_plan.run.to_dict()
    own = make_plan(Request(str(pooled), data=str(folder), site_spacing="site-1=1.5x1x1", **ASKED))
    assert own.run.run_hash != made_plan.run.run_hash
    assert Shared.key(own) != Shared.key(made_plan)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("site-9=1x1x1", "--site-spacing site-9=...; the sites of the run are site-1, site-2"),
        ("site-1=1x1", "three lengths in mm above 0"),
        ("site-1=1x1x0", "three lengths in mm above 0"),
        ("site-1=1x1xinf", "three lengths in mm above 0"),
        ("site-1=1x1xa,2x2x2", "three lengths in mm above 0"),
    ],
)
def test_other_spacings_and_sites_are_refused(
    text: str, problem: str, pooled: Path, folder: Path
) -> None:
    with pytest.raises(InputError) as caught:
        make_plan(Request(str(pooled), data=str(folder), site_spacing=text, **ASKED))

    assert problem in str(caught.value)


def test_an_export_names_the_site_that_it_does_not_have() -> None:
    """As it would at each site, which the job reaches too late."""
    with pytest.raises(InputError, match="--site-spacing west=..."):
        offer("hippocampus", ["north", "south"], requested={"site_spacing": "west=1x1x1"})


def test_pictures_have_no_spacing_of_their_own() -> None:
    with pytest.raises(InputError, match="does not resample"):
        make_plan(
            Request(
                "ham10000", data="phantom", sites=2, partition="iid", site_spacing="site-1=1x1x1"
            )
        )


@pytest.mark.parametrize("kind", ["patch", "spacing"])
def test_only_the_spacing_of_volumes_differs_per_site(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    for index in range(6):
        for name in ("images", "masks"):
            (tmp_path / name).mkdir(exist_ok=True)
            pixels = np.zeros((32, 32), np.uint8)
            pixels[8:20, 8:20] = 1
            Image.fromarray(pixels).save(tmp_path / name / f"p{index}.png")

    where = ["--images", str(tmp_path / "images"), "--masks", str(tmp_path / "masks")]
    out = tmp_path / "planned"
    assert cli.main(["plan", *where, "--per-site", kind, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--per-site {kind}" in line
    assert not out.exists()
