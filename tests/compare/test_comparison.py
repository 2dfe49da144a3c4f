"""Means over seeds, paired tests, ranks and targets, by hand; and their tables."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from medfl.compare import tables
from medfl.compare.comparison import Comparison, MeanSd, read
from medfl.compare.tables import titled
from medfl.core.errors import InputError
from medfl.core.tables import formatted_table
from medfl.report import RunFiles
from tests.compare.test_cost_curves import folder

SCORES = {"fedavg": (0.5, 0.6, 0.7), "fedprox": (0.6, 0.65, 0.8), "moon": (0.4, 0.62, 0.6)}


def finished(
    root: Path, method: str, seed: int, score: float, spec: str = "iid", **more: Any
) -> Path:
    """Write a finished run with this test accuracy, whose validation accuracy is 0.1 in round 1 and 0.3 in round 3."""
    partition = {"sites": {"a": {}}, "spec": spec, "seed": seed}
    data = {"source": "phantom", "checksum": "0" * 64}
    path = folder(
        root, f"{method}-{seed}-{spec}", method, seed=seed, partition=partition, data=data, **more
    )
    pooled = {"accuracy": score, "auroc": score / 2}
    summary = {
        "status": "finished", "judged": "global", "rounds": 3, "personal": None,
        "global": {"last": pooled, "best": pooled},
        "sites": {"mean": score - 0.1, "worst": 0.0}, "bytes_up": 3_000_000, "bytes_down": 3_000_000, "seconds": 30.0,
        "run_hash": "1" * 64,
    }  # fmt: skip
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def grid(root: Path) -> list[Path]:
    return [
        finished(root, method, seed, scores[seed])
        for method, scores in SCORES.items()
        for seed in range(3)
    ]


def test_rows_are_methods_with_their_seeds(tmp_path: Path) -> None:
    found = read(grid(tmp_path))
    assert [(row.method, sorted(row.runs)) for row in found.rows] == [
        (method, [0, 1, 2]) for method in SCORES
    ]
    assert found.partitions == ["iid"]
    assert found.judged_by.name == "global_last_accuracy"
    column = found.judged_by
    spread = MeanSd.of(list(found.rows[0].values(column).values()))
    assert spread is not None
    assert (spread.mean, spread.count) == (pytest.approx(0.6), 3)
    assert spread.sd == pytest.approx(math.sqrt((0.01 + 0 + 0.01) / 3)), "ddof 0"


def test_paired_tests_by_hand(tmp_path: Path) -> None:
    """fedprox - fedavg = 0.1, 0.05, 0.1: mean 0.25 / 3, sd (ddof 1) 0.0288675, t = mean / (sd / sqrt 3) = 5 on 2."""
    found = read(grid(tmp_path))
    test = next(test for test in found.tests("fedavg") if test.row.method == "fedprox")
    assert test.difference == pytest.approx(0.25 / 3)
    sd = math.sqrt(2 * (0.1 - 0.25 / 3) ** 2 / 2 + (0.05 - 0.25 / 3) ** 2 / 2)
    assert test.effect == pytest.approx(0.25 / 3 / sd)
    assert test.effect * math.sqrt(3) == pytest.approx(5)
    assert test.p == pytest.approx(2 * stats.t.sf(5, 2), abs=1e-9)
    half = 4.302652729911275 * sd / math.sqrt(3)  # 97.5 % point of t with 2 degrees of freedom
    assert (test.low, test.high) == (pytest.approx(0.25 / 3 - half), pytest.approx(0.25 / 3 + half))
    assert {test.row.method: test.word for test in found.tests("fedavg")} == {
        "fedprox": "better", "moon": "no clear difference"
    }  # fmt: skip
    with pytest.raises(InputError, match="against nobody; methods are fedavg, fedprox, moon"):
        found.tests("nobody")


def test_a_mean_over_fewer_sites_is_not_compared(tmp_path: Path) -> None:
    """A method without a model for the hospital that was left out would lead by the others' mean."""
    counts = {"fedavg": 3, "fedbn": 2}
    paths = []
    for seed in (0, 1):
        for method, count in counts.items():
            path = finished(tmp_path, method, seed, 0.5)
            summary = json.loads((path / "summary.json").read_text())
            summary |= {"judged": "personal"}
            summary["sites"] |= {"count": count}
            (path / "summary.json").write_text(json.dumps(summary))
            paths.append(path)

    found = read(paths)
    assert found.judged_by.name == "sites_mean"
    assert [len(row.values(found.judged_by)) for row in found.rows] == [2, 0]
    assert found.tests("fedavg") == []
    assert any("a mean of 2 of 3 sites is not compared" in line for line in found.undefined)


def test_equal_differences_and_single_seeds(tmp_path: Path) -> None:
    same = [finished(tmp_path, "fedavg", s, 0.5) for s in (0, 1)] + [
        finished(tmp_path, "moon", s, 0.5) for s in (0, 1)
    ]
    (test,) = read(same).tests("fedavg")
    assert (test.difference, test.p, test.effect) == (0, 1, 0)
    assert read([same[0], same[2]]).tests("fedavg") == []


def test_differences_that_are_equal_up_to_rounding_have_no_test(tmp_path: Path) -> None:
    """0.7 - 0.6 and 0.8 - 0.7 differ by 1e-16 in floating point: no evidence of anything."""
    runs = [finished(tmp_path, "fedavg", s, value) for s, value in enumerate((0.6, 0.7, 0.1))]
    runs += [finished(tmp_path, "moon", s, value) for s, value in enumerate((0.7, 0.8, 0.2))]
    (test,) = read(runs).tests("fedavg")
    assert test.difference == pytest.approx(0.1)
    assert all(math.isnan(value) for value in (test.low, test.high, test.p, test.effect))
    cells = [
        cell.strip()
        for cell in tables.test_table([test], "md", "share").splitlines()[2].strip("|").split("|")
    ]
    assert cells[3:] == ["3", "+10.0", "–", "–", "–", "no clear difference"]


def test_ranks_are_means_over_seeds_with_ties_shared(tmp_path: Path) -> None:
    """Seed 0: fedprox, fedavg, moon; seed 1: fedprox, moon, fedavg; seed 2: fedprox, fedavg, moon."""
    ranks = read(grid(tmp_path)).ranks()
    assert ranks == {"fedavg": pytest.approx(7 / 3), "fedprox": 1, "moon": pytest.approx(8 / 3)}


def test_targets_count_rounds_bytes_and_seconds(tmp_path: Path) -> None:
    found = read(grid(tmp_path))
    run = next(iter(found.rows[0].runs.values()))
    assert [point[0] for point in run.progress()] == [1, 3]
    assert found.target_value("fedavg", "iid") == pytest.approx(0.3)
    target = found.to_reach(found.rows[0], 0.2)
    assert (target.reached, target.count) == (3, 3)
    assert target.rounds == MeanSd(3, 0, 3)
    assert target.bytes == MeanSd(6e6, 0, 3)
    assert found.to_reach(found.rows[0], 0.9).rounds is None
    with pytest.raises(InputError, match="target x; a number, or one of"):
        found.target_value("x", "iid")


def test_what_cannot_be_compared_is_one_line(tmp_path: Path) -> None:
    one = finished(tmp_path, "fedavg", 0, 0.5)
    (tmp_path / "again").mkdir()
    twin = finished(tmp_path / "again", "fedavg", 0, 0.5)
    with pytest.raises(InputError, match="are both fedavg with seed 0"):
        read([one, twin])
    with pytest.raises(InputError, match="no runs"):
        Comparison([])
    other = finished(tmp_path, "moon", 0, 0.5, bundle="other")
    with pytest.raises(InputError, match="different bundles: other and toy"):
        read([one, other])
    unfinished = folder(tmp_path, "x")
    assert len(Comparison([RunFiles(one)]).rows) == 1
    with pytest.raises(InputError, match="no runs"):
        read([unfinished])


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"lr": 0.01}, {"lr": 0.1}, ", but differ in lr (0.01 and 0.1);"),
        ({"lr": None}, {"lr": 0.1}, ", but differ in lr (not set and 0.1);"),
        ({"config": {"network": "a"}}, {"config": {"network": "b"}}, ", but differ in config.network (a and b);"),
        ({"batch_size": 8}, {"batch_size": 16, "tf32": True},
         ", but differ in batch_size (8 and 16), tf32 (false and true);"),
        ({"messages": "lossless"}, {"messages": "topk"}, ", but differ in messages (lossless and topk);"),
        ({"messages": "lossless"}, {}, " with seed 0;"),
        ({"bundle_path": "here"}, {"bundle_path": "there"}, " with seed 0;"),
    ],
)  # fmt: skip
def test_twins_are_refused_with_the_settings_in_which_they_differ(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], said: str
) -> None:
    (tmp_path / "again").mkdir()
    runs = [
        finished(tmp_path, "fedavg", 0, 0.5, **first),
        finished(tmp_path / "again", "fedavg", 0, 0.5, **second),
    ]
    with pytest.raises(InputError) as caught:
        read(runs)
    assert f"{runs[0]} and {runs[1]} are both fedavg with seed 0" in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_twins_with_other_sites_or_folders_of_images(tmp_path: Path) -> None:
    """How many sites there are sets runs apart; where their images lie does not."""
    (tmp_path / "again").mkdir()
    runs = [finished(tmp_path, "fedavg", 0, 0.5), finished(tmp_path / "again", "fedavg", 0, 0.5)]
    document = json.loads((runs[1] / "run.json").read_text())
    document["partition"]["sites"] = {"a": {}, "b": {}}
    document["data"] |= {"folder": "/elsewhere", "counts": {"train": 3}, "notes": ["x"]}
    (runs[1] / "run.json").write_text(json.dumps(document))
    with pytest.raises(
        InputError, match=re.escape("with seed 0, but differ in sites (1 and 2); rows")
    ):
        read(runs)


def test_the_tables(tmp_path: Path) -> None:
    found = read([*grid(tmp_path), finished(tmp_path, "fedavg", 0, 0.2, "dirichlet:0.1")])
    lines = tables.result_table(found, "iid", "md").splitlines()
    assert lines[0].startswith("| method")
    assert "| 60.0 ± 8.2" in lines[2]
    assert "| 68.3 ± 8.5 " in lines[3], (
        "ahead of moon by 0.2, 0.03, 0.2: the interval includes zero"
    )
    assert "**" not in tables.result_table(found, "iid", "md")
    assert "6.0 ± 0.0" in lines[2]
    assert (
        tables.result_table(found, "dirichlet:0.1", "md")
        .splitlines()[2]
        .startswith("| fedavg   | 1       | 20.0 ")
    )
    latex = tables.result_table(found, "iid", "tex")
    assert "\\toprule" in latex
    assert "\\%" in latex
    assert "fedprox" in latex
    assert "\\textbf" not in latex
    assert latex.isascii()
    assert "+8.3" in tables.test_table(found.tests("fedavg"), "md", "share")
    assert "| fedprox  | 1.00" in tables.rank_table(found.ranks(), "md"), (
        "a partition that not all methods have counts for none"
    )
    tables.write_tables(found, tmp_path)
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert len(rows) == 10
    assert float(rows[0]["global_last_accuracy"]) == 0.5
    assert {row["data_source"] for row in rows} == {"phantom"}
    assert "3 of 3" in tables.target_table(found, "iid", 0.3, "md")


def test_only_what_is_better_than_all_others_is_bold(tmp_path: Path) -> None:
    """Ahead of FedAvg by 0.1, 0.05, 0.1: 0.012 to 0.155 by Student's t."""
    runs = [path for path in grid(tmp_path) if not path.name.startswith("moon")]
    found = read(runs)
    table = tables.result_table(found, "iid", "md")
    assert "**68.3 ± 8.5**" in table.splitlines()[3]
    assert "**60.0" not in table
    assert "\\textbf{68.3 $\\pm$ 8.5}" in tables.result_table(found, "iid", "tex")
    text = tables.write_tables(found, tmp_path)["md"].read_text()
    assert "bold: better than all others by the paired 95 % interval" in text
    assert "**" not in tables.result_table(read(runs[:1] + runs[3:4]), "iid", "md"), (
        "one seed has no interval"
    )


def test_one_seed_is_compared_over_its_test_cases(tmp_path: Path) -> None:
    """12 cases: fedprox is right in all of them, fedavg in 6, moon in 11, which is no clear difference to fedprox."""
    runs = [finished(tmp_path, method, 0, 0.5) for method in ("fedprox", "fedavg", "moon")]
    for path, right in zip(runs, (12, 6, 11), strict=True):
        rows = [f"c{i},a,{i % 2},{i % 2 if i < right else 1 - i % 2}" for i in range(12)]
        (path / "predictions.csv").write_text("\n".join(["id,site,label,predicted", *rows]) + "\n")
        record = json.loads((path / "run.json").read_text()) | {"classes": ["x", "y"]}
        (path / "run.json").write_text(json.dumps(record))
    found = read(runs)
    assert found.tests("fedprox") == []
    words = {
        row.method: (one.value, one.cases, one.word) for row, _, one in found.case_tests("fedprox")
    }
    assert words == {
        "fedavg": (-0.5, 12, "worse"),
        "moon": (pytest.approx(-1 / 12), 12, "no clear difference"),
    }
    text = tables.write_tables(found, tmp_path)["md"].read_text()
    assert "Paired over the test cases of the judged models, one seed: Accuracy" in text
    assert "| -50.0 " in text


HOSTILE = {
    "html": "<script>alert(1)</script>",
    "picture": "<img src=x onerror=alert(1)>",
    "link": "[x](javascript:alert(1))",
    "cell": "a | b | c",
    "line": "a\n\n# b",
    "terminal": "\x1b[31mred",
    "direction": "\u202egnp",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_foreign_run_is_called_is_text_in_a_table(kind: str, tmp_path: Path) -> None:
    """As Python-Markdown and markdown-it read it, the one with HTML."""
    markdown = pytest.importorskip("markdown")
    commonmark = pytest.importorskip("markdown_it")
    name = HOSTILE[kind]
    runs = [finished(tmp_path, "fedavg", 0, 0.5, str(number)) for number in range(2)]
    for run, value in zip(runs, (name, "iid"), strict=True):
        record = json.loads((run / "run.json").read_text())
        record["partition"]["spec"] = value
        (run / "run.json").write_text(json.dumps(record))

    summary = json.loads((runs[0] / "summary.json").read_text()) | {"undefined": [name]}
    (runs[0] / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "out").mkdir()
    text = tables.write_tables(read(runs), tmp_path / "out")["md"].read_text()
    plain = markdown.markdown(text, extensions=["tables"])
    for page in (plain, commonmark.MarkdownIt("commonmark").enable("table").render(text)):
        assert "<script" not in page
        assert "<img" not in page
        assert "<a " not in page
        assert "<h1" not in page

    lengths = {row.count("<td") for row in plain.split("<tr>")} - {0}
    heads = {row.count("<th") for row in plain.split("<tr>")} - {0}
    assert lengths <= heads
    assert lengths
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_table_in_latex_has_its_title_as_caption() -> None:
    table = formatted_table(["a", *"bcd"], [["x", "1", "2", "3"]], "tex")
    made = titled("50 % of data_1; PHANTOM data", table, "tex")
    assert made.splitlines()[:3] == [
        "\\begin{table}", "\\centering", "\\caption{50 \\% of data\\_1; PHANTOM data}"
    ]  # fmt: skip
    assert made.splitlines()[3].startswith("\\begin{tabular}{lrrr}")
    assert made.count("\\begin") == made.count("\\end") == 2
    wide = titled("x", formatted_table(["a", *"bcdefghijk"], [["x"] * 11], "tex"), "tex")
    assert "\\resizebox{\\textwidth}{!}{%\n\\begin{tabular}" in wide
    assert "\\end{tabular}}\n" in wide


def test_runs_on_phantoms_and_on_real_images_make_no_table(tmp_path: Path) -> None:
    real = finished(tmp_path, "fedavg", 1, 0.5)
    run = json.loads((real / "run.json").read_text())
    (real / "run.json").write_text(json.dumps({**run, "data": {**run["data"], "source": "real"}}))
    with pytest.raises(InputError, match="different kinds of images: phantom and real"):
        read([finished(tmp_path, "fedavg", 0, 0.5), real])
