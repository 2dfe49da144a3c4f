"""Simulator: all sites of a federation on one machine, round by round, resumable after a kill at any moment."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from medfl import profiling
from medfl.errors import InputError
from medfl.evaluation import Masks
from medfl.folder import RunFolder
from medfl.message import Message, Weights
from medfl.metrics import Cases, higher_is_better, spread, summarise
from medfl.runtimes.federation import Federation
from medfl.runtimes.overlays import chosen
from medfl.runtimes.pictures import Pictures
from medfl.runtimes.step import (
    StepResult,
    global_cases,
    global_masks,
    introduce,
    site_abroad,
    site_judge,
    site_masks,
    site_weights,
)
from medfl.runtimes.stock import Replies, SitesWeights
from medfl.runtimes.visits import scored, served, train, tried
from medfl.runtimes.workers import Later, Task, Workers
from medfl.settings import PublicRecord
from medfl.storage import State, moved, weights_sha256, write_atomic

# Pooled items a task: multiples of the evaluation batch, so that no batch depends on the number of workers.
_CHUNK, _CHUNK_OF_MAPS = 1024, 16
_ABROAD = 100  # sites whose own models are scored on everybody's test items: of more, this many at equal distances

Metrics = dict[str, float]
Say = Callable[[str], object]


class Simulator:
    """One run in one folder.

    No process holds more than one site's State or broadcast, and the server's no more replies than a budget: what it
    needs of memory does not grow with the number of sites, but for names and scores.

    Args:
        federation: sites and server.
        folder: where the run is written; `run.json` is there already.
        jobs: worker processes; they never change a result.
        progress: show a bar on stderr.
        say: where lines for the user go.
        save_predictions: write the predicted masks of all test items.
        profile: say where the time of the rounds went, and write profile.json.
        workers: what runs tasks at the sites: (federation, jobs) -> workers.
    """

    def __init__(
        self,
        federation: Federation,
        folder: RunFolder,
        *,
        jobs: int = 1,
        progress: bool = False,
        say: Say = str,
        save_predictions: bool = False,
        profile: bool = False,
        workers: Callable[[Federation, int], Workers] = Workers,
    ) -> None:
        """Take the parts; nothing runs yet."""
        self._make_workers = workers
        self.federation, self.folder, self.say, self.progress = federation, folder, say, progress
        # masks that an earlier part of the run wrote are kept up to date
        self.save_predictions = save_predictions or (folder.path / "predictions").is_dir()
        self.method, self.run = federation.method, federation.run
        self.jobs = 1 if self.run.device != "cpu" else jobs
        self.key = federation.bundle.key_metric
        self.recorder = profiling.Recorder(self.run.device) if profile else None
        self.server: State = {}
        self.done = 0
        self.record: dict[str, Any] = {
            "best": None,
            "best_test": None,
            "bytes_up": 0,
            "bytes_down": 0,
            "seconds": 0.0,
            "seconds_rounds": 0.0,
        }

    def execute(self, resume: bool = False) -> dict[str, Any]:
        """Run all rounds that are left, score, write everything, and return the summary.

        Raises:
            RunError: training failed; the last committed round is intact.
        """
        manifest = self.folder.manifest() if resume else None
        if manifest:
            self.server = moved(self.folder.server(manifest), self.federation.networks.device)
            self.done, self.record = manifest["round"], manifest["record"]
        if self.done > self.run.rounds:
            raise InputError(
                f"--rounds {self.run.rounds}", f"{self.done} rounds are done already", "ask for at least as many"
            )
        self.folder.rounds(up_to=self.done)
        with profiling.recording(self.recorder), self._make_workers(self.federation, self.jobs) as self.workers:
            summary = self._execute(bool(manifest))
        self.folder.write_summary(summary)
        if self.recorder is not None:
            self.say(self.recorder.table())
            write_atomic(self.folder.path / "profile.json", self.recorder.json())
        return summary

    def _execute(self, resumed: bool) -> dict[str, Any]:
        self.say(self.federation.policy())
        if not resumed:
            self._start()
        with _events(self.folder.path / "events", self.done) as events:
            pictures = Pictures(self.federation, self.folder, events, self.done)
            if not resumed:
                pictures.begin()
            with self._bar() as bar:
                for round_ in range(self.done + 1, self.run.rounds + 1):
                    with profiling.in_round(round_):
                        entry = self._round(round_, bar)
                        if self._evaluated(round_):
                            with profiling.during(profiling.EVALUATION):
                                pictures.after(round_, self.server)
                        with profiling.during(profiling.CHECKPOINT):
                            _log(events, entry)
                            self.folder.commit(round_, self.server, self.record)
            summary, cases = self._finish()
            masks = self._masks(cases)
            self.workers.close()
            summary["peak_memory_bytes"] = _peak_memory()  # with that of the workers, which have ended
            pictures.finish(self.run.rounds, self.server)
            pictures.segmented(self.run.rounds, cases, masks)
        return summary

    # Rounds

    def _start(self) -> None:
        federation = self.federation
        introductions = Replies(federation.participants, self.folder.path)
        for index, message in self.workers.run([(introduce, (name,)) for name in federation.participants]):
            introductions.add(federation.participants[index], message)
            self.record["bytes_up"] += message.num_bytes
        with federation.networks.scope():
            self.server = self.method.init_server(federation.host(0), federation.networks.initial, introductions)

    def _evaluated(self, round_: int) -> bool:
        return round_ == self.run.rounds or (self.run.eval_every > 0 and round_ % self.run.eval_every == 0)

    def _bar(self) -> Any:
        tqdm.monitor_interval = 0  # no thread beside forked workers
        size = len(self.federation.cohort(1))
        bar = tqdm(
            total=self.run.rounds * size,
            initial=self.done * size,
            unit="site",
            disable=not self.progress,
            dynamic_ncols=True,
            bar_format="{desc}{bar:8} {elapsed}<{remaining}{postfix}",
        )
        bar.set_description(f"round {self.done}/{self.run.rounds}")
        return bar

    def _round(self, round_: int, bar: Any) -> dict[str, Any]:
        federation, started = self.federation, time.perf_counter()
        cohort = federation.cohort(round_)
        evaluate = self._evaluated(round_)
        judge = ("validate",) if evaluate and self.method.judged == "global" and not self.method.pools_data else ()
        bar.set_description(f"round {round_}/{self.run.rounds}")
        samples = {name: len(federation.work(name, "train")) for name in cohort}
        results: dict[str, StepResult] = {}
        replies = Replies(cohort, self.folder.path)
        renewed: list[str] = []

        def task(name: str) -> Task:
            fresh = str(self.folder.state_path(round_, name))
            return train, (round_, name, self._kept(name), fresh, self._broadcast(round_, name), judge)

        # longest site first: it has the most training items, for the local epochs are the same everywhere
        tasks = [partial(task, name) for name in cohort]
        for index, (result, saved) in self.workers.run(tasks, [samples[name] for name in cohort]):
            name = cohort[index]
            with profiling.during(profiling.MESSAGES):
                replies.add(name, result.reply)
            results[name] = replace(result, reply=Message())
            renewed += [name] * saved
            bar.update()
        trained = time.perf_counter()
        with federation.networks.scope(), profiling.during(profiling.AGGREGATION):
            self.server = self.method.aggregate(
                federation.host(round_), self.server, replies, len(federation.participants)
            )
        self.folder.renewed(round_, renewed)
        served = time.perf_counter()
        bytes_up = sum(result.bytes_up for result in results.values())
        bytes_down = sum(result.bytes_down for result in results.values())
        self.record["bytes_up"] += bytes_up
        self.record["bytes_down"] += bytes_down
        loss = sum(results[name].loss * samples[name] for name in cohort) / max(1, sum(samples.values()))
        entry: dict[str, Any] = {"round": round_, "cohort": cohort}
        scores: dict[str, Any] = {"val": {}, "val_global": None, "val_personal": None, "sites": {}}
        if evaluate:
            with profiling.during(profiling.EVALUATION):
                scores = self._evaluate(round_, results)
        ended = time.perf_counter()
        entry |= {
            "seconds": ended - started, "seconds_train": trained - started, "seconds_server": served - trained,
            "seconds_eval": ended - served, "bytes_up": bytes_up, "bytes_down": bytes_down, "train_loss": loss,
            "judged": self.method.judged, **scores,
        }  # fmt: skip
        with profiling.during(profiling.AGGREGATION):
            observed = self.method.observed(self.server, replies)
        entry |= {"observed": dict(observed)} if observed else {}
        for name in cohort:
            entry["sites"].setdefault(name, {}).update(train_loss=results[name].loss, steps=results[name].steps)
        self.record["seconds"] += entry["seconds"]
        self.record["seconds_rounds"] += entry["seconds"]
        with profiling.during(profiling.CHECKPOINT):
            self.folder.append_round(entry)
        self._show(bar, entry)
        return entry

    def _show(self, bar: Any, entry: Mapping[str, Any]) -> None:
        """Show loss and best metric on the bar, short enough for 80 columns; without a bar, as one line a round."""
        loss, best, value = f"loss {entry['train_loss']:.3f}", self.record["best"], entry["val"].get(self.key)
        bar.set_postfix_str(loss + (f", best {self.key} {best['value']:.3f} ({best['round']})" if best else ""))
        if not self.progress:
            parts = [loss, *([f"{self.key} {value:.3f}"] if value is not None else [])]
            parts += [f"best {best['value']:.3f} (round {best['round']})"] if best else []
            self.say(f"round {entry['round']}/{self.run.rounds}: {', '.join(parts)}, {entry['seconds']:.1f} s")

    def _broadcast(self, round_: int, name: str) -> Message:
        with profiling.during(profiling.MESSAGES), self.federation.networks.scope():
            return self.method.broadcast(self.federation.host(round_), self.server, name)

    def _kept(self, name: str) -> str | None:
        path = self.folder.kept(name)
        return None if path is None else str(path)

    def _scored(self, function: Callable[..., Any], round_: int, names: Sequence[str], *rest: Any) -> list[Later]:
        """Return tasks that call a function of `step` at these sites; each is made when it is its turn."""

        def task(name: str) -> Task:
            return scored, (function, round_, name, self._kept(name), self._broadcast(round_, name), *rest)

        return [partial(task, name) for name in names]

    # Scores

    def _evaluate(self, round_: int, results: Mapping[str, StepResult]) -> dict[str, Any]:
        """Score the received global and the personal models on validation data; remember the best round."""
        whole = self._global(round_, "validate")
        personal = self._personal(round_, ("validate",)) if self.method.judged == "personal" else None
        if personal is None:
            personal = {name: result.cases for name, result in results.items() if result.cases}
        val_global = summarise(whole) if whole is not None else None
        own = {name: cases["validate"] for name, cases in personal.items()}
        val_personal = summarise(Cases.concat(list(own.values()))) if own else None
        received = self._per_site(whole, "validate")
        sites: dict[str, dict[str, Any]] = {}
        for name in self.federation.names:
            site: dict[str, Any] = {}
            if name in received:
                site["received"] = received[name]
            if name in own:
                site["personal"] = summarise(own[name])
            if site:
                sites[name] = site
        val = (val_global if self.method.judged == "global" else val_personal) or {}
        self._remember(round_, val)
        return {"val": val, "val_global": val_global, "val_personal": val_personal, "sites": sites}

    def _remember(self, round_: int, val: Metrics) -> None:
        value, best = val.get(self.key), self.record["best"]
        if value is None or value != value:
            return
        if best is not None and not (value > best["value"] if higher_is_better(self.key) else value < best["value"]):
            return
        self.record["best"] = {"round": round_, "value": value}
        weights = self._judged_weights(round_)
        self.folder.write_weights("best", weights)
        self.folder.keep_best(self.server)
        if self.method.judged == "personal":
            tested = [cases["test"] for cases in self._personal(round_, ("test",)).values()]
            self.record["best_test"] = summarise(Cases.concat(tested))

    def _global(self, round_: int, section: str, server: State | None = None) -> Cases | None:
        total = len(self.federation.pooled(section))
        state = self.server if server is None else server
        chunk = _CHUNK if self.federation.task.kind == "classification" else _CHUNK_OF_MAPS
        tasks = [(served, (global_cases, round_, state, section, i, i + chunk)) for i in range(0, total, chunk)]
        parts = self.workers.all(tasks)
        return Cases.concat(parts) if parts and parts[0] is not None else None

    def _personal(self, round_: int, sections: tuple[str, ...]) -> dict[str, dict[str, Cases]]:
        names = self.federation.names
        sizes = [sum(len(self.federation.shard(name, section)) for section in sections) for name in names]
        tasks = self._scored(site_judge, round_, names, sections)
        return dict(zip(names, self.workers.all(tasks, sizes), strict=True))

    def _per_site(self, whole: Cases | None, section: str) -> dict[str, Metrics]:
        """Cut the pooled outcomes at the sites: the received model is one model, so it is run once."""
        return {name: summarise(cases) for name, cases in self._cut(whole, section).items()}

    def _cut(self, whole: Cases | None, section: str) -> dict[str, Cases]:
        shards = {name: self.federation.shard(name, section) for name in self.federation.names if whole is not None}
        return {name: whole.select(shard.indices.tolist()) for name, shard in shards.items() if whole and len(shard)}

    def _judged_weights(self, round_: int) -> Weights:
        """Return the global model's weights; where there is none, every site's own under `<site>/<tensor>`."""
        with self.federation.networks.scope():
            network = self.method.global_predictor(self.federation.host(round_), self.server)
            if network is not None:
                return {name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()}
        names, weights = self.federation.names, SitesWeights(self.folder.path)
        for index, part in self.workers.run(self._scored(site_weights, round_, names)):
            weights.add(names[index], part)
        return weights

    # End

    def _finish(self) -> tuple[dict[str, Any], dict[str, Cases]]:
        """Score on the test items, write tables and weights, return the summary and each site's judged cases."""
        started, last = time.perf_counter(), self.run.rounds
        self.say("scoring on the test items")
        whole = self._global(last, "test")
        personal = self._final_personal(last)
        own = {name: cases["test"] for name, cases in personal.items()}
        received = self._per_site(whole, "test")
        mine = {name: summarise(cases) for name, cases in own.items()}
        last_global = {"round": last, **summarise(whole)} if whole is not None else None
        last_personal = {"round": last, **summarise(Cases.concat(list(own.values())))} if own else None
        weights = self._judged_weights(last)
        self.folder.write_weights("weights", weights)
        best_global = self._best_global(whole)
        best_personal = (
            {"round": self.record["best"]["round"], **self.record["best_test"]} if self.record["best_test"] else None
        )
        judged = self.method.judged
        by_site = {n: scores.get(self.key) for n, scores in (received if judged == "global" else mine).items()}
        self.record["seconds"] += time.perf_counter() - started
        summary = {
            "method": self.run.method,
            "bundle": self.run.bundle,
            "seed": self.run.seed,
            "rounds": last,
            "status": "finished",
            "data_source": self.run.data.source,
            **({"public": _public(self.run.public)} if self.run.public else {}),
            "judged": judged,
            "last": last_global if judged == "global" else last_personal,
            "best": best_global if judged == "global" else best_personal,
            "global": {"last": last_global, "best": best_global} if last_global else None,
            "personal": {"last": last_personal, "best": best_personal} if last_personal else None,
            "site_models": self._site_models(last) if judged == "personal" and whole is None else None,
            "sites": {"metric": self.key, **spread(by_site, higher_is_better(self.key))},
            "bytes_up": self.record["bytes_up"],
            "bytes_down": self.record["bytes_down"],
            "seconds": self.record["seconds"],
            "seconds_per_round": self.record["seconds_rounds"] / max(1, last),
            "weights_sha256": weights_sha256(weights),
            "run_hash": self.run.run_hash,
        }
        self._write_tables(received, mine, whole if judged == "global" else None, own)
        return summary, self._cut(whole, "test") if judged == "global" else own

    def _masks(self, cases: Mapping[str, Cases]) -> dict[str, dict[str, Masks]]:
        """Segment what the pictures show by the network that is judged, and write all masks if that is asked for."""
        last, wanted, save = self.run.rounds, chosen(cases), self.save_predictions
        names = [name for name in cases if wanted.get(name) or (save and len(cases[name]))]
        if self.federation.task.kind != "segmentation" or not names:
            return {}
        folders = {name: str(self.folder.predictions(name)) if save else None for name in names}
        asked = {name: (list(wanted.get(name, {})), folders[name]) for name in names}
        if self.method.judged == "global":
            tasks: list[Any] = [(global_masks, (last, self.server, name, *asked[name])) for name in names]
        else:
            tasks = [task for n in names for task in self._scored(site_masks, last, [n], *asked[n])]
        masks = dict(zip(names, self.workers.all(tasks), strict=True))
        if save:
            written = sum(len(list(Path(folder).iterdir())) for folder in folders.values() if folder)
            reason = "" if written else ": channels that overlap are no mask"
            self.say(f"{written} predicted masks in {self.folder.path / 'predictions'}{reason}")
        return masks

    def _final_personal(self, last: int) -> dict[str, dict[str, Cases]]:
        """Score the personal models of all sites on test items.

        For globally judged methods the personal model is the final global one after one more local training, of which
        nothing is sent; sites outside the last cohort have one too then, unless evaluations are off (`eval_every` 0):
        of 10,000 sites it would take as long as 100 rounds with 100 of them.
        """
        if self.method.judged == "personal":
            return self._personal(last, ("test",))
        if self.method.pools_data:
            return {}
        federation = self.federation
        among = federation.names if self.run.eval_every else federation.cohort(last)
        names = [name for name in among if len(federation.shard(name, "test"))]

        def task(name: str) -> Task:
            return tried, (last + 1, name, self._kept(name), self._broadcast(last + 1, name), ("test",))

        sizes = [len(federation.work(name, "train")) for name in names]
        found = self.workers.all([partial(task, name) for name in names], sizes)
        return {name: cases for name, cases in zip(names, found, strict=True) if cases}

    def _site_models(self, last: int) -> dict[str, Metrics] | None:
        """Score each site's own model on everybody's test items: mean and sd over the sites, not their ensemble."""
        names = self.federation.names
        count = min(len(names), _ABROAD)
        names = [names[i * len(names) // count] for i in range(count)]
        found = self.workers.run(self._scored(site_abroad, last, names))
        by_index = {index: summarise(cases) for index, cases in found}
        scores = [by_index[index] for index in range(count)]
        by_metric = {metric: spread({str(i): s.get(metric) for i, s in enumerate(scores)}) for metric in scores[0]}
        return {what: {"round": last, **{m: v[what] for m, v in by_metric.items()}} for what in ("mean", "sd")}

    def _best_global(self, whole: Cases | None) -> Metrics | None:
        """Score the global model of the best round; `whole` are the outcomes of the last one's."""
        best = self.record["best"]
        if best is None:
            return None
        last = best["round"] == self.run.rounds
        tested = whole if last else self._global(best["round"], "test", self.folder.best())
        return {"round": best["round"], **summarise(tested)} if tested is not None else None

    def _write_tables(
        self,
        received: Mapping[str, Metrics],
        personal: Mapping[str, Metrics],
        whole: Cases | None,
        own: Mapping[str, Cases],
    ) -> None:
        federation, classes = self.federation, self.federation.bundle.classes
        rows = []
        for name in federation.names:
            row: dict[str, Any] = {
                "site": name,
                **{s: len(federation.shard(name, s)) for s in ("train", "validate", "test")},
            }
            labels = federation.shard(name, "train").labels
            row |= {f"train_{title}": labels.count(index) for index, title in enumerate(classes)} if labels else {}
            row |= {f"received_{metric}": value for metric, value in received.get(name, {}).items()}
            row |= {f"personal_{metric}": value for metric, value in personal.get(name, {}).items()}
            rows.append(row)
        self.folder.write_table("sites.csv", rows)
        owner = {ident: name for name in federation.names for ident in federation.shard(name, "test").ids}
        cases = whole if whole is not None else (Cases.concat(list(own.values())) if own else None)
        if cases is not None:
            self.folder.write_table("predictions.csv", [*_predictions(cases, classes, owner)])


def _predictions(cases: Cases, classes: tuple[str, ...], owner: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = []
    for index, ident in enumerate(cases.ids):
        row: dict[str, Any] = {"id": ident, "site": owner.get(ident, "")}
        if cases.is_classification:
            probabilities = cases.values["probabilities"][index].tolist()
            row |= {"label": int(cases.values["label"][index]), "predicted": probabilities.index(max(probabilities))}
            titles = classes if len(classes) == len(probabilities) else tuple(str(i) for i in range(len(probabilities)))
            row |= {f"p_{title}": round(p, 6) for title, p in zip(titles, probabilities, strict=True)}
        else:
            row |= {m: float(values[index]) for m, values in cases.values.items() if not values.isnan().all()}
        rows.append(row)
    return rows


def _peak_memory() -> int:
    """Largest resident size of this process and of its finished workers, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


class _events:
    """TensorBoard event files, continued after a resume."""

    def __init__(self, path: Path, done: int) -> None:
        self.path, self.done = path, done

    def __enter__(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # imports for a second

        self.writer: Any = SummaryWriter(str(self.path), purge_step=self.done + 1 if self.done else None)  # type: ignore[no-untyped-call]
        return self.writer

    def __exit__(self, *_: object) -> None:
        self.writer.close()


def _log(events: Any, entry: Mapping[str, Any]) -> None:
    """Write a round's numbers as TensorBoard scalars."""
    step = entry["round"]
    events.add_scalar("train/loss", entry["train_loss"], step)
    for group in ("val_global", "val_personal"):
        for metric, value in (entry[group] or {}).items():
            events.add_scalar(f"{group}/{metric}", value, step)
    for name, value in entry.get("observed", {}).items():
        events.add_scalar(f"observed/{name}", value, step)
    for name in ("bytes_up", "bytes_down", "seconds"):
        events.add_scalar(f"cost/{name}", entry[name], step)


def _public(record: PublicRecord) -> dict[str, Any]:
    """Return what the summary says of the public data."""
    return {
        "bundle": record.bundle,
        "data_source": record.data.source,
        "items": record.items,
        "teachers": [name for name, _ in record.teachers],
    }
