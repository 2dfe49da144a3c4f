"""`medfl site fingerprint` and `medfl plan`: what leaves adds up to the pooled figures, and the planned bundle runs."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import jsonschema
import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser, verify_net_in_out
from PIL import Image

import medfl
from medfl.bundle.open import open_problem
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.data import fingerprint
from medfl.data.fingerprint import Fingerprint, Tally
from medfl.datasets.readers import pairs, volumes
from medfl.flare.offer import offer
from medfl.networks.deep_supervision import with_full_size
from medfl.policy.inspection import inspect
from medfl.problem.fingerprint import Cases, _released as released, gather
from medfl.starter import plan as rules, starter
from medfl.starter.plan import Network, plan
from medfl.starter.survey import Survey
from medfl.storage.run_reader import RunReader

SCHEMA = Path(medfl.__file__).parent / "export" / "schemas" / "bundle_metadata.json"
DATA = Path(__file__).parents[3] / "shared" / "data"
CLASSES = {1: "organ", 2: "tumour"}
EMPTY = Fingerprint("volumes", 1, "images", "masks", CLASSES)


def draw(folder: Path, count: int, seed: int = 0) -> Cases:
    """Balls in noise; every second file lies on its side, every third case has no tumour, spacings differ."""
    draws = np.random.default_rng(seed)
    cases = []
    for index in range(count):
        shape = (20 + index % 4, 24, 18 + index % 3)
        place = np.indices(shape).reshape(3, -1).T - (10, 12, 9)
        radius = np.linalg.norm(place, axis=1).reshape(shape)
        mask = (radius < 5).astype(np.uint8)
        if index % 3:
            mask[radius < 2.5] = 2

        image = (100 * mask + draws.normal(50, 9, shape)).astype(np.float32)
        image[:2] = 0  # is cropped
        affine = np.diag([1.5 + index % 2 / 2, 1, 1, 1])
        if index % 2:
            image, mask = image.transpose(2, 0, 1), mask.transpose(2, 0, 1)
            affine = affine[:, [2, 0, 1, 3]]

        paths = []
        for name, voxels in (("images", image), ("masks", mask)):
            path = folder / name / f"c{index:02}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(voxels, affine), path)
            paths.append(str(path))

        cases.append((paths[0], paths[1]))

    return cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("volumes")
    draw(path, 12)
    return path


@pytest.fixture(scope="module")
def cases(folder: Path) -> Cases:
    images = sorted((folder / "images").iterdir())
    return [(str(image), str(folder / "masks" / image.name)) for image in images]


def test_sites_together_have_the_pooled_figures_in_any_order(cases: Cases) -> None:
    """A site of one case, one whose three cases all lack the tumour, and the rest."""
    parts = [cases[1:2], [cases[0], cases[3], cases[6]], [*cases[2:3], *cases[4:6], *cases[7:]]]
    pooled = gather(EMPTY, cases, 0)
    sites = [gather(EMPTY, part, 0) for part in parts]
    assert sites[1].volumes[2] == Tally()
    for order in itertools.permutations(sites):
        assert reduce(add, order) == pooled

    alone = plan({"all": pooled})
    for order in itertools.permutations(sites):
        together = plan({f"site-{index}": site for index, site in enumerate(order)})
        assert together.choices == alone.choices
        assert replace(together, sites={}, differences=()) == replace(alone, sites={})

    assert "no case with tumour; where it annotates none: --site-labels 'b=organ'" in " ".join(
        plan(dict(zip("abc", sites, strict=True))).differences
    )


def test_figures_are_those_of_the_voxels(cases: Cases) -> None:
    pooled = gather(EMPTY, cases, 0)
    values = []
    spacings, sizes = [], []
    for image, mask in cases:
        file = nib.as_closest_canonical(nib.load(image))
        target = np.asarray(nib.as_closest_canonical(nib.load(mask)).dataobj)
        values.append(np.asarray(file.dataobj)[target > 0].astype(float))
        spacings.append(file.header.get_zooms())
        sizes.append(np.array(file.shape) - (2, 0, 0))

    everything = np.concatenate(values)
    foreground = pooled.foreground[0]
    assert foreground.count == len(everything)
    assert foreground.mean == pytest.approx(everything.mean(), rel=1e-9)
    assert foreground.sd == pytest.approx(everything.std(), rel=1e-9)
    for share in (0.005, 0.5, 0.995):
        exact = np.quantile(everything, share, method="inverted_cdf")
        assert foreground.intensity(share) == pytest.approx(exact, rel=0.008)

    for tallies, rows in ((pooled.spacings, spacings), (pooled.sizes, sizes)):
        for tally, column in zip(tallies, np.transpose(rows), strict=True):
            exact = np.quantile(column, 0.5, method="inverted_cdf")
            assert tally.length() == pytest.approx(exact, rel=0.045)

    assert pooled.orders == {"RAS": 6, "SRA": 6}
    assert (pooled.volumes[1].count, pooled.volumes[2].count) == (12, 8)


def test_nothing_of_fewer_cases_than_the_least_count_leaves(cases: Cases) -> None:
    told = gather(EMPTY, cases, 10)
    counts = [*told.orders.values()]
    for tally in (*told.sizes, *told.spacings, *told.extents):
        counts += tally.cells.values()

    assert min(counts, default=10) >= 10
    assert told.volumes == {
        1: None,
        2: None,
    }  # all of 12, and 8: of two small cells nothing is told
    assert told.spacings[1].length() == 1  # of all
    assert told.spacings[0].length() == pytest.approx(3**0.5, rel=0.045)  # cells are hidden
    with pytest.raises(InputError, match="fewer than 10 training cases"):
        gather(EMPTY, cases[:9], 10)


def test_sums_beside_hidden_cells_do_not_tell_a_single_case(
    tmp_path: Path,
) -> None:
    """Of eleven cases of 1 mm and one of 3.2 mm, squares / total would be log2 of 3.2, to nine digits."""
    cases = draw(tmp_path, 12)
    for number, (image, mask) in enumerate(cases):
        for path in (image, mask):
            voxels = np.asarray(nib.load(path).dataobj)
            spacing = 3.2 if number == 7 else 1
            nib.save(nib.Nifti1Image(voxels, np.diag([1, 1, spacing, 1])), path)

    told = gather(EMPTY, cases, 10).spacings[2]
    assert not told.cells
    for number in (told.total, told.squares):
        assert number % (fingerprint.UNIT // 64 * told.count) == 0

    assert fingerprint.read(gather(EMPTY, cases, 10).encoded(), "x").spacings[2] == told
    assert gather(EMPTY, cases, 10).spacings[0].length() == 1  # all alike: nothing is hidden


def test_a_class_that_all_cases_have_is_told_to_be_there(cases: Cases) -> None:
    """And of what is hidden every number from 0 to K - 1 stays possible: all of them look the same from outside."""
    for least in (4, 6):
        told = gather(EMPTY, cases, least)
        assert told.volumes[1] is True  # 12 of 12
        assert (told.volumes[2] is True) == (least == 6)  # 8 of 12; of K = 4 both cells are told
        for present in range(13):
            tally = Tally(present, 0, 0, {0: present})
            shown = released(replace(told, volumes={1: tally}), [Counter[int]()], least).volumes[1]
            lacking = 12 - present
            assert isinstance(shown, Tally) == (min(present, lacking) >= least)
            if shown is True:
                assert lacking in range(least)
            if shown is False:
                assert present in range(least)

    assert gather(EMPTY, cases, 7).volumes == {1: None, 2: None}  # 12 < 2 K - 1


def test_what_is_told_of_a_class_adds_up_in_any_order() -> None:
    values: list[Any] = [Tally(), Tally(5, 9, 9), True, False, None]
    sites = [
        replace(hospital((64, 64, 64), (1, 1, 1)), volumes={1: value, 2: True}) for value in values
    ]
    for three in itertools.product(sites, repeat=3):
        first, second, third = three
        assert first + second + third == first + (second + third) == third + second + first

    notes = " ".join(plan({"a": sites[3], "b": sites[2]}).differences)
    assert "a: few cases with organ; where it annotates none: --site-labels 'a=tumour'" in notes


def hospital(
    sizes: tuple[float, ...], spacings: tuple[float, ...], cases: int = 100
) -> Fingerprint:
    def tallies(values: Any) -> tuple[Tally, ...]:
        return tuple(reduce(add, [Tally.of_lengths(np.array([value]))] * cases) for value in values)

    extents = np.array(sizes) * spacings
    kind = "volumes" if len(sizes) == 3 else "pictures"
    volumes = dict.fromkeys(CLASSES, tallies([1000.0])[0])
    values = np.random.default_rng(0).normal(40, 20, 10_000)
    return replace(
        EMPTY, kind=kind, cases=cases, sizes=tallies(sizes), spacings=tallies(spacings), extents=tallies(extents),
        volumes=volumes, foreground=(Tally.of_intensities(values),),
    )  # fmt: skip


def test_isotropic_volumes_have_cubes_of_kernels() -> None:
    planned = plan({"a": hospital((200, 180, 190), (1, 1, 1))}, memory=8)
    assert planned.spacing == (1, 1, 1)
    assert planned.coarse is None
    assert set(planned.network.kernels) == {(3, 3, 3)}
    assert planned.network.filters[:5] == (32, 64, 128, 256, 320)
    assert not np.mod(planned.patch, planned.network.factors).any()
    assert min(np.array(planned.patch) / planned.network.factors) >= 4


def test_anisotropic_volumes_are_pooled_in_their_planes_first() -> None:
    sites = {
        "a": hospital((320, 320, 20), (0.6, 0.6, 3)),
        "b": hospital((320, 320, 20), (0.6, 0.6, 4)),
    }
    planned = plan(sites)
    assert planned.coarse == 2
    assert planned.spacing == pytest.approx(
        (0.6, 0.6, 3), rel=0.045
    )  # the 10 % quantile, not the median
    assert planned.network.strides[1] == (2, 2, 1)
    assert planned.network.kernels[0] == (3, 3, 1)
    assert planned.patch[2] < planned.patch[0]
    # slices all 5 mm apart are not resampled by a hair
    assert plan({"a": hospital((320, 320, 20), (0.6, 0.6, 5))}).spacing == (0.6, 0.6, 5)
    many = {"a": hospital((320, 320, 160), (0.6, 0.6, 3))}
    assert plan(many).coarse is None  # as many slices as fit no exception


def test_more_memory_is_a_larger_patch_or_batch() -> None:
    site = {"a": hospital((400, 400, 400), (1, 1, 1))}
    plans = [plan(site, memory) for memory in (4, 8, 24, 80)]
    needs = [planned.network.memory(planned.patch, planned.batch_size, 3) for planned in plans]
    assert all(need <= memory * 2**30 for need, memory in zip(needs, (4, 8, 24, 80), strict=True))
    voxels = [np.prod(planned.patch) * planned.batch_size for planned in plans]
    assert voxels == sorted(set(voxels))
    with pytest.raises(InputError, match="room for two patches"):
        rules._fitted(np.full(3, 64.0), np.ones(3), 2**20, 3)


def test_ct_is_clipped_by_the_pooled_quantiles() -> None:
    site = {"a": hospital((64, 64, 64), (1, 1, 1))}
    low, high, mean, sd = plan(site, channel_names=["CT"]).clip
    assert (low, high) == pytest.approx((40 - 2.576 * 20, 40 + 2.576 * 20), abs=3)
    assert (mean, sd) == pytest.approx((40, 20), abs=1)
    assert plan(site, channel_names=["MRI"]).clip == ()


def test_pictures_have_a_planned_square(tmp_path: Path) -> None:
    planned = plan({"a": hospital((300, 400), (1, 1))})
    assert planned.spacing == ()
    assert planned.patch[0] == planned.patch[1]
    assert planned.patch[0] == pytest.approx(350, abs=40)
    bundle = starter.write(tmp_path / "flat", Survey.of_plan(planned, 1))
    assert f"image_size: {planned.patch[0]}\n" in (bundle / "configs/train.yaml").read_text()
    inspect(bundle).require()


def test_sites_that_differ_are_named() -> None:
    far = hospital((64, 64, 64), (1, 1, 2))
    bright = replace(far, foreground=(Tally.of_intensities(np.full(10_000, 400.0)),))
    near = hospital((64, 64, 64), (1, 1, 1))
    notes = plan({"near": near, "too": near, "far": bright}).differences
    assert any(note.startswith("far: median spacing of axis 2 is 2 times") for note in notes)
    assert any(note.startswith("far: foreground of channel 0 has mean 400") for note in notes)


def spoilt(change: Callable[[dict[str, Any]], object]) -> str:
    document = hospital((64, 64, 64), (1, 1, 1)).document()
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["spacings"][0].update(total=float("nan")), "NaN, which is not JSON"),
        (lambda d: d["volumes"]["1"].update(count=-3), "$.volumes['1'].count is -3"),
        (lambda d: d.update(cases=10**12), "$.cases is 1000000000000"),
        (lambda d: d.update(channels=1.0), "$.channels is 1.0"),
        (lambda d: d["spacings"][0].update(total=-(10**20)), "total and squares of spacings"),
        (lambda d: d["spacings"][0].update(total=-(10**20), squares=10**40), "a length of 0"),
        (lambda d: d["grid"].update(cells_of_a_doubling=16), "$.grid"),
        (lambda d: d["sizes"][0]["cells"].update({"3": 5}), "cells of sizes hold more"),
        (lambda d: d["foreground"][0].update(squares=1), "total and squares of foreground"),
        (lambda d: d["spacings"][2].update(cells={"-401": 100}), "$.spacings[2].cells"),
        (lambda d: d["volumes"]["1"].update(cells={"401": 100}), "$.volumes['1']"),
        (
            lambda d: d["foreground"][0]["cells"].update({"9": 10**6}),
            "cells of foreground hold more",
        ),
        (lambda d: d["spacings"][2].update(squares=10**30), "squares of spacings: a length of 0"),
        (lambda d: d["extents"][0].update(cells={}, squares=10**60), "a length of 0 or without"),
        (lambda d: d["foreground"][0].update(total=float("inf")), "Infinity, which is not JSON"),
        (lambda d: d["foreground"][0].update(total=10**90), "a number of 91 characters"),
        (lambda d: d["volumes"].update({"3": None}), "volumes of other classes"),
        (lambda d: d.update(cases=True), "$.cases is True"),
        (lambda d: d.update(cases="100"), "$.cases is 100: '100' is not of type"),
        (lambda d: d.update(kind="pictures"), "3 sizes, not 2"),
        (lambda d: d.update(channels=2), "1 foreground, not 2"),
        (lambda d: d.update(noise=True), "$.noise is True"),
        (lambda d: d["classes"].update({"1": "a" * 201}), "$.classes['1'] is aaa"),
        (lambda d: d["classes"].update({"1": "a\nb"}), "$.classes['1'] is a"),
        (lambda d: d["classes"].update({"1": "$x"}), "$.classes['1'] is $x"),
        (lambda d: d.update(images="$x"), "$.images is $x"),
        (
            lambda d: d.update(classes={str(value): f"c{value}" for value in range(1, 300)}),
            "$.classes is {'1': 'c1'",
        ),
        (lambda d: d["orders"].update(RAS=True), "$.orders.RAS is True"),
        (lambda d: d.update(masks="../elsewhere"), "$.masks is ../elsewhere"),
        (lambda d: d.update(form="x"), "medfl fingerprint 1"),
        (lambda d: d.update(form="medfl fingerprint 2"), "'medfl fingerprint 1' was expected"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.pop("sizes"), "sizes"),
    ],
)
def test_hostile_fingerprints_are_refused_by_name(
    change: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "clinic.json"
    file.write_text(spoilt(change))
    assert cli.main(["plan", str(file), "--out", str(tmp_path / "bundle")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "clinic.json" in line
    assert problem in line
    assert not (tmp_path / "bundle").exists()


def test_sites_of_other_tasks_are_refused() -> None:
    site = hospital((64, 64, 64), (1, 1, 1))
    with pytest.raises(InputError, match="class 1 is organ and liver"):
        plan({"a": site, "b": replace(site, classes={**CLASSES, 1: "liver"})})
    with pytest.raises(InputError, match="channels 1 and 2"):
        plan({"a": site, "b": replace(site, channels=2)})


@pytest.mark.parametrize("name", ["$print(1)", "a#b", "background"])
def test_names_of_classes_that_mean_something_in_a_bundle_are_refused(
    name: str, tmp_path: Path
) -> None:
    site = replace(hospital((64, 64, 64), (1, 1, 1)), classes={1: name, 2: "tumour"})
    with pytest.raises(InputError, match="choose other names"):
        starter.write(tmp_path / "planned", Survey.of_plan(plan({"a": site}), 1))


def test_it_is_supervised_deeply_as_by_monai_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all levels but the two coarsest with nnU-Net's weights, by the configuration itself."""
    monkeypatch.setattr("medfl.starter.plan._FILTERS", 8)
    planned = plan({"a": hospital((32, 32, 32), (1, 1, 1))})
    bundle = starter.write(tmp_path / "deep", Survey.of_plan(planned, 1))
    inspect(bundle).require()
    parser = ConfigParser()
    parser.read_config(bundle / "configs/train.yaml")
    network = parser.get_parsed_content("network_def").train()
    levels = network.deep_supr_num + 1
    assert levels == len(network.strides) - 2 == 2
    x = torch.randn(2, 1, *parser["patch_size"])
    y = (x > 1).to(torch.uint8)
    outputs = network(x)
    loss = parser.get_parsed_content("loss")(outputs, y)
    of_output = parser.get_parsed_content("loss_of_output")
    by_hand = torch.stack([of_output(outputs[:, level], y) / 2**level for level in range(levels)])
    torch.testing.assert_close(loss, by_hand.sum() / (2 - 2.0 ** (1 - levels)))

    mine = with_full_size(network)(x)
    assert torch.equal(mine, outputs[:, 0])
    assert torch.equal(open_problem(str(bundle)).loss(mine, y), loss)


@pytest.mark.slow
def test_from_folders_to_a_round(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site's file is what it was shown; the bundle passes our gate and MONAI's checks, and learns a round."""
    where = ["--images", str(folder / "images"), "--masks", str(folder / "masks")]
    where += ["--classes", "organ,tumour"]
    file = tmp_path / "site-1.json"
    command = ["site", "fingerprint", *where, "--min-count", "3", "--json"]
    assert cli.main([*command, "--out", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    assert fingerprint.read(file).document() == json.loads(file.read_text())

    assert cli.main(["plan", str(file), "--memory", "1", "--out", str(tmp_path / "planned")]) == 0
    printed = capsys.readouterr().out
    assert "next: medfl site inspect" in printed
    assert re.search(r"^patch: \d+ x \d+ x \d+ \(", printed, re.MULTILINE)
    assert re.search(r"^network: strides .*; filters \d+", printed, re.MULTILINE)
    bundle = tmp_path / "planned"
    inspect(bundle).require()
    metadata = json.loads((bundle / "configs/metadata.json").read_text())
    jsonschema.validate(metadata, json.loads(SCHEMA.read_text()))
    verify_net_in_out(
        net_id="network_def", meta_file=str(bundle / "configs/metadata.json"), device="cpu",
        config_file=str(bundle / "configs/inference.yaml"),
    )  # fmt: skip
    record = json.loads((bundle / "docs/plan.json").read_text())
    assert {choice["choice"] for choice in record["choices"]} >= {"spacing", "patch", "network"}

    again = tmp_path / "again.json"
    options = ["--data", str(folder), "--min-count", "3", "--out", str(again)]
    assert cli.main(["site", "fingerprint", str(bundle), *options]) == 0
    assert json.loads(again.read_text()) == json.loads(file.read_text())

    run = medfl.run(
        bundle,
        data=folder,
        out=tmp_path / "run",
        jobs=1,
        sites=2,
        rounds=1,
        local_epochs=1,
        say=str,
    )
    row = run.predict()[0]
    assert row["mask"].shape == nib.load(next((folder / "images").glob(f"{row['id']}*"))).shape

    choices = json.loads((tmp_path / "run" / "plan.json").read_text())["choices"]
    assert choices == record["choices"]
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert all(choice["because"] in page for choice in choices)

    # its validation cases decided on the components, and an evaluation does not decide anew
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    scored = [summary["last"], summary["global"]["last"]]
    for metrics in [metrics for scores in scored for metrics in scores["classes"].values()]:
        assert {"largest_component", "validation_dice", "validation_dice_largest"} <= metrics.keys()
        metrics["largest_component"] = 1.0

    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    evaluated = tmp_path / "evaluated"
    command = ["evaluate", str(tmp_path / "run"), "--data", str(folder), "--sites", "1"]
    assert cli.main([*command, "--jobs", "1", "--out", str(evaluated)]) == 0
    config = json.loads((evaluated / "run.json").read_text())["config"]
    assert config["largest_component"] == ["organ", "tumour"]
    assert RunReader(evaluated).largest_components == ["organ", "tumour"]
    asked = {"init": f"run:{tmp_path / 'run'}", "rounds": 0}
    offered = offer(str(bundle), ["north"], requested=asked, data=str(folder))
    assert offered.config == config
    largest = {row["id"]: row for row in medfl.Result(tmp_path / "run").predict()}
    for row in medfl.Result(evaluated).predict():
        if row["id"] in largest:
            np.testing.assert_array_equal(row["mask"], largest[row["id"]]["mask"])
            assert row["dice_organ"] == pytest.approx(largest[row["id"]]["dice_organ"], nan_ok=True)


def test_one_machine_plans_as_its_sites_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--images", str(folder / "images"), "--masks", str(folder / "masks"), "--json"]
    records = []
    for sites in (1, 3):
        out = tmp_path / f"of-{sites}"
        assert cli.main(["plan", *where, "--sites", str(sites), "--out", str(out)]) == 0
        records.append(json.loads(capsys.readouterr().out))
        assert f"sites: {sites}\n" in (out / "configs/federated.yaml").read_text()

    assert records[0]["choices"] == records[1]["choices"]
    assert cli.main(["plan", *where, "--sites", "99", "--out", str(tmp_path / "x")]) == 2
    assert cli.main(["plan", "--out", str(tmp_path / "x")]) == 2


def test_new_plans_for_volumes_unless_it_is_told_not_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CT is clipped then, and the note that it is not is gone."""
    draw(tmp_path / "Dataset001_CT", 6)
    root = tmp_path / "Dataset001_CT"
    for number in range(6):
        (root / "images" / f"c{number:02}.nii.gz").rename(
            root / "images" / f"c{number:02}_0000.nii.gz"
        )

    (root / "images").rename(root / "imagesTr")
    (root / "masks").rename(root / "labelsTr")
    content = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "organ": 1, "tumour": 2}}
    content |= {"numTraining": 6, "file_ending": ".nii.gz"}
    (root / "dataset.json").write_text(json.dumps(content))

    networks = {}
    notes = {}
    for name, more in (("a", []), ("b", ["--no-plan"]), ("c", ["--network", "unet16"])):
        bundle = tmp_path / name
        assert cli.main(["new", str(bundle), "--images", str(root), *more, "--json"]) == 0
        notes[name] = json.loads(capsys.readouterr().out)["notes"]
        inspect(bundle).require()
        networks[name] = (bundle / "configs/train.yaml").read_text()

    assert "_target_: DynUNet" in networks["a"]
    assert "clip: true" in networks["a"]
    assert "otherwise" not in " ".join(notes["a"])
    assert "otherwise" in " ".join(notes["b"])
    assert "network_name: unet8" in networks["b"]
    assert "network_name: unet16" in networks["c"]


def test_pictures_from_a_folder(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    cases = []
    for index in range(4):
        paths = []
        for name in ("images", "masks"):
            path = tmp_path / name / f"{index}.png"
            path.parent.mkdir(exist_ok=True)
            pixels = (
                draws.integers(1, 255, (40, 56), np.uint8)
                if name == "images"
                else np.eye(40, 56, dtype=np.uint8)
            )
            Image.fromarray(pixels).save(path)
            paths.append(str(path))

        cases.append((paths[0], paths[1]))

    told = gather(replace(EMPTY, kind="pictures", classes={1: "organ"}), cases, 0)
    assert [round(tally.length()) for tally in told.sizes] == [40, 56]
    assert told.foreground[0].count == 4 * 40


def test_a_network_of_a_small_patch_has_three_levels() -> None:
    assert len(Network.of((16, 16, 16), (1, 1, 1)).filters) == 3


@pytest.mark.filterwarnings("ignore:.*no allow list.*:UserWarning")
def test_monai_alone_trains_and_evaluates_a_planned_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python -m monai.bundle run` does, with deep supervision and patches."""
    monkeypatch.setattr("medfl.starter.plan._FILTERS", 8)
    draw(tmp_path / "data", 8)
    where = ["--images", str(tmp_path / "data/images"), "--masks", str(tmp_path / "data/masks")]
    bundle = tmp_path / "planned"
    assert cli.main(["plan", *where, "--sites", "1", "--out", str(bundle)]) == 0
    train = str(bundle / "configs/train.yaml")
    ids = {
        "bundle_root": str(bundle),
        "dataset_dir": str(tmp_path / "data"),
        "device": "$torch.device('cpu')",
    }
    monai.bundle.run(config_file=train, max_epochs=2, **ids)
    assert (bundle / "models/model.pt").is_file()
    monai.bundle.run(config_file=[train, str(bundle / "configs/evaluate.yaml")], **ids)
    assert "dice" in (bundle / "output/metrics.csv").read_text()


def real(name: str, folder: Path) -> tuple[Fingerprint, Cases]:
    """Return an empty fingerprint of real images, and their cases."""
    if name == "lungs":
        place = DATA / "covid_cxr_lungs"
        files = sorted((place / "images").iterdir())
        empty = replace(EMPTY, kind="pictures", classes={1: "lungs"})
        return empty, [(str(file), str(place / "masks" / file.name)) for file in files]

    if name == "heads":
        return replace(EMPTY, classes={1: "brain"}), heads(folder)

    if name == "oasis":
        files = sorted((DATA / "oasis_tissue").glob("*_t1ss.nii.gz"))
        empty = replace(EMPTY, classes={1: "csf", 2: "grey", 3: "white"})
        return empty, [(str(file), str(file).replace("t1ss", "tissue")) for file in files]

    files = sorted((DATA / "msd_hippocampus/images").glob("*.nii*"))
    empty = replace(EMPTY, masks="labels", classes={1: "anterior", 2: "posterior"})
    return empty, [(str(file), str(file).replace("/images/", "/labels/")) for file in files]


def heads(folder: Path) -> Cases:
    """Three heads, each with the slices of four scanners: 2, 4 or 6 mm along one axis."""
    cases = []
    for file in sorted((DATA / "brain_t1").glob("*_t1.nii.gz")):
        for number, steps in enumerate([(1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 1)]):
            paths = []
            for path in (file, Path(str(file).replace("_t1.", "_brainmask."))):
                volume = nib.load(path)
                voxels = np.asarray(volume.dataobj)[:: steps[0], :: steps[1], :: steps[2]]
                voxels = (voxels > 0).astype(np.uint8) if path != file else voxels * 1.0
                paths.append(str(folder / f"{number}-{path.name}"))
                nib.save(nib.Nifti1Image(voxels, volume.affine @ np.diag([*steps, 1])), paths[-1])

            cases.append((paths[0], paths[1]))

    return cases


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="no images in shared/data")
@pytest.mark.parametrize("name", ["hippocampus", "oasis", "lungs", "heads"])
def test_real_images_are_planned_alike_at_three_sites(name: str, tmp_path: Path) -> None:
    """One of which has a single case: means and variances of the voxels, and quantiles within the stated error."""
    empty, cases = real(name, tmp_path)
    pooled = gather(empty, cases, 0)
    sites = [gather(empty, part, 0) for part in (cases[:1], cases[1::2], cases[2::2])]
    alone = plan({"all": pooled})
    for order in itertools.permutations(sites):
        assert reduce(add, order) == pooled
        assert plan(dict(zip("abc", order, strict=True))).choices == alone.choices

    values = []
    for image, mask in cases:
        if empty.kind == "volumes":
            x, y = volumes.read_pair(image, mask, len(empty.classes) + 1, 1)
            values.append(x.numpy()[0][y.numpy()[0] > 0].astype(float))
        else:
            pixels, truth, _ = pairs.read_pair(image, mask, channels=1, classes=2, convert=True)
            values.append(pixels[..., 0][truth > 0].astype(float))

    everything = np.concatenate(values)
    foreground = pooled.foreground[0]
    assert foreground.count == len(everything)
    assert foreground.mean == pytest.approx(everything.mean(), rel=1e-12)
    assert foreground.sd**2 == pytest.approx(everything.var(), rel=1e-12)
    for share in (0.005, 0.5, 0.995):
        exact = np.quantile(everything, share, method="inverted_cdf")
        assert foreground.intensity(share) == pytest.approx(exact, rel=0.008)

    assert len(gather(empty, cases, 10).encoded()) < 6000  # bytes that would leave
    if name == "hippocampus":
        # nnU-Net's published plan of this task has a patch of 40 x 56 x 40 voxels of 1 mm
        assert alone.spacing == (1, 1, 1)
        assert alone.patch == pytest.approx((40, 56, 40), abs=8)
