"""Reports and tables from synthetic run folders of every shape a run can leave behind."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from medfl.core.errors import InputError
from medfl.report import RunFiles, formatting, result_table, write_report
from medfl.report.model_plots import generated_grid
from tests.support.run_folders import CLASSES, HEADER, Make, build, render


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(build, tmp_path)


def test_page_needs_nothing_but_itself(make: Make, drawn: None) -> None:
    text, page = render(make())
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert all(target.startswith("#") for target in page.loads)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text


def test_page_tells_what_was_run_and_found(make: Make) -> None:
    folder = make()
    _, page = render(folder)
    words = " ".join(page.text.split())
    summary, run = (
        json.loads((folder / "summary.json").read_text()),
        json.loads((folder / "run.json").read_text()),
    )
    for expected in (
        "fedprox on pneumonia",
        "The method fedprox trained for classification into 3 classes at 6 sites over 20 rounds",
        "all sites train for 2 local epochs in batches of 16 at learning rate 0.01, multiplied by 0.98",
        "dirichlet:0.4, seed 0. re-drawn 2 times: a site was empty.",
        run["command"],
        run["run_hash"],
        run["data"]["checksum"],
        "torch 2.15.0",
        "mu=0.1",
        f"{summary['last']['balanced_accuracy']:.3f}",
        f"{summary['best']['auroc']:.3f}",
        "5.38 GB",
        "50 s",
        "Real images",
    ):
        assert " ".join(expected.split()).replace(" ", "") in words.replace(" ", ""), expected
    assert "/secret" not in words
    assert page.tags.count("svg") == 6


def test_site_figures_are_those_of_sites_csv(make: Make) -> None:
    folder = make(sites=2)
    rows = list(csv.DictReader((folder / "sites.csv").read_text().splitlines()))
    received = [float(row["received_balanced_accuracy"]) for row in rows]
    local = [float(row["local_balanced_accuracy"]) for row in rows]
    _, page = render(folder)
    words = " ".join(page.text.split())
    assert f"{np.mean(received):.3f} ± {np.std(received):.3f}" in words
    assert f"{np.mean(local):.3f} ± {np.std(local):.3f}" in words
    assert all(a > b for a, b in zip(received, local, strict=True))
    assert "better at" not in words, (
        "no predictions of the Local models are there, so nothing is clear"
    )


def test_a_plan_is_explained(make: Make) -> None:
    folder = make()
    choices = [
        {"choice": "batch_size", "value": 2, "because": "<b>0.4 GB</b>", "changed_by": "--memory"},
        {"choice": "network", "value": {"strides": [[1, 1], [2, 2]], "filters": [8, 16, 32, 64]}},
    ]
    plan = {"choices": choices, "sites_that_differ": ["north: no case of liver"], "form": "x"}
    (folder / "plan.json").write_text(json.dumps(plan))
    text, page = render(folder)
    words = "".join(page.text.split())
    assert "North:nocaseofliver." in words
    assert "batchsize2<b>0.4GB</b>--memory" in words
    assert "networkstrides1×1,2×2;filters8,16,32,64" in words
    assert 'href="#plan"' in text
    for other in ({"choices": "all"}, [], {**plan, "sites_that_differ": [1]}):
        (folder / "plan.json").write_text(json.dumps(other))
        assert 'id="plan"' not in render(folder)[0]


def test_confusion_matrix_by_hand(make: Make) -> None:
    folder = make(sites=2)
    pairs = [(0, 0), (0, 0), (0, 0), (0, 1), (1, 1), (2, 1)]
    lines = [f"t{i},site-1,{label},{predicted},1,0,0" for i, (label, predicted) in enumerate(pairs)]
    (folder / "predictions.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    _, page = render(folder)
    matrix, foot = "".join(page.text.split()).split("sensitivity")[1].split("precision")
    assert matrix == "normal31040.750" + "bacterialpneumonia01011.000" + "viralpneumonia01010.000"
    assert foot.startswith("1.0000.333–")


@pytest.mark.parametrize("source", ["real", "phantom"])
def test_phantom_is_said_loudly_and_only_then(make: Make, source: str) -> None:
    folder = make(source=source)
    text, page = render(folder)
    assert ("PHANTOM DATA" in page.text) is (source == "phantom")
    assert ('class="alarm"' in text) is (source == "phantom")
    assert ("Real images" in page.text) is (source == "real")
    last = result_table(folder).splitlines()[-1]
    assert last.startswith("PHANTOM data" if source == "phantom" else "real data")


def test_shortened_changes_stand_in_the_page(make: Make) -> None:
    folder = make(aggregation="clip:auto", sites=2, rounds=3)
    entries = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for entry, norm in zip(entries, (2.0, 4.0, 6.0), strict=True):
        entry["observed"] = {
            "clip": 3.0,
            "norm/site-1": norm,
            "share/site-1": 0.25,
            "norm/site-2": 1,
            "share/site-2": 0.75,
        }
    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    words = " ".join(render(folder)[1].text.split())
    assert "The rule clip:auto shortens" in words
    assert "site-1425.0 %2 of 3 rounds" in words
    assert "site-2175.0 %0 of 3 rounds" in words
    assert "shortens" not in render(make("plain"))[1].text


def test_shares_under_a_cap_stand_in_the_page(make: Make) -> None:
    folder = make(max_share=0.5, sites=2, rounds=2)
    entries = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for entry, said in zip(entries, (0.8, 0.6), strict=True):
        entry["observed"] = {
            "share/site-1": 0.5,
            "said/site-1": said,
            "share/site-2": 0.5,
            "said/site-2": 1 - said,
        }
    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    words = " ".join(render(folder)[1].text.split())
    assert "counts for at most 50 %" in words
    assert "site-170.0 %50.0 %" in words
    assert "site-230.0 %50.0 %" in words
    assert "shortens" not in words


def test_names_of_users_are_text(make: Make, drawn: None) -> None:
    bad = "<script>alert('x')</script>"
    sites = [bad, 'a"b onload="x', "$\\frac{1}{0}$", "医院"]
    folder = make(
        sites=sites,
        classes=[bad, "b&b", "c"],
        bundle=bad,
        method=bad,
        command=f"medfl run {bad}",
        options={bad: bad},
        config={bad: [bad]},
        versions={bad: bad},
        run_hash=bad,
        key_metric="balanced_accuracy",
    )
    text, page = render(folder)
    assert "script" not in page.tags
    assert "onload" not in page.tags
    assert bad not in text
    assert bad in page.text
    assert "b&b" in page.text
    assert "$\\frac{1}{0}$" in page.text


def test_no_name_steers_a_page(make: Make, drawn: None) -> None:
    """JSON writes such characters as escapes, so that no look at a file's text finds them."""
    signs = ["\x1b[2J", "\x9b31m", "\u202egnp", "\u2066x", "\u2028", "\U000e0041"]
    sites = [f"a{sign}" for sign in signs]
    name = "".join(signs)
    page = write_report(make(sites=[*sites, "b"], classes=[*signs, "b"], bundle=name, method=name))
    text = page.read_text()
    assert [sign for sign in signs if sign[0] in text] == []


def test_names_of_any_language_stay_as_they_are(make: Make, drawn: None) -> None:
    names = ["क्\u200dष", "می\u200cخواهم", "בית חולים", "👩\u200d⚕️"]
    text = write_report(make(sites=[*names, "b"])).read_text()
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("name", ["partition.png", "pictures/worst-01.png", "pictures/dice.png"])
@pytest.mark.parametrize("kind", ["text", "link", "link to a picture", "pipe", "huge"])
def test_a_report_shows_pictures_of_its_run_alone(
    make: Make, tmp_path: Path, name: str, kind: str
) -> None:
    """Of a folder that somebody has sent: the page, which is sent back, would carry a key or a patient's image."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"PRIVATE KEY")
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "PNG")
    image = tmp_path / "patient.png"
    image.write_bytes(picture.getvalue())
    folder = make()
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    put = {
        "text": lambda: path.write_bytes(secret.read_bytes()),
        "link": lambda: path.symlink_to(secret),
        "link to a picture": lambda: path.symlink_to(image),
        "pipe": lambda: os.mkfifo(path),
        "huge": lambda: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
    }
    put[kind]()
    if (name, kind) == ("partition.png", "pipe"):
        assert "PRIVATE" not in write_report(folder).read_text()
        return

    with pytest.raises(InputError, match="cannot be shown"):
        write_report(folder)


def test_a_folder_of_pictures_elsewhere_and_a_mark_that_is_no_number_are_refused(
    make: Make, tmp_path: Path
) -> None:
    words = PngInfo()
    words.add_text("Mark", "abc")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Image.new("RGB", (4, 4)).save(elsewhere / "masks-a.png", pnginfo=words)
    folder = make()
    (folder / "pictures").symlink_to(elsewhere)
    with pytest.raises(InputError, match="is a link"):
        write_report(folder)
    (folder / "pictures").unlink()
    shutil.copytree(elsewhere, folder / "pictures")
    with pytest.raises(InputError, match="could not convert string to float"):
        write_report(folder)


def test_key_metric_from_a_foreign_bundle_is_text_in_charts(make: Make, drawn: None) -> None:
    key = "$x_<b>"
    folder = make(key_metric=key)
    entries = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for entry in entries:
        entry["val"][key] = entry["val_global"][key] = 3.0
    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    _, page = render(folder)
    assert "$x <b> on the validation set" in page.text
    assert "b" not in page.tags[: page.tags.index("h1")]


def test_unfinished_run(make: Make) -> None:
    folder = make(done=7)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 8, "cohort": ["si')
    _, page = render(folder)
    assert "Not finished: 7 of 20 rounds" in " ".join(page.text.split())
    assert "round 7, pooled validation set" in page.text
    table = result_table(folder)
    assert "unfinished: 7 of 20 rounds" in table
    assert "site-6" in table


@pytest.mark.parametrize(
    ("scores", "rising"),
    [
        (
            [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
            "0.400 to 0.600. More rounds are had with --resume --rounds 12",
        ),
        ([0.5, 0.6, 0.7, 0.7, 0.7, 0.7], ""),
        ([0.1, 0.2, 0.3, 0.4, 0.6, 0.2], ""),
        ([0.1, 0.9], ""),
        ([0.1, 0.2, float("nan"), 0.4, 0.5, 0.6], ""),
    ],
)
def test_a_metric_that_still_rises_is_told(make: Make, scores: list[float], rising: str) -> None:
    folder = make(rounds=len(scores))
    entries = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for entry, score in zip(entries, scores, strict=True):
        entry["val"]["balanced_accuracy"] = score
    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    words = " ".join(render(folder)[1].text.split())
    assert ("Still learning" in words) == bool(rising)
    assert rising in words


def test_no_round_yet(make: Make) -> None:
    folder = make(done=0)
    (folder / "rounds.jsonl").unlink()
    _, page = render(folder)
    assert "Not finished: 0 of 20 rounds" in " ".join(page.text.split())
    assert "svg" not in page.tags


def test_one_round_is_drawn(make: Make, drawn: None) -> None:
    text, page = render(make(rounds=1, sites=1))
    assert page.tags.count("svg") == 6
    assert "at 1 site over 1 round." in " ".join(page.text.split())
    assert "nan" not in text.lower().replace("nano", "")


def test_one_site_has_no_standard_deviation(make: Make) -> None:
    """Nor has its model's score on everybody's test items one beside the mean."""
    folder = make(rounds=1, sites=1, judged="personal")
    summary = json.loads((folder / "summary.json").read_text())
    apart = {
        what: {"round": 1, "balanced_accuracy": value}
        for what, value in (("mean", 0.5), ("sd", 0.0))
    }
    (folder / "summary.json").write_text(json.dumps(summary | {"site_models": apart}))
    text, page = render(folder)
    assert "± 0.000" not in text
    assert "± –" in page.text
    table = result_table(folder)
    assert [set(line.split()[1:]) for line in table.splitlines() if line.startswith("sd ")] == [
        {"–"}
    ]
    assert "each site's model mean" in table
    assert "each site's model sd" not in table


def test_method_without_a_global_model(make: Make) -> None:
    folder = make(judged="personal")
    _, page = render(folder)
    assert "judged by the personalised models" in " ".join(page.text.split())
    assert "Global model" not in page.text
    assert "received" not in result_table(folder)


@pytest.mark.parametrize(
    ("units", "told"), [({"units": {"hd95": "mm"}}, "mm"), ({}, "mm or pixels")]
)
def test_distances_have_their_unit(make: Make, units: dict[str, object], told: str) -> None:
    """Also where one is the metric that a run is judged by; folders of before do not know which it is."""
    folder = make(task="segmentation", key_metric="hd95", rounds=2, classes=["a", "b"])
    (folder / "predictions.csv").unlink()
    for name in ("summary.json", "rounds.jsonl", "sites.csv"):
        text = (folder / name).read_text()
        (folder / name).write_text(
            text.replace("balanced_accuracy", "hd95").replace("auroc", "dice")
        )
    (folder / "summary.json").write_text(
        json.dumps(json.loads((folder / "summary.json").read_text()) | units)
    )
    _, page = render(folder)
    words = " ".join(page.text.split())
    for place in ("HD95 ({}), last", "HD95 ({}) at each site", "HD95 ({}) on the validation set"):
        assert place.format(told) in words
    table = result_table(folder)
    assert f"HD95 ({told})" in table.splitlines()[0]
    assert f"hd95 ({told})  " in table
    assert "dice (" not in table


def test_rounds_without_evaluation_and_loss_that_is_not_a_number(make: Make, drawn: None) -> None:
    folder = make()
    entries = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for entry in entries[::2]:
        entry |= {"val": None, "val_global": None, "val_personal": None}
        entry["sites"] = {site: {"train_loss": float("nan"), "steps": 1} for site in entry["sites"]}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    _, page = render(folder)
    assert page.tags.count("svg") == 6


def test_optional_files_may_be_missing(make: Make) -> None:
    folder = make()
    for name in ("predictions.csv", "sites.csv"):
        (folder / name).unlink()
    _, page = render(folder)
    assert "Confusion matrix" not in page.text
    assert "at each site" not in page.text


def test_segmentation_run_shows_the_stored_partition_picture(make: Make) -> None:
    folder = make(task="segmentation", key_metric="dice")
    run = json.loads((folder / "run.json").read_text()) | {"classes": [], "site_class_counts": {}}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "predictions.csv").unlink()
    Image.new("RGB", (4, 4)).save(folder / "partition.png")
    for name in ("summary.json", "rounds.jsonl", "sites.csv"):
        text = (folder / name).read_text()
        (folder / name).write_text(
            text.replace("balanced_accuracy", "dice").replace("auroc", "hd95")
        )
    _, page = render(folder)
    shown = base64.b64encode((folder / "partition.png").read_bytes()).decode()
    assert f"data:image/png;base64,{shown}" in page.loads
    assert "Dice at each site" in page.text
    assert "95th percentile of surface distances" in page.text


@pytest.mark.slow
def test_pictures_are_embedded_with_their_words(make: Make) -> None:
    folder = make(rounds=2)
    assert "Pictures" not in render(folder)[1].text
    (folder / "pictures").mkdir()
    for number in range(1, 7):
        picture = generated_grid(np.zeros((3, 1, 16, 16)), CLASSES, number)
        (folder / "pictures" / f"{picture.name}.png").write_bytes(picture.png)
    words = PngInfo()
    words.add_text("Title", '"><script>title')
    words.add_text("Description", "<script>caption")
    Image.new("RGB", (2, 2)).save(folder / "pictures" / "spectrum.png", pnginfo=words)
    text, page = render(folder)
    assert "script" not in page.tags
    assert '<img alt="&#34;&gt;&lt;script&gt;title" src="data:image/png;base64,' in text
    assert "<script>caption" in page.text
    assert [f"round {n}" for n in range(1, 7) if f'alt="Generated images after round {n}"' in text] == [
        "round 1", "round 2", "round 4", "round 6"
    ]  # fmt: skip
    assert "2 more rounds are in the run folder" in page.text
    shown = [
        base64.b64decode(target.removeprefix("data:image/png;base64,"))
        for target in page.loads
        if "base64" in target
    ]
    names = ["generated-0001", "generated-0002", "generated-0004", "generated-0006", "spectrum"]
    assert shown == [(folder / "pictures" / f"{name}.png").read_bytes() for name in names]


def test_hundred_sites(make: Make, drawn: None) -> None:
    folder = make(
        sites=100, classes=[f"a rather long name of tissue class number {i}" for i in range(9)]
    )
    text, page = render(folder)
    assert all(f"site-{i} " in page.text for i in range(1, 101))
    assert len(text) < 1_500_000
    lines = result_table(folder).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 45
    assert "80 better sites are in sites.csv" in "\n".join(lines)


def test_same_folder_same_bytes(make: Make, drawn: None) -> None:
    folder = make(rounds=3)
    assert render(folder)[0] == render(folder)[0]


def test_result_table(make: Make) -> None:
    folder = make(sites=["rosendahl", "a hospital with a very long name indeed", "bad\x1b[31mname"])
    rows = list(csv.DictReader((folder / "sites.csv").read_text().splitlines()))
    summary = json.loads((folder / "summary.json").read_text())
    lines = result_table(folder).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[1].split() == ["site", "train", "test", *["received", "personal", "local"] * 2]
    first = lines[3].split()
    names = [
        f"{kind}_{name}"
        for name in ("balanced_accuracy", "accuracy")
        for kind in ("received", "personal", "local")
    ]
    assert first == [
        "rosendahl",
        rows[0]["train"],
        "20",
        *(f"{float(rows[0][name]):.3f}" for name in names),
    ]
    assert lines[4].startswith("a hospital with a very …")
    assert "\x1b" not in "".join(lines)
    mean = next(line for line in lines if line.startswith("mean")).split()
    assert mean[1] == f"{np.mean([float(row[names[0]]) for row in rows]):.3f}"
    text = "\n".join(lines)
    pooled = lines[lines.index("") + 1 :]
    names = ["balanced_accuracy", "accuracy", "f1_macro", "auroc"]
    assert pooled[0].split() == ["pooled", "test", "set", "round", *names]
    for row, kind, when in zip(
        pooled[1:5], ["global"] * 2 + ["personal"] * 2, ["best", "last"] * 2, strict=True
    ):
        values = summary[kind][when]
        assert row.split() == [
            kind,
            when,
            str(values["round"]),
            *(f"{values[name]:.3f}" for name in names),
        ]
    assert "up 2.69 GB, down 2.69 GB, time 50 s" in text
    assert lines[-1] == "real data: pneumonia, checksum 5f2c5f2c5f2c5f2c"


def test_table_lists_the_worst_sites_where_lower_is_better(make: Make) -> None:
    folder = make(sites=30, key_metric="loss")
    values = RunFiles(folder).site_values("received", "loss")
    lines = result_table(folder).splitlines()
    assert lines[3].split()[0] == max(values, key=lambda site: values[site])


@pytest.mark.parametrize(
    ("file", "where", "value"),
    [
        ("run.json", ("rounds",), "20"), ("run.json", ("options",), 3), ("run.json", ("classes",), [1, 2, 3]),
        ("run.json", ("data", "counts"), {"train": None}), ("run.json", ("data", "notes"), "a note"),
        ("run.json", ("partition",), "iid"), ("run.json", ("partition", "sites"), {"site-1": {"train": 3}}),
        ("run.json", ("site_class_counts",), {"site-1": [1, "2", 3]}),
        ("run.json", ("site_class_counts",), {"site-1": [1, -2, 3]}), ("run.json", ("resumed",), [{"round": 3}]),
        ("summary.json", ("global",), []), ("summary.json", ("global", "last"), {"round": 1, "accuracy": "0.5"}),
        ("rounds.jsonl", ("seconds_eval",), None), ("rounds.jsonl", ("seconds",), float("nan")),
        ("rounds.jsonl", ("sites", "site-1"), {"received": 0.5}), ("rounds.jsonl", ("sites", "site-1"), 3),
        ("summary.json", ("sites",), 3), ("summary.json", ("sites",), {"mean": "0.5"}),
        ("summary.json", ("units",), {"hd95": 1}), ("summary.json", ("last", "classes"), {"liver": 0.5}),
        ("summary.json", ("global", "best", "classes"), {"liver": {"dice": "0.5"}}),
        ("rounds.jsonl", ("val_global",), [1]), ("rounds.jsonl", ("cohort",), 3), ("rounds.jsonl", ("round",), "1"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_damage_that_is_named(
    make: Make, file: str, where: tuple[str, ...], value: object
) -> None:
    folder = make(rounds=1)
    document = json.loads((folder / file).read_text())
    node = document
    for name in where[:-1]:
        node = node[name]
    node[where[-1]] = value
    (folder / file).write_text(json.dumps(document) + "\n")
    with pytest.raises(InputError, match=f"{file}.* has .*{where[-1]}.*restore the file"):
        write_report(folder)


def spoil_picture(folder: Path) -> None:
    (folder / "pictures").mkdir()
    (folder / "pictures" / "spectrum.png").write_bytes(b"\x89PNG\r\n\x1a\n")


def spoil_rounds(folder: Path) -> None:
    (folder / "rounds.jsonl").write_text('{"round": 1}\n{oops\n')


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "run.json").unlink(), "has no run.json"),
        (lambda folder: (folder / "run.json").write_text("{"), "run.json: not valid JSON"),
        (lambda folder: (folder / "run.json").write_text("[]"), "run.json holds no JSON object"),
        (lambda folder: (folder / "run.json").write_text("{}"), "run.json lacks method, bundle"),
        (
            lambda folder: (folder / "summary.json").write_bytes(b"\xff\xfe\x00"),
            "summary.json: bytes that are not",
        ),
        (spoil_picture, "pictures cannot be shown: spectrum.png is no whole PNG file"),
        (spoil_rounds, "rounds.jsonl line 2: not valid JSON"),
        (lambda folder: (folder / "rounds.jsonl").write_text("{}\n"), "line 1 lacks round"),
        (
            lambda folder: (folder / "sites.csv").write_text("a,b\n1,2\n"),
            "sites.csv line 2 does not fit",
        ),
        (
            lambda folder: (folder / "sites.csv").write_text("site,train\nx,1,2\n"),
            "sites.csv line 2 has more cells than the header",
        ),
        (
            lambda folder: (folder / "predictions.csv").write_text("id,label,predicted\nx,0,9\n"),
            "line 2 has a class outside 0 to 2",
        ),
        (
            lambda folder: (folder / "predictions.csv").write_text("id,label,predicted\nx,0,\n"),
            "line 2 has no class numbers",
        ),
        (
            lambda folder: (folder / "predictions.csv").write_text("id,label,x\nx,0,0\n"),
            "line 2 has no class numbers",
        ),
        (
            lambda folder: (folder / "sites.csv").write_text(
                "site,received_balanced_accuracy\nx,good\n"
            ),
            "no number in column received_balanced_accuracy",
        ),
    ],
)
def test_damaged_folder_is_named(make: Make, spoil: Callable[[Path], None], said: str) -> None:
    folder = make(rounds=2)
    spoil(folder)
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        write_report(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


def test_run_that_hides_its_data_source_is_refused(make: Make) -> None:
    folder = make(rounds=1, data={"folder": "x"})
    (folder / "report.html").unlink(missing_ok=True)
    with pytest.raises(InputError, match="real or phantom"):
        result_table(folder)


def test_remarks_on_the_images_do_not_tell_where_they_lie(make: Make) -> None:
    run = make("a")
    record = json.loads((run / "run.json").read_text())
    record["data"] |= {
        "folder": "/home/somebody/images",
        "notes": ["/home/somebody/images is a phantom: drawn images"],
    }
    (run / "run.json").write_text(json.dumps(record))
    text = write_report(run).read_text()
    assert "The data folder is a phantom: drawn images." in text
    assert "somebody" not in text


def test_a_command_names_no_folder_of_the_machine() -> None:
    given = "medfl run /home/a/lungs --data='/data/of mine' --out runs/x --init run:/scratch/b --set text=a/b"
    assert (
        formatting.command(given)
        == "medfl run lungs '--data=of mine' --out runs/x --init run:b --set text=a/b"
    )
    assert formatting.command("medfl.run('/home/a')") == "medfl.run('/home/a')"


def test_sites_that_a_table_lacks_are_counted(make: Make) -> None:
    folder = make(rounds=1, sites=["a", "b", "c"])
    lines = (folder / "sites.csv").read_text().splitlines()
    (folder / "sites.csv").write_text("\n".join(lines[:2]) + "\n")
    assert RunFiles(folder).site_names == ("a", "b", "c")
    _, page = render(folder)
    assert "at 3 sites" in " ".join(page.text.split())


@pytest.mark.parametrize(
    "change", [{"seed": [1]}, {"public": {"bundle": 5}}, {"public": {"bundle": "x", "data": {}}}]
)
def test_a_record_of_another_form_is_refused(make: Make, change: dict[str, object]) -> None:
    folder = make()
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(InputError, match=r"run\.json"):
        write_report(folder)


def test_a_learning_rate_that_the_bundle_alone_knows_is_not_told(make: Make) -> None:
    _, page = render(make(lr=None))
    words = " ".join(page.text.split())
    assert "in batches of 16." in words
    assert "None" not in words


def test_entries_that_a_record_may_lack_are_left_out(make: Make, drawn: None) -> None:
    folder = make()
    run = json.loads((folder / "run.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    run.pop("options", None)
    run["data"].pop("checksum", None)
    run["data"].pop("split", None)
    summary.pop("weights_sha256", None)
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "summary.json").write_text(json.dumps(summary))
    assert write_report(folder).is_file()
