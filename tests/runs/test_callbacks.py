"""Callbacks after each round: what they see, how they end a run, and that they change no weight."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import medfl
from medfl.runtimes.callbacks import asked_to_stop
from medfl.storage.files import load_weights, weights_sha256

QUIET: dict[str, Any] = {"say": str}


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 2))


@pytest.fixture(scope="module")
def parts() -> medfl.Parts:
    """Return noise of two classes, of which nothing can be learnt but by heart."""
    draws = torch.Generator().manual_seed(0)
    items = [{"image": torch.randn(1, 6, 6, generator=draws), "label": i % 2} for i in range(60)]
    data = {"a": items[:30], "b": items[30:]}
    return medfl.Parts(
        linear, data, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.5), classes=("p", "q")
    )


def ended(history: list[tuple[int, dict[str, float]]], folder: Path = Path()) -> medfl.RoundEnd:
    return medfl.RoundEnd(
        history[-1][0], 9, history[-1][1], 0.5, history, "dice", folder, lambda: {}
    )


def test_a_run_that_stops_says_so_and_is_the_same_up_to_there(
    parts: medfl.Parts, tmp_path: Path
) -> None:
    """One worker, two, and a resumed run stop after the same round; the weights are those of so many rounds."""
    stop = medfl.EarlyStopping(patience=2)
    said: list[str] = []
    one = medfl.run(
        parts, rounds=12, out=tmp_path / "one", jobs=1, callbacks=[stop], say=said.append
    )
    done = one.summary["rounds"]
    best = max(one.rounds, key=lambda row: (row["val_balanced_accuracy"], -row["round"]))["round"]
    assert done == best + 2 < 12
    assert one.summary["status"] == "stopped"
    assert one.summary["stopped"] in "\n".join(said)
    assert f"of round {best} for 2 rounds" in one.summary["stopped"]
    assert one.finished
    assert len(one.rounds) == done == one.summary["last"]["round"]
    assert json.loads((tmp_path / "one/run.json").read_text())["callbacks"] == [repr(stop)]
    two = medfl.run(parts, rounds=12, out=tmp_path / "two", jobs=2, callbacks=[stop], **QUIET)
    medfl.run(parts, rounds=1, out=tmp_path / "part", jobs=1, callbacks=[stop], **QUIET)
    part = medfl.run(
        parts, rounds=12, out=tmp_path / "part", jobs=1, callbacks=[stop], resume=True, **QUIET
    )
    plain = medfl.run(parts, rounds=done, out=tmp_path / "plain", jobs=1, **QUIET)
    assert {result.summary["weights_sha256"] for result in (one, two, part, plain)} == {
        one.summary["weights_sha256"]
    }
    assert part.summary["rounds"] == done
    assert plain.summary["status"] == "finished"
    again = medfl.run(
        parts, rounds=12, out=tmp_path / "one", jobs=1, callbacks=[stop], resume=True, **QUIET
    )
    assert again.summary["rounds"] == done
    on = medfl.run(parts, rounds=done + 1, out=tmp_path / "one", jobs=1, resume=True, **QUIET)
    assert (on.summary["status"], on.summary["rounds"], len(on.rounds)) == (
        "finished",
        done + 1,
        done + 1,
    )


def test_a_callback_sees_metrics_and_weights_and_may_stop(
    parts: medfl.Parts, tmp_path: Path
) -> None:
    seen: list[medfl.RoundEnd] = []

    def watch(told: medfl.RoundEnd) -> bool:
        seen.append(told)
        told.weights["1.weight"].zero_()  # a copy
        return told.round == 3

    result = medfl.run(parts, rounds=9, out=tmp_path / "run", jobs=1, callbacks=[watch], **QUIET)
    assert [told.round for told in seen] == [1, 2, 3]
    assert [dict(told.metrics) for told in seen] == [
        {name.removeprefix("val_"): value for name, value in row.items() if name.startswith("val_")}
        for row in result.rounds
    ]
    assert "watch asked for it" in result.summary["stopped"]
    assert weights_sha256(seen[-1].weights) != result.summary["weights_sha256"]
    seen[-1].weights["1.weight"].copy_(
        load_weights(tmp_path / "run/weights.safetensors")["1.weight"]
    )
    assert weights_sha256(seen[-1].weights) == result.summary["weights_sha256"]


def test_the_best_round_is_kept_in_a_file(parts: medfl.Parts, tmp_path: Path) -> None:
    keep = [medfl.BestCheckpoint(tmp_path / f"kept/best{end}") for end in (".pt", ".safetensors")]
    medfl.run(parts, rounds=4, out=tmp_path / "run", jobs=1, callbacks=keep, **QUIET)
    best = load_weights(tmp_path / "run/best.safetensors")
    for found in (torch.load(keep[0].path, weights_only=True), load_weights(Path(keep[1].path))):
        assert weights_sha256(found) == weights_sha256(best)


def test_a_method_without_weights_at_the_server_has_no_checkpoint(
    parts: medfl.Parts, tmp_path: Path
) -> None:
    keep = [medfl.BestCheckpoint(tmp_path / "best.pt")]
    with pytest.raises(medfl.InputError, match="whose server has no weights"):
        medfl.run(parts, "local", rounds=1, out=tmp_path / "run", jobs=1, callbacks=keep, **QUIET)
    assert not (tmp_path / "best.pt").exists()


def test_early_stopping_counts_from_the_best_round() -> None:
    rows = [(n, {"dice": d, "loss": 1 - d}) for n, d in enumerate((0.5, 0.7, 0.7, 0.71, 0.6), 1)]
    assert medfl.EarlyStopping(2)(ended(rows[:3])) is None
    assert "of round 2 for 2 rounds" in (
        medfl.EarlyStopping(2, min_delta=0.05)(ended(rows[:4])) or ""
    )
    assert medfl.EarlyStopping(2, "loss")(ended(rows)) is None
    assert "loss has not become better than 0.29 of round 4" in (
        medfl.EarlyStopping(1, "loss")(ended(rows)) or ""
    )
    with pytest.raises(medfl.InputError, match="the rounds have dice, loss"):
        medfl.EarlyStopping(1, "dise")(ended(rows))
    # of equal predictions there is no correlation, and of numbers and masks no area
    rows = [(1, {"mae": 3.0}), (2, {"mae": 2.0, "pearson": 0.5})]
    assert medfl.EarlyStopping(1, "pearson")(ended(rows[:1])) is None
    assert medfl.EarlyStopping(1, "pearson")(ended(rows)) is None
    for values in rows[0][1], {"dice": 0.5, "loss": 1.0}:
        with pytest.raises(medfl.InputError, match="metric 'auroc'; the rounds have"):
            medfl.EarlyStopping(1, "auroc")(ended([(1, values)]))
    with pytest.raises(medfl.InputError, match="patience from 1"):
        medfl.EarlyStopping(0)
    with pytest.raises(medfl.InputError, match="safetensors or .pt"):
        medfl.BestCheckpoint("best.pth")


def test_a_callback_that_fails_is_named_and_the_round_kept(
    parts: medfl.Parts, tmp_path: Path
) -> None:
    def broken(told: medfl.RoundEnd) -> None:
        raise KeyError("hd95")

    with pytest.raises(
        medfl.RunError, match=r"broken fails after round 1: KeyError: 'hd95'; the round is kept"
    ):
        medfl.run(parts, rounds=2, out=tmp_path / "run", jobs=1, callbacks=[broken], **QUIET)
    result = medfl.run(parts, rounds=2, out=tmp_path / "run", jobs=1, resume=True, **QUIET)
    assert len(result.rounds) == 2
    assert (
        asked_to_stop(
            [lambda _: None, lambda _: 0, lambda _: "enough"], ended([(1, {"dice": 1.0})])
        )
        == "enough"
    )


def test_stopping_by_metrics_needs_rounds_that_are_evaluated(
    parts: medfl.Parts, tmp_path: Path
) -> None:
    with pytest.raises(medfl.InputError, match="EarlyStopping or --patience with eval_every 0"):
        medfl.run(
            parts, eval_every=0, out=tmp_path / "a", callbacks=[medfl.EarlyStopping(2)], **QUIET
        )
    with pytest.raises(medfl.InputError, match="callbacks with --runtime flare"):
        medfl.run(
            "mednist",
            data="phantom",
            out=tmp_path / "a",
            runtime="flare",
            callbacks=[print],
            **QUIET,
        )
    assert not (tmp_path / "a").exists()
