"""Simulator: all sites of a federation on one machine, round by round, resumable after a kill at any moment."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from medfl.core import Document, InputError, Message, pick, terminal
from medfl.report.formatting import time_left
from medfl.runtimes.attendance import Tolerance
from medfl.runtimes.callbacks import Callback, EarlyStopping, RoundEnd, asked_to_stop
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.output.events import Events
from medfl.runtimes.output.pictures import Pictures
from medfl.runtimes.output.tracking import tracked
from medfl.runtimes.profiling import (
    AGGREGATION,
    CHECKPOINT,
    EVALUATION,
    MESSAGES,
    OTHER,
    PartsProfile,
    during,
)
from medfl.runtimes.registry import Execution, Runtime
from medfl.runtimes.server.dispatch import Dispatcher, RoundTraining
from medfl.runtimes.server.next_state import first_state, next_state, resumed_state
from medfl.runtimes.server.scoring import Final, Scoring
from medfl.runtimes.spilled_replies import Replies
from medfl.runtimes.step import StepResult
from medfl.storage import CROSS_SITE, State
from medfl.storage.run_documents import MANIFEST
from medfl.storage.run_integrity import verified_manifest

Bar = Any
"""A progress bar of tqdm, which has no type annotations."""


class Simulator:
    """One run in one folder.

    A process holds at most one site's State or broadcast, and the server's process only a limited amount of replies:
    except for names and scores, memory does not grow with the number of sites.

    Raises:
        InputError: the tolerance does not fit the run.
    """

    def __init__(
        self, execution: Execution, workers: Callable[[Federation, int], Workers] = Workers
    ) -> None:
        launch = execution.launch
        federation = execution.federation
        self.launch = launch
        self.federation = federation
        self.folder = execution.folder
        self.say = launch.say
        self.tolerance = Tolerance(launch.min_replies, launch.deadline, execution.max_share)
        self.tolerance.check(federation)
        self._make_workers = workers
        # masks written by an earlier part of the run are kept up to date
        self.save_predictions = (
            launch.save_predictions or (self.folder.path / "predictions").is_dir()
        )
        self.method = federation.method
        self.run = federation.run
        # processes do not share a GPU, and a profile covers one process
        alone = self.run.device != "cpu" or launch.profile
        self.jobs = 1 if alone else launch.jobs or 1
        self.key = federation.bundle.key_metric
        self.profile = PartsProfile(launch.profile)
        self.server: State = {}
        self.done = 0
        self.stopped = ""
        stopping = [EarlyStopping(self.run.patience)] if self.run.patience else []
        self.callbacks: tuple[Callback, ...] = (*launch.callbacks, *stopping)
        self.record: Document = {
            "best": None,
            "best_test": None,
            "bytes_up": 0,
            "bytes_down": 0,
            "seconds": 0.0,
            "seconds_rounds": 0.0,
            "absent": {},
            "left_out": {},
        }

    def execute(self) -> Document:
        """Run all remaining rounds, score, write everything, and return the summary.

        Raises:
            InputError: a run to be resumed is damaged, or has more rounds; nothing was changed.
            RunError: training failed; the last committed round is intact.
        """
        manifest = verified_manifest(self.folder) if self.launch.resume else None
        if manifest:
            self.done = manifest["round"]
            self.record = {**self.record, **manifest["record"]}
            # before the State is read: it belongs to the sites that introduced themselves
            self.federation.leave_out(self.record["absent"])
            if not self.federation.participants:
                raise InputError(
                    f"{self.folder.state / MANIFEST}, by which no site takes part",
                    "at least one",
                    "restore it",
                )

            self.server = resumed_state(self.federation, self.folder, manifest)

        if self.done > self.run.rounds:
            raise InputError(
                f"--rounds {self.run.rounds}",
                f"{self.done} rounds are done already",
                "ask for at least as many",
            )

        # a killed process may have written lines of a round that it did not commit
        self.folder.truncate_rounds(self.done)
        with (
            self.profile,
            during(OTHER),
            self._make_workers(self.federation, self.jobs) as self.workers,
        ):
            self.workers.set_deadline(self.tolerance.deadline)
            self.workers.keep_statements(self.record)
            self.dispatcher = Dispatcher(
                self.federation, self.folder, self.workers, self.tolerance, self.say
            )
            # a matrix written by an earlier part of the run is kept up to date
            cross_site = self.launch.cross_site or (self.folder.path / CROSS_SITE).is_file()
            self.scoring = Scoring(
                self.federation,
                self.folder,
                self.record,
                self.dispatcher,
                self.launch.untested,
                cross_site,
            )
            summary = self._execute(bool(manifest))

        if self.launch.untested:
            self.folder.write_trial(summary)
        else:
            self.folder.write_summary(summary)

        if self.launch.profile:
            self.say(self.profile.parts_table())
            self.profile.export_chrome_trace(  # type: ignore[no-untyped-call]
                str(self.folder.path / "profile.json")
            )

        for line in (*self._missing(), *summary.get("undefined", ())):
            self.say(line)

        return summary

    def _execute(self, resumed: bool) -> Document:
        self.say(self.federation.describe_exchange())
        if not resumed:
            self._start()

        with Events(
            self.folder.path / "events",
            self.done,
            *tracked(self.folder, self.launch.track, self.say),
        ) as events:
            pictures = Pictures(self.federation, self.folder, events, self.done)
            if not resumed:
                pictures.begin()

            with self._bar() as bar:
                self._rounds(events, pictures, bar)

            # before any test item is used
            if self.launch.untested:
                return self._trial_summary()

            summary, cases = self._finish()
            masks, written = self.scoring.masks(self.server, cases, self.save_predictions)
            if written is not None:
                reason = "" if written else ": channels that overlap are no mask"
                self.say(f"{written} predicted masks in {self.folder.path / 'predictions'}{reason}")

            # before memory is measured: the system counts only processes that have ended
            self.workers.close()
            # including the workers, which have ended
            summary["peak_memory_bytes"] = _peak_memory()
            summary |= _peak_device_memory(self.run.device)
            pictures.finish(self.done, self.server)
            pictures.draw_cases(self.done, cases, masks)

        return summary

    # Rounds

    def _start(self) -> None:
        federation = self.federation
        # like replies: those of thousands of sites may not fit in memory
        introductions = Replies(federation.participants, self.folder.path)
        for name, message in self.dispatcher.introductions(self.record["absent"]):
            introductions.add(name, message)
            self.record["bytes_up"] += message.num_bytes

        federation.leave_out(self.record["absent"])
        self.server = first_state(
            federation, introductions, self.tolerance, self.record["absent"], self.say
        )
        federation.leave_out(self.record["absent"])

    def _is_eval_round(self, round_: int) -> bool:
        return round_ == self.run.rounds or (
            self.run.eval_every > 0 and round_ % self.run.eval_every == 0
        )

    def _bar(self) -> Bar:
        size = len(self.federation.cohort(1))
        bar = terminal.bar(
            total=self.run.rounds * size,
            initial=self.done * size,
            unit="site",
            shown=self.launch.progress and self.run.rounds > 0,
            dynamic_ncols=True,
            bar_format="{desc}{bar:8} {elapsed}<{remaining}{postfix}",
        )
        bar.set_description(f"round {self.done}/{self.run.rounds}")

        return bar

    def _rounds(self, events: Events, pictures: Pictures, bar: Bar) -> None:
        """Run the remaining rounds.

        If the workers support it, the next round trains while this one is evaluated, which fills the gaps. Its results
        are not used before this round is committed, so the order of everything else is unchanged.
        """
        first = self.done + 1
        began = time.perf_counter()
        training = None
        # a resumed run may already have finished
        if self.done and self._run_callbacks(self.folder.rounds()[-1]):
            return

        for round_ in range(first, self.run.rounds + 1):
            with during(f"round {round_}"):
                entry, results = self._train(training or self._start_training(round_, bar))
                # the first commit of a process removes what a kill left behind: all States that it does not know
                overlaps = (
                    self.workers.overlaps
                    and first < round_ < self.run.rounds
                    and not self.callbacks
                )
                training = self._start_training(round_ + 1, bar) if overlaps else None
                self._evaluate(entry, results, training)
                self._show(bar, entry, (time.perf_counter() - began) / (round_ - first + 1))

                if self._is_eval_round(round_):
                    with during(EVALUATION):
                        pictures.after(round_, self.server)

                with during(CHECKPOINT):
                    events.log(entry)
                    self.folder.commit(round_, self.server, self.record)

                self.done = round_
                if self._run_callbacks(entry):
                    return

    def _run_callbacks(self, entry: Document) -> bool:
        """Call the callbacks after a round, and tell whether the run ends with it."""
        if not self.callbacks:
            return False

        history = []
        for past in self.folder.rounds():
            if past["val"] or "undefined" in past:
                history.append((past["round"], past["val"]))

        ended = RoundEnd(
            entry["round"],
            self.run.rounds,
            entry["val"],
            entry["train_loss"],
            history,
            self.key,
            self.folder.path,
            lambda: self.server.get("weights") or {},
        )
        self.stopped = asked_to_stop(self.callbacks, ended)

        if self.stopped and self.done < self.run.rounds:
            self.say(f"stopped after round {self.done} of {self.run.rounds}: {self.stopped}")

        return bool(self.stopped)

    def _start_training(self, round_: int, bar: Bar) -> RoundTraining:
        cohort = self.federation.cohort(round_)
        evaluate = self._is_eval_round(round_)
        scored: tuple[str, ...] = ()
        if evaluate and self.method.judged == "global" and not self.method.pools_data:
            scored = ("validate",)

        bar.set_description(f"round {round_}/{self.run.rounds}")
        training = RoundTraining(round_, cohort, bar.update)
        training.results = self.dispatcher.train(
            round_, self.server, cohort, scored, training.left_out, training.count_result
        )

        return training

    def _train(self, training: RoundTraining) -> tuple[Document, dict[str, StepResult]]:
        """Wait for the replies of a round and aggregate them; return its entry, and the results without replies."""
        federation = self.federation
        # time shared with the last evaluation is already counted, in `overlap`
        since = time.perf_counter() if training.overlap else training.started
        round_ = training.round
        cohort = training.cohort
        left_out = training.left_out
        samples = {name: self.workers.item_count(name) for name in cohort}
        results = {}
        replies = Replies(cohort, self.folder.path)
        renewed = []

        for name, (result, saved) in training.results:
            with during(MESSAGES):
                replies.add(name, result.reply)
            # only `replies`, which spills to disk, keeps the replies
            results[name] = replace(result, reply=Message())
            renewed += [name] * saved

        trained = time.perf_counter()
        with during(AGGREGATION):
            outcome = next_state(
                federation, round_, self.server, replies, self.tolerance, left_out, self.say
            )

        # contributions measure this round's changes, so they need the State before them
        before = self.server
        self.server = outcome.server
        # in the cohort's order, not the order of arrival: sums over sites depend on it
        present = [name for name in cohort if name in results and name not in left_out]
        results = pick(results, present)
        self.folder.accept_states(round_, [name for name in renewed if name in results])
        # a refused reply never happened, nor did the State that came with it
        self.folder.drop_states(round_, left_out)
        self.record["left_out"] = dict(Counter(self.record["left_out"]) + Counter(left_out.keys()))
        bytes_up = 0
        bytes_down = 0
        trained_on = 0
        losses = []
        for name, result in results.items():
            bytes_up += result.bytes_up
            bytes_down += result.bytes_down
            trained_on += samples[name]
            losses.append(result.loss * samples[name])

        self.record["bytes_up"] += bytes_up
        self.record["bytes_down"] += bytes_down
        left_out = dict(sorted(left_out.items()))  # not in the order in which they failed
        # the order of the keys is that of the lines in rounds.jsonl
        entry = {
            "round": round_,
            "cohort": cohort,
            **_unless_empty(left_out=left_out),
            "seconds": 0.0,
            "seconds_train": training.overlap + trained - since,
            "seconds_server": time.perf_counter() - trained,
            "seconds_eval": 0.0,
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
            "train_loss": sum(losses) / max(1, trained_on),
            "judged": self.method.judged,
            "val": {},
            "val_global": None,
            "val_personal": None,
            "sites": {},
            **_unless_empty(observed=outcome.observed),
        }
        if self.launch.contribution and self._is_eval_round(round_):
            with during(EVALUATION):
                entry["contribution"] = self.scoring.contributions(round_, before, outcome.replies)

        return entry, results

    def _evaluate(
        self,
        entry: Document,
        results: Mapping[str, StepResult],
        training: RoundTraining | None,
    ) -> None:
        """Complete a round's entry: score its models if it is due for evaluation, while the next round trains."""
        round_ = entry["round"]
        started = time.perf_counter()
        if self._is_eval_round(round_):
            with during(EVALUATION):
                entry |= self.scoring.evaluate(round_, self.server, results)

        for name, result in results.items():
            entry["sites"].setdefault(name, {}).update(train_loss=result.loss, steps=result.steps)

        ended = time.perf_counter()
        entry["seconds_eval"] = training.evaluation_seconds(ended) if training else ended - started
        entry["seconds"] = sum(entry[f"seconds_{part}"] for part in ("train", "server", "eval"))
        self.record["seconds"] += entry["seconds"]
        self.record["seconds_rounds"] += entry["seconds"]

        with during(CHECKPOINT):
            self.folder.append_round(entry)

    def _show(self, bar: Bar, entry: Document, seconds: float) -> None:
        """Show loss and best metric on the bar, short enough for 80 columns, and the round in a permanent line.

        `seconds` is the mean time of a round, from which the line computes the remaining time.
        """
        loss = f"loss {entry['train_loss']:.3f}"
        best = self.record["best"]
        value = entry["val"].get(self.key)
        shown = loss
        parts = [loss]
        if value is not None:
            parts.append(f"{self.key} {value:.3f}")
        elif "undefined" in entry:
            parts.append(f"{self.key} –")

        if best:
            shown += f", best {self.key} {best['value']:.3f} ({best['round']})"
            parts.append(f"best {best['value']:.3f} (round {best['round']})")

        following = self.launch.followed_by
        left = self.run.rounds * (1 + following) - entry["round"]
        parts.append(f"{entry['seconds']:.1f} s")
        if left:
            parts.append(time_left(seconds * left))
            if following:
                parts[-1] += f" with {following} more run{'s' * (following > 1)}"

        bar.set_postfix_str(shown)
        self.say(f"round {entry['round']}/{self.run.rounds}: {', '.join(parts)}")

    # End

    def _finish(self) -> Final:
        """Score on the test items, write tables and weights, and report the cost of the run."""
        started = time.perf_counter()
        run = self.run
        record = self.record
        self.say("scoring on the test items")
        self.scoring.last = self.done
        self.dispatcher.progress = self.launch.progress  # the rounds' bar is closed
        scores, cases = self.scoring.finish(self.server)
        record["seconds"] += time.perf_counter() - started
        public = {}

        if run.public:
            public["public"] = {
                "bundle": run.public.bundle,
                "data_source": run.public.data.source,
                "items": run.public.items,
                "teachers": [name for name, _ in run.public.teachers],
            }

        is_stopped = self.done < run.rounds
        summary = {
            "method": run.method,
            "bundle": run.bundle,
            "seed": run.seed,
            "rounds": self.done,
            "status": "stopped" if is_stopped else "finished",
            **({"stopped": self.stopped} if is_stopped else {}),
            "data_source": run.data.source,
            **public,
            **scores,
            **_unless_empty(absent=record["absent"], left_out=record["left_out"]),
            "bytes_up": record["bytes_up"],
            "bytes_down": record["bytes_down"],
            "seconds": record["seconds"],
            "seconds_per_round": record["seconds_rounds"] / max(1, self.done),
            "run_hash": run.run_hash,
        }

        return Final(summary, cases)

    def _trial_summary(self) -> Document:
        """Return the summary of an untested run: its best round by the validation metric, and its cost."""
        best = self.record["best"]
        return {
            "rounds": self.done,
            "status": "finished",
            "seconds": self.record["seconds"],
            "best": best and {"round": best["round"], self.key: best["value"]},
            "run_hash": self.run.run_hash,
            **self.scoring.undefined_lines(),
            **_peak_device_memory(self.run.device),
        }

    def _missing(self) -> Iterator[str]:
        """Report which sites' work is not in the result."""
        if self.record["absent"]:
            yield f"without these sites, which did not introduce themselves: {', '.join(self.record['absent'])}"
        if self.record["left_out"]:
            left_out = sorted(self.record["left_out"].items())
            counts = [f"{name} in {count}" for name, count in left_out]
            yield f"left out of rounds: {', '.join(counts)} of {self.run.rounds}"


def _unless_empty(**entries: Mapping[str, object]) -> Document:
    """Return the non-empty entries: a record has no others, so that it equals older ones."""
    return {name: entry for name, entry in entries.items() if entry}


def _peak_memory() -> int:
    """Largest resident size of this process and of its finished workers, in bytes."""
    # bytes on macOS, KiB on Linux
    unit = 1 if sys.platform == "darwin" else 1024
    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return unit * max(resource.getrusage(process).ru_maxrss for process in processes)


def _peak_device_memory(device: str) -> dict[str, int]:
    """Return the most bytes of a GPU that PyTorch's allocator reserved in this process, {} on a CPU."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {"peak_device_bytes": torch.cuda.max_memory_reserved(device)}


RUNTIME = Runtime(lambda execution: Simulator(execution).execute())
"""Sites in this process and in worker processes."""
