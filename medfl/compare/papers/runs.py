"""Run a published table's grid, whole or in part, and print its figures beside ours."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from medfl.bundle.bundle import Bundle
from medfl.bundle.protocol import resolved
from medfl.compare import papers
from medfl.compare.comparison import Comparison
from medfl.compare.grid import Grid, compare
from medfl.compare.papers import tables as paper_tables
from medfl.compare.papers.tables import PaperTable
from medfl.compare.tables import write_tables
from medfl.core.documents import Config, Document
from medfl.core.errors import InputError
from medfl.core.tables import formatted_table
from medfl.methods import load, method_class, options_of, values_of
from medfl.runtimes.launch import Launch
from medfl.storage.files import write_atomic

PAPER = "paper"
"""The preset with what a bundle's paper prints, which its tables' runs have; of a second paper it is paper-NAME."""
_OURS = re.compile(r"\(ours\b|\bours[;)]")  # in the help text of an option that no paper has
_HEADS = ("partition", "method", "metric, %", "ours", "published", "difference")


def run(
    table: PaperTable,
    launch: Launch,
    *,
    bundle: str | None = None,
    methods: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    partitions: Sequence[str] | None = None,
    scale: float = 1.0,
    options: Mapping[str, object],
    config: Mapping[str, object],
    requested: Config,
) -> tuple[list[str], int, Document]:
    """Run what is missing of a published table, a folder for each grid, and compare.

    Only this bundle, these methods (a method's name is all its variants, a row's is one), seeds and partitions, and
    this `scale` of the rounds are run; `options` are for all methods that have them, take the place of the table's, and
    are printed.

    Returns:
        lines to print, exit code, document.

    Raises:
        InputError: no run of the table is left, or a run would be refused.
    """
    grids = []
    for number, full in enumerate(table.grids, 1):
        grid = restricted(table, full, methods, partitions)
        if grid.entries and grid.partitions and bundle in (None, grid.bundle):
            grids.append((number, grid))

    if not grids:
        bundles = sorted({grid.bundle for grid in table.grids})
        specs = dict[str, None]()
        for full in table.grids:
            specs |= dict.fromkeys(_spec(full, partition) for partition in full.partitions)

        raise InputError(
            f"--paper {table.key} with bundle {bundle or 'any'} and methods {', '.join(methods) or 'all'}, "
            f"partitions {', '.join(partitions or ()) or 'all'}",
            f"its bundles are {', '.join(bundles)}, its rows {', '.join(dict.fromkeys(table.names.values()))}, its "
            f"partitions {', '.join(specs)}",
            "give --methods and --partition from these lists, and one of the bundles",
        )

    out = launch.folder
    lines = [f"# {table.paper}: {table.title}"]
    collected = []
    document: Document = {"paper": table.key, "folder": str(out), "failed": {}, "rows": []}

    for number, grid in grids:
        grid, rounds = paper_tables.scaled(grid, scale, Bundle(grid.bundle).protocol)
        grid_requested = {**grid.requested, **requested}
        presets = presets_of(grid, requested.get("presets", ()))
        if presets:
            grid_requested["presets"] = presets

        grid = replace(
            grid,
            seeds=tuple(seeds) if seeds is not None else grid.seeds,
            options={**grid.options, **options},
            config={**grid.config, **config},
            requested=grid_requested,
        )
        heading = f"{grid.bundle}, {rounds}"
        changes = [*options.items(), *config.items(), *requested.items()]
        if changes:
            heading += f", changed: {', '.join(f'{name}={value}' for name, value in changes)}"

        launch.say(f"{table.key}: {heading}")
        folder = out / grid.bundle
        # several grids of a table may be of one bundle
        if len(table.grids) > 1:
            folder = out / f"{number}-{grid.bundle}"

        comparison, failed = compare(grid, replace(launch, out=folder))
        document["failed"] |= failed

        if comparison is not None and comparison.phantom:
            heading = f"PHANTOM images, not the paper's: {heading}"

        lines += ["", f"## {heading}"]
        if comparison is None:
            lines.append("no run finished")
        else:
            write_tables(comparison, folder)
            labels = _labels(grid, comparison)
            collected.append((comparison, labels))
            rows = paper_tables.beside(table, comparison, labels)
            document["rows"] += [dict(zip(_HEADS, row, strict=True)) for row in rows]
            lines += [
                formatted_table(_HEADS, rows, "md"),
                _sizes(comparison),
                f"tables: {folder / 'tables.md'}",
            ]

        lines += [f"FAILED: {title}: {text}" for title, text in failed.items()]

    if collected and (averaged := paper_tables.averages(table, collected)):
        lines += ["", "## Averages over the partitions", formatted_table(_HEADS, averaged, "md")]
        document["rows"] += [dict(zip(_HEADS, row, strict=True)) for row in averaged]

    lines += [
        "",
        "## What is ours and not the paper's",
        *_ours(table, [grid for _, grid in grids]),
        "",
    ]
    lines += dict.fromkeys(comparison.describe() for comparison, _ in collected)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "published.md", ("\n".join(lines) + "\n").encode())

    return lines, 1 if document["failed"] else 0, document


def presets_of(grid: Grid, more: Sequence[str] = ()) -> list[str]:
    """Return the presets of a grid's runs: `paper` of the bundle unless the grid has one of its own, and `more`."""
    presets = list(dict.fromkeys([*grid.requested.get("presets", ()), *more]))
    has_own = any(name.partition("-")[0] == PAPER for name in presets)
    if has_own or PAPER not in Bundle(grid.bundle).protocol.get("presets", {}):
        return presets

    return [PAPER, *presets]


def _sizes(comparison: Comparison) -> str:
    """Say how many images runs train on: validation takes a part of those that a paper prints as training images."""
    counts = comparison.rows[0].first.record["data"]["counts"]
    train, validate, test = (counts[name] for name in ("train", "validate", "test"))
    return (
        f"images: {train:,} to train on, {validate:,} to validate, {test:,} to test; a paper without validation prints "
        f"{train + validate:,} to train on"
    )


def _ours(table: PaperTable, grids: Sequence[Grid]) -> list[str]:
    protocols = {}
    for grid in grids:
        protocol = Bundle(grid.bundle).protocol
        presets = presets_of(grid)
        # the preset of a second paper replaces the protocol, whose text then does not hold
        if not any(name.startswith(f"{PAPER}-") for name in presets):
            protocols[f"bundle {grid.bundle}"] = str(protocol.get("protocol", ""))

        for name, values in protocol.get("presets", {}).items():
            if name in presets:
                protocols[f"bundle {grid.bundle}, preset {name}"] = values.get("about", "")

    methods = [entry.method for grid in grids for entry in grid.entries]
    return departures(methods, protocols, table.notes)


def departures(
    methods: Iterable[str], protocols: Mapping[str, str], notes: Iterable[str]
) -> list[str]:
    """Return lines of a list: the notes, what protocols and presets say of themselves, and each method's departures."""
    lines = [f"- {note}" for note in notes]
    lines += [f"- {source}: {text}" for source, text in protocols.items() if text]
    for name in dict.fromkeys(methods):
        kind = method_class(name)
        document = inspect.getdoc(importlib.import_module(kind.__module__)) or ""
        for paragraph in document.split("\n\n"):
            # methods list what they do otherwise than their paper under this word
            _, word, text = paragraph.partition("Departures")
            if word:
                lines.append(f"- {name}: {' '.join((word + text).split())}")

        for option in options_of(kind):
            if _OURS.search(option["help"]):
                lines.append(f"- {name}: {option['name']}={option['default']}: {option['help']}")

    return lines or ["- nothing that is known"]


def published(comparison: Comparison) -> list[str]:
    """Return lines with our runs beside the papers' figures for these methods, partitions and numbers of sites.

    The runs may have other settings than the papers'; `--paper` runs a table's own protocol.
    """
    bundle = comparison.rows[0].first.record["bundle"]
    rows = []
    notes = []
    bundles = set()
    for key in papers.names():
        table = paper_tables.load(key)
        for grid in table.grids:
            bundles.add(grid.bundle)
            if grid.bundle != bundle:
                continue

            # two grids of a table may both have a row, as where their seeds differ
            for row in paper_tables.beside(table, comparison, _labels(grid, comparison)):
                if [key, *row] not in rows:
                    rows.append([key, *row])

        if any(row[0] == key for row in rows):
            notes.append(
                f"{key}: {table.paper}, {table.title}; its own protocol: medfl compare {bundle} --paper {key}"
            )

    if not rows:
        return [
            f"no published figures for {bundle} with these methods, partitions and numbers of sites; tables have "
            f"{', '.join(sorted(bundles))}"
        ]

    return [
        formatted_table(("table", *_HEADS), rows, "md"),
        *notes,
        "ours may have other settings than the papers'",
    ]


def restricted(
    table: PaperTable, grid: Grid, methods: Sequence[str], partitions: Sequence[str] | None = None
) -> Grid:
    """Return a grid with only these methods and partitions; where none are given, with all.

    A method is given by its name, for all its variants, or by that of the table's row.
    """
    names = {name.lower() for name in methods}
    entries = grid.entries
    specs = grid.partitions
    if names:
        entries = tuple(
            entry
            for entry in grid.entries
            if entry.method in names or table.names[entry.label].lower() in names
        )

    if partitions:
        specs = tuple(spec for spec in grid.partitions if _spec(grid, spec) in partitions)

    return replace(grid, entries=entries, partitions=specs)


def _spec(grid: Grid, partition: str | None) -> str:
    """Return the spec of a partition of a grid; None is that of the bundle's protocol with the grid's presets."""
    protocol = resolved(
        grid.bundle, Bundle(grid.bundle).protocol, grid.requested.get("presets", ())
    )
    return partition or str(protocol["partition"])


def _labels(grid: Grid, comparison: Comparison) -> dict[str, str]:
    """Return the label of each of our rows -> the label of its entry in the grid."""
    labels = {}
    for row in comparison.rows:
        run = row.first.record
        for entry in grid.entries:
            if entry.method != run["method"]:
                continue
            # compared as the method reads them, with its defaults
            values = values_of(load(entry.method, {**entry.options}))
            if all(run["options"].get(name) == values[name] for name in entry.options):
                labels[row.method] = entry.label
                if entry.options:  # an entry with options fits better than one without
                    break

    return labels
