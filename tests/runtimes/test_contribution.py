"""`--contribution`: Shapley values against their definition, and what runs make of them."""

from __future__ import annotations

import csv
import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from medfl.core.errors import InputError
from medfl.data.prepared import Stacked
from medfl.methods import load
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.exchange import Exchange
from medfl.runtimes.registry import Execution
from medfl.runtimes.server.contribution import check, contributions, cost, rows
from medfl.runtimes.simulator import Simulator
from medfl.storage.run_folder import RunFolder
from tests.runtimes.test_task_kinds import Vectors
from tests.support.toy import ToyBundle, run_record


def game(count: int, seed: int = 0) -> dict[frozenset[str], float]:
    """Return a random value for each set of sites."""
    draws = np.random.default_rng(seed)
    names = "abcdefgh"[:count]
    sets = [frozenset(n for i, n in enumerate(names) if bits >> i & 1) for bits in range(2**count)]
    return dict(zip(sets, draws.random(len(sets)).tolist(), strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shapley_values_are_the_mean_gain_over_all_orders(count: int) -> None:
    value = game(count)
    names = "abcdefgh"[:count]
    gains = dict.fromkeys(names, 0.0)
    orders = list(permutations(names))
    for order in orders:
        for place, name in enumerate(order):
            before = frozenset(order[:place])
            gains[name] += (value[before | {name}] - value[before]) / len(orders)

    found = contributions(names, value.__getitem__, 0)
    assert found["shapley"] == pytest.approx(gains, abs=1e-12)
    whole = value[frozenset(names)]
    assert sum(found["shapley"].values()) == pytest.approx(whole - value[frozenset()])
    assert found["left_out"] == {name: whole - value[frozenset(names) - {name}] for name in names}


def test_of_many_sites_few_models_are_asked_for_and_an_additive_game_is_exact() -> None:
    names = [f"s{i}" for i in range(12)]
    worth = {name: float(i) for i, name in enumerate(names, 1)}
    asked = []

    def value(group: frozenset[str]) -> float:
        asked.append(group)
        return sum(worth[name] for name in group)

    found = contributions(names, value, 0)
    assert found == contributions(names, value, 0)
    assert len(set(asked)) < 200
    assert len(asked) == 2 * len(set(asked)), "each set is scored once"
    # an order ends within 1 % of the whole, 78: no gain here is so small
    assert found["shapley"] == pytest.approx(worth)


def test_an_undefined_metric_gives_nothing() -> None:
    assert contributions("ab", lambda group: float("nan"), 0) == {}
    assert contributions("abcdefg", lambda group: 0.5, 0)["shapley"] == dict.fromkeys("abcdefg", 0)


def test_the_table_has_students_intervals_over_the_rounds() -> None:
    values = [0.1, 0.3, -0.1]
    entries: list[Any] = [
        {"contribution": {"shapley": {"a": v}, "left_out": {"a": 2 * v}}} for v in values
    ]
    (row,) = rows([*entries, {}, {"contribution": {}}])
    ends = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (row["site"], row["rounds"]) == ("a", 3)
    assert (row["shapley"], row["shapley_sum"]) == pytest.approx((0.1, 0.3))
    assert (row["shapley_low"], row["shapley_high"]) == pytest.approx(ends)
    assert row["left_out_high"] == pytest.approx(2 * ends[1])
    assert rows(entries[:1])[0]["shapley_low"] == ""


def simulated(
    out: Path, method: str, bundle: Any, workers: Any = Workers, **changes: Any
) -> tuple[dict[str, Any], list[Any]]:
    """Run, or continue, three sites; return summary and rounds."""
    launch = Launch(
        resume=(out / "run.json").is_file(), contribution=changes.pop("contribution", True)
    )
    record = run_record(method=method, **changes)
    folder = RunFolder.existing(out) if launch.resume else RunFolder.create(out)
    folder.write_run(record, {})
    federation = Federation(bundle, load(method), record)
    summary = Simulator(Execution(federation, folder, launch), workers).execute()
    lines = (out / "rounds.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression"])
def test_a_run_s_values_add_up_to_its_gain(tmp_path: Path, kind: str) -> None:
    bundle = ToyBundle(key_metric="loss") if kind == "classification" else Vectors(kind)
    summary, rounds = simulated(tmp_path / "run", "fedavg", bundle)
    key = bundle.key_metric
    sign = 1 if key == "auroc" else -1
    for before, entry in zip(rounds, rounds[1:], strict=False):
        gain = sign * (entry["val"][key] - before["val"][key])
        assert sum(entry["contribution"]["shapley"].values()) == pytest.approx(gain, abs=1e-5)

    table = list(csv.DictReader((tmp_path / "run" / "contribution.csv").read_text().splitlines()))
    assert [row["site"] for row in table] == ["x", "y", "z"]
    mean = np.mean([entry["contribution"]["left_out"]["y"] for entry in rounds])
    assert float(table[1]["left_out"]) == pytest.approx(mean)
    # nothing of it changes the run
    plain, _ = simulated(tmp_path / "plain", "fedavg", bundle, contribution=False)
    assert plain["weights_sha256"] == summary["weights_sha256"]
    assert not (tmp_path / "plain" / "contribution.csv").exists()


def test_a_site_with_wrong_labels_contributes_least(tmp_path: Path) -> None:
    class Mislabelled(ToyBundle):
        def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Stacked:
            stacked = super().prepared(section)
            labels = stacked.targets.clone()
            if section == "train":
                labels[3:8] = (labels[3:8] + 1) % 3  # those of site y

            return Stacked(stacked.items, stacked.inputs, labels)

    bundle = Mislabelled(norm=False, key_metric="loss")
    simulated(tmp_path / "run", "fedavg", bundle, rounds=5, local_epochs=3)
    table = list(csv.DictReader((tmp_path / "run" / "contribution.csv").read_text().splitlines()))
    worth = {row["site"]: float(row["shapley"]) for row in table}
    assert min(worth, key=worth.__getitem__) == "y"
    assert worth["y"] < 0 < worth["z"]
    alone = {row["site"]: float(row["left_out"]) for row in table}
    assert min(alone, key=alone.__getitem__) == "y"


def test_two_runtimes_and_a_resumed_run_give_the_same(tmp_path: Path) -> None:
    bundle = ToyBundle(key_metric="loss")
    _, whole = simulated(tmp_path / "whole", "fedprox", bundle, cohort=0.67)
    _, other = simulated(tmp_path / "monai-fl", "fedprox", bundle, Exchange, cohort=0.67)
    simulated(tmp_path / "parts", "fedprox", bundle, cohort=0.67, rounds=1)
    _, parts = simulated(tmp_path / "parts", "fedprox", bundle, cohort=0.67)
    expected = [entry["contribution"] for entry in whole]
    assert expected == [entry["contribution"] for entry in other]
    assert expected == [entry["contribution"] for entry in parts]
    assert all(entry["contribution"]["shapley"].keys() == {*entry["cohort"]} for entry in whole)
    csvs = [(tmp_path / name / "contribution.csv").read_bytes() for name in ("whole", "parts")]
    assert csvs[0] == csvs[1]


@pytest.mark.parametrize(
    ("method", "remote", "changes", "told"),
    [
        ("scaffold", False, {}, "scaffold: its server does more"),
        ("feddgga", False, {}, "feddgga: its server does more"),
        ("fedper", False, {}, "fedper: it has no model for all sites"),
        ("fedavg", True, {}, "fedavg: the validation images of all sites are not here"),
        ("fedavg", False, {"aggregation": "median"}, "fedavg: --aggregation median is no mean"),
    ],
)
def test_what_has_no_such_value_says_why(
    method: str, remote: bool, changes: dict[str, Any], told: str
) -> None:
    made = Federation(ToyBundle(), load(method), run_record(method=method, **changes))
    with pytest.raises(InputError, match=f"--contribution with method {told}"):
        check(made, remote)


def test_the_cost_is_said() -> None:
    made = Federation(ToyBundle(), load("fedavg"), run_record())
    check(made, False)
    assert cost(made).startswith("contribution: 8 models of 3 sites scored on all 12 validation")
