"""Sites that lack channels, in runs: --site-channels and --channel-drop."""

from __future__ import annotations

import html
import json
import shutil
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.bundle.open import protocol_of
from medfl.bundle.protocol import resolved
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.flare.offer import offer
from medfl.runs.launch import federate
from medfl.runs.plan import Request, make_plan
from medfl.runtimes import site_channels, site_settings
from medfl.runtimes.federation import Federation
from medfl.runtimes.monai_fl.view import SiteView


@pytest.fixture(scope="module")
def skin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn images of three channels."""
    return datasets.write_phantom(
        "ham10000", tmp_path_factory.mktemp("skin") / "data", per_class=10, size=24
    )


CONFIG = {"network": "small_cnn", "image_size": 16}
ASKED: dict[str, Any] = {
    "sites": 2, "partition": "iid", "rounds": 2, "local_epochs": 1, "batch_size": 16, "site_channels": "site-2=0,2",
    "channel_drop": 0.3,
}  # fmt: skip


def run(skin: Path, out: Path, **changes: Any) -> dict[str, Any]:
    called = {name: changes.pop(name) for name in ("runtime", "jobs", "resume") if name in changes}
    requested = {**ASKED, "data": str(skin), **changes}
    return federate(
        "ham10000", config=CONFIG, requested=requested, out=out, **{"jobs": 1, **called}
    )


def test_a_site_sees_zeros_wherever_its_images_are_used(skin: Path) -> None:
    plan = make_plan(
        Request("ham10000", config=CONFIG, data=str(skin), **{**ASKED, "channel_drop": 0.0})
    )
    made = Federation(plan.bundle, plan.method, plan.run)
    for section in ("train", "validate", "test"):
        lacking = {ident for ident in made.shard("site-2", section).ids}
        pooled = made.pooled(section) if section != "train" else made.shard("site-1", section)
        shards = [made.shard("site-2", section), pooled]
        for shard in shards:
            for ident, (x, _) in zip(shard.ids, shard.batches(1), strict=True):
                assert bool((x[:, 1] == 0).all()) == (ident in lacking)
                assert (x[:, 0] != 0).any()
    assert [SiteView(made, name, Event()).facts for name in made.names] == [
        {},
        {"channels": [0, 2]},
    ]
    site = make_plan(Request("ham10000", config=CONFIG, data=str(skin), **ASKED))
    dropping = Federation(site.bundle, site.method, site.run, prepared=made.sections)
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([x for x, _ in dropping.site("site-1", 1).train.batches(8, generator)])
    gone = (x == 0).flatten(2).all(2)
    assert 0.15 < gone.float().mean() < 0.45  # wrapped once, whatever the sections were taken from
    assert not gone.all(1).any()


@pytest.mark.slow
def test_law1_workers_a_resume_and_monai_fl_give_the_same_bits(skin: Path, tmp_path: Path) -> None:
    whole = run(skin, tmp_path / "whole")
    run(skin, tmp_path / "cut", rounds=1)
    others = [
        federate(out=tmp_path / "cut", resume=True, requested={"rounds": 2}, jobs=1),
        run(skin, tmp_path / "workers", jobs=2, runtime="simulator"),
        run(skin, tmp_path / "monai", runtime="monai-fl"),
    ]
    for other in others:
        assert (other["run_hash"], other["weights_sha256"]) == (
            whole["run_hash"],
            whole["weights_sha256"],
        )
    record = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert (record["site_channels"], record["channel_drop"]) == ("site-2=0,2", 0.3)
    page = html.unescape((tmp_path / "whole" / "report.html").read_text())
    assert "Site 'site-2' lacks channel green: zero in its images." in page


@pytest.mark.flare
def test_law1_flare_gives_the_same_bits(skin: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    whole, other = (
        run(skin, tmp_path / runtime, runtime=runtime) for runtime in ("simulator", "flare")
    )
    assert (other["run_hash"], other["weights_sha256"]) == (
        whole["run_hash"],
        whole["weights_sha256"],
    )


@pytest.mark.parametrize(
    ("bundle", "text", "told"),
    [
        (
            "ham10000",
            "site-2=T1",
            "channel 'T1' of site 'site-2'; the channels of the bundle's images are red, green, blue; choose among ",
        ),
        ("ham10000", "site-2=", "--site-channels site-2=; SITE=NAME,NAME;SITE=NAME, "),
        (
            "ham10000",
            "north=0",
            "--site-channels north=...; the sites of the run are site-1, site-2; ",
        ),
        (
            "pneumonia",
            "site-2=0",
            "--site-channels with images of 1 channel; two or more; leave it out",
        ),
    ],
)
def test_what_the_bundle_or_the_run_does_not_have_is_refused_in_a_line(
    bundle: str, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = [
        "run",
        bundle,
        "--data",
        "phantom",
        "--sites",
        "2",
        "--partition",
        "iid",
        "--out",
        str(out),
    ]
    assert cli.main([*command, "--site-channels", text]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert [line[: len(told) + 7] for line in error] == [f"error: {told}"]
    assert not out.exists()


def test_channels_have_names_where_the_bundle_says_them(tmp_path: Path) -> None:
    copied = tmp_path / "named"
    shutil.copytree(Bundle("ham10000").root, copied)
    file = copied / "configs" / "metadata.json"
    content = json.loads(file.read_text())
    content["network_data_format"]["inputs"]["image"]["channel_def"] = {
        "0": "T1",
        "1": "T2",
        "2": "FLAIR",
    }
    file.write_text(json.dumps(content))
    channels = site_channels.names(Bundle(str(copied)))
    assert channels == ("T1", "T2", "FLAIR")
    assert site_channels.read("a=flair,0;b=1", channels, ["a", "b"]) == {"a": (0, 2), "b": (1,)}
    (copied / "configs" / "federated.yaml").write_text("sites: {a: {channels: [T1]}, b: {}}\n")
    told = resolved("named", protocol_of(str(copied)))
    assert (told["sites"], told["site_channels"]) == (2, "a=T1")
    asked = {"site_channels": "b=1", "unlabelled": "a,b"}
    assert site_settings.of_request_for("b", str(copied), asked) == {
        "site_labels": "", "site_channels": "b=1", "site_spacing": "", "unlabelled": "b",
    }  # fmt: skip


def test_a_job_says_which_channels_its_sites_have() -> None:
    pytest.importorskip("nvflare")
    asked = {"rounds": 2, "batch_size": 8}
    made = offer(
        "ham10000",
        ["north", "south"],
        requested={**asked, "site_channels": "south=0"},
        rehearsal=True,
    )
    assert made.site_channels == "south=0"
    with pytest.raises(InputError, match="channel '7' of site 'south'"):
        offer(
            "ham10000",
            ["north", "south"],
            requested={**asked, "site_channels": "south=7"},
            rehearsal=True,
        )
