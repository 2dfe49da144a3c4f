"""Several runs against the bytes that they sent."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from medfl.cli import main
from medfl.compare.cost_curves import cost_curves
from medfl.compare.labels import labels
from medfl.core.errors import InputError
from medfl.report import RunFiles
from medfl.report.picture import Picture


def folder(
    root: Path,
    name: str,
    method: str = "fedavg",
    rounds: int = 3,
    sent: int = 1_000_000,
    **more: Any,
) -> Path:
    """Write what the picture reads of a run: each round sends `sent` bytes each way, scored in odd rounds."""
    path = root / name
    path.mkdir()
    run = {
        "method": method, "bundle": "toy", "task": "classification", "key_metric": "accuracy", "rounds": rounds,
        "data": {"source": "phantom"}, "partition": {"sites": {"a": {}}}, "options": {}, "classes": ["p", "q"], **more,
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(run))
    entries = [
        {
            "round": r,
            "bytes_up": sent,
            "bytes_down": sent,
            "seconds": 2.0,
            "val": {"accuracy": r / 10} if r % 2 else {},
        }
        for r in range(1, rounds + 1)
    ]
    (path / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_points_are_the_scored_rounds_over_all_bytes_until_then(tmp_path: Path) -> None:
    run = RunFiles(folder(tmp_path, "a"))
    assert run.progress() == [(1, 2e6, 2.0, 0.1), (3, 6e6, 6.0, pytest.approx(0.3))]


def test_runs_are_named_by_method_and_the_options_in_which_they_differ(tmp_path: Path) -> None:
    options = [{"mu": 0.1, "tau": 1}, {"mu": 0.5, "tau": 1}, {"lam": 2}]
    methods = ["moon", "moon", "ditto"]
    runs = [
        RunFiles(folder(tmp_path, str(i), method, options=given))
        for i, (method, given) in enumerate(zip(methods, options, strict=True))
    ]
    assert labels(runs) == ["moon mu=0.1", "moon mu=0.5", "ditto"]


def test_silent_runs_are_named_not_drawn(tmp_path: Path) -> None:
    runs = [RunFiles(folder(tmp_path, "a")), RunFiles(folder(tmp_path, "b", "local", sent=0))]
    picture = cost_curves(runs)
    assert "Dashed" not in picture.caption
    assert picture.title == "Accuracy against what was sent and how long it took, PHANTOM data"
    assert picture.caption.endswith(
        "Not drawn on the left, as they send nothing or were not scored: local."
    )
    unscored = RunFiles(folder(tmp_path, "c", rounds=0))
    with pytest.raises(InputError, match="1 runs without scored rounds"):
        cost_curves([unscored])


def test_each_sites_own_models_are_told_from_a_common_one(tmp_path: Path) -> None:
    path = folder(tmp_path, "a", "fedproto")
    entries = [
        {**json.loads(line), "judged": "personal"}
        for line in (path / "rounds.jsonl").read_text().splitlines()
    ]
    (path / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    caption = cost_curves([RunFiles(path), RunFiles(folder(tmp_path, "b"))]).caption
    assert "Dashed: each site's own model on the site's own images" in caption


def test_seeds_of_a_method_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One colour a method and one marker a seed, also on long lines; a single seed needs no legend."""
    drawn: list[Figure] = []

    def draw(
        name: str,
        title: str,
        caption: str,
        size: tuple[float, float],
        fill: Callable[[Figure], None],
        *,
        layout: str,
    ) -> Picture:
        drawn.append(Figure(figsize=size, layout=layout))
        fill(drawn[-1])
        return Picture(name, b"", title, caption)

    monkeypatch.setattr(sys.modules[cost_curves.__module__], "render", draw)
    runs = [
        RunFiles(folder(tmp_path, f"{method}-{seed}", method, rounds=60, seed=seed))
        for method in ("fedavg", "moon") for seed in (0, 1)
    ]  # fmt: skip
    assert "Markers tell the seeds apart" in cost_curves(runs).caption
    lines = [line for line in drawn[0].axes[0].get_lines() if len(line.get_xdata())]
    looks = [(line.get_color(), line.get_marker()) for line in lines]
    assert len(set(looks)) == 4
    assert looks[0][0] == looks[1][0] != looks[2][0]
    assert looks[0][1] == looks[2][1] != looks[1][1]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        "fedavg",
        "moon",
        "seed 0",
        "seed 1",
    ]
    cost_curves(runs[::2])
    assert [text.get_text() for text in drawn[1].legends[0].get_texts()] == ["fedavg", "moon"]


def test_runs_with_different_metrics_are_not_compared(tmp_path: Path) -> None:
    runs = [folder(tmp_path, "a"), folder(tmp_path, "b", key_metric="dice")]
    with pytest.raises(
        InputError, match="runs of different key metrics: accuracy and dice; one picture"
    ):
        cost_curves([RunFiles(run) for run in runs])


def test_runs_on_other_images_are_not_compared(tmp_path: Path) -> None:
    runs = [
        RunFiles(folder(tmp_path, "a")),
        RunFiles(folder(tmp_path, "b", bundle="other")),
        RunFiles(folder(tmp_path, "c", data={"source": "real"})),
    ]
    with pytest.raises(InputError, match="different bundles: other and toy"):
        cost_curves(runs[:2])
    with pytest.raises(InputError, match="different kinds of images: phantom and real"):
        cost_curves([runs[0], runs[2]])


def test_a_picture_of_drawn_images_says_so(tmp_path: Path) -> None:
    drawn, real = folder(tmp_path, "a"), folder(tmp_path, "b", data={"source": "real"})
    assert cost_curves([RunFiles(drawn)]).title.endswith(", PHANTOM data")
    assert "PHANTOM" not in cost_curves([RunFiles(real)]).title


def test_the_command_writes_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medfl.report.write_report", lambda run: run / "report.html")
    runs = [str(folder(tmp_path, name, seed=seed)) for seed, name in enumerate("ab")]
    file = tmp_path / "new" / "curves.png"
    assert main(["report", *runs, "--curves", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(file)
    assert (
        Picture.read(file).title
        == "Accuracy against what was sent and how long it took, PHANTOM data"
    )
    assert main(["report", *runs, "--curves", str(tmp_path / "curves.txt")]) == 2
    assert "the curves are a PNG file" in capsys.readouterr().err
