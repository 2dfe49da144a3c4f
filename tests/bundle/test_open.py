"""`medfl data check` of a bundle of one's own: what is there, what is missing, what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.bundle.open import phantom_folder, with_data
from medfl.cli import verbs as cli
from medfl.core.errors import RunError
from medfl.starter import starter

DRAWS = np.random.default_rng(0)


def picture(path: Path, pixels: np.ndarray | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = DRAWS.integers(0, 255, (8, 8)).astype(np.uint8) if pixels is None else pixels
    Image.fromarray(shown).save(path)


@pytest.fixture
def labelled(tmp_path: Path) -> tuple[Path, Path]:
    for name in "ab":
        for number in range(10):
            picture(tmp_path / "data" / name / f"p{number // 2}_{number}.png")
    bundle = starter.write(tmp_path / "mine", starter.survey(tmp_path / "data"))
    return bundle, tmp_path / "data"


def check(capsys: pytest.CaptureFixture[str], bundle: Path, *flags: str) -> tuple[int, dict, str]:
    code = cli.main(["data", "check", str(bundle), *flags, "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else {}, said.err


def test_counts_patients_and_what_is_left_out_are_said(
    labelled: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, data = labelled
    (data / "empty").mkdir()
    (data / "a" / "notes.txt").write_text("")
    code, found, _ = check(capsys, bundle, "--data", str(data))
    assert (code, found["ok"], found["images"], found["classes"]) == (0, True, 20, ["a", "b"])
    assert found["counts"]["train"] == {"unknown": [7, 7]}
    notes = " | ".join(found["notes"])
    assert "patients are not known" in notes
    assert "folder 'empty'" in notes
    assert "1 files that do not end in" in notes
    (data / "cases.csv").write_text(
        "file,patient,centre\n"
        + "".join(f"{c}/p{n // 2}_{n}.png,{n // 2},{c}\n" for c in "ab" for n in range(10))
    )
    _, found, _ = check(capsys, bundle, "--data", str(data))
    assert found["counts"]["train"].keys() == {"a", "b"}
    assert "5 patients, each in one section" in found["notes"]
    assert cli.main(["data", "check", str(bundle), "--data", str(data)]) == 0
    assert "the data can be used" in capsys.readouterr().out


def test_images_of_a_shipped_bundle_lie_where_a_path_leads_upwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets.write_phantom("mednist", tmp_path / "cohort", per_class=10, size=16)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    opened = with_data(Bundle("mednist"), "../cohort", {})
    assert len(opened.bundle.section("test").items) > 0


def test_what_cannot_be_used_is_said_with_its_name(
    labelled: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, data = labelled
    (data / "a" / "p0_0.png").write_bytes(b"none")
    code, found, error = check(capsys, bundle, "--data", str(data))
    assert (code, found["ok"]) == (2, False)
    assert "p0_0.png" in found["problems"][0]
    assert error.count("\n") == 1
    (data / "b").rename(data / "c")
    _, found, _ = check(capsys, bundle, "--data", str(data))
    assert "folder 'c'" in found["problems"][0]
    assert check(capsys, bundle)[0] == 2
    assert check(capsys, bundle, "--data", str(tmp_path / "none"))[0] == 2


def test_masks_of_other_values_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(6):
        picture(tmp_path / "data" / f"x{number}.png")
        picture(tmp_path / "data" / f"x{number}_mask.png", np.eye(8, dtype=np.uint8))
    bundle = starter.write(tmp_path / "mine", starter.survey(tmp_path / "data"))
    assert check(capsys, bundle, "--data", str(tmp_path / "data"))[1]["ok"]
    picture(tmp_path / "data" / "x3_mask.png", 7 * np.eye(8, dtype=np.uint8))
    (problem,) = check(capsys, bundle, "--data", str(tmp_path / "data"))[1]["problems"]
    assert "x3_mask.png" in problem
    assert "the value 7 at 8 pixels" in problem


def test_other_bundles_are_sent_to_the_preflight(
    labelled: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, data = labelled
    text = (
        (bundle / "configs" / "train.yaml")
        .read_text()
        .replace("classes: [", "classed: [")
        .replace("@classes", "['a']")
    )
    (bundle / "configs" / "train.yaml").write_text(text)
    code, _, error = check(capsys, bundle, "--data", str(data))
    assert code == 2
    assert "run medfl site check" in error


def test_no_sentence_ends_twice(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["site", "check"], ["data", "check"]):
        assert cli.main([*verb, "--help"]) == 0
        said = capsys.readouterr().out
        assert "?." not in said
        assert ".." not in said.replace("...", "")


def test_a_phantom_that_another_command_draws_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    draw = datasets.write_phantom

    def full(name: str, folder: Path) -> Path:
        raise RunError(f"no space for {name} in {folder}")

    def second(name: str, folder: Path) -> Path:
        draw(name, folder, per_class=10, size=16)
        return draw(name, folder, per_class=10, size=16)

    monkeypatch.setattr(datasets, "write_phantom", full)
    with pytest.raises(RunError, match="no space for pneumonia"):
        phantom_folder("pneumonia")
    monkeypatch.setattr(datasets, "write_phantom", second)
    assert datasets.is_phantom(phantom_folder("pneumonia"))
