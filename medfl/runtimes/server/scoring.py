"""Scores of a run: each round's on validation data, of which the best is remembered, and the last on test data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from medfl import methods
from medfl.core.documents import Metrics
from medfl.core.message import Messages, Weights
from medfl.core.names import slug
from medfl.core.run import examines
from medfl.core.seeding import derive
from medfl.core.task import SECTIONS
from medfl.evaluation import bootstrap, tally, undefined
from medfl.evaluation.evaluators import Masks
from medfl.evaluation.metrics import (
    OVER_CLASSES,
    Cases,
    CasesByName,
    fewer_classes,
    higher_is_better,
    spread,
)
from medfl.evaluation.slices import unit
from medfl.runtimes import site_labels, tasks
from medfl.runtimes.federation import Federation
from medfl.runtimes.output.overlays import chosen
from medfl.runtimes.registry import Document
from medfl.runtimes.server import contribution
from medfl.runtimes.server.dispatch import Dispatcher
from medfl.runtimes.spilled_replies import SitesWeights
from medfl.runtimes.step import StepResult, copied_weights
from medfl.storage.files import State, file_sha256, weights_sha256
from medfl.storage.places import CONTRIBUTION, CROSS_SITE
from medfl.storage.run_documents import NEWCOMERS
from medfl.storage.run_folder import RunFolder

_MAX_SCORED = 100  # sites whose own models are scored on everybody's test items: of more, this many, equally spaced

_OWN = "the site's own model, as the method leaves it"
_GLOBAL = "the global model, for want of one of its own"
_RECEIVED = (
    "what the server sends, with initial values of what each site keeps (of BatchNorm's mean and variance those of its "
    "own test images)"
)
_NOTHING = "nothing, for the server has something for each of its sites and nothing for others"
"""What is scored at a site without training items, of a method with a model for each site."""
_TRAINED_ONCE_MORE = (
    "the final global model after one more local training at the site, of which nothing is sent"
)

CasesBySite = dict[str, dict[str, Cases]]
"""site -> section -> outcomes"""


class Final(NamedTuple):
    """What a run's end gives: scores for summary.json, and outcomes of each site's test items by the judged model."""

    summary: Document
    cases: CasesByName


@dataclass
class Scoring:
    """Scores the models of one run.

    Attributes:
        untested: whether nothing is to be scored on test items.
        cross_site: whether sites' models are scored at every site.
        last: the round after which the run ends.
    """

    federation: Federation
    folder: RunFolder
    record: Document
    dispatcher: Dispatcher
    untested: bool
    cross_site: bool

    def __post_init__(self) -> None:
        self.method = self.federation.method
        self.run = self.federation.run
        self.key = self.federation.bundle.key_metric
        self.kind = self.federation.bundle.kind
        self.summarise = self.federation.bundle.summarise
        self.last = self.run.rounds
        # test items, and those by which some tasks choose thresholds
        self.sections = ("validate", "test") if self.kind.decides else ("test",)

    @property
    def names(self) -> list[str]:
        """The sites that can be asked: without those that take no part."""
        federation = self.federation
        # there the one participant is no site, and scores are still of sites
        if self.method.pools_data:
            return federation.names

        return federation.participants

    # A round

    def evaluate(self, round_: int, server: State, results: Mapping[str, StepResult]) -> Document:
        """Score the received global and the personal models on validation data; remember the best round."""
        global_cases = self._global(round_, "validate", server)
        if self.method.judged == "personal":
            personal = self._personal(round_, server, ("validate",), self.names)
        else:
            personal = {name: result.cases for name, result in results.items() if result.cases}

        personal_cases = {name: cases["validate"] for name, cases in personal.items()}
        pooled = {"global": global_cases, "personal": None}
        if personal_cases:
            pooled["personal"] = Cases.concat(list(personal_cases.values()))

        vals: dict[str, Metrics | None] = {}
        for model, outcomes in pooled.items():
            vals[f"val_{model}"] = None if outcomes is None else self.summarise(outcomes)

        models = {"received": self._by_site(global_cases, "validate"), "personal": personal_cases}
        sites: dict[str, dict[str, Metrics]] = {}
        for name in self.federation.names:
            for model, cases in models.items():
                if name in cases:
                    sites.setdefault(name, {})[model] = self.summarise(cases[name])

        val = vals[f"val_{self.method.judged}"] or {}
        self._remember(round_, server, val)
        entry: Document = {"val": val, **vals, "sites": sites}
        if why := undefined.reason(self.key, val, pooled[self.method.judged]):
            entry["undefined"] = why

        return entry

    def contributions(self, round_: int, server: State, replies: Messages) -> dict[str, Metrics]:
        """Return what each reply contributes to a round; `server` is the State before it."""
        sign = 1 if higher_is_better(self.key) else -1

        def value(names: frozenset[str]) -> float:
            state = server
            if names:
                # in the sites' order, on which the bits of a mean depend
                some = {name: replies[name] for name in replies if name in names}
                state = self.federation.aggregate(round_, server, some)

            cases = self._global(round_, "validate", state)
            metric = self.summarise(cases).get(self.key) if cases is not None else None
            return math.nan if metric is None else sign * metric

        seed = derive(self.run.seed, "contribution", round_)
        return contribution.contributions(list(replies), value, seed)

    def _remember(self, round_: int, server: State, val: Metrics) -> None:
        value = val.get(self.key)
        best = self.record["best"]
        if value is None:
            return

        sign = 1 if higher_is_better(self.key) else -1
        if best is not None and sign * value <= sign * best["value"]:
            return

        # written now: the next round replaces the server's State and those of the sites
        self.record["best"] = {"round": round_, "value": value}
        weights = self._judged_weights(round_, server)
        self.folder.write_weights("best", weights)
        self.folder.save_best(round_, server)

        if self.method.judged == "personal" and not self.untested:
            tested = self._personal_tested(round_, server, self.names)
            cases = Cases.concat(list(tested.values()))
            scores = self.summarise(cases)
            self.record["best_test"] = scores
            self.record["best_classes"] = self._classes(scores, cases)

    def _global(self, round_: int, section: str, server: State) -> Cases | None:
        if examines(self.run) and self.method.judged == "global":
            return self._at_sites(round_, section, server)

        total = len(self.federation.pooled(section))
        chunk = self.kind.chunk
        task = partial(tasks.ScoreGlobal, round_, server, section)
        starts = range(0, total, chunk)
        parts = self.dispatcher.at_server([partial(task, i, i + chunk) for i in starts])
        if parts and parts[0] is not None:
            return Cases.concat(parts)

        return None

    def _at_sites(self, round_: int, section: str, server: State) -> Cases | None:
        """Have each site examine the received model, and return their outcomes in the order of the data."""
        by_site = self._personal(round_, server, (section,), self.names)
        cases = Cases.concat([part[section] for part in by_site.values()])
        if not len(cases):
            return None

        scored = {*cases.ids}
        return cases.select([i for i in self.federation.pooled(section).ids if i in scored])

    def _personal(
        self,
        round_: int,
        server: State,
        sections: tuple[str, ...],
        names: Sequence[str],
    ) -> CasesBySite:
        task = partial(tasks.ScoreSite, sections=sections)
        return _in_order(names, self.dispatcher.at_sites(task, round_, server, names, sections))

    def _tested(self, round_: int, server: State) -> Cases | None:
        """Return the global model's outcomes of the test items."""
        cases = self._global(round_, "test", server)
        validation = self._global(round_, "validate", server) if self.kind.decides else None
        if cases is None:
            return None

        return self.kind.decided(cases, validation)

    def _personal_tested(self, round_: int, server: State, names: Sequence[str]) -> CasesByName:
        """Return the outcomes of each site's test items by its own model."""
        by_site = self._personal(round_, server, self.sections, names)
        return {name: self._decided(cases) for name, cases in by_site.items()}

    def _decided(self, cases: Mapping[str, Cases]) -> Cases:
        return self.kind.decided(cases["test"], cases.get("validate"))

    def _of_sites(self, cases_of: Mapping[str, Cases]) -> dict[str, Metrics]:
        """Return the metrics of each site, whose macro means are of the same findings at all."""
        compared = self.kind.comparable(cases_of)
        return {name: self.summarise(cases) for name, cases in compared.items()}

    def _by_site(self, cases: Cases | None, section: str) -> CasesByName:
        """Cut the pooled outcomes at the sites: the received model is one model, so it is run once."""
        by_site: CasesByName = {}
        if not cases:
            return by_site

        scored = {*cases.ids}
        for name in self.federation.names:
            shard = self.federation.shard(name, section)
            if len(shard) and scored.issuperset(shard.ids):
                by_site[name] = cases.select(shard.ids)

        return by_site

    def _judged_weights(self, round_: int, server: State) -> Weights:
        """Return the global model's weights; where there is none, every site's own under `<site>/<tensor>`."""
        with self.federation.networks.scope():
            network = self.method.global_predictor(self.federation.host(round_), server)
            if network is not None:
                return copied_weights(network)

        # one site's at a time, spilled to disk: those of thousands do not fit in memory
        weights = SitesWeights(self.folder.path)
        for name, part in self.dispatcher.at_sites(tasks.CopyWeights, round_, server, self.names):
            weights.add(name, part)

        return weights

    # End

    def finish(self, server: State) -> Final:
        """Score on the test items, and write tables and weights."""
        last = self.last
        judged = self.method.judged
        global_cases = self._tested(last, server)
        personal_by_site = self._final_personal(last, server)
        global_by_site = self._by_site(global_cases, "test")
        newcomers, newcomer_model = self._newcomers(last, server, global_by_site)
        global_by_site = {**global_by_site, **newcomers}
        received = self._of_sites(global_by_site)
        personal = self._of_sites(personal_by_site)

        personal_cases = None
        if personal_by_site:
            personal_cases = Cases.concat(list(personal_by_site.values()))

        last_global = self._scored(last, global_cases)
        last_personal = self._scored(last, personal_cases)
        tallies = self.dispatcher.workers.tallies
        examined = tally.examined(tallies, self.kind.decides, self.key)
        if examined is not None:
            last_global = {"round": last, **examined.pooled.metrics}
            received = {name: site.row for name, site in examined.sites.items()}

        weights = self._judged_weights(last, server)
        self.folder.write_weights("weights", weights)
        best_global = self._best_global(global_cases)
        best_personal = None

        if self.record["best_test"] and personal_cases is not None:
            best_personal = {
                "round": self.record["best"]["round"],
                **self.record["best_test"],
                **self.record.get("best_classes", {}),
            }

        judged_cases = personal_by_site
        judged_scores = personal
        judged_last = last_personal
        judged_best = best_personal
        site_models = None
        if judged == "global":
            judged_cases = global_by_site
            judged_scores = received
            judged_last = last_global
            judged_best = best_global
        elif global_cases is None:
            site_models = self._site_models(last, server)

        by_site = {name: scores.get(self.key) for name, scores in judged_scores.items()}
        reasons = {}
        for name in self.names:  # of those that are absent that is said
            reasons[name] = undefined.reason(
                self.key, judged_scores.get(name), judged_cases.get(name)
            )

        summary = {
            "judged": judged,
            "last": judged_last,
            "best": judged_best,
            "global": last_global and {"last": last_global, "best": best_global},
            "personal": last_personal and {"last": last_personal, "best": best_personal},
            **self._personal_model(),
            "site_models": site_models,
            "sites": {"metric": self.key, **self._spread(by_site, judged_cases)},
            **self._units([scores for scores in (last_global, last_personal) if scores]),
            **site_labels.for_summary(self.federation.known, self.federation.bundle),
            "weights_sha256": weights_sha256(weights),
        }
        if newcomer_model:
            summary["newcomers"] = newcomer_model
        if examined is not None:
            lines = examined.lines
            summary["examined"] = examined.pooled.as_dict()
        else:
            judged_all = global_cases if judged == "global" else personal_cases
            lines = undefined.of_tests(self.key, judged_last, judged_all, reasons)

        summary |= self.undefined_lines(lines)
        if self.record["best"]:
            summary["best_sha256"] = file_sha256(self.folder.path / "best.safetensors")

        columns: dict[str, Document] = {}
        models = (("received", received, global_by_site), ("personal", personal, personal_by_site))
        for name in self.federation.names:
            columns[name] = {}
            for model, scores, cases in models:
                classes = self._classes(scores.get(name), cases.get(name))
                columns[name] |= _columns(model, scores.get(name), classes)

        self._write_tables(columns, global_cases if judged == "global" else None, personal_cases)
        if contributed := contribution.rows(self.folder.rounds()):
            self.folder.write_table(CONTRIBUTION, contributed)

        if self.cross_site:
            self._score_everywhere(server, global_by_site)

        if newcomers:
            self._write_cases(NEWCOMERS, Cases.concat([*newcomers.values()]))

        return Final(summary, judged_cases)

    def _spread(
        self, by_site: Mapping[str, float | None], cases_of: Mapping[str, Cases]
    ) -> dict[str, Any]:
        """Return mean and worst of the sites, and of which classes or findings their means are where that is not all.

        "of_classes" and "classes_at" are as of `fewer_classes`; "left_out" are findings that no site's mean is over.
        """
        higher = higher_is_better(self.key)
        if self.key not in OVER_CLASSES:
            return {**spread(by_site, higher)}

        averaged = {}
        for name, cases in self.kind.comparable(cases_of).items():
            if by_site.get(name) is not None:
                averaged[name] = self.kind.averaged(cases)

        basis = fewer_classes(averaged)
        # a mean over fewer classes ranks no site
        complete = None
        if basis:
            counts = basis["classes_at"]
            complete = [name for name in counts if counts[name] == basis["of_classes"]]

        if self.kind.decides and averaged:
            everywhere = set[int]().union(*averaged.values())
            names = enumerate(self.federation.bundle.classes)
            left_out = [name for index, name in names if index not in everywhere]
            if left_out:
                basis["left_out"] = left_out

        return {**spread(by_site, higher, complete), **basis}

    def undefined_lines(self, lines: Sequence[str] = ()) -> Document:
        """Return `undefined`, what is said of rounds without the validation metric, and these lines; {} without any."""
        reasons = {}
        for entry in self.folder.rounds():
            if entry["val"] or "undefined" in entry:
                reasons[entry["round"]] = entry.get("undefined", "")

        lines = [*undefined.of_rounds(self.key, reasons), *lines]
        return {"undefined": lines} if lines else {}

    def _scored(self, round_: int, cases: Cases | None) -> Document | None:
        """Return a round with the metrics of its cases, of a segmentation each structure's among them."""
        if cases is None:
            return None
        metrics = self.summarise(cases)
        return {"round": round_, **metrics, **self._classes(metrics, cases)}

    def _classes(self, scores: Metrics | None, cases: Cases | None) -> Document:
        """Return `classes`, {} where the task has no structures, findings or numbers; `scores` are of these cases."""
        if scores is None or cases is None or not len(cases):
            return {}
        bundle = self.federation.bundle
        class_metrics = self.kind.by_name(scores, cases, bundle.structures or bundle.classes)
        return {"classes": class_metrics} if class_metrics else {}

    def _units(self, scored: Sequence[Document]) -> dict[str, dict[str, str]]:
        """Return what a report cannot know without the images and the bundle: the units of metrics that have one."""
        metrics: set[str] = set().union(*scored)
        distances = sorted(name for name in metrics if name.startswith("hd95"))
        if distances:
            geometry = self.federation.sections["test"].geometry
            units = sorted(set(map(unit, geometry or (None,))))
            return {"units": dict.fromkeys(distances, " or ".join(units))}

        units_of = self.kind.units(self.federation.bundle.metadata)
        of_metrics = {name: text for name, text in units_of.items() if name in metrics}
        return {"units": of_metrics} if of_metrics else {}

    def masks(
        self, server: State, cases: Mapping[str, Cases], save: bool
    ) -> tuple[dict[str, dict[str, Masks]], int | None]:
        """Segment what the pictures show by the network that is judged; with `save` all masks are written.

        Returns:
            site -> id -> masks, and how many were written, None if there was nothing to write.
        """
        last = self.last
        shown = chosen(cases)
        names = []
        for name, outcomes in cases.items():
            if shown.get(name) or (save and len(outcomes)):
                names.append(name)

        if self.federation.task.kind != "segmentation" or not names:
            return {}, None

        folders: dict[str, str | None] = dict.fromkeys(names)
        if save:
            folders = {name: str(self.folder.predictions_folder(name)) for name in names}

        ids = {name: list(shown.get(name, {})) for name in names}
        if self.method.judged == "global":
            segment = partial(tasks.SegmentGlobal, last, server)
            at_server = [partial(segment, name, ids[name], folders[name]) for name in names]
            masks = dict(zip(names, self.dispatcher.at_server(at_server), strict=True))
        else:

            def task(site: str, **fields: Any) -> tasks.RoundTask:
                return tasks.SegmentSite(site, **fields, ids=ids[site], folder=folders[site])

            masks = _in_order(names, self.dispatcher.at_sites(task, last, server, names))

        written = sum(len(list(Path(folder).iterdir())) for folder in folders.values() if folder)
        return masks, written if save else None

    def _final_personal(self, last: int, server: State) -> CasesByName:
        """Score the personal models of all sites on test items.

        For globally judged methods the personal model is the site's own where there is one (`SiteModels`), else,
        where the run asks for it (`score_trained`), the final global one after one more local training, of which
        nothing is sent. Sites outside the last cohort have one too then, unless evaluations are off (`eval_every` 0):
        of 10,000 sites it would take as long as 100 rounds with 100 of them.
        """
        if self.method.judged == "personal":
            return self._personal_tested(last, server, self.names)
        if self.method.pools_data:
            return {}

        among = self.names if self.run.eval_every else self.federation.cohort(last)
        names = []
        for name in among:
            if len(self.federation.shard(name, "test")):
                names.append(name)

        if methods.has_site_models(self.method):
            return self._personal_tested(last, server, names)
        if not self.run.score_trained:
            return {}

        task = partial(tasks.TrainToScore, sections=self.sections)
        answers = self.dispatcher.at_sites(task, last + 1, server, names, ("train",))
        by_site = _in_order(names, answers)
        return {name: self._decided(cases) for name, cases in by_site.items() if cases}

    def _newcomers(
        self, last: int, server: State, global_by_site: Mapping[str, Cases]
    ) -> tuple[CasesByName, str]:
        """Score on test items of sites without training items what a method with a model for each site gives them.

        That is the global model where there is one. Returns site -> outcomes, and in words what was scored, "" for no
        such site.
        """
        names = []
        for name in self.federation.names:
            trains = len(self.federation.shard(name, "train"))
            if not trains and len(self.federation.shard(name, "test")):
                names.append(name)

        if not names or self.method.judged != "personal":
            return {}, ""
        if global_by_site:
            return {name: global_by_site[name] for name in names}, _GLOBAL

        score = partial(tasks.ScoreNewcomer, last, server)
        answers = self.dispatcher.at_server([partial(score, name, self.sections) for name in names])
        by_site = {}
        for name, cases in zip(names, answers, strict=True):
            if cases is not None:
                by_site[name] = self._decided(cases)

        return by_site, _RECEIVED if by_site else _NOTHING

    def _personal_model(self) -> dict[str, str]:
        """Say what the personal model is, where one is scored."""
        if methods.has_site_models(self.method):
            return {"personal_model": _OWN}

        if self.run.score_trained and not self.method.pools_data:
            return {"personal_model": _TRAINED_ONCE_MORE}

        return {}

    def _site_models(self, last: int, server: State) -> dict[str, Metrics] | None:
        """Score each site's own model on everybody's test items: mean and sd over the sites, not their ensemble."""
        # n models on the items of n sites: the time grows with the square of n
        count = min(len(self.names), _MAX_SCORED)
        names = [self.names[i * len(self.names) // count] for i in range(count)]
        answers = self.dispatcher.at_sites(tasks.ScoreSiteOnAll, last, server, names)
        scores = _in_order(
            names,
            ((name, self.summarise(self.kind.decided(cases, None))) for name, cases in answers),
        )
        models: dict[str, Metrics] = {"mean": {"round": last}, "sd": {"round": last}}
        for metric in dict.fromkeys(name for metrics in scores.values() for name in metrics):
            over_sites = spread({name: metrics.get(metric) for name, metrics in scores.items()})
            models["mean"][metric] = over_sites["mean"]
            models["sd"][metric] = over_sites["sd"]

        return models

    def _score_everywhere(self, server: State, global_by_site: Mapping[str, Cases]) -> None:
        """Write cross_site.csv: the global model and each site's own, on the test items of each site."""
        rows = self._at_each_site("received", "", global_by_site)
        if methods.has_site_models(self.method):
            answers = self.dispatcher.at_sites(
                tasks.ScoreSiteOnAll, self.last, server, self.names, ("test",)
            )
            for name, cases in _in_order(self.names, answers).items():
                decided = self.kind.decided(cases, None)
                rows += self._at_each_site("personal", name, self._by_site(decided, "test"))

        self.folder.write_table(CROSS_SITE, rows)

    def _at_each_site(
        self, model: str, owner: str, cases_of: Mapping[str, Cases]
    ) -> list[Document]:
        rows = []
        for name, cases in self.kind.comparable(cases_of).items():
            draws = bootstrap.draw(self.kind.strata(cases), derive(self.run.seed, CROSS_SITE, name))
            redrawn = self.kind.redrawn(cases, draws, [self.key])
            low, high = self.kind.intervals(cases, redrawn).get(self.key, ("", ""))
            # the key metric has a column even where it is undefined at all sites
            scores = {self.key: "", **self.summarise(cases)}
            row = {"model": model, "of": owner, "at": name, "cases": len(cases)}
            rows.append({**row, "low": low, "high": high, **scores})

        return rows

    def _best_global(self, last_cases: Cases | None) -> Metrics | None:
        """Score the global model of the best round; `last_cases` are the outcomes of the last one's."""
        best = self.record["best"]
        if best is None:
            return None

        cases = last_cases
        if best["round"] != self.last:
            cases = self._tested(best["round"], self.folder.best_state())

        return self._scored(best["round"], cases)

    def _write_tables(
        self,
        columns: Mapping[str, Document],
        global_cases: Cases | None,
        personal_cases: Cases | None,
    ) -> None:
        federation = self.federation
        classes = self.federation.bundle.classes
        rows = []
        for name in federation.names:
            row: Document = {"site": name}
            for section in SECTIONS:
                row[section] = len(federation.shard(name, section))

            for title, count in self.kind.counts(federation.shard(name, "train"), classes).items():
                row[f"train_{title}"] = count

            rows.append(row | columns[name])

        self.folder.write_table("sites.csv", rows)
        cases = global_cases if global_cases is not None else personal_cases
        if cases is not None:
            self._write_cases("predictions.csv", cases)

    def _write_cases(self, name: str, cases: Cases) -> None:
        """Write a table of cases, with the site of each."""
        federation = self.federation
        classes = federation.bundle.classes
        owner: dict[str, str] = {}
        for site in federation.names:
            owner |= dict.fromkeys(federation.shard(site, "test").ids, site)

        rows = []
        for index, ident in enumerate(cases.ids):
            columns = self.kind.row(cases, index, classes, self.key)
            rows.append({"id": ident, "site": owner.get(ident, ""), **columns})

        self.folder.write_table(name, rows)


def _in_order(names: Sequence[str], answers: Iterable[tuple[str, Any]]) -> Document:
    """Return the answers in the order of the sites, which is that of every sum over them."""
    by_site = dict(answers)
    return {name: by_site[name] for name in names if name in by_site}


def _columns(model: str, scores: Metrics | None, classes: Document) -> Document:
    """Return a site's cells of sites.csv: of each structure or finding also how many of its test items have it."""
    structures = classes.get("classes", {})
    row = {f"{model}_{metric}": value for metric, value in (scores or {}).items()}
    for name in structures:
        row.pop(f"{model}_dice_{slug(name)}_cases", None)
    for name, class_metrics in structures.items():
        for metric, value in class_metrics.items():
            if value is not None and metric != "scored":
                row.setdefault(f"{model}_{metric}_{slug(name)}", value)

    return row
