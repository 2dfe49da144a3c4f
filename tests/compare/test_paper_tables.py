"""Published tables: every file can be run as it stands, and its figures meet ours."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from medfl import datasets, methods
from medfl.bundle.bundle import Bundle, shipped
from medfl.bundle.protocol import options_for, resolved
from medfl.compare.comparison import Comparison, read
from medfl.compare.grid import Grid
from medfl.compare.papers import names
from medfl.compare.papers.runs import (
    AVERAGE,
    COUNTS,
    Figure,
    PaperTable,
    averages,
    beside,
    load,
    scaled,
)
from medfl.compare.search import Entry
from medfl.core.errors import InputError
from medfl.data.partition.draw import canonical
from medfl.data.partition.rules import parse
from medfl.runs.plan import Request
from tests.compare.test_comparison import finished
from tests.support.packaged import packaged_files


@lru_cache
def bundle(name: str) -> Bundle:
    return Bundle(name)


def protocol(grid: Grid) -> dict[str, Any]:
    return resolved(grid.bundle, bundle(grid.bundle).protocol, grid.requested.get("presets", ()))


def options(grid: Grid, entry: Entry) -> dict[str, Any]:
    """Return a method's options as a run of the grid records them."""
    own = {
        name: value
        for name, value in grid.options.items()
        if methods.has_option(entry.method, name)
    }
    given = {**options_for(protocol(grid), entry.method), **own, **entry.options}
    return methods.values_of(methods.load(entry.method, given))


def settings(grid: Grid) -> Iterator[tuple[str, int]]:
    """Return (partition, number of sites) of each partition of a grid, as its runs record them."""
    values = protocol(grid)
    for spec in grid.partitions:
        kind, fields = parse(spec or values["partition"])
        yield (
            canonical(kind, fields),
            len(fields) if kind == "counts" else grid.requested.get("sites", values["sites"]),
        )


def test_every_table_of_each_paper_is_here() -> None:
    assert Counter(name.split("/")[0] for name in names()) == {
        "fedbm": 12, "fedcb": 5, "fedhelp": 8, "fedmr": 8, "pfedpm": 2,
    }  # fmt: skip
    with pytest.raises(InputError, match="--paper fedbm/table99; tables are fedbm/table1, "):
        load("fedbm/table99")


def test_the_tables_are_installed_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = packaged_files(monkeypatch)
    assert {Path("medfl", "compare", "papers", f"{name}.yaml") for name in names()} <= packaged


@pytest.mark.parametrize("key", names())
def test_a_table_is_whole_and_can_be_run(key: str) -> None:
    table = load(key)
    asks_for_what_exists(table)
    the_runs_of_its_grids_are_told_apart(table)
    every_figure_has_runs_or_a_note_and_every_run_a_figure(table)
    one_row_of_a_comparison_meets_one_figure_a_metric(table)


def asks_for_what_exists(table: PaperTable) -> None:
    """Bundles, presets, partitions, methods, options and configuration ids; `Request` takes what is requested."""
    assert table.grids
    assert table.figures
    assert table.round in ("last", "best")
    assert table.spread in ("seeds", "sites")
    for grid in table.grids:
        assert grid.bundle in shipped()
        assert len(set(grid.seeds)) == len(grid.seeds)
        for spec, sites in settings(grid):
            assert parse(spec)
            assert sites >= 2
        for entry in grid.entries:
            tasks = methods.method_class(entry.method).tasks
            assert bundle(grid.bundle).task in tasks
            Request(
                grid.bundle,
                entry.method,
                options=options(grid, entry),
                config=grid.config,
                **grid.requested,
            )
        for name in grid.options:
            assert any(methods.has_option(entry.method, name) for entry in grid.entries), name
        if grid.config:
            Bundle(grid.bundle, grid.config)  # refuses an id that its configuration has not


def the_runs_of_its_grids_are_told_apart(table: PaperTable) -> None:
    """No two entries are the same run, and of those with options only the right one fits a run's options first."""
    for grid in table.grids:
        ran = {entry.label: (entry.method, options(grid, entry)) for entry in grid.entries}
        assert len({json.dumps(run) for run in ran.values()}) == len(grid.entries)
        for label, (method, values) in ran.items():
            fitting = [
                entry for entry in grid.entries
                if entry.method == method and all(
                    values.get(name) == methods.values_of(methods.load(method, {**entry.options}))[name]
                    for name in entry.options
                )
            ]  # fmt: skip
            chosen = next((entry for entry in fitting if entry.options), fitting[-1])
            assert table.names[chosen.label] == table.names[label], label
    labels = {
        (entry.label, table.names[entry.label]) for grid in table.grids for entry in grid.entries
    }
    assert len(labels) == len(table.names), "a label has one name in a table"


def every_figure_has_runs_or_a_note_and_every_run_a_figure(table: PaperTable) -> None:
    told = " ".join(table.notes)
    met = {
        (grid.bundle, table.names[entry.label]): 0 for grid in table.grids for entry in grid.entries
    }
    places: dict[str, set[tuple[str, int]]] = {}
    for grid in table.grids:
        places.setdefault(grid.bundle, set()).update(settings(grid))
    for figure in table.figures:
        if (figure.bundle, figure.name) not in met:
            assert figure.name in told, (
                f"{figure.name} on {figure.bundle} has neither runs nor a note"
            )
            assert "published only" in told
            continue
        met[figure.bundle, figure.name] += 1
        here = [
            (spec, sites) for spec, sites in places[figure.bundle]
            if figure.partition in (None, AVERAGE, spec) and figure.num_sites in (None, sites)
        ]  # fmt: skip
        assert here, f"no grid has {figure.partition} with {figure.num_sites} sites"
        if figure.metric not in COUNTS:
            assert 0 < figure.mean < 1
        assert figure.sd is None or 0 < figure.sd < figure.mean
    assert all(met.values()), f"no figure of {[name for name, count in met.items() if not count]}"


def one_row_of_a_comparison_meets_one_figure_a_metric(table: PaperTable) -> None:
    """Figures are told apart by bundle, partition, number of sites and name."""
    figures = table.figures
    assert len({(f.bundle, f.partition, f.num_sites, f.name, f.metric) for f in figures}) == len(
        figures
    )
    general = {
        (f.bundle, f.name, f.metric) for f in figures if f.partition is None and f.num_sites is None
    }
    assert not general & {(f.bundle, f.name, f.metric) for f in figures if f.partition is not None}


def test_sites_of_figures_are_sites_of_the_data() -> None:
    """FedHelp's C1 to C6: the sizes that its card gives, 9930, 3163, 2691 | 655, 351, 180 on Fed-ISIC19."""
    found = {}
    for key in names():
        for figure in load(key).figures:
            if ":" in figure.metric:
                found.setdefault(figure.bundle, {})[figure.metric.split(":")[1]] = None
    assert {bundle: list(sites) for bundle, sites in found.items()} == {
        "isic19": ["BCN", "vidir_molemax", "vidir_modern", "MSK", "vienna_dias", "rosendahl"],
        "pneumonia": [f"site-{i}" for i in range(1, 7)],
        "lung_cxr": ["site-1", "site-2", "site-3"],
        "ixi_brain": ["Guys", "HH", "IOP"],
    }


def test_figures_by_hand() -> None:
    """FedBM's Tables I and II, FedMR's Table 1, pFedPM's Table I, FedHelp's Tables 1 and 6, as they are printed."""
    figure = load("fedbm/table1").published("oct_c8", "dirichlet:0.05", "FedBM")["accuracy"]
    assert (figure.mean, figure.sd) == (pytest.approx(0.8484), pytest.approx(0.0277)), (
        "84.84 ± 2.77"
    )
    table = load("fedbm/table2")
    assert table.published("kvasir_v2", "dirichlet:0.1", "FedREP")[
        "f1_macro"
    ].mean == pytest.approx(0.3971)
    assert {grid.seeds for grid in table.grids} == {(1, 3, 6)}
    table = load("fedmr/table1")
    assert table.published("cifar10", "classes:2", "FedMR", 5)["accuracy"].mean == pytest.approx(
        0.7419
    ), "P5C2"
    assert table.published("cifar10", "classes:2", "FedMR", 10)["accuracy"].mean == pytest.approx(
        0.7332
    ), "P10C2"
    assert table.published("svhn", "dirichlet:100000", "FedProc", 10)[
        "accuracy"
    ].mean == pytest.approx(0.9357)
    assert table.published("svhn", AVERAGE, "FedNova")["accuracy"].mean == pytest.approx(0.8387)
    figures = load("pfedpm/table1").published("mnist", "shots:4,100,2", "pFedPM", 20)
    assert (figures["sites_accuracy"].mean, figures["sites_accuracy"].sd) == (
        pytest.approx(0.9752),
        pytest.approx(0.0051),
    )
    assert figures["thousand_values_up"].mean == 4
    figures = load("fedhelp/table1").published("isic19", "centre", "FedHelp")
    assert (figures["site_accuracy:BCN"].mean, figures["sites_accuracy"].mean) == (0.5922, 0.5091)
    assert (
        load("fedhelp/table6b").published("ixi_brain", "centre", "FedSM")["site_dice:IOP"].mean
        == 0.6963
    )


def test_averages_are_printed_as_the_values_give_them_or_a_note_says_so() -> None:
    """FedHelp's averages are plain means of its sites, FedMR's of its partitions."""
    off = {}
    for key, metric in (
        ("fedhelp/table1", "accuracy"),
        ("fedhelp/table6a", "dice"),
        ("fedhelp/table6b", "dice"),
    ):
        table = load(key)
        for name in {figure.name for figure in table.figures}:
            values = {f.metric: f.mean for f in table.figures if f.name == name}
            sites = [
                value for label, value in values.items() if label.startswith(f"site_{metric}:")
            ]
            if abs(sum(sites) / len(sites) - values[f"sites_{metric}"]) > 1.01e-4:
                off[key, name] = round(sum(sites) / len(sites), 4)
    table = load("fedmr/table1")
    for average in (figure for figure in table.figures if figure.partition == AVERAGE):
        own = [
            f.mean
            for f in table.figures
            if (f.bundle, f.name) == (average.bundle, average.name) and f != average
        ]
        assert len(own) == 5
        if abs(sum(own) / 5 - average.mean) > 1.01e-4:
            off[average.bundle, average.name] = round(sum(own) / 5, 4)
    assert off == {
        ("fedhelp/table6b", "FedSM"): 0.7648,
        ("fmnist", "FedMR"): 0.8325,
        ("fmnist", "MOON"): 0.7985,
        ("svhn", "FedNova"): 0.8404,
        ("cifar100", "FedDyn"): 0.6702,
    }


def test_protocols_of_the_papers() -> None:
    """FedBM: 12 or 10 sites, half of them a round, 200 rounds; its temperatures follow the partition."""
    grids = load("fedbm/table6").grids
    found = [
        (
            g.bundle,
            *next(iter(settings(g))),
            protocol(g)["rounds"],
            options(g, g.entries[-1])["tau"],
        )
        for g in grids
    ]
    assert found == [
        ("oct_c8", "dirichlet:0.05", 12, 200, 17.5),
        ("oct_c8", "dirichlet:0.1", 12, 200, 12.5),
        ("kvasir_v2", "dirichlet:0.05", 10, 200, 12.5),
        ("kvasir_v2", "dirichlet:0.1", 10, 200, 7.5),
    ]
    mnist = {
        e.label: g.requested["rounds"]
        for g in load("pfedpm/table1").grids
        if g.bundle == "mnist"
        for e in g.entries
    }
    assert (mnist["fedavg"], mnist["fedprox"], mnist["pfedpm"]) == (150, 110, 100)
    (grid,) = load("fedhelp/table5b").grids
    public = {entry.method: options(grid, entry).get("public") for entry in grid.entries}
    assert public["fedhelp"] == public["fedmd"] == "nct_crc"
    assert public["fedavg"] is None


@pytest.mark.parametrize(
    ("key", "split"), [("fedbm/table3", "dermamnist"), ("fedbm/table4", "official")]
)
def test_splits_are_those_of_the_paper(key: str, split: str) -> None:
    """MedMNIST's: 11,959, 1,712 and 3,421 images of PBC, where a folder's own split is another."""
    for grid in load(key).grids:
        assert grid.config["split"] == split
        assert split in datasets.get(grid.bundle).splits


def test_scaled_reduces_the_rounds_and_says_so() -> None:
    grid = load("fedbm/table4").grids[0]
    reduced, told = scaled(grid, 0.1, bundle("pbc").protocol)
    assert (reduced.requested["rounds"], told) == (5, "5 of 50 rounds")
    assert (reduced.entries, reduced.partitions, reduced.seeds) == (
        grid.entries,
        grid.partitions,
        grid.seeds,
    )
    assert scaled(grid, 0.011, bundle("pbc").protocol)[1] == "1 of 50 rounds"
    assert scaled(grid, 1, bundle("pbc").protocol)[1] == "all 50 rounds"
    grid = load("pfedpm/table1").grids[0]
    assert scaled(grid, 0.5, bundle("mnist").protocol)[1] == "75 of 150 rounds", (
        "the grid's own rounds come first"
    )
    grid = next(grid for grid in load("pfedpm/table2").grids if grid.bundle == "cifar10")
    reduced, _ = scaled(grid, 0.5, bundle("cifar10").protocol)
    assert reduced.requested["presets"] == ["pfedpm"]
    for factor in (0, 1.5):
        with pytest.raises(InputError, match="above 0 and at most 1"):
            scaled(grid, factor, bundle("cifar10").protocol)


# Beside our runs


def made(**changes: Any) -> PaperTable:
    """Return a table of FedAvg and "Ours" (fedprox mu=0.5) on the bundle `toy`."""
    at_sites = (("sites", None), ("sites_auroc", 0.1), ("site_auroc:a", None))
    counts = ("rounds_to_fedavg", "thousand_values_up", "million_values_down", "eigenvalue_spread")
    figures = (
        Figure("toy", "iid", None, "FedAvg", "accuracy", 0.5, 0.02),
        Figure("toy", "iid", None, "Ours", "accuracy", 0.7, None),
        *(Figure("toy", None, None, "FedAvg", metric, 0.5, sd) for metric, sd in at_sites),
        *(Figure("toy", None, 2, "FedAvg", metric, 2.5, None) for metric in counts),
    )
    entries = (Entry.read("fedavg"), Entry.read("fedprox mu=0.5"))
    known = {"fedavg": "FedAvg", "fedprox mu=0.5": "Ours"}
    return PaperTable(
        "x/y",
        "P",
        "T",
        **{"grids": (Grid("toy", entries),), "names": known, "figures": figures, **changes},
    )


def ran(root: Path, method: str, seed: int, score: float, spec: str = "iid", **more: Any) -> Path:
    """Write a finished run with two sites: a has AUROC score, b 0.2 less; a round sends 40 kB up and 40 MB down."""
    path = finished(root, method, seed, score, spec, **more)
    run = json.loads((path / "run.json").read_text())
    run["partition"]["sites"] = {"a": {}, "b": {}}
    (path / "run.json").write_text(json.dumps(run))
    with (path / "sites.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["site", "received_accuracy", "received_auroc"])
        writer.writerows([["a", score, score], ["b", score - 0.1, score - 0.2]])
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    rounds = [
        {**entry, "cohort": ["a", "b"], "bytes_up": 40_000, "bytes_down": 40_000_000}
        for entry in rounds
    ]
    (path / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rounds))
    return path


def compared(root: Path) -> Comparison:
    runs = [ran(root, "fedavg", seed, score) for seed, score in enumerate((0.5, 0.6, 0.7))]
    return read([*runs, *(ran(root, "fedprox", seed, 0.8) for seed in range(3))])


def test_our_figures_stand_beside_the_published_ones(tmp_path: Path) -> None:
    """FedAvg's accuracies 0.5, 0.6, 0.7: mean 0.6, sd (ddof 0) 0.0816; published 50.0 ± 2.0, so +10.0."""
    rows = beside(made(), compared(tmp_path), {"fedprox": "fedprox mu=0.5"})
    told = {(row[1], row[2]): row[3:] for row in rows}
    assert {row[0] for row in rows} == {"iid"}
    assert told["FedAvg", "accuracy"] == ["60.0 ± 8.2", "50.0 ± 2.0", "+10.0"]
    assert told["Ours", "accuracy"] == ["80.0 ± 0.0", "70.0", "+10.0"]
    assert told["FedAvg", "sites"][0] == "55.0 ± 8.2", "mean of the sites' key metric, accuracy"
    assert told["FedAvg", "sites_auroc"] == ["50.0 ± 8.2", "50.0 ± 10.0", "+0.0"]
    assert told["FedAvg", "site_auroc:a"][0] == "60.0 ± 8.2"


def test_counts_are_told_as_they_are(tmp_path: Path) -> None:
    """FedAvg's best validation value is in round 3; 40 kB are 10 thousand values, 40 MB for 2 sites 5 million each."""
    rows = beside(made(), compared(tmp_path), {})
    told = {(row[1], row[2]): row[3:] for row in rows}
    assert told["FedAvg", "rounds_to_fedavg"] == ["3 ± 0", "2.5", "+0.5"]
    assert told["FedAvg", "thousand_values_up"] == ["10 ± 0", "2.5", "+7.5"]
    assert told["FedAvg", "million_values_down"] == ["5 ± 0", "2.5", "+2.5"]
    assert told["FedAvg", "eigenvalue_spread"] == ["–", "2.5", "–"], "published only"


def test_figures_for_another_partition_or_number_of_sites_are_not_shown(tmp_path: Path) -> None:
    table = made()
    other = read([ran(tmp_path, "fedavg", 0, 0.5, "dirichlet:0.1")])
    assert "accuracy" not in {row[2] for row in beside(table, other, {})}
    assert "rounds_to_fedavg" in table.published("toy", "iid", "FedAvg", 2)
    assert "rounds_to_fedavg" not in table.published("toy", "iid", "FedAvg", 3)
    alone = read([ran(tmp_path, "fedprox", 0, 0.5)])
    assert [
        row[3]
        for row in beside(table, alone, {"fedprox": "fedavg"})
        if row[2] == "rounds_to_fedavg"
    ] == ["–"]


def test_a_spread_over_sites_is_ours_too(tmp_path: Path) -> None:
    """Two sites 0.2 apart have an sd of 0.1 in each run, whatever the seed."""
    rows = beside(made(spread="sites"), compared(tmp_path), {})
    told = {(row[1], row[2]): row[3] for row in rows}
    assert told["FedAvg", "sites_auroc"] == "50.0 ± 10.0"
    assert told["FedAvg", "accuracy"] == "60.0 ± 8.2", "pooled metrics have no sites"


def test_the_best_round_and_sites_own_models_where_there_is_no_common_one(tmp_path: Path) -> None:
    best, personal = ran(tmp_path, "fedavg", 0, 0.5), ran(tmp_path, "fedprox", 0, 0.5)
    summary = json.loads((best / "summary.json").read_text())
    summary["global"]["best"] = {"accuracy": 0.9}
    (best / "summary.json").write_text(json.dumps(summary))
    summary = json.loads((personal / "summary.json").read_text())
    summary |= {"judged": "personal", "global": None, "site_models": {"mean": {"accuracy": 0.3}}}
    (personal / "summary.json").write_text(json.dumps(summary))
    rows = beside(made(round="best"), read([best, personal]), {"fedprox": "fedprox mu=0.5"})
    told = {(row[1], row[2]): row[3] for row in rows}
    assert told["FedAvg", "accuracy"] == "90.0"
    assert told["Ours", "accuracy"] == "30.0"
    told = {(row[1], row[2]): row[3] for row in beside(made(), read([best, personal]), {})}
    assert told["FedAvg", "accuracy"] == "50.0", "last"


def test_averages_wait_for_all_partitions(tmp_path: Path) -> None:
    """Seed 0: (0.5 + 0.7) / 2 = 0.6, seed 1: (0.6 + 0.8) / 2 = 0.7; mean 0.65, sd 0.05."""
    figures = (Figure("toy", AVERAGE, None, "FedAvg", "accuracy", 0.6, None),)
    fedavg = (Entry.read("fedavg"),)
    table = made(
        figures=figures, grids=(Grid("toy", fedavg, ("iid",)), Grid("toy", fedavg, ("classes:2",)))
    )
    first = read([ran(tmp_path, "fedavg", seed, score) for seed, score in enumerate((0.5, 0.6))])
    second = read(
        [ran(tmp_path, "fedavg", seed, score, "classes:2") for seed, score in enumerate((0.7, 0.8))]
    )
    assert beside(table, first, {}) == []
    assert averages(table, [(first, {})]) == [[AVERAGE, "FedAvg", "accuracy", "–", "60.0", "–"]]
    assert averages(table, [(first, {}), (second, {})]) == [
        [AVERAGE, "FedAvg", "accuracy", "65.0 ± 5.0", "60.0", "+5.0"]
    ]
