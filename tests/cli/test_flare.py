"""`medfl flare` and `medfl site serve`: their flags, what they write, what they refuse."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from medfl.cli import run, verbs as cli
from medfl.core.errors import InputError

pytest.importorskip("nvflare")

from medfl.flare.parts import ALLOWED, SIMULATED
from tests.support.local_federation import ADMIN, LocalFederation


def parse(*given: str) -> Any:
    """Parse as the command line does."""
    return cli.parser().parse_args(list(given))


def call(*given: str) -> int:
    options = parse(*given)
    return int(options.verb(options) or 0)


@pytest.mark.parametrize(("action", "runtime"), [("simulate", "flare"), ("poc", "flare-poc")])
def test_simulate_and_poc_are_a_run_on_another_runtime(action: str, runtime: str) -> None:
    options = parse("flare", action, "pneumonia")
    assert (options.verb, options.bundle, options.runtime) == (run.run, "pneumonia", runtime)


def test_export_writes_a_job_and_says_how_to_submit_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "jobs"
    command = [
        "flare",
        "export",
        "mednist",
        "--sites",
        "north, south",
        "--method",
        "fedprox",
        "--set",
        "mu=0.1",
    ]
    command += [
        "--rounds",
        "3",
        "--rehearsal",
        "--min-replies",
        "1",
        "--deadline",
        "30",
        "--out",
        str(out),
    ]
    assert call(*command, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    job = Path(document["job"])
    run = json.loads((job / "app" / "config" / "run.json").read_text())
    assert (run["method"], run["options"]["mu"], run["rounds"]) == ("fedprox", 0.1, 3)
    assert list(run["partition"]["sites"]) == document["sites"] == ["north", "south"]
    with pytest.raises(InputError, match="exists and is not empty"):
        call(*command)
    assert call(*command[:-1], str(tmp_path / "again")) == 0
    assert f"nvflare job submit -j {tmp_path / 'again'}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_that_submits_a_job_finds_its_kit(tmp_path: Path) -> None:
    """With the kit of a federation whose server is away; without a kit FLARE looks for no server."""
    command = ["flare", "export", "mednist", "--sites", "north", "--rounds", "1", "--rehearsal"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert call(*command, "--out", str(tmp_path / "jobs")) == 0
    kit = LocalFederation(tmp_path / "federation", ["north"], []).kit(ADMIN)
    line = next(
        line.strip() for line in said.getvalue().splitlines() if "nvflare job submit" in line
    )
    command = [
        sys.executable,
        "-m",
        "nvflare.cli",
        *line.replace("ADMIN-KIT", str(kit)).split()[1:],
    ]
    told = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert "Could not connect to the FLARE server" in told.stdout + told.stderr
    assert "kit" not in told.stderr.lower()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--sites", ""], "--sites; different names"),
        (["--sites", "a,a"], "--sites a,a; different names"),
        (["--sites", "a b"], "site 'a b'; letters, digits"),
        (["--sites", "a", "--min-replies", "2"], "--min-replies 2; there are 1 sites"),
        (["--sites", "a", "--min-replies", "0"], "--min-replies 0"),
        (["--sites", "a", "--deadline", "-1"], "--deadline -1"),
        (
            ["--sites", "a", "--method", "fedmd", "--set", "public=mnist"],
            "method 'fedmd', which needs public data",
        ),
    ],
)
def test_what_cannot_be_exported_is_one_line(tmp_path: Path, more: list[str], text: str) -> None:
    with pytest.raises(InputError) as caught:
        call("flare", "export", "mednist", *more, "--out", str(tmp_path / "out"))
    assert text in str(caught.value)
    assert not (tmp_path / "out").exists()


# medfl site serve


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A startup kit, but for certificates."""
    folder = tmp_path / "kit"
    (folder / "startup").mkdir(parents=True)
    (folder / "startup" / "fed_client.json").write_text("{}")
    (folder / "local").mkdir()
    listed = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": ["nvflare.x.Y", SIMULATED[0]],
    }
    (folder / "local" / "resources.json.default").write_text(json.dumps(listed))
    (tmp_path / "data").mkdir()
    return folder


def given(kit: Path) -> list[str]:
    place = kit.parent
    command = [
        "site",
        "serve",
        "mednist",
        "--kit",
        str(kit),
        "--data",
        str(place / "data"),
        "--permit",
        "network",
    ]
    return [
        *command,
        "--folder",
        str(place / "states"),
        "--audit",
        str(place / "log" / "audit.jsonl"),
        "--check",
    ]


def test_serve_writes_what_the_site_says_and_what_may_be_made(
    kit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*given(kit), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["as"], document["bundle"]) == ("site", "mednist")
    said = yaml.safe_load((kit / "local" / "medfl.yaml").read_text())
    assert said == {
        "bundle": "mednist", "data": str(kit.parent / "data"), "folder": str(kit.parent / "states"),
        "audit": str(kit.parent / "log" / "audit.jsonl"), "permits": ["network"],
    }  # fmt: skip
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == ALLOWED
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert call("site", "serve", "--kit", str(kit), "--check") == 0
    assert call(*given(kit)) == 0
    assert json.loads((kit / "local" / "resources.json").read_text()) == resources


def test_serve_never_changes_what_the_site_said(kit: Path) -> None:
    call(*given(kit))
    before = (kit / "local" / "medfl.yaml").read_text()
    with pytest.raises(
        InputError, match="says something else; what a site said is not overwritten"
    ):
        call(*given(kit), "--permit", "image_size")
    assert (kit / "local" / "medfl.yaml").read_text() == before


def test_serve_refuses_what_it_cannot_start(kit: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is written the first time; give BUNDLE and --folder"):
        call("site", "serve", "--kit", str(kit))
    with pytest.raises(InputError, match="both are needed the first time"):
        call("site", "serve", "mednist", "--kit", str(kit))
    with pytest.raises(InputError, match="the folder of a startup kit"):
        call("site", "serve", "--kit", str(tmp_path))
    with pytest.raises(InputError, match="the folder of the site's images"):
        call(
            "site",
            "serve",
            "mednist",
            "--kit",
            str(kit),
            "--folder",
            str(tmp_path / "s"),
            "--check",
        )


@pytest.mark.parametrize("where", ["startup/notes", "local", "local/medfl.yaml"])
def test_serve_follows_no_link_of_a_kit(where: str, kit: Path, tmp_path: Path) -> None:
    """FLARE's process gets a copy of what is in a kit, and has a connection to the server that made it."""
    theirs = tmp_path / "theirs"
    if where == "local":
        (kit / "local").rename(theirs)
    else:
        theirs.write_text("secret")

    (kit / where).symlink_to(theirs)
    with pytest.raises(InputError, match="is neither a plain file nor a folder"):
        call(*given(kit))
    assert not (theirs.is_dir() and (theirs / "medfl.yaml").exists())


def test_serve_refuses_a_bundle_that_is_not_the_pinned_one(kit: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        yaml.safe_dump({"bundle": "mednist", "files": {"configs/train.yaml": "0" * 64}})
    )
    with pytest.raises(InputError, match="is refused"):
        call(*given(kit), "--policy", str(policy))


def test_a_server_s_kit_needs_no_images(kit: Path) -> None:
    (kit / "startup" / "fed_client.json").rename(kit / "startup" / "fed_server.json")
    place = kit.parent
    assert (
        call(
            "site",
            "serve",
            "mednist",
            "--kit",
            str(kit),
            "--folder",
            str(place / "runs"),
            "--check",
        )
        == 0
    )
    assert json.loads((kit / "local" / "resources.json").read_text())["class_allow_list"] == ALLOWED
