"""The tables and figures of docs/results.md and docs/results/, made from what the runs left.

    python docs/results/make.py                      rewrite the pages
    python docs/results/make.py --collect FOLDER...  first renew summaries.jsonl from the run folders below FOLDER

`summaries.jsonl` has one line for each run: its `summary.json` as the run wrote it, but findings, structures or numbers
one by one in `last` alone, the columns of `sites.csv`, the rounds that were scored and what `run.json` says of the run,
without item lists and folders. `tables.yaml` says what is shown:

    tables: name -> {columns: {title: template}, rows: {label: run hashes, or {runs, cells: {title: template}}}}
        a table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`
    said: list of {texts: [template, ...], runs: {group: run hashes, or "TABLE / LABEL"}, from: whence, without runs}
        pieces of prose, which must stand in the page once; their figures are brought up to date
    claims: list of {paper, claim, where, row: "TABLE / LABEL", against: {name: "TABLE / LABEL"},
                     metrics: {name: VALUE}, expect: higher or lower}
        the lines of the table `claims`, one for each metric and reference, with verdicts by the rule of `judged`
    gone: hashes that the page names and of which no run folder is left

A template is text with fields `{VALUE|FORM}`, or in prose `{GROUP VALUE|FORM}` and `{GROUP VALUE - GROUP VALUE|FORM}`.

VALUE: a path in summary.json, as `global.last.accuracy`, or
    sent: bytes both ways
    site_METRIC:NAME: at a site, or mean, sd or worst of the sites, by the model that each is judged by
    received_METRIC:NAME, personal_METRIC:NAME, local_METRIC:NAME: by the global, personalised, Local model
    val:ROUND, loss:ROUND: key metric on the validation set, training loss; val:FIRST-LAST: the mean of these rounds
    settled: the first scored round whose key metric on the validation set is at most 0.01 below that of the best
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
import math
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

from medfl.compare.comparison import MeanSd
from medfl.compare.papers import runs as paper_tables
from medfl.core import tables
from medfl.core.errors import InputError, MedflError
from medfl.evaluation import metrics
from medfl.evaluation.bootstrap import t_interval
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

LEAST_SEEDS = 6
LEAST_IMAGES = 20
"""At each site."""
MARGIN = 0.05
"""Between the reference and chance, and between it and 1."""
RESOLVED = 0.05
"""The largest effect that may stay hidden where a claim is called not shown."""
CLAIMS = (
    "paper", "claim", "where tested", "difference", "effect", "smallest effect that shows", "reference", "chance",
    "seeds", "images at the smallest site", "verdict",
)  # fmt: skip
SECTIONS = {"train": "to train on", "validate": "to validate", "test": "to test"}

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
_AT_SITES = (
    "accuracy",
    "balanced_accuracy",
    "dice",
    "pixel_accuracy",
    "auroc",
    "auroc_covid",
    "mae",
)


@dataclass(frozen=True)
class Row:
    """What a field may refer to: runs that differ in their seed, and what they are called."""

    label: str
    runs: Sequence[RunFiles]


@dataclass(frozen=True)
class Verdict:
    """What runs say of a claim.

    Attributes:
        word: supported, contradicted, not shown, or cannot tell with the reasons.
        shows: the smallest effect whose interval leaves out zero, with as many seeds as there are, at least six.
    """

    word: str
    shows: float | None


def judged(
    effects: Sequence[float],
    reference: Sequence[float],
    *,
    chance: float | None,
    images: int | None,
    expect: str = "higher",
) -> Verdict:
    """Return the verdict on a claim that runs are better than their reference, all by rule.

    It can be told where there are at least six seeds and 20 images at each site, and where the 95 % interval of the
    reference is more than 5 points above chance and below 95. Then an interval of the effect without zero decides. With
    zero in it the claim is not shown if an effect of 5 points would have been seen, else that cannot be told.

    Args:
        effects: difference of each pair of runs with the same seed.
        reference: each of its runs.
        chance: None of a metric without one, which has no ceiling either.
        images: the fewest that a site is scored on, None where runs do not record them.
        expect: higher, or lower for an effect below zero.
    """
    planned = max(len(effects), LEAST_SEEDS)
    shows = None
    if len(effects) > 1:
        t = float(stats.t.ppf(0.975, planned - 1))
        shows = t * statistics.stdev(effects) / math.sqrt(planned)

    reasons = []
    if len(effects) < LEAST_SEEDS:
        reasons.append(f"{len(effects)} seed{'s' if len(effects) > 1 else ''}")
    if images is None:
        reasons.append("images at the sites not recorded")
    elif images < LEAST_IMAGES:
        reasons.append(f"{images} images at a site")
    low, high = t_interval(reference) or (min(reference), max(reference))
    if chance is not None and low <= chance + MARGIN:
        reasons.append("reference near chance")
    if chance is not None and high >= 1 - MARGIN:
        reasons.append("reference near the ceiling")

    mean = statistics.fmean(effects)
    ends = t_interval(effects) or (mean, mean)  # of equal effects
    if not reasons and (ends[0] > 0 or ends[1] < 0):
        return Verdict(
            "supported" if (ends[0] > 0) == (expect == "higher") else "contradicted", shows
        )
    if not reasons and shows is not None and shows > RESOLVED:
        reasons.append("too few seeds for so wide an interval")
    return Verdict(f"cannot tell ({'; '.join(reasons)})" if reasons else "not shown", shows)


class Results:
    """`tables.yaml` with the runs that it names."""

    def __init__(self, asked: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
        """Take the contents of tables.yaml and of summaries.jsonl."""
        self.asked = asked
        self.runs = {_ident(record["summary"]): _folder(record) for record in records}
        self._by_name: dict[str, RunFiles] = {}

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
        if name in self._by_name:
            return self._by_name[name]
        found = [run for ident, run in self.runs.items() if _is(ident, name)]
        if len(found) != 1:
            raise InputError(
                f"run {name}, of which {SUMMARIES.name} has {len(found)}",
                "runs with one line there",
                "--collect it",
            )
        self._by_name[name] = found[0]
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
            [self.asked["tables"][name].get("head", "method"), *columns], lines, is_markup=True
        )

    def below(self, name: str) -> str:
        """Return what stands below a table: how many images its runs have."""
        entries = self.asked["tables"][name]["rows"].values()
        return shares([self.run(run) for entry in entries for run in _named(entry)])

    def claims(self) -> str:
        """Return the table of the papers' claims in Markdown."""
        return tables.markdown_table(CLAIMS, [*self._judged()], is_markup=True)

    def _judged(self) -> Iterator[list[str]]:
        for claim in self.asked["claims"]:
            row = self._group(claim["row"])
            for name, against in claim["against"].items():
                reference = self._group(against)
                for metric, value in claim["metrics"].items():
                    ours, theirs = values(row, value), values(reference, value)
                    effects = [a - b for a, b in zip(ours, theirs, strict=True)]
                    both = [*row.runs, *reference.runs]
                    chances = [chance(run, value) for run in both]
                    least = None if None in chances else max(chances)
                    images = fewest(both, "validate" if value.startswith("val:") else "test")
                    verdict = judged(
                        effects,
                        theirs,
                        chance=least,
                        images=images,
                        expect=claim.get("expect", "higher"),
                    )
                    yield [
                        claim["paper"], claim["claim"], claim["where"], f"{metric}, over {name}",
                        written(effects, "%.1f~", value),
                        "–" if verdict.shows is None else f"{100 * verdict.shows:.1f}",
                        written(theirs, "%.1f±", value),
                        "–" if least is None else f"{100 * least:.1f}",
                        str(len(effects)), "–" if images is None else str(images), verdict.word,
                    ]  # fmt: skip

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
        for name in ("claims", *self.asked["tables"]):
            opening = f"<!-- table: {name} -->\n"
            start, found, rest = page.partition(opening)
            _, end, tail = rest.partition("\n<!-- end -->")
            if not found or not end:
                raise InputError(
                    f"no table {name} in the pages",
                    f"{opening.strip()} … <!-- end -->",
                    "add the lines",
                )
            made = (
                self.claims() if name == "claims" else f"{self.table(name)}\n\n{self.below(name)}"
            )
            page = f"{start}{opening}{made}{end}{tail}"
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


def chance(run: RunFiles, name: str) -> float | None:
    """Return what guessing reaches: one over the classes, of sites' own images over those that the site has."""
    if run.record["task"] != "classification":
        return None
    if name.endswith("auroc"):
        return 0.5
    if name.startswith(("global.", "val:")):
        return 1 / len(run.classes)
    owned = [sum(map(bool, counts)) for counts in run.record["site_class_counts"].values()]
    return statistics.fmean(1 / count for count in owned)


def fewest(runs: Sequence[RunFiles], section: str) -> int | None:
    """Return how many images of a section the smallest site of the runs has, None where one records none."""
    counts = [row.get(section) for run in runs for row in run.sites]
    return None if None in counts or not counts else min(map(int, counts))


def shares(runs: Sequence[RunFiles]) -> str:
    """Return how many images the runs train on, validate and test with: what is validated on is not trained on."""
    parts = []
    for section, purpose in SECTIONS.items():
        counts = sorted({sum(int(row[section]) for row in run.sites) for run in runs})
        if counts == [0]:  # images that belong to no site
            counts = sorted({run.record["data"]["counts"][section] for run in runs})
        few = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        parts.append(f"{few} {purpose}")
    return f"Images of a run: {', '.join(parts)}."


def stored() -> list[dict[str, Any]]:
    """Return the runs of summaries.jsonl."""
    if not SUMMARIES.is_file():
        return []

    return [unpacked(json.loads(line)) for line in SUMMARIES.read_text().splitlines()]


def packed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run as its line has it: sites and rounds as columns, `last` and `best` where they repeat nothing."""
    summary = dict(record["summary"])
    judged = summary.get(summary["judged"]) or {}
    for which in ("last", "best"):
        if which in summary and summary[which] == judged.get(which):
            del summary[which]

    rounds = [{**row, "val": None} for row in record["rounds"]]
    scores = _columns([row.get("val") or {} for row in record["rounds"]])
    return {
        **record,
        "summary": summary,
        "sites": _columns(record["sites"]),
        "rounds": {**_columns(rounds), "val": scores},
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return name -> the values of all rows, None where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _rows(columns: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """Invert `_columns`."""
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, cells in columns.items():
        for row, cell in zip(rows, cells, strict=True):
            if cell is not None:
                row[name] = cell

    return rows


def unpacked(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run of a line."""
    summary = dict(line["summary"])
    judged = summary.get(summary["judged"]) or {}
    for which in ("last", "best"):
        if which in judged:
            summary.setdefault(which, judged[which])

    sites = _rows(line["sites"], max(map(len, line["sites"].values()), default=0))
    columns = dict(line["rounds"])
    scores = columns.pop("val")
    rounds = _rows(columns, len(columns["round"]))
    for row, score in zip(rounds, _rows(scores, len(rounds)), strict=True):
        row["val"] = score

    return {**line, "summary": summary, "sites": sites, "rounds": rounds}


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
    if name == "settled":
        scores = {entry["round"]: entry["val"].get(run.key) for entry in run.rounds}
        known = {number: score for number, score in scores.items() if score is not None}
        return min(number for number, score in known.items() if score >= max(known.values()) - 0.01)

    kind, _, which = name.partition(":")
    if kind in ("val", "loss"):
        first, _, last = which.partition("-")
        rounds = {entry["round"]: entry for entry in run.rounds}
        wanted = [rounds[number] for number in range(int(first), int(last or first) + 1)]
        return statistics.fmean(
            entry["train_loss"] if kind == "loss" else entry["val"][run.key] for entry in wanted
        )
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
        ident = _ident(RunFiles(path.parent).summary or {}) if summary.is_file() else "@"
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
    return f"{summary.get('run_hash')}@{summary.get('weights_sha256')}"


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
            lines = (
                json.dumps(packed(record), ensure_ascii=False, separators=(",", ":")) + "\n"
                for record in records
            )
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
