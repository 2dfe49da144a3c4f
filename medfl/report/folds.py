"""A cross-validation's folder: the results of each fold, and on all test cases together, each tested once.

It contains `folds.json`, the request, and a run folder `fold-<number>` for each fold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from medfl.core import (
    SECTIONS,
    Config,
    Count,
    Document,
    InputError,
    Metrics,
    listed,
    tables,
    terminal,
    within,
)
from medfl.evaluation import Cases, metrics, told_by
from medfl.report import formatting
from medfl.report.run_files import Predictions, RunFiles
from medfl.report.table import PHANTOM_NOTE, structure_lines
from medfl.report.templating import rendered
from medfl.storage import FOLDS, RunFolder, write_atomic, write_json
from medfl.storage.run_documents import read_document, refuse_code

FORM: Config = {
    "folds": Count,
    "bundle": str,
    "options": Document,
    "config": Document,
    "requested": Document,
    "settings": Document,
    "images": list[str],
    "command": str | None,
}
NOTE = (
    "pooled: each case once, by the model of the fold that tests it; sd: between folds, whose training images overlap, "
    "so it says little of how another cohort would score"
)
EXAMINED = "pooled: each case once, all by one finished model; sd: between parts of the images"
_COLUMNS = 6  # metrics that fit side by side


def fold_folder(folder: Path, number: int) -> Path:
    """Return the run folder of a fold, from 1."""
    return folder / f"fold-{number}"


def read_record(folder: Path) -> Document:
    """Return the entries of `folds.json`.

    Raises:
        InputError: it is missing or damaged.
    """
    record = read_document(folder / FOLDS, FORM, FORM)
    refuse_code(folder / FOLDS, record["bundle"], record["config"])
    if not 2 <= record["folds"] == len(record["images"]):
        raise InputError(
            f"{folder / FOLDS} is damaged",
            "as many folds as it lists images of",
            "restore the file",
        )

    return record


@dataclass(frozen=True)
class Folds:
    """The finished folds of a cross-validation.

    Attributes:
        path: the folder.
        count: planned number of folds.
        runs: number -> the run of a fold.
    """

    path: Path
    count: int
    runs: Mapping[int, RunFiles]

    @classmethod
    def read(cls, path: Path) -> Folds:
        """Read a folder.

        Raises:
            InputError: it is not a cross-validation's, no fold is finished, or a file is damaged.
        """
        count = int(read_record(path)["folds"])
        runs = {}
        for number in range(1, count + 1):
            folder = fold_folder(path, number)
            run = RunFiles(folder) if (folder / "summary.json").is_file() else None
            if run is not None and run.finished and run.predictions is not None:
                runs[number] = run

        if not runs:
            raise InputError(
                f"no fold in {path} is finished",
                "a folder of medfl run --folds",
                "continue it with --resume",
            )

        # a fold without test cases has no columns to compare
        forms = {_form(run) for run in runs.values() if _predictions(run).ids}
        if len(forms) > 1:
            raise InputError(
                f"the folds in {path} have other classes or metrics",
                "folds of one run",
                "run them anew",
            )

        folds = cls(path, count, runs)
        # a case that is pooled twice would count twice
        for ident, times in Counter(folds.cases.ids).items():
            if times > 1:
                raise InputError(
                    f"{ident} is a test case of several folds in {path}",
                    "folds that test each case once",
                    "run them anew",
                )

        return folds

    @property
    def first(self) -> RunFiles:
        """The first run."""
        return next(iter(self.runs.values()))

    @cached_property
    def compared(self) -> Mapping[str, Cases]:
        """Fold -> its test cases, with means over the same findings in all folds."""
        return self.first.kind.comparable({str(n): _cases(run) for n, run in self.runs.items()})

    @cached_property
    def rows(self) -> dict[int, Metrics]:
        """Fold -> the metrics of its test cases."""
        return {number: metrics.summarise(self.compared[str(number)]) for number in self.runs}

    @cached_property
    def pooled(self) -> Metrics:
        """The metrics of all test cases."""
        return metrics.summarise(self.cases)

    @cached_property
    def structures(self) -> dict[str, dict[str, float | None]]:
        """Structure, finding or number -> its metrics over all test cases that have it, and their number."""
        names = [*self.first.structures] or self.first.classes
        return self.first.kind.by_name(self.pooled, self.cases, names)

    @cached_property
    def cases(self) -> Cases:
        """All test cases."""
        return Cases.concat(list(map(_cases, self.runs.values())))

    @property
    def names(self) -> list[str]:
        """The metrics that are shown, the key metric first."""
        return list(dict.fromkeys([self.first.key, *within(metrics.METRICS, self.pooled)]))

    def spread(self, name: str) -> metrics.Spread:
        """Return mean and standard deviation of a metric over the folds, and the worst fold."""
        values = {f"fold-{n}": row.get(name) for n, row in self.rows.items()}
        return metrics.spread(values, metrics.higher_is_better(name))

    def summary(self) -> Document:
        """Return the content of summary.json."""
        run = self.first
        summaries = [fold.summary for fold in self.runs.values()]
        classes = {"classes": self.structures} if self.structures else {}
        per_fold = []
        for number, fold in self.runs.items():
            row = {"fold": number, "folder": f"fold-{number}", **_sizes(fold)}
            per_fold.append({**row, "run_hash": fold.record.get("run_hash"), **self.rows[number]})

        totals = {}
        for name in ("bytes_up", "bytes_down", "seconds"):
            totals[name] = sum(float(fold.get(name) or 0) for fold in summaries)

        return {
            "method": run.method,
            "bundle": run.record["bundle"],
            "seed": run.record.get("seed"),
            "rounds": run.record["rounds"],
            "folds": self.count,
            "status": "finished" if len(self.runs) == self.count else "running",
            "data_source": run.record["data"]["source"],
            "judged": summaries[0].get("judged"),
            "key_metric": run.key,
            "cases": len(self.cases),
            "last": {"round": run.record["rounds"], **self.pooled, **classes},
            "per_fold": per_fold,
            "spread": {name: self.spread(name) for name in self.names},
            "units": summaries[0].get("units") or {},
            **totals,
            "notes": [*self.notes],
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """The basis of the results, undefined metrics, and different numbers of rounds between folds."""
        undefined = ((f"fold-{number}", run.undefined) for number, run in self.runs.items())
        notes = (NOTE if self.first.record["rounds"] else EXAMINED, *told_by(undefined))
        averaged = self.first.kind.averaged
        pooled = averaged(self.cases)
        in_all = {*pooled}
        for cases in filter(len, self.compared.values()):
            in_all.intersection_update(averaged(cases))

        if len(in_all) < len(pooled):
            names = listed([self.first.classes[i] for i in pooled if i not in in_all])
            notes += (
                f"pooled means are also over {names}, which too few test images of a fold have or lack",
            )

        folds_by_rounds: dict[int, list[str]] = {}
        for number, run in self.runs.items():
            folds_by_rounds.setdefault(int(run.record["rounds"]), []).append(f"fold-{number}")

        if len(folds_by_rounds) == 1:
            return notes

        rounds_text = "; ".join(
            f"{n} in {', '.join(names)}" for n, names in folds_by_rounds.items()
        )
        again = f"medfl run --resume --out {self.path} --rounds {max(folds_by_rounds)}"
        return (
            *notes,
            f"the folds have different numbers of rounds: {rounds_text}; {again} makes them the same",
        )

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the table of the folds: one row per fold, then mean, sd and pooled."""
        names = self.names[:_COLUMNS]
        spreads = list(map(self.spread, names))

        def numbers(values: Mapping[str, float]) -> list[str]:
            return [formatting.number(values.get(name)) for name in names]

        rows = []
        for fold, run in self.runs.items():
            sizes = _sizes(run)
            row = numbers(self.rows[fold])
            rows.append([f"fold-{fold}", str(sizes["train"]), str(sizes["test"]), *row])

        # a metric that no fold has also has no spread
        means = [formatting.number(spread.get("mean")) for spread in spreads]
        counts = [spread.get("count", 0) for spread in spreads]
        rows.append(["mean", "", "", *means])
        rows.append(["sd", "", "", *map(formatting.sd, spreads)])
        if min(counts) < len(self.runs):
            rows.append(["folds with it", "", "", *map(str, counts)])

        rows.append(["pooled", "", str(len(self.cases)), *numbers(self.pooled)])

        return ["", "train", "test", *map(self.first.title, names)], rows

    def title(self) -> str:
        """Describe the run in one line."""
        done = f"{self.count} folds"
        if len(self.runs) < self.count:
            done = f"{len(self.runs)} of {done}"

        return f"cross-validation of {self.first.record['bundle']} with {self.first.method}: {done}"

    def text(self) -> str:
        """Return the table for the terminal; the last line says whether the data are real or phantom."""
        head, rows = self.cells()
        lines = [self.title(), "", *tables.text_table(head, rows), ""]
        lines += structure_lines(self.first, self.structures, "pooled")
        for note in self.notes:
            lines += terminal.hanging_indent("", note)

        if self.first.phantom:
            lines.append(PHANTOM_NOTE)
        else:
            lines.append(f"real data: {self.first.record['bundle']}")

        return "\n".join(lines)


def write(folder: Path) -> Folds:
    """Write summary.json, predictions.csv and report.html of a cross-validation.

    Raises:
        InputError: as for `Folds.read`.
    """
    cross_validation = Folds.read(folder)
    write_json(folder / "summary.json", cross_validation.summary())

    predictions = []
    for number, run in cross_validation.runs.items():
        assert run.prediction_table is not None  # `Folds.read` accepts no others
        for _, row in run.prediction_table.rows:
            predictions.append({"id": row["id"], "fold": number, **row})

    RunFolder(folder).write_table("predictions.csv", predictions)
    head, rows = cross_validation.cells()
    values = {
        "folds": cross_validation,
        "head": head,
        "rows": rows,
        "notes": [
            *cross_validation.notes,
            *(cross_validation.first.record["data"].get("notes") or ()),
        ],
        "links": [f"fold-{number}" for number in cross_validation.runs],
    }
    write_atomic(folder / "report.html", rendered("folds.html.j2", values))

    return cross_validation


def _predictions(run: RunFiles) -> Predictions:
    assert run.predictions is not None  # `Folds.read` accepts no others
    return run.predictions


def _form(run: RunFiles) -> tuple[object, ...]:
    """Return what must be equal in all folds: key metric, classes, and columns with their sizes."""
    values = _cases(run).values
    columns = [(name, *tensor.shape[1:]) for name, tensor in values.items()]
    return run.key, *run.classes, *columns


def _cases(run: RunFiles) -> Cases:
    return _predictions(run).cases


def _sizes(run: RunFiles) -> dict[str, int]:
    sizes = {}
    for section in SECTIONS:
        sizes[section] = sum(run.size(site, section) for site in run.site_names)

    return sizes
