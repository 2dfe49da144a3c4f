"""`medfl run --folds K`: each case is tested once, patients together, in one folder that can be gone on with."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import medfl
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.datasets import write_phantom
from medfl.datasets.base import sections
from medfl.report import RunFiles, write_report
from medfl.runs import folds
from medfl.runs.launch import federate
from medfl.starter import starter

SMALL = {"rounds": 1, "sites": 1, "local_epochs": 1, "batch_size": 4}
K = 3


def pictures(root: Path) -> Path:
    """Six patients of two pictures each, in two classes that differ in brightness."""
    draws = np.random.default_rng(0)
    for number in range(12):
        name = ("dark", "light")[number // 2 % 2]
        (root / name).mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 120, (16, 16)) + 120 * (name == "light")
        Image.fromarray(pixels.astype(np.uint8)).save(
            root / name / f"p{number // 2}_{number % 2}.png"
        )
    return root


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, dict[str, Any]]:
    """Images, bundle, folder and document of a cross-validation."""
    root = tmp_path_factory.mktemp("folds")
    data = pictures(root / "data")
    bundle = starter.write(root / "mine", starter.survey(data, group_by="^([^_]+)_"), size=16)
    document = folds.cross_validate(
        str(bundle),
        K,
        requested={**SMALL, "data": str(data)},
        out=root / "out",
        jobs=1,
        command="medfl run ...",
    )
    return data, bundle, root / "out", document


def test_a_matrix_of_each_fold_is_made_later(
    done: tuple[Path, Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(done[2], tmp_path / "again"))
    assert not list(root.rglob("cross_site.csv"))
    folds.resume(root, cross_site=True, jobs=1)
    assert len(list(root.rglob("cross_site.csv"))) == K


def test_a_resumed_cross_validation_keeps_what_was_asked_of_each_fold(
    done: tuple[Path, Path, Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(shutil.copytree(done[2], tmp_path / "again"))
    record = json.loads((root / "folds.json").read_text())
    record["settings"] |= {"cross_site": True, "contribution": True}
    (root / "folds.json").write_text(json.dumps(record))
    asked = []

    def noted(*_: Any, launch: Any, **__: Any) -> None:
        asked.append((launch.cross_site, launch.contribution))

    monkeypatch.setattr(folds, "federate", noted)
    folds.resume(root)
    assert asked == [(True, True)] * K


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((path / "predictions.csv").read_text().splitlines()))


def test_each_patient_is_tested_in_one_fold_that_did_not_train_on_it(done: tuple) -> None:
    _, _, out, document = done
    assert document["status"] == "finished"
    assert document["cases"] == 12
    tested: list[str] = []
    for number in range(1, K + 1):
        record = json.loads((out / f"fold-{number}" / "run.json").read_text())
        assert record["config"]["split"] == f"fold:{number}/{K}"
        held = {name: {i for site in record["partition"]["sites"].values() for i in site[name]} for name in
                ("train", "validate", "test")}  # fmt: skip
        patients = {
            name: {ident.split("/")[1].split("_")[0] for ident in ids} for name, ids in held.items()
        }
        assert len(set.union(*patients.values())) == sum(map(len, patients.values())) == 6
        tested += held["test"]
    assert len(tested) == len(set(tested)) == 12


def test_pooled_figures_are_those_of_all_cases(done: tuple) -> None:
    _, _, out, document = done
    found = rows(out)
    assert {row["fold"] for row in found} == {"1", "2", "3"}
    hits = [row["label"] == row["predicted"] for row in found]
    assert document["last"]["accuracy"] == pytest.approx(np.mean(hits))
    by_fold = [
        np.mean([row["label"] == row["predicted"] for row in rows(out / f"fold-{n}")])
        for n in (1, 2, 3)
    ]
    assert [one["accuracy"] for one in document["per_fold"]] == pytest.approx(by_fold)
    assert document["spread"]["accuracy"]["mean"] == pytest.approx(np.mean(by_fold))
    assert document["spread"]["accuracy"]["sd"] == pytest.approx(np.std(by_fold))
    assert json.loads((out / "summary.json").read_text()) == {
        k: v for k, v in document.items() if k != "folder"
    }


def test_the_report_and_the_table_say_the_same(done: tuple) -> None:
    _, _, out, document = done
    page = (out / "report.html").read_text()
    assert "3 folds" in page
    assert 'href="fold-2/report.html"' in page
    assert f"{document['last']['balanced_accuracy']:.3f}" in page
    (out / "report.html").unlink()
    assert write_report(out).read_text() == page
    text = folds.report.Folds.read(out).text()
    assert f"{document['last']['balanced_accuracy']:.3f}" in next(
        x for x in text.splitlines() if x.startswith("pooled")
    )
    assert text.splitlines()[-1] == "real data: mine"


def test_a_fold_is_the_run_that_it_says(done: tuple, tmp_path: Path) -> None:
    """Its configuration alone makes it: nothing of the other folds does."""
    data, bundle, out, document = done
    summary = federate(
        str(bundle),
        config={"split": f"fold:2/{K}"},
        requested={**SMALL, "data": str(data)},
        out=tmp_path / "two",
        jobs=1,
    )
    assert summary["run_hash"] == document["per_fold"][1]["run_hash"]
    recorded = json.loads((out / "fold-2" / "summary.json").read_text())
    assert summary["weights_sha256"] == recorded["weights_sha256"]


def test_each_structure_is_scored_over_all_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the data are named from the working folder."""
    draws = np.random.default_rng(0)
    for number in range(4):
        (tmp_path / "data").mkdir(exist_ok=True)
        Image.fromarray(draws.integers(0, 255, (16, 16)).astype(np.uint8)).save(
            tmp_path / "data" / f"x{number}.png"
        )
        Image.fromarray(np.eye(16, dtype=np.uint8)).save(tmp_path / "data" / f"x{number}_mask.png")
    seen = starter.survey(tmp_path / "data", names=["line"])
    bundle = starter.write(tmp_path / "mine", seen, size=16, network="unet8")
    monkeypatch.chdir(tmp_path)
    found = folds.cross_validate(
        str(bundle), 2, requested={**SMALL, "data": "data"}, out=tmp_path / "out", jobs=1
    )
    assert found["last"]["classes"]["line"]["cases"] == 4
    assert found["last"]["classes"]["line"]["dice"] == pytest.approx(found["last"]["dice"])
    assert found["judged"] == "global"
    assert json.loads((tmp_path / "out" / "folds.json").read_text())["requested"]["data"] == str(
        tmp_path / "data"
    )


def test_what_was_cut_off_is_gone_on_with(
    done: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One fold is done, one has a lost summary, one was not begun: the same figures in the end."""
    data, _, out, document = done
    shutil.copytree(out, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "fold-3")
    for name in ("summary.json", "report.html"):
        (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / "fold-2" / "summary.json").unlink()
    kept = (tmp_path / "out" / "fold-1" / "summary.json").stat().st_mtime_ns
    assert (
        cli.main(["run", "--resume", "--out", str(tmp_path / "out"), "--jobs", "1", "--json"]) == 0
    )
    again = json.loads(capsys.readouterr().out)
    assert again["last"] == document["last"]
    assert [one["run_hash"] for one in again["per_fold"]] == [
        one["run_hash"] for one in document["per_fold"]
    ]
    assert (tmp_path / "out" / "fold-1" / "summary.json").stat().st_mtime_ns == kept
    shutil.rmtree(tmp_path / "out" / "fold-3")
    moved = pictures(tmp_path / "moved")
    Image.fromarray(np.zeros((40, 40), np.uint8)).save(
        moved / "dark" / "p0_0.png", compress_level=0
    )
    with pytest.raises(InputError, match="other images in"):
        folds.resume(tmp_path / "out", {"data": str(moved)})
    assert not (tmp_path / "out" / "fold-3").exists()


def test_all_folds_are_gone_on_with_and_uneven_ones_are_told(
    done: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice of a fold whose metric still rises names the cross-validation's folder, not its own."""
    monkeypatch.setattr(RunFiles, "rise", (0.1, 0.2))
    out, said = Path(shutil.copytree(done[2], tmp_path / "out")), list[str]()
    assert "numbers of rounds" not in folds.report.Folds.read(out).text()
    federate(out=out / "fold-1", resume=True, requested={"rounds": 2}, jobs=1, say=said.append)
    assert said[-1].endswith(
        f"from 0.100 to 0.200: go on with medfl run --resume --out {out} --rounds 4"
    )
    told = "the folds have different numbers of rounds: 2 in fold-1; 1 in fold-2, fold-3; "
    found = folds.report.write(out)
    assert found.notes[1] == f"{told}medfl run --resume --out {out} --rounds 2 makes them the same"
    assert told.split(":")[0] in found.text()
    assert told.removeprefix("the ") in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--folds", "1"], "--folds 1; a whole number from 2 to 100"),
        (["--folds", "7"], "7 folds of 6 patients"),
        (["--folds", "3", "--resume"], "holds no run"),
        (["--folds", "3", "--sandbox"], "--sandbox in Python's own process"),
    ],
)
def test_wrong_wishes_are_refused_and_nothing_is_written(
    flags: list[str], told: str, done: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, bundle, _, _ = done
    assert (
        cli.main(["run", str(bundle), "--data", str(data), "--out", str(tmp_path / "new"), *flags])
        == 2
    )
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_folder_of_folds_is_resumed_with_its_own_settings(
    done: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, bundle, out, _ = done
    assert cli.main(["run", "--resume", "--out", str(out), "--lr", "0.1"]) == 2
    assert "resumed with its own settings" in capsys.readouterr().err
    assert cli.main(["run", str(bundle), "--resume", "--out", str(out)]) == 2
    assert "a cross-validation with --resume and other settings" in capsys.readouterr().err
    assert cli.main(["run", str(bundle), "--folds", "3", "--out", str(out)]) == 2
    assert "or continue: medfl run --resume --out DIR" in capsys.readouterr().err
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "folds.json").write_text(json.dumps({"folds": 3}))
    assert cli.main(["run", "--resume", "--out", str(tmp_path / "bad")]) == 2
    assert "folds.json" in capsys.readouterr().err


def test_a_fold_that_is_a_link_is_not_written_to(
    done: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(done[2], tmp_path / "out")
    shutil.rmtree(out / "fold-2")
    (tmp_path / "home").mkdir()
    (out / "fold-2").symlink_to(tmp_path / "home")
    assert cli.main(["run", "--resume", "--out", str(out)]) == 2
    assert "fold-2 is neither a plain file nor a folder" in capsys.readouterr().err
    assert not [*(tmp_path / "home").iterdir()]


def test_a_bundle_that_cannot_be_divided_is_refused(done: tuple, tmp_path: Path) -> None:
    data, bundle, _, _ = done
    other = shutil.copytree(bundle, tmp_path / "other")
    for file in (other / "configs").glob("*.yaml"):
        file.write_text(
            file.read_text().replace("@split", "None").replace("split: null", "splitting: null")
        )
    with pytest.raises(
        InputError,
        match="--folds with bundle .*other; a shipped bundle, or one that medfl new wrote",
    ):
        folds.cross_validate(
            str(other), 3, requested={**SMALL, "data": str(data)}, out=tmp_path / "out"
        )
    for file in (other / "configs").glob("*.yaml"):
        file.write_text(file.read_text().replace("splitting: null", "split: null"))
    with pytest.raises(InputError, match="does not make folds"):
        folds.cross_validate(
            str(other), 3, requested={**SMALL, "data": str(data)}, out=tmp_path / "out"
        )


def test_another_fault_about_a_split_keeps_its_own_words(done: tuple, tmp_path: Path) -> None:
    data, bundle, _, _ = done
    asked = {
        "requested": {**SMALL, "data": str(data)},
        "config": {"'split'": 1},
        "out": tmp_path / "out",
    }
    with pytest.raises(InputError, match=r"^configuration id \"'split'\" of bundle 'mine'"):
        folds.cross_validate(str(bundle), 3, **asked)


def test_folds_in_python_are_a_call_of_their_own(done: tuple) -> None:
    for call in (
        lambda: medfl.run("mednist", folds=5),
        lambda: medfl.compare("mednist", ["fedavg"], out="x", folds=5),
    ):
        with pytest.raises(
            InputError, match=r"^folds=5; a cross-validation .* use medfl\.runs\.cross_validate\("
        ):
            call()


def test_sections_of_a_table_are_no_folds(done: tuple, tmp_path: Path) -> None:
    data, bundle, _, _ = done
    copied = shutil.copytree(data, tmp_path / "data")
    files = sorted(path.relative_to(copied).as_posix() for path in copied.rglob("*.png"))
    lines = [f"{name},{('train', 'validate', 'test')[n % 3]}" for n, name in enumerate(files)]
    (copied / "cases.csv").write_text("\n".join(["file,section", *lines]) + "\n")
    with pytest.raises(
        InputError, match="table names their sections; .*; take the column 'section' out"
    ):
        folds.cross_validate(
            str(bundle), 3, requested={**SMALL, "data": str(copied)}, out=tmp_path / "out"
        )


def test_shipped_data_sets_have_folds_too(tmp_path: Path) -> None:
    write_phantom("mednist", tmp_path / "data", per_class=10, size=16)
    tested = [
        item["id"]
        for n in (1, 2, 3)
        for item in sections("mednist", tmp_path / "data", f"fold:{n}/3")["test"]
    ]
    assert len(tested) == len(set(tested)) == 60
    for wrong in ("fold:0/3", "fold:4/3", "fold:1/1", "fold:a", "fold:1/3/4"):
        with pytest.raises(InputError, match="fold:NUMBER/COUNT"):
            sections("mednist", tmp_path / "data", wrong)


def test_the_table_of_all_folds_has_no_formula_that_one_of_them_has(
    done: tuple, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(done[2], tmp_path / "folds"))
    file = folder / "fold-2" / "predictions.csv"
    head, first, *lines = file.read_text().splitlines()
    odd = first.split(",")
    odd[1] = "=cmd()"
    file.write_text("\n".join([head, ",".join(odd), *lines]) + "\n")
    write_report(folder)
    with (folder / "predictions.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [row["site"] for row in rows].count("'=cmd()") == 1
    assert not any(cell.startswith("=") for row in rows for cell in row.values())
    assert next(iter(rows[0])) == "id"
    assert [*rows[0]][1] == "fold"


def test_folds_of_somebody_else_are_refused_in_a_line(done: tuple, tmp_path: Path) -> None:
    """Folds that are of different runs, and a record with more than `medfl run --folds` writes."""
    _, _, out, _ = done
    damages = {
        "other classes": (
            "fold-2/run.json",
            lambda text: json.dumps({**json.loads(text), "classes": ["a", "b"]}),
        ),
        "other columns": ("fold-2/predictions.csv", lambda text: text.replace("p_light", "light")),
    }
    for number, (file, damage) in enumerate(damages.values()):
        folder = Path(shutil.copytree(out, tmp_path / str(number)))
        (folder / file).write_text(damage((folder / file).read_text()))
        with pytest.raises(InputError):
            write_report(folder)
    for name, value in (
        ("settings", {"trust": True}),
        ("settings", {"runtime": 5}),
        ("requested", {"bundle": "x"}),
    ):
        record = {**json.loads((out / "folds.json").read_text()), name: value}
        (tmp_path / "folds.json").write_text(json.dumps(record))
        with pytest.raises(InputError, match=f"under .*{name}"):
            folds.resume(tmp_path)
