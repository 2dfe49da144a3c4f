"""Who gains: each site against its Local and FedAvg, by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from medfl.cli import main
from medfl.compare.gains import draw, gains
from medfl.core.errors import InputError
from tests.compare.test_cost_curves import folder

SITES = {"big": 30, "tiny": 4}


def finished(
    root: Path,
    method: str,
    scores: dict[str, float],
    seed: int = 0,
    judged: str = "personal",
    name: str = "",
    **more: Any,
) -> Path:
    """Write a finished run of two sites with these test scores."""
    sites = {name: {"train": [str(i) for i in range(n)]} for name, n in SITES.items()}
    partition = {"sites": sites, "spec": "centre", "seed": 0}
    data = {"source": "phantom", "split": "seeded", "counts": {}, "checksum": "0" * 64}
    more = {
        "command": "medfl run",
        "bundle_path": "/toy",
        "run_hash": "1" * 64,
        "versions": {},
        "config": {},
        "protocol": "",
        **more,
    }
    path = folder(
        root, name or f"{method}-{seed}", method, seed=seed, partition=partition, data=data, **more
    )
    summary = {
        "judged": judged,
        "weights_sha256": "2" * 64,
        "bytes_up": 0,
        "bytes_down": 0,
        "rounds": 1,
        "seconds": 1.0,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    kind = "personal" if judged == "personal" else "received"
    with (path / "sites.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["site", f"{kind}_accuracy"])
        writer.writerows(scores.items())
    return path


def three(root: Path) -> list[Path]:
    made = []
    for seed, shift in ((0, 0.0), (1, 0.1)):
        made.append(finished(root, "local", {"big": 0.6, "tiny": 0.3}, seed))
        made.append(finished(root, "fedavg", {"big": 0.5, "tiny": 0.5}, seed, "global"))
        options = {"large": "big"}
        made.append(
            finished(root, "fedhelp", {"big": 0.5 + shift, "tiny": 0.7}, seed, options=options)
        )
    return made


def test_gains_are_differences_to_the_runs_with_the_same_seed(tmp_path: Path) -> None:
    found = gains(three(tmp_path))
    assert found.small == {"tiny"}
    assert found.train == SITES
    helped = found.gains["fedhelp"]
    assert helped["local"]["big"] == pytest.approx([-0.1, 0.0])
    assert helped["local"]["tiny"] == pytest.approx([0.4, 0.4])
    assert helped["fedavg"]["tiny"] == pytest.approx([0.2, 0.2])
    assert found.gains["fedavg"]["local"]["big"] == pytest.approx([-0.1, -0.1])
    assert not any(found.gains["local"].values()), "Local is the reference, not a method that gains"
    assert found.methods == ["fedavg", "fedhelp"]


def test_the_table_and_the_sentences(tmp_path: Path) -> None:
    found = gains(three(tmp_path))
    lines = found.table().splitlines()
    assert lines[0] == (
        "| site | training items | local | fedavg | fedavg − Local | fedhelp | fedhelp − Local | fedhelp − FedAvg |"
    )
    assert lines[3].startswith(
        "| tiny (small) | 4 | 0.300 ± 0.000 | 0.500 ± 0.000 | +0.200 ± 0.000 | 0.700 ± 0.000 | +0.400"
    )
    said = "better at 0 of 2 sites, no clear difference at 2; better at 0 of the 1 small ones"
    assert f"fedhelp against local: {said}" in found.summary(), (
        "equal differences of two seeds are no interval"
    )


def test_better_is_said_where_the_interval_over_the_seeds_excludes_zero(tmp_path: Path) -> None:
    """Gains of 0.1, 0.05, 0.1: mean 0.083 with 0.012 to 0.155 by Student's t; of 0.2, 0.03, 0.2: -0.10 to 0.39."""
    runs = []
    for seed, (big, tiny) in enumerate(((0.1, 0.2), (0.05, 0.03), (0.1, 0.2))):
        runs.append(finished(tmp_path, "local", {"big": 0.6, "tiny": 0.3}, seed))
        runs.append(
            finished(tmp_path, "fedavg", {"big": 0.6 + big, "tiny": 0.3 + tiny}, seed, "global")
        )
    found = gains(runs)
    assert found.words["fedavg"]["local"] == {"big": "better", "tiny": "no clear difference"}
    assert found.summary() == [
        "fedavg against local: better at 1 of 2 sites, no clear difference at 1"
    ]


def test_a_runs_own_local_reference_counts(tmp_path: Path) -> None:
    run = finished(tmp_path, "fedhelp", {"big": 0.7, "tiny": 0.7})
    finished(tmp_path, "local", {"big": 0.6, "tiny": 0.3}).rename(run / "local")
    found = gains([run])
    assert found.gains["fedhelp"]["local"]["tiny"] == pytest.approx([0.4])


def test_each_run_is_measured_against_its_own_local_reference(tmp_path: Path) -> None:
    """Two runs with other settings, each with a Local of these and of its own networks: none may stand for another."""
    runs = []
    for number, level in enumerate((0.6, 0.1)):
        given = {"lr": 0.1 / (1 + number)}
        run = finished(
            tmp_path, "fedhelp", {"big": 0.7, "tiny": 0.7}, name=f"run-{number}", **given
        )
        local = {"big": level, "tiny": level}
        finished(run, "local", local, name="local", options={"bodies": f"body-{number}"}, **given)
        runs.append(run)
    found = gains(runs)
    for label, level in (("fedhelp lr=0.1", 0.6), ("fedhelp lr=0.05", 0.1)):
        assert found.gains[label]["local"]["tiny"] == pytest.approx([0.7 - level])
    assert found.values["local bodies=body-1 lr=0.05"]["tiny"] == [0.1]
    assert found.methods == ["fedhelp lr=0.1", "fedhelp lr=0.05"]
    assert gains([*runs, runs[0] / "local", runs[0]]) == found, (
        "a folder that is given twice counts once"
    )


def test_settings_tell_runs_of_one_method_apart(tmp_path: Path) -> None:
    """The reference of a run is that with its settings."""
    runs = [
        finished(tmp_path, method, {"big": level + lr, "tiny": level}, name=f"{method}-{lr}", lr=lr)
        for method, level in (("fedavg", 0.5), ("moon", 0.6))
        for lr in (0.1, 0.2)
    ]
    found = gains(runs)
    assert found.values["fedavg lr=0.1"]["big"] == [0.6]
    assert found.values["fedavg lr=0.2"]["big"] == [0.7]
    assert found.gains["moon lr=0.2"]["fedavg"]["big"] == pytest.approx([0.1])
    assert found.notes == ()
    assert gains([runs[0], runs[3]]).summary()[-1] == (
        "moon and the fedavg that it is measured against differ in lr"
    )  # fmt: skip


def test_two_runs_that_could_be_meant_are_refused(tmp_path: Path) -> None:
    fedavg, again = (
        finished(tmp_path, "fedavg", {"big": 0.5, "tiny": 0.5}, name=name) for name in "ab"
    )
    moon = finished(tmp_path, "moon", {"big": 0.7, "tiny": 0.7}, lr=0.1)
    with pytest.raises(
        InputError,
        match=rf"{fedavg} and {again} are both fedavg with seed 0; .*settings.*; leave one",
    ):
        gains([fedavg, again, moon])
    other = finished(tmp_path, "fedavg", {"big": 0.5, "tiny": 0.5}, name="c", lr=0.3)
    with pytest.raises(
        InputError,
        match=rf"{moon} could be measured against {fedavg} and {other}; one run of fedavg",
    ):
        gains([fedavg, other, moon])


def test_the_picture_says_what_is_in_it(tmp_path: Path) -> None:
    picture = draw(gains(three(tmp_path)))
    assert picture.png.startswith(b"\x89PNG")
    assert picture.title == "Accuracy: what each site gains, PHANTOM data"
    assert "Small sites on grey" in picture.caption


def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = finished(tmp_path, "moon", {"big": 0.7, "tiny": 0.7})
    with pytest.raises(
        InputError, match="none of which has the data and seed of a run of Local or FedAvg"
    ):
        gains([alone])
    other = finished(tmp_path, "local", {"big": 0.7, "tiny": 0.7}, seed=5)
    with pytest.raises(InputError, match="none of which"):
        gains([alone, other])
    unfinished = folder(tmp_path, "x")
    with pytest.raises(InputError, match="is not finished"):
        gains([unfinished])
    assert main(["report", str(alone), "--gains", str(tmp_path / "g.pdf")]) == 2
    assert "the gains are a PNG file" in capsys.readouterr().err


def test_drawn_images_are_told_from_real_ones(tmp_path: Path) -> None:
    runs = [finished(tmp_path, method, {"big": 0.5, "tiny": 0.6}) for method in ("local", "fedavg")]
    assert draw(gains(runs)).title.endswith(", PHANTOM data")
    real = finished(tmp_path, "fedprox", {"big": 0.5, "tiny": 0.6})
    run = json.loads((real / "run.json").read_text())
    (real / "run.json").write_text(json.dumps({**run, "data": {**run["data"], "source": "real"}}))
    with pytest.raises(InputError, match="runs of different kinds of images: phantom and real"):
        gains([*runs, real])


@pytest.mark.slow
def test_the_verb_writes_the_picture_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(path) for path in three(tmp_path)]
    assert main(["report", *folders, "--gains", str(tmp_path / "out" / "g.png")]) == 0
    told = capsys.readouterr().out
    assert "| tiny (small) | 4 |" in told
    assert (tmp_path / "out" / "g.png").is_file()
    assert main(["report", *folders, "--json", "--gains", str(tmp_path / "g.png")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gains"]["fedhelp"]["local"]["tiny"] == pytest.approx([0.4, 0.4])
    assert document["small"] == ["tiny"]
