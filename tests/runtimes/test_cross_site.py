"""`--cross-site`: every model at every site, for each kind of task, on two runtimes, and kept up to date."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from medfl.evaluation.metrics import Cases
from medfl.methods import load
from medfl.report import cross_site
from medfl.report.run_files import RunFiles
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.exchange import Exchange
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.runtimes.tasks import ScoreSiteOnAll
from medfl.storage.run_folder import RunFolder
from tests.runtimes.test_task_kinds import Vectors
from tests.support.toy import ToyBundle, run_record

KEYS = {"classification": "accuracy", "multilabel": "auroc", "regression": "mae"}


def simulated(
    out: Path, method: str, kind: str = "classification", workers: Any = Workers, **more: Any
) -> list[dict[str, str]]:
    """Run, or continue, a run of three sites; return the rows of its matrix."""
    bundle = ToyBundle(key_metric="accuracy") if kind == "classification" else Vectors(kind)
    launch = Launch(resume=(out / "run.json").is_file(), cross_site=more.pop("cross_site", True))
    record = run_record(method=method, **{"rounds": 2, **more})
    folder = RunFolder.existing(out) if launch.resume else RunFolder.create(out)
    folder.write_run(record, {"task": kind, "key_metric": KEYS[kind], "classes": bundle.classes})
    federation = Federation(bundle, load(method), record)
    Simulator(Execution(federation, folder, launch), workers).execute()
    if not (out / "cross_site.csv").is_file():
        return []

    return list(csv.DictReader((out / "cross_site.csv").read_text().splitlines()))


@pytest.mark.parametrize("kind", KEYS)
def test_a_site_s_own_model_has_there_what_sites_csv_says(tmp_path: Path, kind: str) -> None:
    rows = simulated(tmp_path / "run", "ditto", kind)
    table = csv.DictReader((tmp_path / "run" / "sites.csv").read_text().splitlines())
    at_site = {row["site"]: row for row in table}
    owners = [(row["model"], row["of"], row["at"]) for row in rows]
    expected = [("received", "", at) for at in "xyz"]
    assert owners == [*expected, *(("personal", of, at) for of in "xyz" for at in "xyz")]
    key = KEYS[kind]
    for row in rows:
        assert row["cases"] == at_site[row["at"]]["test"]
        if row["of"] in ("", row["at"]):
            assert row[key] == at_site[row["at"]].get(f"{row['model']}_{key}", "")

    # models differ, and so do their scores
    losses = {(row["of"], row["at"]): row.get("loss", row[key]) for row in rows}
    assert len({losses[of, "x"] for of in ("", "x", "y", "z")}) > 1


@pytest.mark.parametrize("method", ["local", "fedavg"])
def test_two_runtimes_leave_the_same(tmp_path: Path, method: str) -> None:
    first = simulated(tmp_path / "simulator", method)
    assert first == simulated(tmp_path / "monai-fl", method, workers=Exchange)
    assert {row["model"] for row in first} == {"local": {"personal"}, "fedavg": {"received"}}[
        method
    ]


def test_a_matrix_is_kept_up_to_date_and_made_later(tmp_path: Path) -> None:
    assert simulated(tmp_path / "later", "local", cross_site=False) == []
    once = simulated(tmp_path / "later", "local")
    assert once == simulated(tmp_path / "once", "local")
    more = simulated(tmp_path / "later", "local", cross_site=False, rounds=3)
    assert more == simulated(tmp_path / "three", "local", rounds=3)
    assert more != once


def test_the_matrix_is_read_shaded_and_averaged(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    simulated(folder, "ditto", "regression")
    matrix = cross_site.read(RunFiles(folder))
    assert matrix is not None
    assert matrix.sites == ["x", "y", "z"]
    assert list(matrix.rows) == ["Global model", *(f"Personalised, {of}" for of in "xyz")]
    cells = {(t, s): c for t, row in matrix.rows.items() for s, c in row.items()}
    assert [key for key, cell in cells.items() if cell.is_own] == [
        (f"Personalised, {of}", of) for of in "xyz"
    ]
    # of an error less is better; a site whose images are easier is not darker for that
    for site in "xyz":
        of_site = [cell for (_, at), cell in cells.items() if at == site]
        shades = [matrix.shade(site, cell) for cell in of_site]
        assert min(shades) == 0
        assert shades.index(max(shades)) == of_site.index(min(of_site, key=lambda cell: cell.value))

    assert max(matrix.shade(at, cell) for (_, at), cell in cells.items()) == 1
    assert cross_site.mean([matrix, matrix]).rows["Global model"]["x"].value == pytest.approx(
        cells["Global model", "x"].value
    )
    cross_site.write(folder)
    text = (folder / "cross_site.md").read_text()
    assert f"| Personalised, y | {cells['Personalised, y', 'x'].value:.3f} |" in text
    assert f"**{cells['Personalised, y', 'y'].value:.3f}**" in text


@pytest.mark.parametrize("kind", KEYS)
def test_models_that_never_meet_others_images_have_no_scores_there(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a job of FLARE across machines: of findings, thresholds were asked of cases that there are not."""
    monkeypatch.setattr(ScoreSiteOnAll, "function", lambda *arguments: Cases((), {}))
    out = tmp_path / "run"
    simulated(out, "local", kind, cross_site=False)
    assert RunFiles(out).summary["site_models"] == {"mean": {"round": 2}, "sd": {"round": 2}}
