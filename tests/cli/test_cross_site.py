"""`medfl run --cross-site` and `medfl compare --cross-site` from the command line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from medfl import datasets
from medfl.cli.verbs import main
from medfl.report import cross_site, templating

FEW = ("--config", "image_size=24", "--sites", "2", "--partition", "iid", "--rounds", "1")


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans") / "data"
    datasets.write_phantom("mednist", folder, per_class=10, size=24)
    return folder


def test_a_run_with_local_models(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ["run", "mednist", "--data", str(scans), *FEW, "--cross-site", "--with-local"]
    assert main([*arguments, "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "cross-site: 2 models at 2 sites, 4 examinations at the end" in said
    rows = list(csv.DictReader((out / "cross_site.csv").read_text().splitlines()))
    models = [(row["model"], row["of"], row["at"]) for row in rows]
    local = [("local", of, at) for of in ("site-1", "site-2") for at in ("site-1", "site-2")]
    assert models == [("received", "", "site-1"), ("received", "", "site-2"), *local]
    sites = csv.DictReader((out / "sites.csv").read_text().splitlines())
    own = {row["site"]: row["local_accuracy"] for row in sites}
    assert all(row["accuracy"] == own[row["of"]] for row in rows if row["of"] == row["at"])
    assert "| Local only, site-2 |" in (out / "cross_site.md").read_text()
    page = (out / "report.html").read_text()
    assert "Every model at every site" in page
    assert 'class="share hit"' in page


def test_what_one_model_has_is_said_and_flare_is_refused(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "mednist", "--data", str(scans), *FEW, "--cross-site"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    assert "fedavg has one model for all sites" in capsys.readouterr().err
    out = tmp_path / "flare"
    assert main([*arguments, "--runtime", "flare", "--out", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: --cross-site with 2 sites and --runtime flare; ")
    assert not out.exists()


@pytest.mark.slow
def test_contributions_and_what_has_none(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ["run", "mednist", "--data", str(scans), *FEW, "--contribution", "--out"]
    assert main([*arguments, str(out)]) == 0
    assert "contribution: 4 models of 2 sites scored on all " in capsys.readouterr().err
    rows = csv.DictReader((out / "contribution.csv").read_text().splitlines())
    assert [row["site"] for row in rows] == ["site-1", "site-2"]
    assert "What each site contributed" in (out / "report.html").read_text()

    other = tmp_path / "other"
    assert main([*arguments, str(other), "--method", "scaffold"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: --contribution with method scaffold: its server does more")
    assert not other.exists()


@pytest.mark.slow
def test_a_comparison_has_a_matrix_and_makes_it_later(scans: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid"
    arguments = ["compare", "mednist", "--data", str(scans), *FEW, "--methods", "fedavg,local"]
    arguments += ["--seeds", "0,1", "--out", str(out)]
    assert main(arguments) == 0
    assert not (out / "cross_site.csv").exists()
    assert main([*arguments, "--cross-site"]) == 0
    assert not (out / "contribution.md").exists()
    rows = list(csv.DictReader((out / "cross_site.csv").read_text().splitlines()))
    models = ["fedavg: Global model", "local: Personalised, site-1", "local: Personalised, site-2"]
    assert list(dict.fromkeys(row["model"] for row in rows)) == models
    assert "## Every model at every site" in (out / "cross_site.md").read_text()
    # of local there is nothing to estimate; runs that are done are not trained again
    arguments[arguments.index("0,1")] = "2"
    assert main([*arguments, "--contribution"]) == 0
    assert "Bold: a site's own model" in (out / "cross_site.md").read_text()
    text = (out / "contribution.md").read_text()
    assert "+ is better" in text
    assert "| fedavg | site-1 |" in text
    assert "| local |" not in text


def test_a_page_shows_models_that_were_not_at_every_site() -> None:
    """A local model of a hospital that only tests is scored there alone."""
    cell = cross_site.Cell(0.75, None, 9, False)
    matrix = cross_site.Matrix("accuracy", {"global": {"a": cell, "b": cell}, "new": {"b": cell}})
    page = templating._environment().from_string(
        "{% from 'report_macros.html.j2' import heat with context %}{{ heat(matrix) }}"
    )
    assert page.render(matrix=matrix, level="95 %").count("0.750") == 3
    assert "| new | – | 0.750 |" in matrix.markdown()
