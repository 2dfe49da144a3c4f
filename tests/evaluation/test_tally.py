"""Tables of outcomes: they have the metrics of the cases, add up, and tell no small cell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfl.core.errors import RunError
from medfl.evaluation import tally
from medfl.evaluation.metrics import WHOLE, Cases, summarise
from medfl.problem.tasks.multilabel import Multilabel


def classified(count: int, classes: int, seed: int = 0) -> Cases:
    draws = torch.Generator().manual_seed(seed)
    label = torch.randint(classes, (count,), generator=draws)
    logits = torch.randn(count, classes, generator=draws)
    logits[torch.arange(count), label] += 1.5
    values = {"probabilities": logits.softmax(1), "label": label, "loss": torch.rand(count)}
    return Cases(tuple(f"{seed}-{i}" for i in range(count)), values)


def with_findings(count: int, seed: int = 0) -> Cases:
    draws = torch.Generator().manual_seed(seed)
    truth = torch.randint(-1, 2, (count, 3), generator=draws)
    scores = torch.sigmoid(2 * torch.randn(count, 3, generator=draws) + 2 * truth)
    values = {"probabilities": scores, "findings": truth.to(torch.int8)}
    return Cases(tuple(f"{seed}-{i}" for i in range(count)), values)


@pytest.mark.parametrize("classes", [2, 4])
def test_tables_of_two_sites_have_the_metrics_of_all_cases(classes: int) -> None:
    north, south = classified(70, classes), classified(40, classes, seed=1)
    expected = summarise(Cases.concat([north, south]))
    found = tally.outcome(tally.added([tally.of(north), tally.of(south)]))
    assert found.cases == 110
    assert found.metrics.keys() == expected.keys()
    for name in expected.keys() - {"auroc"}:
        assert found.metrics[name] == pytest.approx(expected[name], rel=1e-6), name
    assert 0 < found.error < 0.02
    assert abs(found.metrics["auroc"] - expected["auroc"]) <= found.error
    for name, (low, high) in found.intervals.items():
        assert low <= found.metrics[name] <= high


def numbers_of(count: int, offset: float, seed: int, known: float = 0.8) -> Cases:
    draws = torch.Generator().manual_seed(seed)
    target = offset + 40 * torch.randn(count, 2, generator=draws, dtype=torch.float64)
    prediction = target + 9 * torch.randn(count, 2, generator=draws, dtype=torch.float64)
    target[torch.rand(count, 2, generator=draws) > known] = torch.nan
    values = {"prediction": prediction, "target": target, "loss": torch.rand(count)}
    return Cases(tuple(f"{seed}-{i}" for i in range(count)), values)


@pytest.mark.parametrize("offset", [0.0, 130.0, 1e5])
def test_sums_of_numbers_have_the_metrics_of_all_cases(offset: float) -> None:
    """RMSE, R² and r are no means over cases; of two numbers, of which some are unknown, each is its own."""
    north, south = numbers_of(70, offset, 0), numbers_of(40, offset + 30, 1, known=1.0)
    expected = summarise(Cases.concat([north, south]))
    found = tally.outcome(tally.added([tally.of(north), tally.of(south)]))
    assert {"mae", "rmse", "r2", "pearson"} <= expected.keys()
    for name in ("mae", "rmse", "r2", "pearson"):
        assert found.metrics[name] == pytest.approx(expected[name], rel=1e-6), name
        if offset < 1000:
            assert found.metrics[name] == pytest.approx(expected[name], rel=1e-10), name


def test_equal_numbers_have_no_correlation() -> None:
    equal = numbers_of(30, 0.0, 2, known=1.0)
    for changes in ({"target": 0.1}, {"prediction": 0.7}):
        values = dict(equal.values)
        for name, value in changes.items():
            values[name] = torch.full_like(values[name], value)

        cases = Cases(equal.ids, values)
        names = {"rmse", "r2", "pearson"}
        assert (
            tally.outcome(tally.of(cases)).metrics.keys() & names == summarise(cases).keys() & names
        )


def test_sums_of_few_numbers_stay() -> None:
    cases = numbers_of(30, 0.0, 3, known=0.2)
    assert not any(name.startswith("numbers/") for name in tally.released(tally.of(cases), 10))


def test_findings_are_decided_by_thresholds_of_all_validation_cases() -> None:
    sites = {name: (with_findings(80, i), with_findings(90, 9 + i)) for i, name in enumerate("ab")}
    validation = Cases.concat([pair[0] for pair in sites.values()])
    tested = Cases.concat([pair[1] for pair in sites.values()])
    expected = summarise(Multilabel().decided(tested, validation))
    found = tally.examined(
        {name: {"validate": tally.of(v), "test": tally.of(t)} for name, (v, t) in sites.items()},
        decides=True,
        key="auroc",
    )
    assert found is not None
    assert not found.lines
    assert abs(found.pooled.metrics["auroc"] - expected["auroc"]) <= found.pooled.error
    for name in ("f1", "sensitivity", "specificity", "average_precision"):
        assert found.pooled.metrics[name] == pytest.approx(expected[name], abs=0.02)
    assert sorted(found.sites) == ["a", "b"]


def test_scores_and_errors_of_cases_add_up() -> None:
    draws = torch.Generator().manual_seed(0)
    target = 40 + torch.randn(60, 1, generator=draws, dtype=torch.float64)
    target[3, 0] = torch.nan
    values = {
        "target": target,
        "prediction": target.nan_to_num() + torch.randn(60, 1, generator=draws).double(),
        "dice": torch.rand(60, generator=draws),
        f"{WHOLE}their_own": torch.full((60,), 0.25, dtype=torch.float64),
    }
    cases = Cases(tuple(map(str, range(60))), values)
    parts = [tally.of(cases.select(list(range(*ends)))) for ends in ((0, 25), (25, 60))]
    found = tally.outcome(tally.added(parts))
    expected = summarise(cases)
    for name in ("mae", "dice"):
        low, high = found.intervals[name]
        assert low < found.metrics[name] < high
        assert found.metrics[name] == pytest.approx(expected[name])

    assert found.metrics["their_own"] == expected["their_own"] == 0.25
    assert "their_own" not in found.intervals


def test_what_a_small_cell_hides() -> None:
    table = np.array([[30, 12], [4, 25]])
    whole = {"cases": np.array([71]), "confusion": table, "mean/dice": np.array([3.0, 2, 2])}
    shown = tally.released(whole, 0)
    assert shown.keys() == whole.keys()
    shown = tally.released(whole, 10)
    assert shown["hits"].tolist() == [55, 16]
    assert shown.keys() == {"cases", "hits"}
    assert tally.outcome(shown).metrics == {"accuracy": 55 / 71}
    assert tally.released(whole, 72) == {}


def test_bins_grow_until_none_is_small() -> None:
    full = tally.of(classified(400, 2))
    shown = tally.released(full, 10)
    assert shown["scores/1"].shape[1] < full["scores/1"].shape[1]
    assert shown["scores/1"].min() >= 10
    fine, coarse = tally.outcome(full), tally.outcome(shown)
    assert fine.error < coarse.error
    assert abs(fine.metrics["auroc"] - coarse.metrics["auroc"]) <= fine.error + coarse.error
    both = tally.added([full, shown])
    assert both["scores/1"].shape == shown["scores/1"].shape


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("confusion", torch.ones(3, 3, dtype=torch.int64)),
        ("confusion", torch.tensor([[1, -1], [1, 1]])),
        ("confusion", torch.ones(2, 2)),
        ("scores/1", torch.ones(2, 127, dtype=torch.int64)),
        ("scores/7", torch.ones(2, 64, dtype=torch.int64)),
        ("mean/dice", torch.tensor([3.0, torch.nan, 1.0], dtype=torch.float64)),
        ("mean/d\x1b", torch.ones(3, dtype=torch.float64)),
        ("weights", torch.ones(3, dtype=torch.float64)),
    ],
)
def test_odd_tables_are_refused(name: str, table: torch.Tensor) -> None:
    good = tally.tensors(tally.of(classified(20, 2)))
    assert tally.read(good, 2).keys() == good.keys()
    with pytest.raises(RunError, match="is none of a site's outcomes"):
        tally.read({**good, name: table}, 2)
    with pytest.raises(RunError, match="of how many cases"):
        tally.read({"hits": torch.ones(2, dtype=torch.int64)}, 2)
