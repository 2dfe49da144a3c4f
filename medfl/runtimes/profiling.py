"""Where the time of a run's rounds goes: a time line of each process, as a table and as a trace for a viewer.

At any moment one part is going on in a process, so the parts and what is left over (idle) add up to the wall clock.
While nothing is recorded nothing is hooked in: training runs as if this module did not exist.

The trace is in the Trace Event Format (JSON object format), which Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from medfl.data.prepared import Batch, Shard
from medfl.evaluation.evaluators import CaseEvaluator, ClassEvaluator, MaskEvaluator

DATA = "data"
PASSES = "forward and backward"
OPTIMISER = "optimiser"
REST = "rest of local update"
AGGREGATION = "aggregation"
EVALUATION = "evaluation"
MESSAGES = "messages"
CHECKPOINT = "checkpoint"
IDLE = "idle"
PARTS = (DATA, PASSES, OPTIMISER, REST, AGGREGATION, EVALUATION, MESSAGES, CHECKPOINT)
_LOCAL = (DATA, PASSES, OPTIMISER, REST)
_DRAWN = 200_000  # spans in a trace; after these only whole visits to a site are drawn, and times still count


class Span(NamedTuple):
    """Something from `start` to `end`, in seconds of `time.perf_counter`, which all processes of a machine share.

    Attributes:
        name: the part, or the site that was visited.
        round: in which round, 0 before the first and after the last.
        site: at which site, "" for the server.
    """

    name: str
    start: float
    end: float
    round: int
    site: str


class Segment(NamedTuple):
    """What a worker has recorded since it was last asked: spans, and (round, site, part) -> seconds."""

    spans: list[Span]
    seconds: Mapping[tuple[int, str, str], float]


class Recorder:
    """The time line of one process; the server's also gathers those of the workers.

    Args:
        device: of the networks; a GPU is waited for whenever the part changes, so that its work counts where it was
            asked for.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.round = 0
        self.round_seconds: dict[int, float] = {}
        self._part: str | None = None
        self._since = 0.0
        self._site = ""
        self._spans: list[Span] = []
        self._seconds: defaultdict[tuple[int, str, str], float] = defaultdict(float)
        self._segments: dict[int, list[Segment]] = {}
        self._room = _DRAWN

    @property
    def local(self) -> bool:
        """Whether a site is being trained, so that batches and optimiser steps are parts of their own."""
        return self._part in _LOCAL

    def switch(self, part: str | None) -> str | None:
        """Let another part go on from now, None for idling, and return the one that has ended."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

        now = time.perf_counter()
        before = self._part
        if before is not None:
            self.add(before, self._since, now)

        self._part = part
        self._since = now
        return before

    def add(self, part: str, start: float, end: float) -> None:
        """Enter a stretch of time in this round and at this site."""
        self._seconds[self.round, self._site, part] += end - start
        if self._room > 0:
            self._room -= 1
            self._spans.append(Span(part, start, end, self.round, self._site))

    @contextmanager
    def during(self, part: str | None) -> Iterator[None]:
        """Let a part go on inside the block, and then the one from before."""
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    @contextmanager
    def visit(self, site: str) -> Iterator[None]:
        """Enter what happens inside the block as this site's."""
        before = self.switch(None)
        started = time.perf_counter()
        held = self._site
        self._site = site

        try:
            yield
        finally:
            self.switch(None)
            self._spans.append(Span(site, started, time.perf_counter(), self.round, site))
            self._site = held
            self.switch(before)

    @contextmanager
    def in_round(self, round_: int) -> Iterator[None]:
        """Enter what happens inside the block in a round, whose wall clock it is."""
        self.switch(None)
        started = time.perf_counter()
        self.round = round_
        try:
            yield
        finally:
            self.switch(None)
            self.round_seconds[round_] = (
                self.round_seconds.get(round_, 0.0) + time.perf_counter() - started
            )
            self.round = 0

    def take_segment(self) -> Segment:
        """Hand over what was recorded so far and forget it."""
        segment = Segment(self._spans, dict(self._seconds))
        self._spans = []
        self._seconds = defaultdict(float)
        return segment

    def gather(self, worker: int, segment: Segment) -> None:
        """Take over what a worker (from 1) has recorded."""
        if self._room > 0:
            spans = segment.spans
        else:
            spans = [span for span in segment.spans if span.name == span.site]
        self._room -= len(spans)
        self._segments.setdefault(worker, []).append(Segment(spans, segment.seconds))

    # What is told

    def rows(self) -> dict[str, dict[str, float]]:
        """Return process -> part -> seconds in the rounds, idle among them; those of a process are the wall clock."""
        wall = sum(self.round_seconds.values())
        durations = {}
        for name, segments in self._processes().items():
            seconds = dict.fromkeys(PARTS, 0.0)
            for _, _, part, value in _in_rounds(segments):
                seconds[part] += value
            durations[name] = {**seconds, IDLE: wall - sum(seconds.values())}

        return durations

    def table(self) -> str:
        """Return the table that is shown at the end of a run: each column adds up to the rounds' wall clock."""
        rows = self.rows()
        wall = sum(self.round_seconds.values())
        count = len(self.round_seconds)
        server, *workers = rows.values()
        columns = {"server" if workers else "seconds": server}

        if workers:
            title = "worker" if len(workers) == 1 else f"mean of {len(workers)} workers"
            columns[title] = {
                part: sum(row[part] for row in workers) / len(workers) for part in server
            }

        widths = [max(len(title), 10) for title in columns]
        head = f"where {count} round{'s' * (count != 1)} spent the time".ljust(34)
        lines = [
            head + "".join(f"{t:>{w}}{'':7}" for t, w in zip(columns, widths, strict=True)).rstrip()
        ]
        rule = "─" * max(len(lines[0]), 34 + sum(w + 7 for w in widths))

        for part in (*PARTS, IDLE, "wall clock"):
            values = [wall if part == "wall clock" else column[part] for column in columns.values()]
            cells = [
                f"{v:>{w}.3f} {v / wall if wall else 0:>5.0%} "
                for v, w in zip(values, widths, strict=True)
            ]
            if any(values) or part not in PARTS:
                lines.append(f"{part:<34}{''.join(cells)}".rstrip())

        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def trace(self) -> dict[str, Any]:
        """Return the document of profile.json: one row a process, seconds by round and by site beside it."""
        processes = self._processes()
        begin = min(
            (span.start for parts in processes.values() for part in parts for span in part.spans),
            default=0.0,
        )
        events: list[dict[str, Any]] = []
        rounds = {round_: dict.fromkeys(PARTS, 0.0) for round_ in self.round_seconds}
        sites: dict[str, dict[str, float]] = {}

        for row, (name, segments) in enumerate(processes.items()):
            process_ids = {"pid": 1, "tid": row}
            events.append({"name": "thread_name", "ph": "M", **process_ids, "args": {"name": name}})
            events.append(
                {"name": "thread_sort_index", "ph": "M", **process_ids, "args": {"sort_index": row}}
            )
            events += [
                _event(span, begin, process_ids) for segment in segments for span in segment.spans
            ]

            for round_, site, part, value in _in_rounds(segments):
                rounds[round_][part] += value
                if site:
                    site_seconds = sites.setdefault(site, {})
                    site_seconds[part] = site_seconds.get(part, 0.0) + value

        timings = {
            "seconds": self.rows(),
            "rounds": [
                {"round": r, "seconds": self.round_seconds[r], **parts}
                for r, parts in rounds.items()
            ],
            "sites": sites,
        }

        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": timings}

    def _processes(self) -> dict[str, list[Segment]]:
        """Return the server and the workers, each with what it recorded."""
        workers = {f"worker {worker}": self._segments[worker] for worker in sorted(self._segments)}
        return {"server": [Segment(self._spans, self._seconds)], **workers}


def _in_rounds(segments: list[Segment]) -> Iterator[tuple[int, str, str, float]]:
    """Yield round, site, part and seconds of what was recorded in rounds."""
    for segment in segments:
        for (round_, site, part), seconds in segment.seconds.items():
            if round_:
                yield round_, site, part, seconds


def _event(span: Span, begin: float, process_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a complete event; times are in microseconds."""
    start = round((span.start - begin) * 1e6, 1)
    length = round((span.end - span.start) * 1e6, 1)
    details = {"round": span.round, **({"site": span.site} if span.site else {})}
    kind = "visit" if span.name == span.site else "part"
    return {
        "name": span.name,
        "cat": kind,
        "ph": "X",
        "ts": start,
        "dur": length,
        **process_ids,
        "args": details,
    }


# The recorder that is running

_RUNNING: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def running() -> Recorder | None:
    """Return the recorder of this process, None where nothing is recorded."""
    return _RUNNING.get()


def during(part: str | None) -> AbstractContextManager[None]:
    """Let a part go on inside a block, if anything is recorded."""
    recorder = _RUNNING.get()
    if recorder is None:
        return nullcontext()

    return recorder.during(part)


def visit(site: str) -> AbstractContextManager[None]:
    """Enter what happens inside a block as a site's, if anything is recorded."""
    recorder = _RUNNING.get()
    if recorder is None:
        return nullcontext()

    return recorder.visit(site)


def in_round(round_: int) -> AbstractContextManager[None]:
    """Enter what happens inside a block in a round, if anything is recorded."""
    recorder = _RUNNING.get()
    if recorder is None:
        return nullcontext()

    return recorder.in_round(round_)


def restart() -> Recorder | None:
    """Give a forked process, where something is recorded, a time line of its own."""
    recorder = _RUNNING.get()
    if recorder is not None:
        recorder = Recorder(recorder.device)
        _RUNNING.set(recorder)
    return recorder


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Record inside the block, in processes forked there too; None records nothing and hooks nothing in.

    Batches, optimiser steps and evaluators are watched from outside, so methods and `fit` know nothing of it.
    """
    if recorder is None:
        yield
        return

    token = _RUNNING.set(recorder)
    batches = Shard.batches
    evaluators = (ClassEvaluator, MaskEvaluator, CaseEvaluator)
    calls = [evaluator.__call__ for evaluator in evaluators]
    before = register_optimizer_step_pre_hook(_switching(OPTIMISER))
    after = register_optimizer_step_post_hook(_switching(PASSES))
    Shard.batches = _watched(batches)  # type: ignore[method-assign]

    for evaluator, call in zip(evaluators, calls, strict=True):
        evaluator.__call__ = _evaluating(call)  # type: ignore[method-assign, assignment]

    try:
        yield
    finally:
        Shard.batches = batches  # type: ignore[method-assign]
        for evaluator, call in zip(evaluators, calls, strict=True):
            evaluator.__call__ = call  # type: ignore[method-assign]

        before.remove()
        after.remove()
        _RUNNING.reset(token)


def _switching(part: str) -> Callable[..., None]:
    def switch(*_: Any) -> None:
        recorder = _RUNNING.get()
        if recorder is not None and recorder.local:
            recorder.switch(part)

    return switch


def _watched(batches: Callable[..., Iterator[Batch]]) -> Callable[..., Iterator[Batch]]:
    """Count making a batch as data, and what follows, but for the optimiser, as forward and backward."""

    def watched(
        shard: Shard, size: int, generator: torch.Generator | None = None
    ) -> Iterator[Batch]:
        iterator = batches(shard, size, generator)
        while True:
            recorder = _RUNNING.get()
            local = recorder is not None and recorder.local
            if recorder is not None and local:
                recorder.switch(DATA)

            batch = next(iterator, None)
            if recorder is not None and local:
                recorder.switch(REST if batch is None else PASSES)

            if batch is None:
                return

            yield batch

    return watched


def _evaluating(call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **settings: Any) -> Any:
        with during(EVALUATION):
            return call(*arguments, **settings)

    return timed
