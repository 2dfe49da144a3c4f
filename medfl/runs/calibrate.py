"""`medfl calibrate`: sets, masks and intervals with a promised coverage, for a finished run, by sums of its sites.

Each site scores its validation images by the model that it is judged by, and tells a histogram of the scores
(`medfl.evaluation.conformal.sums_of`), no image's. From these sums each site has a threshold in three ways: of its own
alone, pooled, and shrunken between both. Each is then examined on the site's test images.

A site without validation images is calibrated on half of its test images, by patients where these are known, and
examined on the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from medfl.core import tables, terminal
from medfl.core.arrays import Floats
from medfl.core.documents import Document
from medfl.core.errors import InputError
from medfl.core.seeding import derive
from medfl.core.setting_values import WAYS, check_coverage
from medfl.evaluation import conformal
from medfl.evaluation.conformal import Scored
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
from medfl.storage.run_reader import RunReader
from medfl.training.accelerate.precision import tf32

_PROMISES = (
    "the promise holds in the mean over calibration sets and new images; images of one patient count as independent",
    "alone: for new images of a site, where they are exchangeable with its calibration images",
    "pooled: for images of all sites, in the proportion of their calibration images, not for each site",
    "shrunken: own images count 1, those of others together {strength:g} at most; for a site that is "
    "exchangeable with the others, else less by at most twice their total variation times the others' share",
)
_SUPPRESSED = (
    "bins of fewer than {min_count} cases are joined with higher ones: the promise holds, sets grow; sites with "
    "fewer calibration cases share nothing, and coverages of fewer cases kept or lost are not told"
)


@dataclass(frozen=True)
class Options:
    """What is promised, and how it is shared.

    Attributes:
        coverage: above 0 and below 1.
        scores: of `Kind.set_scores`, "" for the default.
        share: the way of `WAYS` whose thresholds predict.
        strength: of how many cases those of other sites count together, shrunken.
        min_count: a site's bins, and counts of test cases, of fewer cases are not told.
        by: column whose groups are examined too, as of `Result.subgroups`.
        which: weights of the "last" or the "best" round.
    """

    coverage: float = 0.9
    scores: str = ""
    share: str = "pooled"
    strength: float = 100.0
    min_count: int = 0
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
    if (options.scores or "") not in ("", *kind.set_scores) or not kind.set_scores:
        raise InputError(
            f"scores {options.scores or 'of sets'} of a {kind.name} task",
            " or ".join(kind.set_scores) or "tasks of classes, findings, numbers or masks",
            "leave --scores out, or calibrate such a run",
        )
    if not result.finished:
        raise InputError(
            f"the run in {result.path}, which is not finished",
            "a finished model is calibrated",
            f"let it finish: medfl run --resume --out {result.path}",
        )

    scores = options.scores or kind.set_scores[0]
    sites = _sites(result, kind, scores, options.which, progress)
    table = _Table(kind, sites, options)
    rows = table.rows()
    notes = _below(rows, options.coverage)
    for text in _PROMISES:
        notes.append(text.format(strength=options.strength))
    if options.min_count:
        notes.append(_SUPPRESSED.format(min_count=options.min_count))

    document = {
        **asdict(options),
        "scores": scores,
        "weights_sha256": RunReader(result.path).sha256_of(options.which),
        "task": result.task,
        "data_source": result.run.data.source,
        "model": result.plan.method.judged,
        "site": "",
        "seed": result.run.seed,
        "promise": kind.promise,
        "scale": table.scale,
        "rows": rows,
        "groups": table.groups(result) if options.by else [],
        "notes": notes,
    }

    folder = out or result.path
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CALIBRATION, document)
    RunFolder(folder).write_table("calibration.csv", rows + document["groups"])
    blocks = [f"Coverage {options.coverage:g} is promised of {kind.promise}."]
    blocks += [tables.markdown_table(*table) for table in coverage.tables_of(document)]
    blocks += [f"- {note}" for note in document["notes"]]
    write_atomic(folder / "calibration.md", ("\n\n".join(blocks) + "\n").encode())
    if folder == result.path:
        write_report(folder)

    return document


def _sites(result: Result, kind: Kind, scores: str, which: str, progress: bool) -> dict[str, _Site]:
    judges = result.judges(which)
    sites = {}

    def scored(name: str, section: str, ids: Sequence[str]) -> Scored | None:
        network = judges.get(name, judges.get(""))
        if network is None or not ids:
            return None

        examined = result.examined(network, section, ids)
        with tf32(result.run.tf32):
            return kind.scored(examined, scores)

    partition = result.run.partition.sites
    for name in terminal.bar(partition, desc="calibrating", unit="site", shown=progress):
        section = "validate"
        source = "validation"
        calibration: Sequence[str] = partition[name].get(section, ())
        test: Sequence[str] = partition[name].get("test", ())
        if not calibration:
            section = "test"
            source = f"half of test, seed {result.run.seed}"
            calibration, test = _halves(result, test)

        sites[name] = _Site(scored(name, section, calibration), scored(name, "test", test), source)

    sites = {name: site for name, site in sites.items() if site.calibration or site.test}
    if not sites:
        raise InputError(
            f"the run in {result.path}: no site has images to calibrate on",
            "validation or test images that have what is promised to be covered",
            "give the run such images",
        )

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


class _Table:
    """The thresholds of all sites, and what they reach on test cases.

    Attributes:
        places: site -> way -> place of the threshold, None where there are too few cases.
        scale: as of `conformal.Rule`.
    """

    def __init__(self, kind: Kind, sites: Mapping[str, _Site], options: Options) -> None:
        """Choose the thresholds; InputError if there are too few cases for the share that is asked for."""
        self.kind = kind
        self.sites = sites
        self.options = options
        self.scale: tuple[float, ...] = ()
        self.sums: dict[str, Floats] = {}
        for name, site in sites.items():
            self.sums[name] = conformal.sums_of(site.calibration, options.min_count)
            if site.calibration:
                self.scale = site.calibration.scale

        self.places: dict[str, dict[str, int | None]] = {}
        for name, ways in conformal.shared(self.sums, options.strength).items():
            places = {way: conformal.place_of(ways[way], options.coverage) for way in WAYS}
            self.places[name] = places
            if places[options.share] is None:
                where = ALL_SITES if options.share == "pooled" else name
                raise InputError(
                    f"{ways[options.share].sum():.4g} calibration cases, {options.share}, at {where}",
                    f"coverage {options.coverage:g} takes at least {conformal.needed(options.coverage)}",
                    "lower --coverage or --min-count, give more validation images, or --share pooled",
                )

    def rows(self) -> list[CoverageRow]:
        """Return a row for each site and way, then one of all sites that are told for each way."""
        rows = []
        shown = []
        for name, site in self.sites.items():
            for way in WAYS:
                row = self._row(name, way, [name])
                row["source"] = site.source
                row["calibration"] = round(self.sums[name].sum())
                place = self.places[name][way]
                if place is not None:
                    row["threshold"] = float(conformal.EDGES[place])

                rows.append(row)

            # a site that is not told would follow from the others and the total
            if "test" in rows[-1]:
                shown.append(name)

        pooled = rows[1].get("threshold")
        for way in WAYS:
            rows.append(self._row(ALL_SITES, way, shown))
            if way == "pooled" and pooled is not None:
                rows[-1]["threshold"] = pooled

        return rows

    def groups(self, result: Result) -> list[CoverageRow]:
        """Return a row for each value of a column, of the sites' test cases; small groups are not told."""
        by = self.options.by
        cases = result.predictions if by == "site" else result.cases()
        value_of = dict(zip([row["id"] for row in cases], group_values(cases, by), strict=True))
        members: dict[str, set[str]] = {}
        for site in self.sites.values():
            if site.test is None:
                continue
            for ident in site.test.ids:
                members.setdefault(str(value_of[ident]), set()).add(ident)

        least = self.options.min_count or MIN_COUNT
        counts, _ = suppress_counts({name: len(ids) for name, ids in members.items()}, least)
        rows = []
        for name in sorted(members, key=group_order):
            ids = members[name] if counts[name] is not None else ()
            rows.append(self._row(name, self.options.share, [*self.sites], ids))

        return rows

    def _row(
        self, name: str, way: str, sites: Sequence[str], ids: Collection[str] | None = None
    ) -> CoverageRow:
        """Return what the thresholds of some sites reach, of all their test cases or of those with these ids."""
        outcomes = [np.zeros((3, 0))]
        for site in sites:
            test = self.sites[site].test
            place = self.places[site][way]
            if test is None or place is None:
                continue

            chosen = [ids is None or ident in ids for ident in test.ids]
            abstained = self.kind.abstains(test, place)
            values = np.stack([test.losses(place), test.sizes(place), abstained])
            outcomes.append(values[:, chosen])

        row = CoverageRow(name=name, way=way)
        loss, sizes, abstentions = np.concatenate(outcomes, 1)
        cases = len(loss)
        intact = int((loss < 1e-9).sum())
        cells = {"intact": intact, "lost": cases - intact}
        shown, total = suppress_counts(cells, self.options.min_count)
        if not cases or total is None or None in shown.values():
            return row

        covered = cases - float(loss.sum())
        low, high = conformal.interval(covered, cases)
        row |= {"test": cases, "coverage": covered / cases, "low": low, "high": high}
        row |= {"size": float(sizes.mean()), "abstained": float(abstentions.mean())}
        return row


def _below(rows: Sequence[CoverageRow], promised: float) -> list[str]:
    """Return for each way at how many sites the interval of the reached coverage is below what was promised."""
    lines = []
    for way in WAYS:
        tested = [row for row in rows[:-3] if row["way"] == way and "high" in row]
        below = [row["name"] for row in tested if row["high"] < promised]
        names = f": {', '.join(below)}" * bool(below)
        lines.append(f"{way}: below the promise at {len(below)} of {len(tested)} sites{names}")

    return lines
