"""`medfl calibrate`: prediction sets, masks and intervals with guaranteed coverage for a finished run, from site sums.

Each site scores its validation images with the model that it is judged by, and releases a histogram of the scores
(`medfl.evaluation.conformal.sums_of`), not those of images. From these sums each site gets a threshold in three ways:
from its own sums, pooled, and shrunken between both. Each is then evaluated on histograms of the site's test images
(`table_of`). If the sites of a FLARE job keep their images, one answer of theirs contains all of these.

A site without validation images is calibrated on half of its test images, split by patient if known, and
evaluated on the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from medfl import methods
from medfl.core import (
    WAYS,
    Document,
    Floats,
    InputError,
    RunError,
    check_coverage,
    map_values,
    markdown_table,
    markdown_text,
    printable,
    terminal,
)
from medfl.evaluation import Scored, conformal
from medfl.policy.gate import Gate
from medfl.policy.policy import EVALUATE, Policy
from medfl.policy.privacy import Account
from medfl.policy.suppression import suppress_counts
from medfl.problem.tasks import KINDS
from medfl.problem.tasks.kind import Kind
from medfl.report import coverage, write_report
from medfl.runs.result import Result
from medfl.runs.subgroups import MIN_COUNT, group_order, group_values
from medfl.storage import (
    ALL_SITES,
    CALIBRATION_SUMS,
    RunFolder,
    RunReader,
    load_weights,
    made,
    write_atomic,
    write_json,
)
from medfl.storage.places import CALIBRATION
from medfl.storage.run_documents import CoverageRow
from medfl.storage.run_integrity import read_verified_run
from medfl.training.accelerate.precision import tf32

_PROMISES = (
    "the promise holds in the mean over calibration sets and new images; images of one patient count as independent",
    "alone: for new images of a site, where they are exchangeable with its calibration images",
    "pooled: for images of all sites, in the proportion of their calibration images, not for each site",
    "shrunken: own images count 1, those of others together {strength:g} at most; for a site that is "
    "exchangeable with the others, else less by at most twice their total variation times the others' share",
)
_NOT_CHARGED = (
    "all images are on this machine, which nothing leaves: the policy's noise is not added, its budget not charged; a "
    "job (medfl flare export --evaluate --calibrate SCORES) charges it at each site"
)
_SUPPRESSED = (
    "bins of fewer than {min_count} cases are joined with higher ones: the promise holds, sets grow; sites with "
    "fewer calibration cases share nothing; of test cases too, so that at least so many are covered, and sizes and "
    "coverages of fewer cases kept or lost are not told"
)


@dataclass(frozen=True)
class Options:
    """The coverage, and how sums are shared.

    Attributes:
        coverage: above 0 and below 1.
        scores: one of `Kind.set_scores`, "" for the default.
        share: one of `WAYS`: the thresholds used for predictions.
        strength: number of cases that all other sites together count as, if shrunken.
        min_count: bins of a site, and counts of test cases, with fewer cases are suppressed.
        by: column whose groups are evaluated too, as in `Result.subgroups`.
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
class SiteSums:
    """A site's released sums and, if its images are available, the test cases themselves.

    Attributes:
        calibration: histogram (B,) of the calibration cases.
        test: from `conformal.table_of`, None without test cases.
        source: origin of the calibration cases.
        scale: as in `conformal.Rule`.
        cases: the test cases, None if they are elsewhere.
    """

    calibration: Floats
    test: Floats | None
    source: str
    scale: tuple[float, ...] = ()
    cases: Scored | None = None

    @classmethod
    def told(
        cls,
        tables: Mapping[str, Mapping[str, Floats]],
        seed: int,
        scale: tuple[float, ...] = (),
        cases: Scored | None = None,
    ) -> SiteSums:
        """Convert tables of `conformal.tables_of`."""
        test = tables.get("test", {})
        calibration = tables.get("validate", {}).get("sets")
        source = "validation"
        if calibration is None:
            # a site that has neither shares no case
            calibration = test.get("half", conformal.sums_of(None)[None])
            source = f"half of test, seed {seed}"

        return cls(calibration[0], test.get("sets"), source, scale, cases)


def calibrate(
    result: Result,
    options: Options,
    out: Path | None = None,
    *,
    policy: Policy | None = None,
    progress: bool = False,
) -> Document:
    """Calibrate a finished run and write calibration.json, .csv and .md into `out`, by default its folder.

    In its own folder the report is rewritten, and `medfl predict` and `medfl export` use the calibration. `policy` is
    that of the sites whose images are here: each releases what it allows.

    Raises:
        InputError: the run is not finished, was edited, its outputs allow no sets, or there are too few cases for the
            coverage.
    """
    check_coverage(options.coverage)
    kind = KINDS[result.task]
    if options.scores not in ("", *kind.set_scores) or not kind.set_scores:
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

    read_verified_run(result.path / "run.json")
    rules = policy or Policy()
    options = replace(options, min_count=max(options.min_count, rules.outbound.min_count))
    answers = _told(result)
    if answers is None:
        scores = options.scores or kind.set_scores[0]
        sites = _sites(result, kind, options, scores, rules, progress)
    else:
        scores, sites = answers
        if options.scores not in ("", scores) or options.by or options.min_count or policy:
            raise InputError(
                f"--scores, --by, --min-count or --policy: the sites of {result.path} told their sums",
                f"these, by {scores}, as the policy of each says",
                "leave it out, or export another job: medfl flare export --evaluate --calibrate SCORES",
            )

    calibration = Calibration(sites, options)
    rows = calibration.rows()
    notes = _below(rows, options.coverage)
    for text in _PROMISES:
        notes.append(text.format(strength=options.strength))
    if options.min_count:
        notes.append(_SUPPRESSED.format(min_count=options.min_count))
    if rules.outbound.noise is not None:
        notes.append(_NOT_CHARGED)

    document = {
        **asdict(options),
        "scores": scores,
        "weights_sha256": RunReader(result.path).sha256_of(options.which),
        "task": result.task,
        "data_source": result.run.data.source,
        "model": methods.load(result.run.method, result.run.options).judged,
        "site": "",
        "seed": result.run.seed,
        "promise": kind.promise,
        "scale": calibration.scale,
        "rows": rows,
        "groups": calibration.groups(result) if options.by else [],
        "notes": notes,
    }

    folder = out or result.path
    blocks = [f"Coverage {options.coverage:g} is promised of {kind.promise}."]
    blocks += [markdown_table(*table) for table in coverage.tables_of(document)]
    blocks += [f"- {markdown_text(note)}" for note in notes]
    with made(folder, [CALIBRATION, "calibration.csv", "calibration.md"]):
        write_json(folder / CALIBRATION, document)
        RunFolder(folder).write_table("calibration.csv", rows + document["groups"])
        write_atomic(folder / "calibration.md", ("\n\n".join(blocks) + "\n").encode())

    if folder == result.path:
        write_report(folder)

    return document


def _told(result: Result) -> tuple[str, dict[str, SiteSums]] | None:
    """Return the kind of scores and the sums released by the sites of a FLARE job; None if images are scored here.

    Raises:
        InputError: the file is damaged, or not from such a job.
    """
    path = result.path / CALIBRATION_SUMS
    if not path.is_file():
        return None

    by_site: dict[str, dict[str, dict[str, Floats]]] = defaultdict(lambda: defaultdict(dict))
    try:
        tensors = load_weights(path)
        names = dict(enumerate(KINDS[result.task].set_scores, 1))
        scores = names[int(tensors.pop(conformal.SCORES))]
        scale = tensors.pop(conformal.SCALE, torch.empty(0)).flatten().tolist()
        for key in sorted(tensors):
            name, section, part = key.split("/")
            by_site[name][section][part] = conformal.read_table(tensors[key])
    except (LookupError, ValueError, RuntimeError, RunError) as error:
        raise InputError(
            f"{path}: {printable(error, 200)}",
            "what the sites of a job told, as its server wrote it",
            "restore the file, or export the job again",
        ) from error

    sites = {}
    for name in result.run.partition.sites:
        if name in by_site:
            sites[name] = SiteSums.told(by_site[name], result.run.seed, tuple(scale))

    return scores, sites


def _sites(
    result: Result, kind: Kind, options: Options, scores: str, policy: Policy, progress: bool
) -> dict[str, SiteSums]:
    if policy.jobs and EVALUATE not in policy.jobs:
        raise InputError(
            "a calibration, which is a job to evaluate",
            f"{' and '.join(policy.jobs)}, as the policy says",
            "ask the sites",
        )

    judges = result.judges(options.which)
    sites = {}
    partition = result.run.partition.sites
    for name in terminal.bar(partition, desc="calibrating", unit="site", shown=progress):
        # the site's own, else the global one
        network = judges.get(name, judges.get(""))
        if network is None:
            continue

        parts = {}
        for section in ("validate", "test"):
            parts[section] = result.examined(network, section, partition[name].get(section, []))

        with tf32(result.run.tf32):
            sets = kind.sets(**parts, scores=scores, seed=result.run.seed)

        tables = conformal.tables_of(sets, options.min_count)
        keys = [f"{section}/{part}" for section, parts in tables.items() for part in parts]
        Gate(policy.outbound, Account(), name).charge_numbers("metrics", keys, from_images=False)
        if sets:
            scale = next(iter(sets.values())).scale
            sites[name] = SiteSums.told(tables, result.run.seed, scale, sets.get("test"))

    if not sites:
        raise InputError(
            f"the run in {result.path}: no site has images to calibrate on",
            "validation or test images that have what is promised to be covered",
            "give the run such images",
        )

    return sites


class Calibration:
    """The thresholds of all sites, and their coverage on test cases.

    Attributes:
        places: site -> way -> index of the threshold, None if there are too few cases.
        scale: as in `conformal.Rule`.
    """

    def __init__(self, sites: Mapping[str, SiteSums], options: Options) -> None:
        """Choose the thresholds; InputError if there are too few cases for the requested way."""
        self.sites = sites
        self.options = options
        self.scale: tuple[float, ...] = ()
        self.sums: dict[str, Floats] = {}
        for name, site in sites.items():
            self.sums[name] = site.calibration
            self.scale = site.scale

        self.places: dict[str, dict[str, int | None]] = {}
        for name, ways in conformal.shared(self.sums, options.strength).items():
            places = {way: conformal.place_of(ways[way], options.coverage) for way in WAYS}
            self.places[name] = places
            if places[options.share] is None:
                where = ALL_SITES if options.share == "pooled" else name
                raise InputError(
                    f"{ways[options.share].sum():.4g} calibration cases, {options.share}, at {where}",
                    f"coverage {options.coverage:g} takes at least {conformal.needed(options.coverage)}",
                    "lower --coverage or --min-count, or give more validation images"
                    + ", or --share pooled" * (options.share != "pooled"),
                )

    def rows(self) -> list[CoverageRow]:
        """Return a row for each site and way, then for each way one over all released sites."""
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

            # an unreleased site would follow from the others and the total
            if "test" in rows[-1]:
                shown.append(name)

        # the second row of a site is of the pooled way, whose threshold all sites share
        pooled = rows[1].get("threshold")
        for way in WAYS:
            rows.append(self._row(ALL_SITES, way, shown))
            if way == "pooled" and pooled is not None:
                rows[-1]["threshold"] = pooled

        return rows

    def groups(self, result: Result) -> list[CoverageRow]:
        """Return a row for each value of a column, over the sites' test cases; small groups are suppressed."""
        by = self.options.by
        cases = result.predictions if by == "site" else result.cases()
        value_of = dict(zip([row["id"] for row in cases], group_values(cases, by), strict=True))
        members: dict[str, set[str]] = {}
        for site in self.sites.values():
            for ident in site.cases.ids if site.cases else ():
                if ident not in value_of:
                    raise InputError(
                        f"{result.path / 'predictions.csv'} without case {ident}",
                        "every test case",
                        "restore the file, or repeat the run",
                    )

                members.setdefault(str(value_of[ident]), set()).add(ident)

        least = self.options.min_count or MIN_COUNT
        counts, _ = suppress_counts(map_values(len, members), least)
        rows = []
        for name in sorted(members, key=group_order):
            ids = members[name] if counts[name] is not None else ()
            rows.append(self._row(name, self.options.share, [*self.sites], ids))

        return rows

    def _row(
        self, name: str, way: str, sites: Sequence[str], ids: Collection[str] | None = None
    ) -> CoverageRow:
        """Return the coverage by some sites' thresholds, on all their test cases or on those with these ids."""
        least = self.options.min_count
        cases = 0
        at_least = at_most = 0.0
        sums = np.zeros(2)
        is_whole = True
        for site in sites:
            place = self.places[site][way]
            table = self.sites[site].test
            tested = self.sites[site].cases
            if ids is not None and tested is not None:
                rows = [row for row, ident in enumerate(tested.ids) if ident in ids]
                table = conformal.table_of(tested.select(rows), least)

            if table is None or place is None:
                continue

            low, high = conformal.kept_at(table, place)
            cases += round(table[0].sum())
            at_least += low
            at_most += high
            # merged bins reveal nothing else
            if len(table) == 1:
                is_whole = False
            else:
                sums += table[1:, : place + 1].sum(1)

        row = CoverageRow(name=name, way=way)
        whole_cases = math.floor(at_least + 1e-9)  # sums of floats may miss a whole number
        cells = {"kept": whole_cases, "lost": cases - whole_cases}
        shown, total = suppress_counts(cells, least)
        if not cases or total is None or None in shown.values():
            return row

        low = conformal.interval(at_least, cases)[0]
        high = conformal.interval(at_most, cases)[1]
        row |= {"test": cases, "coverage": at_least / cases, "low": low, "high": high}
        if is_whole:
            row |= {"size": float(sums[0]) / cases, "abstained": float(sums[1]) / cases}

        return row


def _below(rows: Sequence[CoverageRow], promised: float) -> list[str]:
    """Return for each way at how many sites the interval of the reached coverage is below the guarantee."""
    lines = []
    for way in WAYS:
        # the last three rows are of all sites together
        tested = [row for row in rows[:-3] if row["way"] == way and "high" in row]
        below = []
        for row in tested:
            if row["high"] < promised:
                below.append(row["name"])

        names = f": {', '.join(below)}" * bool(below)
        lines.append(
            f"{way}: clearly below the promise at {len(below)} of {len(tested)} sites{names}"
        )

    return lines
