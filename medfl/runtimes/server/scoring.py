"""Scores of a run: each round on validation data, remembering the best, and the last round on test data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from medfl import methods
from medfl.core import (
    SECTIONS,
    Messages,
    Metrics,
    Weights,
    examines,
    map_values,
    pick,
    pick_known,
    slug,
    within,
)
from medfl.core.seeding import derive
from medfl.evaluation import (
    OVER_CLASSES,
    Cases,
    CasesByName,
    Masks,
    bootstrap,
    direction,
    higher_is_better,
    tally,
    undefined,
    unit,
)
from medfl.evaluation.metrics import fewer_classes, spread
from medfl.problem import LARGEST_COMPONENT
from medfl.runtimes import site_labels, tasks
from medfl.runtimes.federation import Federation
from medfl.runtimes.output.overlays import chosen
from medfl.runtimes.registry import Document
from medfl.runtimes.server import contribution
from medfl.runtimes.server.dispatch import Dispatcher
from medfl.runtimes.spilled_replies import SitesWeights
from medfl.runtimes.step import StepResult, copied_weights
from medfl.storage import CONTRIBUTION, CROSS_SITE, RunFolder, State, file_sha256, weights_sha256
from medfl.storage.run_documents import NEWCOMERS

_MAX_SCORED = 100  # maximum of sites whose own models are scored on all test items, equally spaced

_OWN = "the site's own model, as the method leaves it"
_GLOBAL = "the global model, for want of one of its own"
_RECEIVED = (
    "what the server sends, with initial values of what each site keeps (of BatchNorm's mean and variance those of its "
    "own test images)"
)
_NOTHING = "nothing, for the server has something for each of its sites and nothing for others"
"""What is scored at a site without training items, for a method with a model per site."""
_TRAINED_ONCE_MORE = (
    "the final global model after one more local training at the site, of which nothing is sent"
)

CasesBySite = dict[str, dict[str, Cases]]
"""site -> section -> outcomes"""


class Final(NamedTuple):
    """Result of a run's end: scores for summary.json, and the judged model's outcomes on each site's test items."""

    summary: Document
    cases: CasesByName


@dataclass
class _FinalModel:
    """A model at the end of a run: the outcomes of its test items by site and in all, and their scores.

    `last` and `best` are the rounds' scores in all; None if the round was not scored.
    """

    cases: CasesByName
    scores: dict[str, Metrics]
    pooled: Cases | None
    last: Document | None
    best: Document | None = None

    @property
    def rounds(self) -> Document | None:
        """Both rounds for summary.json."""
        return self.last and {"last": self.last, "best": self.best}


@dataclass
class Scoring:
    """Scores the models of one run.

    Attributes:
        untested: whether nothing may be scored on test items.
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
        # thresholds are chosen on validation images: on test images they would look better than they are
        self.sections = ("validate", "test") if self.kind.decides else ("test",)

    @property
    def names(self) -> list[str]:
        """The sites that can be asked: all but those that take no part."""
        federation = self.federation
        # there the single participant is not a site, and scores are still per site
        if self.method.pools_data:
            return federation.names

        return federation.participants

    # A round

    def evaluate(self, round_: int, server: State, results: Mapping[str, StepResult]) -> Document:
        """Score the received global and the personal models on validation data; remember the best round."""
        global_cases = self._global(round_, "validate", server)
        if self.method.judged == "personal":
            # such a model is built from State and broadcast only, so it is scored after the round, at all sites
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
        """Return each reply's contribution to a round; `server` is the State before it."""
        sign = direction(self.key)

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
        # with a separate seed, so that estimating contributions changes no other random draws
        return contribution.contributions(list(replies), value, seed)

    def _remember(self, round_: int, server: State, val: Metrics) -> None:
        value = val.get(self.key)
        best = self.record["best"]
        if value is None:
            return

        sign = direction(self.key)
        if best is not None and sign * value <= sign * best["value"]:
            return

        # written now: the next round replaces the States of the server and the sites
        self.record["best"] = {"round": round_, "value": value}
        weights = self._judged_weights(round_, server)
        self.folder.write_weights("best", weights)
        self.record["best_sha256"] = file_sha256(self.folder.path / "best.safetensors")
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
        # in chunks of fixed size, whatever the number of workers, so that batches, and thus bits, are the same
        parts = self.dispatcher.at_server([partial(task, i, i + chunk) for i in starts])
        if parts and parts[0] is not None:
            return Cases.concat(parts)

        return None

    def _at_sites(self, round_: int, section: str, server: State) -> Cases | None:
        """Have each site evaluate the received model, and return their outcomes in the order of the data."""
        by_site = self._personal(round_, server, (section,), self.names)
        cases = Cases.concat([part[section] for part in by_site.values()])
        if not len(cases):
            return None

        scored = {*cases.ids}
        # not site by site: metrics of a global model are summed in one order under every partition
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
        """Return the global model's outcomes on the test items."""
        cases = self._global(round_, "test", server)
        validation = self._global(round_, "validate", server) if self.kind.decides else None
        if cases is None:
            return None

        return self.kind.decided(cases, validation)

    def _personal_tested(self, round_: int, server: State, names: Sequence[str]) -> CasesByName:
        """Return the outcomes of each site's own model on its test items."""
        by_site = self._personal(round_, server, self.sections, names)
        return map_values(self._decided, by_site)

    def _decided(self, cases: Mapping[str, Cases]) -> Cases:
        return self.kind.decided(cases["test"], cases.get("validate"))

    def _of_sites(self, cases_of: Mapping[str, Cases]) -> dict[str, Metrics]:
        """Return the metrics of each site, with macro means over the same findings at all sites."""
        compared = self.kind.comparable(cases_of)
        return map_values(self.summarise, compared)

    def _by_site(self, cases: Cases | None, section: str) -> CasesByName:
        """Split the pooled outcomes by site: the received model is the same at all sites, so it is run once."""
        by_site: CasesByName = {}
        if not cases:
            return by_site

        scored = {*cases.ids}
        for name in self.federation.names:
            shard = self.federation.shard(name, section)
            # a runtime without a site's images has no outcomes for it either
            if len(shard) and scored.issuperset(shard.ids):
                by_site[name] = cases.select(shard.ids)

        return by_site

    def _judged_weights(self, round_: int, server: State) -> Weights:
        """Return the global model's weights; without a global model, every site's own under `<site>/<tensor>`."""
        with self.federation.networks.scope():
            network = self.method.global_predictor(self.federation.host(round_), server)
            if network is not None:
                return copied_weights(network)

        # one site at a time, spilled to disk: those of thousands do not fit in memory
        weights = SitesWeights(self.folder.path)
        for name, part in self.dispatcher.at_sites(tasks.CopyWeights, round_, server, self.names):
            weights.add(name, part)

        return weights

    # End

    def finish(self, server: State) -> Final:
        """Score on the test items, and write tables and weights."""
        global_cases = self._tested(self.last, server)
        personal_by_site = self._final_personal(self.last, server)
        global_by_site = self._by_site(global_cases, "test")
        newcomers, newcomer_model = self._newcomers(self.last, server, global_by_site)
        personal_cases = None
        if personal_by_site:
            personal_cases = Cases.concat(list(personal_by_site.values()))

        # newcomers have no personal model, so they are listed with the received one
        received = self._final_model({**global_by_site, **newcomers}, global_cases)
        personal = self._final_model(personal_by_site, personal_cases)
        tallies = self.dispatcher.workers.tallies
        examined = tally.examined(tallies, self.kind.decides, self.key)
        if examined is not None:
            # sites that only release tables have no cases here: their sums replace them
            received.last = {"round": self.last, **examined.pooled.metrics}
            received.scores = {name: site.row for name, site in examined.sites.items()}

        weights = self._judged_weights(self.last, server)
        self.folder.write_weights("weights", weights)
        received.best = self._best_global(global_cases)
        if self.record["best_test"] and personal_cases is not None:
            personal.best = {
                "round": self.record["best"]["round"],
                **self.record["best_test"],
                **self.record.get("best_classes", {}),
            }

        judged = personal
        site_models = None
        if self.method.judged == "global":
            judged = received
        elif global_cases is None:
            site_models = self._site_models(server)

        # means over the sites are of the same sites whatever the method: newcomers use what they receive
        with_newcomers = {**pick(received.scores, newcomers), **judged.scores}
        by_site = {name: scores.get(self.key) for name, scores in with_newcomers.items()}
        summary = {
            "judged": self.method.judged,
            "last": judged.last,
            "best": judged.best,
            "global": received.rounds,
            "personal": personal.rounds,
            **self._personal_model(),
            "site_models": site_models,
            "sites": {"metric": self.key, **self._spread(by_site, {**newcomers, **judged.cases})},
            **self._units(list(filter(None, (received.last, personal.last)))),
            **site_labels.for_summary(self.federation.known, self.federation.bundle),
            "weights_sha256": weights_sha256(weights),
        }
        if newcomer_model:
            summary["newcomers"] = newcomer_model
        if examined is not None:
            lines = examined.lines
            summary["examined"] = examined.pooled.as_dict()
        else:
            reasons = {}
            for name in self.names:  # absent sites are reported
                reasons[name] = undefined.reason(
                    self.key, judged.scores.get(name), judged.cases.get(name)
                )

            lines = undefined.of_tests(self.key, judged.last, judged.pooled, reasons)

        summary |= self.undefined_lines(lines)
        if self.record["best"]:
            # of what the run wrote: the file may have been changed since
            summary["best_sha256"] = self.record.get("best_sha256")

        self._write_sites(received, personal)
        pooled = personal.pooled if judged.pooled is None else judged.pooled
        if pooled is not None:
            self._write_cases("predictions.csv", pooled)

        if contributed := contribution.rows(self.folder.rounds()):
            self.folder.write_table(CONTRIBUTION, contributed)

        if self.cross_site:
            self._score_everywhere(server, received.cases)

        if newcomers:
            self._write_cases(NEWCOMERS, Cases.concat([*newcomers.values()]))

        return Final(summary, judged.cases)

    def _final_model(self, by_site: CasesByName, pooled: Cases | None) -> _FinalModel:
        return _FinalModel(
            by_site, self._of_sites(by_site), pooled, self._scored(self.last, pooled)
        )

    def _spread(
        self, by_site: Mapping[str, float | None], cases_of: Mapping[str, Cases]
    ) -> Document:
        """Return mean and worst over the sites, and which classes or findings their means cover if that is not all.

        "of_classes" and "classes_at" are as in `fewer_classes`; "left_out" are findings in no site's mean.
        """
        higher = higher_is_better(self.key)
        if self.key not in OVER_CLASSES:
            return {**spread(by_site, higher)}

        averaged = {}
        for name, cases in self.kind.comparable(cases_of).items():
            if by_site.get(name) is not None:
                averaged[name] = self.kind.averaged(cases)

        basis = fewer_classes(averaged)
        # a mean over fewer classes does not rank a site: the one without the hard class would lead
        complete = None
        if basis:
            counts = basis["classes_at"]
            complete = [name for name in counts if counts[name] == basis["of_classes"]]

        if self.kind.decides and averaged:
            everywhere = set().union(*averaged.values())
            names = enumerate(self.federation.bundle.classes)
            left_out = [name for index, name in names if index not in everywhere]
            if left_out:
                basis["left_out"] = left_out

        return {**spread(by_site, higher, complete), **basis}

    def undefined_lines(self, lines: Sequence[str] = ()) -> Document:
        """Return `undefined`: notes on rounds without the validation metric, and these lines; {} without any."""
        reasons = {}
        for entry in self.folder.rounds():
            if entry["val"] or "undefined" in entry:
                reasons[entry["round"]] = entry.get("undefined", "")

        lines = [*undefined.of_rounds(self.key, reasons), *lines]
        return {"undefined": lines} if lines else {}

    def _scored(self, round_: int, cases: Cases | None) -> Document | None:
        """Return a round with the metrics of its cases, for segmentation including each structure's."""
        if cases is None:
            return None
        metrics = self.summarise(cases)
        return {"round": round_, **metrics, **self._classes(metrics, cases)}

    def _classes(self, scores: Metrics | None, cases: Cases | None) -> Document:
        """Return `classes`, {} if the task has no structures, findings or numbers; `scores` are of these cases."""
        if scores is None or cases is None or not len(cases):
            return {}
        bundle = self.federation.bundle
        class_metrics = self.kind.by_name(scores, cases, bundle.structures or bundle.classes)
        return {"classes": class_metrics} if class_metrics else {}

    def _units(self, scored: Sequence[Document]) -> dict[str, dict[str, str]]:
        """Return what a report cannot know without the images and the bundle: the units of metrics that have one."""
        # the unit of a distance is that of the files' spacing, which only some formats record
        metrics = set().union(*scored)
        distances = sorted(name for name in metrics if name.startswith("hd95"))
        if distances:
            geometry = self.federation.sections["test"].geometry
            units = sorted(set(map(unit, geometry or (None,))))
            return {"units": dict.fromkeys(distances, " or ".join(units))}

        units_of = self.kind.units(self.federation.bundle.metadata)
        of_metrics = within(units_of, metrics)
        return {"units": of_metrics} if of_metrics else {}

    def masks(
        self, server: State, cases: Mapping[str, Cases], save: bool
    ) -> tuple[dict[str, dict[str, Masks]], int | None]:
        """Segment what the pictures show with the judged network; with `save` all masks are written.

        Returns:
            site -> id -> masks, and the number written, None if there was nothing to write.
        """
        last = self.last
        shown = chosen(cases)
        names = []
        for name, outcomes in cases.items():
            if shown.get(name) or (save and len(outcomes)):
                names.append(name)

        if self.federation.task.kind != "segmentation" or not names:
            return {}, None

        folders = dict.fromkeys(names)
        if save:
            folders = {name: str(self.folder.predictions_folder(name)) for name in names}

        ids = {name: list(shown.get(name, {})) for name in names}
        largest = {name: self._largest(cases[name]) for name in names}
        if self.method.judged == "global":
            segment = partial(tasks.SegmentGlobal, last, server)
            at_server = [
                partial(segment, name, ids[name], folders[name], largest[name]) for name in names
            ]
            masks = dict(zip(names, self.dispatcher.at_server(at_server), strict=True))
        else:

            def task(site: str, **fields: Any) -> tasks.RoundTask:
                return tasks.SegmentSite(
                    site, **fields, ids=ids[site], folder=folders[site], largest=largest[site]
                )

            masks = _in_order(names, self.dispatcher.at_sites(task, last, server, names))

        written = sum(len(list(Path(folder).iterdir())) for folder in folders.values() if folder)
        return masks, written if save else None

    def _largest(self, cases: Cases) -> list[str]:
        """Return the structures whose largest component alone is kept in these cases."""
        classes = self._classes(self.summarise(cases), cases).get("classes", {})
        return [name for name, metrics in classes.items() if metrics.get(LARGEST_COMPONENT)]

    def _final_personal(self, last: int, server: State) -> CasesByName:
        """Score the personal models of all sites on test items.

        For globally judged methods the personal model is the site's own if there is one (`SiteModels`); otherwise, if
        the run asks for it (`score_trained`), it is the final global model after one more local training, of which
        nothing is sent. Sites outside the last cohort then have one too, unless evaluations are off (`eval_every` 0):
        with 10,000 sites it would take as long as 100 rounds with 100 of them.
        """
        if self.method.judged == "personal":
            return self._personal_tested(last, server, self.names)
        if self.method.pools_data:
            return {}

        among = self.names if self.run.eval_every else self.federation.cohort(last)
        names = [name for name in among if len(self.federation.shard(name, "test"))]
        if methods.has_site_models(self.method):
            return self._personal_tested(last, server, names)
        if not self.run.score_trained:
            return {}

        task = partial(tasks.TrainToScore, sections=self.sections)
        # round `last + 1`: the random draws of the last round would repeat its batches
        answers = self.dispatcher.at_sites(task, last + 1, server, names, ("train",))
        by_site = _in_order(names, answers)
        return {name: self._decided(cases) for name, cases in by_site.items() if cases}

    def _newcomers(
        self, last: int, server: State, global_by_site: Mapping[str, Cases]
    ) -> tuple[CasesByName, str]:
        """Score sites without training items on their test items, for a method with a model per site.

        They get the global model if there is one. Returns site -> outcomes, and a description of what was scored, ""
        for no such site.
        """
        shard = self.federation.shard
        names = [
            name
            for name in self.federation.names
            if len(shard(name, "test")) and not len(shard(name, "train"))
        ]
        if not names or self.method.judged != "personal":
            return {}, ""
        if global_by_site:
            return pick(global_by_site, names), _GLOBAL

        score = partial(tasks.ScoreNewcomer, last, server)
        answers = self.dispatcher.at_server([partial(score, name, self.sections) for name in names])
        pairs = zip(names, answers, strict=True)
        by_site = {name: self._decided(cases) for name, cases in pairs if cases is not None}
        return by_site, _RECEIVED if by_site else _NOTHING

    def _personal_model(self) -> dict[str, str]:
        """Describe the personal model, if one is scored."""
        if methods.has_site_models(self.method):
            return {"personal_model": _OWN}

        if self.run.score_trained and not self.method.pools_data:
            return {"personal_model": _TRAINED_ONCE_MORE}

        return {}

    def _site_models(self, server: State) -> dict[str, Metrics] | None:
        """Score each site's own model on all test items: mean and sd over the sites, not their ensemble."""
        # n models on the items of n sites: quadratic in n
        count = min(len(self.names), _MAX_SCORED)
        names = [self.names[i * len(self.names) // count] for i in range(count)]
        scores = map_values(self.summarise, self._on_all(server, names))
        mean: Metrics = {"round": self.last}
        sd = {**mean}
        # a metric that some sites' models lack is a mean over those that have it
        for metric in dict.fromkeys(chain.from_iterable(scores.values())):
            over_sites = spread({name: metrics.get(metric) for name, metrics in scores.items()})
            mean[metric] = over_sites["mean"]
            sd[metric] = over_sites["sd"]

        return {"mean": mean, "sd": sd}

    def _on_all(self, server: State, names: Sequence[str]) -> CasesByName:
        """Return the outcomes of these sites' own models on all test items; the site's validation items decide."""
        by_site: CasesBySite = {}
        if self.kind.decides:
            by_site = self._personal(self.last, server, ("validate",), names)

        answers = self.dispatcher.at_sites(tasks.ScoreSiteOnAll, self.last, server, names)
        # in the order of the sites: the bits of mean and sd depend on it
        return {
            name: self._decided({**by_site.get(name, {}), "test": cases})
            for name, cases in _in_order(names, answers).items()
            if cases
        }

    def _score_everywhere(self, server: State, global_by_site: Mapping[str, Cases]) -> None:
        """Write cross_site.csv: the global model and each site's own, on the test items of each site."""
        rows = self._at_each_site("received", "", global_by_site)
        if methods.has_site_models(self.method):
            for name, cases in self._on_all(server, self.names).items():
                rows += self._at_each_site("personal", name, self._by_site(cases, "test"))

        self.folder.write_table(CROSS_SITE, rows)

    def _at_each_site(
        self, model: str, owner: str, cases_of: Mapping[str, Cases]
    ) -> list[Document]:
        rows = []
        for name, cases in self.kind.comparable(cases_of).items():
            draws = bootstrap.draw(self.kind.strata(cases), derive(self.run.seed, CROSS_SITE, name))
            redrawn = self.kind.redrawn(cases, draws, [self.key])
            low, high = self.kind.intervals(cases, redrawn).get(self.key, ("", ""))
            # the key metric has a column even if it is undefined at all sites
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

    def _write_sites(self, received: _FinalModel, personal: _FinalModel) -> None:
        federation = self.federation
        rows = []
        for name in federation.names:
            row: Document = {"site": name}
            for section in SECTIONS:
                row[section] = len(federation.shard(name, section))

            train = federation.shard(name, "train")
            for title, count in self.kind.counts(train, federation.bundle.classes).items():
                row[f"train_{title}"] = count

            for title, model in (("received", received), ("personal", personal)):
                scores = model.scores.get(name)
                row |= _columns(title, scores, self._classes(scores, model.cases.get(name)))

            rows.append(row)

        self.folder.write_table("sites.csv", rows)

    def _write_cases(self, name: str, cases: Cases) -> None:
        """Write a table of cases with the site of each."""
        classes = self.federation.bundle.classes
        owner = self.run.partition.owners("test")
        rows = []
        for index, ident in enumerate(cases.ids):
            columns = self.kind.row(cases, index, classes, self.key)
            rows.append({"id": ident, "site": owner.get(ident, ""), **columns})

        self.folder.write_table(name, rows)


def _in_order(names: Sequence[str], answers: Iterable[tuple[str, Any]]) -> Document:
    """Return the answers in the order of the sites, which is that of every sum over them."""
    return pick_known(dict(answers), names)


def _columns(model: str, scores: Metrics | None, classes: Document) -> Document:
    """Return a site's cells of sites.csv: for each structure or finding also how many of its test items have it."""
    structures = classes.get("classes", {})
    row = {f"{model}_{metric}": value for metric, value in (scores or {}).items()}
    # the structure's own `cases` says the same
    for name in structures:
        row.pop(f"{model}_dice_{slug(name)}_cases", None)

    for name, class_metrics in structures.items():
        for metric, value in class_metrics.items():
            if value is not None and metric != "scored":
                row.setdefault(f"{model}_{metric}_{slug(name)}", value)

    return row
