"""`medfl calibrate`: sets, masks and intervals with a promised coverage, for a finished run, by sums of its sites.

Each site scores its validation images by the model that it is judged by, and tells a histogram of the scores
(`medfl.evaluation.conformal.Sums`), no image's. From these sums each site has a threshold in three ways: of its own
alone, pooled, and shrunken between both. Each is then examined on the site's test images.

A site without validation images is calibrated on half of its test images, by patients where these are known, and
examined on the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medfl.core import tables, terminal
from medfl.core.arrays import Floats
from medfl.core.documents import Document
from medfl.core.errors import InputError
from medfl.core.seeding import derive
from medfl.core.setting_values import WAYS, check_coverage
from medfl.evaluation import conformal
from medfl.evaluation.conformal import Scored, Sums
from medfl.policy.suppression import suppress_counts
from medfl.problem.tasks import KINDS
from medfl.problem.tasks.kind import Kind
from medfl.report import coverage, write_report
from medfl.runs.result import Result
from medfl.runs.subgroups import MIN_COUNT, group_order, group_values
from medfl.storage.files import write_atomic, write_json
from medfl.storage.places import CALIBRATION
from medfl.storage.run_documents import ALL_SITES, CoverageRow
from medfl.storage.run_folder import RunFolder
from medfl.training.accelerate.precision import tf32

_PROMISES = {
    "alone": "alone: for new images of a site, where they are exchangeable with its calibration images",
    "pooled": "pooled: for images of all sites, in the proportion of their calibration images, not for each site",
    "shrunken": "shrunken: own images count 1, those of others together {strength:g} at most; for a site that is "
    "exchangeable with the others, else less by at most twice their total variation times the others' share",
}


@dataclass(frozen=True)
class Options:
    """What is promised, and how it is shared.

    Attributes:
        coverage: above 0 and below 1.
        scores: of `Kind.set_scores`, "" for the default.
        share: the way of `WAYS` whose thresholds predict.
        strength: of how many cases those of other sites count together, shrunken.
        least: a site's bins, and counts of test cases, of fewer cases are not told.
        by: column whose groups are examined too, as of `Result.subgroups`.
        which: weights of the "last" or the "best" round.
    """

    coverage: float = 0.9
    scores: str = ""
    share: str = "pooled"
    strength: float = 100.0
    least: int = 0
    by: str = ""
    which: str = "last"


@dataclass(frozen=True, eq=False)
class _Site:
    """What a site has: calibration and test cases, None without any, and from where the first are."""

    calibration: Scored | None
    test: Scored | None
    source: str


def calibrate(
    result: Result, options: Options, out: Path | None = None, *, progress: bool = False
) -> Document:
    """Calibrate a finished run and write calibration.json, .csv and .md into `out`, by default its folder.

    There the report is written anew, and `medfl predict` and `medfl export` take the calibration up.

    Raises:
        InputError: the run is not finished, its outputs make no sets, or its cases are too few for the coverage.
    """
    check_coverage(options.coverage)
    kind = KINDS[result.task]
    scores = _checked_scores(kind, options.scores)
    if not result.finished:
        raise InputError(
            f"the run in {result.path}, which is not finished",
            "a finished model is calibrated",
            f"let it finish: medfl run --resume --out {result.path}",
        )

    sites = _examined(result, kind, scores, options.which, progress)
    sums = {}
    scale: tuple[float, ...] = ()
    for name, site in sites.items():
        sums[name] = Sums.of(site.calibration, kind.edges, options.least)
        scale = scale or (site.calibration.scale if site.calibration else ())

    table = _Table(kind, sites, sums, _places(sums, options), options)
    rows = table.rows()
    groups = table.groups(result) if options.by else []
    summary = result.summary
    document = {
        "run_hash": result.run.run_hash,
        "weights_sha256": summary["weights_sha256" if options.which == "last" else "best_sha256"],
        "which": options.which,
        "task": result.task,
        "data_source": result.run.data.source,
        "model": result.plan.method.judged,
        "site": "",
        "coverage": options.coverage,
        "scores": scores,
        "share": options.share,
        "strength": options.strength,
        "min_count": options.least,
        "seed": result.run.seed,
        "promise": kind.promise[0],
        "size_unit": kind.promise[1],
        "scale": [*scale],
        "rows": rows,
        "by": options.by,
        "groups": groups,
        "summary": _summary(rows, options.coverage),
        "notes": _notes(rows, options),
    }

    folder = out or result.path
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CALIBRATION, document)
    RunFolder(folder).write_table("calibration.csv", rows + groups)
    blocks = [tables.markdown_table(head, body) for head, body in coverage.tables_of(document)]
    blocks.append("\n".join(f"- {line}" for line in document["summary"] + document["notes"]))
    write_atomic(folder / "calibration.md", ("\n\n".join(blocks) + "\n").encode())
    if folder == result.path:
        write_report(folder)

    return document


def _checked_scores(kind: Kind, scores: str) -> str:
    if not kind.set_scores:
        raise InputError(
            f"a model of the task {kind.name!r}",
            "classes, findings, numbers or masks are calibrated",
            "calibrate such a run",
        )
    if scores and scores not in kind.set_scores:
        raise InputError(
            f"--scores {scores} of a {kind.name} task",
            f"its scores are {' or '.join(kind.set_scores)}",
            "leave it out",
        )

    return scores or kind.set_scores[0]


def _examined(
    result: Result, kind: Kind, scores: str, which: str, progress: bool
) -> dict[str, _Site]:
    judges = result.judges(which)
    partition = result.run.partition.sites
    sites = {}

    def scored(name: str, section: str, ids: Sequence[str]) -> Scored | None:
        network = judges.get(name, judges.get(""))
        if network is None or not ids:
            return None

        examined = result.examined(network, section, ids)
        with tf32(result.run.tf32):
            return kind.scored(examined, scores)

    for name in terminal.bar(partition, desc="calibrating", unit="site", shown=progress):
        test: Sequence[str] = partition[name].get("test", ())
        validation = partition[name].get("validate", ())
        half: Sequence[str] = ()
        if validation:
            calibration = scored(name, "validate", validation)
            source = "validation"
        else:
            half, test = _halves(result, test)
            calibration = scored(name, "test", half)
            source = f"half of test, seed {result.run.seed}"

        if validation or half or test:
            sites[name] = _Site(calibration, scored(name, "test", test), source)

    return sites


def _halves(result: Result, ids: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide test images by patients, in an order that depends on the run's seed alone."""
    patient_of = {}
    for item in result.plan.bundle.items("test"):
        patient_of[str(item["id"])] = str(item.get("group") or item["id"])

    patients = {patient_of[ident] for ident in ids}
    ordered = sorted(patients, key=lambda patient: derive(result.run.seed, "calibrate", patient))
    first = set(ordered[: len(ordered) // 2])
    halves: tuple[list[str], list[str]] = ([], [])
    for ident in ids:
        halves[patient_of[ident] not in first].append(ident)

    return halves


def _places(sums: Mapping[str, Sums], options: Options) -> dict[str, dict[str, int | None]]:
    """Return site -> way -> place of the threshold; InputError if there are too few cases for `share`."""
    places = {}
    for name, ways in conformal.shared(sums, options.strength).items():
        places[name] = {way: conformal.place_of(ways[way], options.coverage) for way in WAYS}
        if places[name][options.share] is None:
            where = ALL_SITES if options.share == "pooled" else name
            raise InputError(
                f"{ways[options.share].cases:g} calibration cases, {options.share}, at {where}",
                f"coverage {options.coverage:g} takes at least {conformal.needed(options.coverage)}",
                "lower --coverage or --min-count, give more validation images, or --share pooled",
            )

    if not places:
        raise InputError("no calibration cases", "sites with images", "give the run such sites")

    return places


class _Table:
    """What each way reaches on test cases."""

    def __init__(
        self,
        kind: Kind,
        sites: Mapping[str, _Site],
        sums: Mapping[str, Sums],
        places: Mapping[str, Mapping[str, int | None]],
        options: Options,
    ) -> None:
        self.kind = kind
        self.sites = sites
        self.places = places
        self.sums = sums
        self.options = options

    def rows(self) -> list[CoverageRow]:
        """Return a row for each site and way, then one of all sites that are told for each way."""
        rows = []
        told = []
        for name, site in self.sites.items():
            for way in WAYS:
                rows.append(self._row(name, way, [name], site.source))

            # a site that is not told would follow from the others and the total
            if rows[-1]["test"] is not None:
                told.append(name)

        for way in WAYS:
            rows.append(self._row(ALL_SITES, way, told, ""))
            if way == "pooled":
                rows[-1]["threshold"] = rows[1]["threshold"]

        return rows

    def groups(self, result: Result) -> list[CoverageRow]:
        """Return a row for each value of a column, of the sites' test cases; small groups are not told."""
        by = self.options.by
        cases = result.predictions if by == "site" else result.cases()
        values = dict(zip([row["id"] for row in cases], group_values(cases, by), strict=True))
        members: dict[str, set[str]] = {}
        for site in self.sites.values():
            for ident in site.test.ids if site.test else ():
                members.setdefault(str(values[ident]), set()).add(ident)

        least = self.options.least or MIN_COUNT
        counts, _ = suppress_counts({name: len(ids) for name, ids in members.items()}, least)
        rows = []
        for name in sorted(members, key=group_order):
            ids = members[name] if counts[name] is not None else set[str]()
            rows.append(self._row(name, self.options.share, [*self.sites], "", ids))

        return rows

    def _row(
        self, name: str, way: str, sites: Sequence[str], source: str, ids: set[str] | None = None
    ) -> CoverageRow:
        """Return what the thresholds of some sites reach, of all their test cases or of those named by their ids."""
        losses = [np.zeros(0)]
        sizes = [np.zeros(0)]
        abstained = [np.zeros(0, bool)]
        for site in sites:
            test = self.sites[site].test
            place = self.places[site][way]
            if test is None or place is None:
                continue

            chosen = [ids is None or ident in ids for ident in test.ids]
            size = test.sizes(place, self.kind.edges)
            losses.append(test.losses(place)[chosen])
            sizes.append(size[chosen])
            abstained.append(self.kind.abstains(size, test.everything)[chosen])

        calibrated = None
        threshold = None
        if [name] == sites and ids is None:
            calibrated = int(self.sums[name].cases)
            own = self.places[name][way]
            threshold = None if own is None else float(self.kind.edges[own])

        row = CoverageRow(
            name=name, way=way, calibration=calibrated, source=source, threshold=threshold,
            test=None, coverage=None, low=None, high=None, size=None, abstained=None,
        )  # fmt: skip
        self._reach(row, np.concatenate(losses), np.concatenate(sizes), np.concatenate(abstained))
        return row

    def _reach(self, row: CoverageRow, losses: Floats, sizes: Floats, abstained: Floats) -> None:
        """Enter what is reached, unless there are no cases, or too few that are kept whole or are not."""
        cases = len(losses)
        whole = int((losses < 1e-9).sum())
        cells, total = suppress_counts({"kept": whole, "lost": cases - whole}, self.options.least)
        if not cases or total is None or None in cells.values():
            return

        kept = cases - float(losses.sum())
        low, high = conformal.interval(kept, cases)
        row["test"] = cases
        row["coverage"] = kept / cases
        row["low"] = low
        row["high"] = high
        row["size"] = float(sizes.mean())
        row["abstained"] = float(abstained.mean())


def _summary(rows: Sequence[CoverageRow], promised: float) -> list[str]:
    """Return for each way at how many sites the interval of the reached coverage is below what was promised."""
    lines = []
    for way in WAYS:
        ends = {}
        for row in rows:
            if row["way"] == way and row["name"] != ALL_SITES and row["high"] is not None:
                ends[row["name"]] = row["high"]

        below = [name for name, high in ends.items() if high < promised]
        names = f": {', '.join(below)}" * bool(below)
        lines.append(f"{way}: below the promise at {len(below)} of {len(ends)} sites{names}")

    return lines


def _notes(rows: Sequence[CoverageRow], options: Options) -> list[str]:
    notes = [
        "the promise holds in the mean over calibration sets and new images; images of one patient count as independent"
    ]
    for way in WAYS:
        notes.append(_PROMISES[way].format(strength=options.strength))

    if options.least:
        notes.append(
            f"bins of fewer than {options.least} cases are joined with higher ones: the promise holds, sets grow; "
            "sites with fewer calibration cases share nothing, and coverages of fewer cases kept or lost are not told"
        )

    without = {row["name"]: None for row in rows if row["calibration"] == 0}
    if without:
        notes.append(f"without calibration cases: {', '.join(without)}")
    for row in rows:
        if row["abstained"] == 1:
            notes.append(f"{row['name']}, {row['way']}: every set is empty or has everything")

    return notes
