"""A published table from one command: a part of its grid on drawn images, its figures beside ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from medfl import datasets
from medfl.cli import verbs as cli
from medfl.compare.comparison import read
from medfl.compare.papers.runs import published

PART = (
    "--methods", "fedavg,fedetf", "--partition", "dirichlet:0.1", "--seeds", "0", "--scale", "0.005",
    "--config", "network=small_cnn", "--config", "image_size=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def lesions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "kvasir_v2", tmp_path_factory.mktemp("scans") / "data", per_class=20, size=16
    )


def table(lesions: Path, out: Path, *arguments: str) -> int:
    return cli.main(
        [
            "compare",
            "--paper",
            "fedbm/table2",
            "--data",
            str(lesions),
            "--out",
            str(out),
            *arguments,
        ]
    )


@pytest.mark.slow
def test_a_part_of_a_table_runs_and_stands_beside_the_published_figures(
    lesions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table(lesions, tmp_path / "out", *PART) == 0
    told = capsys.readouterr()
    assert "of 200 rounds, changed: network=small_cnn, image_size=16, data=" in told.err
    lines = [line for line in told.out.splitlines() if line.startswith("| dirichlet:0.1 | FedAvg")]
    assert len(lines) == 2
    assert "67.0 ± 1.7" in lines[0], "as published"
    assert told.out.splitlines()[-1] == "PHANTOM data, drawn by a program: kvasir_v2"
    assert "FedETF" in told.out
    assert "FedProx" not in "".join(
        line for line in told.out.splitlines() if line.startswith("| dirichlet")
    )
    text = (tmp_path / "out" / "published.md").read_text()
    assert text.startswith("# FedBM")
    ours = text.split("## What is ours and not the paper's\n")[1].splitlines()
    assert (
        sum(line.startswith("- fedetf: Departures: the bundle's loss replaces") for line in ours)
        == 1
    )
    assert any(line.startswith("- bundle kvasir_v2: FedBM") for line in ours)
    assert any("text embeddings are all-MiniLM-L6-v2's unless" in line for line in ours)
    assert not any(line.startswith("- fedprox") for line in ours), "of what ran only"
    record = json.loads(next((tmp_path / "out").rglob("run.json")).read_text())
    assert (record["decay_per"], record["site_weights"]) == ("epoch", "uniform")
    assert record["config"]["init_weights"] == "pytorch"
    counts = record["data"]["counts"]
    assert (
        f"images: {counts['train']:,} to train on, {counts['validate']:,} to validate, {counts['test']:,} to test; a "
        f"paper without validation prints {counts['train'] + counts['validate']:,} to train on"
    ) in text
    assert table(lesions, tmp_path / "out", *PART, "--json") == 0
    captured = capsys.readouterr()
    assert "2 runs, 2 of them there already" in captured.err
    document = json.loads(captured.out)
    assert {row["method"] for row in document["rows"]} == {"FedAvg", "FedETF"}

    # the same runs, taken as any comparison: every table that has their methods and partition is put beside them
    found = read([path.parent for path in (tmp_path / "out").rglob("summary.json")])
    rows, *notes, warning = published(found)
    same = [
        [part.strip() for part in line.split("|")[1:4]]
        for line in rows.splitlines()
        if "67.0 ± 1.7" in line
    ]
    assert ["fedbm/table2", "dirichlet:0.1", "FedAvg"] in same
    assert any(note.startswith("fedbm/table2: FedBM") for note in notes)
    assert warning == "ours may have other settings than the papers'"
    elsewhere = replace(found.rows[0], partition="iid")
    found.rows[:] = [elsewhere]
    assert published(found)[0].startswith("no published figures for kvasir_v2 with these methods")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--methods", "moon"), "its bundles are kvasir_v2"),
        (("--partition", "iid"), "partitions dirichlet:0.05, dirichlet:0.1"),
        (("--scale", "2"), "--scale 2; a factor above 0 and at most 1"),
        (("--seeds", "x"), "--seeds x; whole numbers"),
        (("--target", "0.5"), "--target with --paper"),
        (("--against", "fedavg"), "--against with --paper"),
        (("--method", "fedprox mu=1"), "--method with --paper"),
    ],
)
def test_what_is_not_in_the_table_is_one_line(
    lesions: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert table(lesions, tmp_path / "out", *arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line
    assert not (tmp_path / "out").exists()


def test_an_unknown_table_lists_those_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "--paper", "fedbm/table99", "--out", str(tmp_path / "out")]) == 2
    assert "fedhelp/table1" in capsys.readouterr().err
    assert cli.main(["compare", "--scale", "0.5", "mednist", "--out", str(tmp_path / "out")]) == 2
    assert "--scale 0.5 without --paper" in capsys.readouterr().err
