"""The tables and figures of docs/results.md and docs/results/, made from what the runs left.

    python docs/results/make.py                      rewrite the pages
    python docs/results/make.py --collect FOLDER...  first renew summaries.jsonl from the run folders below FOLDER

`summaries.jsonl` has one line for each run: its `summary.json` as the run wrote it, but findings, structures or numbers
one by one in `last` alone, the rows of `sites.csv`, the rounds that were scored and what `run.json` says of the run,
without item lists and folders. `tables.yaml` says what is shown:

    tables: name -> {columns: {title: template}, rows: {label: run hashes, or {runs, cells: {title: template}}}}
        a table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`
    said: list of {texts: [template, ...], runs: {group: run hashes, or "TABLE / LABEL"}, from: whence, without runs}
        pieces of prose, which must stand in the page once; their figures are brought up to date
    gone: hashes that the page names and of which no run folder is left

A template is text with fields `{VALUE|FORM}`, or in prose `{GROUP VALUE|FORM}` and `{GROUP VALUE - GROUP VALUE|FORM}`.

VALUE: a path in summary.json, as `global.last.accuracy`, or
    sent: bytes both ways
    site_METRIC:NAME: at a site, or mean, sd or worst of the sites, by the model that each is judged by
    received_METRIC:NAME, personal_METRIC:NAME, local_METRIC:NAME: by the global, personalised, Local model
    val:ROUND, loss:ROUND: key metric on the validation set, training loss
    PAPER/TABLE:METHOD:METRIC: the figure of `medfl/papers`; METHOD may be empty: the row's label
FORM: a Python format of the mean over the runs, as `.3f`, after `%` times 100, after `M` in millions, with `±` and the
    standard deviation (ddof 0) where there are several runs, with `,` each run's value, or with `~` the 95 % interval
    of the mean by Student's t, where runs differ in what is measured; `names`: of what is text; `code12`: the first 12
    letters of each run's
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from medfl.compare.comparison import MeanSd, t_interval
from medfl.compare.papers import tables as paper_tables
from medfl.core import tables
from medfl.core.errors import InputError, MedflError
from medfl.evaluation import metrics
from medfl.report import RunFiles
from medfl.storage.files import write_atomic

HERE = Path(__file__).resolve().parent
PAGES = [
    HERE.with_suffix(".md"),
    *(
        HERE / f"{name}.md"
        for name in ("fedcb-fedbm", "fedmr", "fedhelp", "pfedpm", "beyond", "tasks")
    ),
]
TABLES = HERE / "tables.yaml"
SUMMARIES = HERE / "summaries.jsonl"
BREAK = "\f\n"
"""Between pages that are read as one text."""

_FIELD = re.compile(r"\{([^{}|]+)\|([^{}|]+)\}")
_FORM = re.compile(r"([%M]?)(\.\d[fg])([±,~]?)")
_NUMBER = (
    r"([-+]?\d[\d,]*(?:\.\d+)?(?:\s+±\s+\d+(?:\.\d+)?|\s+\[[-+]\d+\.\d+\s+to\s+[-+]\d+\.\d+\])?)"
)
_UNITS = {"": 1.0, "%": 100.0, "M": 1e-6}
_FOLDER = re.compile(r"(?<![\w./])/(?:[^\s/\"',:]+/)+([^\s/\"',:]+)")
_RUN = (
    "command", "method", "bundle", "task", "classes", "key_metric", "site_class_counts", "options", "config", "data",
    "partition", "cohort", "rounds", "local_epochs", "batch_size", "lr", "lr_decay", "seed", "device", "amp", "threads",
    "eval_every", "site_labels", "partial_loss", "unlabelled", "versions", "public", "bundle_sha256", "run_hash",
)  # fmt: skip
_LEFT_OUT = ("folder", "notes", "sites")
_AT_SITES = ("accuracy", "balanced_accuracy", "dice", "pixel_accuracy", "auroc", "mae")


@dataclass(frozen=True)
class Row:
    """What a field may refer to: runs that differ in their seed, and what they are called."""

    label: str
    runs: Sequence[RunFiles]


class Results:
    """`tables.yaml` with the runs that it names."""

    def __init__(self, asked: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
        """Take the contents of tables.yaml and of summaries.jsonl."""
        self.asked = asked
        self.runs = {_ident(record["summary"]): _folder(record) for record in records}

    @classmethod
    def read(cls) -> Results:
        """Read both files."""
        return cls(yaml.safe_load(TABLES.read_text()), stored())

    def hashes(self) -> list[str]:
        """Return the runs that tables.yaml names, as it names them, each once."""
        rows = [
            entry for table in self.asked["tables"].values() for entry in table["rows"].values()
        ]
        groups = [entry for said in self.asked["said"] for entry in said.get("runs", {}).values()]
        return list(dict.fromkeys(name for entry in (*rows, *groups) for name in _named(entry)))

    def run(self, name: str) -> RunFiles:
        """Return a run by the beginning of its hash."""
        found = [run for ident, run in self.runs.items() if _is(ident, name)]
        if len(found) != 1:
            raise InputError(
                f"run {name}, of which {SUMMARIES.name} has {len(found)}",
                "runs with one line there",
                "--collect it",
            )
        return found[0]

    def table(self, name: str) -> str:
        """Return a table in Markdown."""
        columns, lines = self.asked["tables"][name]["columns"], []
        for label, entry in self.asked["tables"][name]["rows"].items():
            row, own = (
                self._row(label, entry),
                entry.get("cells", {}) if isinstance(entry, dict) else {},
            )
            if unknown := sorted(own.keys() - columns.keys()):
                raise InputError(
                    f"column {unknown[0]} of {label}",
                    f"columns are {', '.join(columns)}",
                    "choose one",
                )
            cells = [own.get(title, template) for title, template in columns.items()]
            lines.append([filled(text, {"": row}) for text in (label, *cells)])
        return tables.markdown_table(
            [self.asked["tables"][name].get("head", "method"), *columns], lines
        )

    def said(self) -> list[tuple[re.Pattern[str], str]]:
        """Return for each piece of prose how it is found and how it has to be."""
        made: list[tuple[re.Pattern[str], str]] = []
        for entry in self.asked["said"]:
            groups = {
                "": Row("", []),
                **{name: self._group(given) for name, given in entry.get("runs", {}).items()},
            }
            made += [(_wherever(text), filled(text, groups)) for text in entry["texts"]]
        return made

    def rewritten(self, page: str) -> str:
        """Return the page with its tables and figures up to date.

        Raises:
            InputError: a table's lines or a piece of prose are missing, or there twice.
        """
        for name in self.asked["tables"]:
            opening = f"<!-- table: {name} -->\n"
            start, found, rest = page.partition(opening)
            _, end, tail = rest.partition("\n<!-- end -->")
            if not found or not end:
                raise InputError(
                    f"no table {name} in the pages",
                    f"{opening.strip()} … <!-- end -->",
                    "add the lines",
                )
            page = f"{start}{opening}{self.table(name)}{end}{tail}"
        for pattern, text in self.said():
            span = _found(page, pattern, text)
            spaces, words = re.findall(r"\s+", span.group()), text.split()
            if len(spaces) == len(words) - 1:  # the page's line breaks stay
                text = "".join(
                    word + space for word, space in zip(words, [*spaces, ""], strict=True)
                )
            page = page[: span.start()] + text + page[span.end() :]
        return page

    def spans(self, page: str) -> list[tuple[int, int]]:
        """Return where the pieces of prose stand in the page."""
        return [_found(page, pattern, text).span() for pattern, text in self.said()]

    def _row(self, label: str, entry: Any) -> Row:
        return Row(label, [self.run(name) for name in _named(entry)])

    def _group(self, given: Any) -> Row:
        if not isinstance(given, str):
            return self._row("", given)
        table, _, label = given.partition(" / ")
        return self._row(label, self.asked["tables"][table]["rows"][label])


def stored() -> list[dict[str, Any]]:
    """Return the lines of summaries.jsonl."""
    return (
        [json.loads(line) for line in SUMMARIES.read_text().splitlines()]
        if SUMMARIES.is_file()
        else []
    )


def filled(template: str, rows: Mapping[str, Row]) -> str:
    """Return a template with its fields filled in, a dash if none has a value; `rows` has the groups that they name."""
    parts = []

    def write(field: re.Match[str]) -> str:
        given, form = field.groups()
        found = [
            values(rows[group], name)
            for group, _, name in (side.rpartition(" ") for side in given.split(" - "))
        ]
        if len(found) == 2:
            found = [[a - b for a, b in zip(*found, strict=True)]]
        parts.append(written(found[0], form, given))
        return parts[-1]

    text = _FIELD.sub(write, template)
    return "–" if set(parts) == {"–"} else text


def values(row: Row, name: str) -> Any:
    """Return the list of each run's value, empty where they have none; of a published one its spread."""
    if "/" in name:
        return _published(row, *name.split(":", 2))
    try:
        found = [value for run in row.runs if (value := _value(run, name)) is not None]
    except (KeyError, StopIteration) as error:
        raise InputError(
            f"{name} of {row.label}", "a value as docs/results/make.py lists them", "choose one"
        ) from error
    if len(found) not in (0, len(row.runs)):
        raise InputError(
            f"{name} of {row.label}", "a value that all of its runs have, or none", "leave it out"
        )
    return found


def written(found: Any, form: str, name: str) -> str:
    """Return values, or a spread, in a form; a dash where there are none."""
    if not found:
        return "–"
    if form == "names":
        return ", ".join(sorted(set(map(str, found))))
    if form.startswith("code"):
        return " ".join(f"`{value[: int(form[4:])]}`" for value in found)
    parts, spread = _FORM.fullmatch(form), found if isinstance(found, MeanSd) else MeanSd.of(found)
    if parts is None or spread is None:
        raise InputError(
            f"{{{name}|{form}}}",
            "forms such as .3f, %.1f± and M.3g of finite numbers",
            "write one of these",
        )
    unit, digits, over = _UNITS[parts[1]], parts[2], parts[3]
    if over == ",":
        return ", ".join(f"{unit * value:{digits}}" for value in found)
    if over == "~":
        ends = t_interval(found)
        between = f" [{unit * ends[0]:+{digits}} to {unit * ends[1]:+{digits}}]" if ends else ""
        return f"{unit * spread.mean:+{digits}}{between}"
    mean = f"{unit * spread.mean:{digits}}"
    return f"{mean} ± {unit * spread.sd:{digits}}" if over and spread.count > 1 else mean


def _value(run: RunFiles, name: str) -> Any:
    summary = run.summary or {}
    if name == "sent":
        return summary["bytes_up"] + summary["bytes_down"]
    kind, _, which = name.partition(":")
    if kind in ("val", "loss"):
        entry = next(entry for entry in run.rounds if entry["round"] == int(which))
        return entry["train_loss"] if kind == "loss" else entry["val"][run.key]
    if which:
        model, _, metric = kind.partition("_")
        known = run.site_values(run.judged if model == "site" else model, metric)
        return {**metrics.spread(known, metrics.higher_is_better(metric)), **known}[which]
    found: Any = summary
    for key in name.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _published(row: Row, key: str, method: str, metric: str) -> MeanSd | None:
    """Return the published figure for the bundle and partition of the row's runs, where it has runs."""
    about = next(iter(row.runs)).record if row.runs else None
    for figure in _paper(key).figures:
        if (figure.name, figure.metric) == (method or row.label, metric) and (
            about is None
            or (
                figure.bundle == about["bundle"]
                and figure.partition in (None, about["partition"]["spec"])
            )
        ):
            return MeanSd(figure.mean, figure.sd or 0, 1 if figure.sd is None else 2)
    return None


@functools.cache
def _paper(key: str) -> paper_tables.PaperTable:
    return paper_tables.load(key)


def _named(entry: Any) -> Sequence[str]:
    """Return the run hashes of a row or a group; one that refers to a row names none itself."""
    if isinstance(entry, dict):
        entry = entry.get("runs", ())
    return () if isinstance(entry, str) else entry


def _wherever(template: str) -> re.Pattern[str]:
    """Return what finds a piece of prose, whatever its figures are and its lines break."""
    literal = _FIELD.split(template)[::3]
    return re.compile(
        _NUMBER.join(r"\s+".join(map(re.escape, re.split(r"\s+", text))) for text in literal)
    )


def _found(page: str, pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = list(pattern.finditer(page))
    if len(found) != 1:
        raise InputError(
            f"'{text}' stands {len(found)} times in the pages", "once", "edit it or tables.yaml"
        )
    return found[0]


def _folder(record: Mapping[str, Any]) -> RunFiles:
    run = record["run"]
    entries = {name: record[name] for name in ("rounds", "sites", "summary")}
    return RunFiles.from_record(run, **entries, path=Path(run["run_hash"]))


def collect(folders: Sequence[Path], wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Return a line for each wanted run: from a folder where one has it, else as it is stored.

    Raises:
        InputError: a run is in neither.
    """
    known = {_ident(record["summary"]): record for record in stored()}
    for path in (
        path
        for folder in reversed(folders)
        for path in sorted(folder.rglob("run.json"), reverse=True)
    ):
        summary = path.parent / "summary.json"
        ident = _ident(json.loads(summary.read_text())) if summary.is_file() else "@"
        if any(_is(ident, name) for name in wanted):
            known[ident] = _record(RunFiles(path.parent))
    found = {
        name: [record for ident, record in known.items() if _is(ident, name)] for name in wanted
    }
    if missing := [name for name, records in found.items() if len(records) != 1]:
        raise InputError(
            f"runs {', '.join(missing)} are not there, or not one",
            "a folder each",
            "give where they are",
        )
    return [records[0] for records in found.values()]


def _ident(summary: Mapping[str, Any]) -> str:
    """Return HASH@WEIGHTS: another version of medfl may give a run other bits."""
    return f"{summary['run_hash']}@{summary['weights_sha256']}"


def _is(ident: str, name: str) -> bool:
    """Tell whether HASH@WEIGHTS begins as the HASH, or the HASH@WEIGHTS, that tables.yaml names."""
    return all(
        whole.startswith(part)
        for whole, part in zip(ident.split("@"), name.split("@"), strict=False)
    )


def _record(folder: RunFiles) -> dict[str, Any]:
    """Return what is kept of a run; folders of the machine are left out, with `runs/` in a command instead."""
    run = {name: folder.record[name] for name in _RUN if name in folder.record}
    scored = [
        entry
        for entry in folder.rounds
        if entry["round"] == 1 or (entry.get("val") or {}).get(folder.key)
    ]
    columns = {"site", "train", "validate", "test"}
    columns |= {
        f"{kind}_{metric}" for kind in ("received", "personal", "local") for metric in _AT_SITES
    }
    record = {
        "run": {name: _without(value) for name, value in run.items()},
        "summary": _once(folder.summary or {}),
        "rounds": [
            {
                "round": entry["round"],
                "train_loss": entry.get("train_loss"),
                "val": {
                    name: value
                    for name, value in (entry.get("val") or {}).items()
                    if name == folder.key
                },
            }
            for entry in scored
        ],
        "sites": [
            {name: cell for name, cell in row.items() if name in columns} for row in folder.sites
        ],
    }
    kept: dict[str, Any] = json.loads(_FOLDER.sub(r"runs/\1", json.dumps(record)))
    return kept


def _once(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary that has the findings, structures or numbers one by one in its `last` alone."""
    told: dict[str, Any] = _bare(summary)
    if "last" in summary:
        told["last"] = summary["last"]

    return told


def _bare(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _bare(inner) for name, inner in value.items() if name != "classes"}


def _without(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _without(inner) for name, inner in value.items() if name not in _LEFT_OUT}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make the tables of docs/results.md and docs/results/."
    )
    parser.add_argument(
        "--collect",
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="where run folders are",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Renew what is asked for and return the exit code."""
    options = _options(arguments)
    try:
        if options.collect:
            records = collect(options.collect, Results.read().hashes())
            lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            write_atomic(SUMMARIES, "".join(lines).encode())
        texts = [path.read_text() for path in PAGES]
        renewed = Results.read().rewritten(BREAK.join(texts)).split(BREAK)
    except MedflError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    for path, before, after in zip(PAGES, texts, renewed, strict=True):
        if after != before:
            write_atomic(path, after.encode())
        sys.stdout.write(f"{path.name}: {'up to date' if after == before else 'rewritten'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
