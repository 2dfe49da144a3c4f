"""A site whose work a worker does: equal bits, and what a worker that lies or fails does to its keeper."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.evaluation import tally
from medfl.evaluation.metrics import WHOLE, Cases
from medfl.policy.audit import verify
from medfl.policy.policy import Outbound
from medfl.runtimes.monai_fl.client import MedflClientAlgo
from medfl.runtimes.monai_fl.held import HeldSite, Worker, cases_state
from medfl.runtimes.monai_fl.view import Aborted, SiteView
from medfl.runtimes.monai_fl.worker import _ANSWERS
from medfl.runtimes.step import copy_site_weights, introduce
from medfl.safety import sandbox
from medfl.safety.sandbox import Allowed, devices, private_folders, python_and_system
from medfl.storage.files import State, join_state, split_state
from tests.runtimes.test_monai_fl import broadcast, federation
from tests.support.programs import python_path
from tests.support.toy import ToyBundle, bits

walls = pytest.mark.skipif(bool(sandbox.lacking()), reason=f"needs {sandbox.lacking()}")
Change = Callable[[State], object]


class Near:
    """A worker in this process: its answers go through the pipe's documents; `change` makes a liar of it."""

    def __init__(self, made: Any, change: Change = lambda answer: None) -> None:
        self.stop = threading.Event()
        self.is_running = True
        self._view = SiteView(made, "x", self.stop)
        self._change = change

    def ask(self, question: str, **values: object) -> State:
        asked = join_state(*split_state({"question": question, **values}))
        answer = _ANSWERS[question](self._view, asked)
        self._change(answer)
        return join_state(*split_state(answer))

    def close(self) -> None:
        self.is_running = False


def held(made: Any, change: Change = lambda answer: None, reviewed: bool = False) -> HeldSite:
    return HeldSite("x", made.run, Near(made, change), is_reviewed=reviewed)  # type: ignore[arg-type]


def rounds(site: Any, made: Any, count: int = 2, **settings: Any) -> list[Any]:
    """What a site says in some rounds that all begin with the same message."""
    algo = MedflClientAlgo(site, "x", **settings)
    algo.initialize()
    told = []
    for round_ in range(1, count + 1):
        algo.train(broadcast(made, "x", round_), {"judge": ("validate",)})
        reply = algo.get_weights()
        scores = algo.evaluate(broadcast(made, "x", round_)).metrics
        told.append((bits(reply.weights), reply.statistics, scores, algo.cases))

    return told


@pytest.mark.parametrize(
    ("method", "messages"),
    [("fedavg", "lossless"), ("scaffold", "topk:0.1"), ("ditto", "int8"), ("fedper", "float16")],
)
def test_law1_what_a_held_site_says_has_the_bits_of_a_site_in_the_same_process(
    method: str, messages: str, tmp_path: Path
) -> None:
    made = federation(method, messages=messages)
    kept = {}
    for name, site in (("here", made), ("held", lambda: held(made))):
        kept[name] = rounds(site, made, folder=tmp_path / name)

    assert [one[:3] for one in kept["held"]] == [one[:3] for one in kept["here"]]
    for here, there in zip(kept["here"], kept["held"], strict=True):
        assert bits(here[3]["validate"].values) == bits(there[3]["validate"].values)

    states = [
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")}
        for name in kept
    ]
    assert states[0] == states[1]
    assert states[0]


@pytest.mark.parametrize("where", ["here", "held"])
def test_a_metric_of_a_whole_set_is_told_as_its_value(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is computed of stays with the worker: its keeper, MONAI FL's host and the tables get a number."""

    def told(_: ToyBundle, cases: Cases) -> Cases:
        return Cases(cases.ids, {f"{WHOLE}theirs": torch.full((len(cases),), 0.25)})

    monkeypatch.setattr(ToyBundle, "told", told)
    made = federation("fedavg")
    site = MedflClientAlgo(made if where == "here" else lambda: held(made), "x")
    site.initialize()
    assert site.evaluate(broadcast(made, "x", 1), {"section": "test"}).metrics == {"theirs": 0.25}
    if where == "held":
        assert [*site.cases["test"].values] == [f"{WHOLE}theirs"]

    table = site.examine(broadcast(made, "x", 1), ("test",))["test"]
    assert tally.outcome(table).metrics == {"theirs": 0.25}


def add(name: str, value: torch.Tensor) -> Change:
    def change(answer: State) -> None:
        if "message" in answer:
            answer["message"][name] = value

    return change


def put(name: str, value: object) -> Change:
    def change(answer: State) -> None:
        if name in answer:
            answer[name] = value

    return change


def scale(answer: State) -> None:
    if "message" in answer:
        name = next(iter(answer["message"]))
        answer["message"][name] = answer["message"][name] * float("nan")


LIES = {
    "a tensor of its own": (add("weights/patient", torch.ones(3)), "must not leave it"),
    "a group of its own": (add("patients/names", torch.ones(3)), "groups() does not declare"),
    "another form": (add("weights/0.weight", torch.ones(64, 64)), "expected"),
    "no name": (add("", torch.ones(1)), "is not named group/name"),
    "not finite": (scale, "NaN or infinite"),
    "no message": (put("message", 3), "has no message"),
    "a text for a loss": (put("loss", "patient 17"), "no result of a training"),
    "steps below zero": (put("steps", -1), "no result of a training"),
    "a text in its steps": (
        put("steps", int.from_bytes(b"patient seventeen")),
        "no result of a training",
    ),
    "no names of sections": (put("cases", [1]), "scores something else"),
    "a section of its own": (
        put("cases", {"patient 17": {"ids": ["a"], "values": {"loss": torch.ones(1)}}}),
        "scores something else",
    ),
    "texts as names of metrics": (
        put(
            "cases",
            {
                "validate": {
                    "ids": ["a"],
                    "values": {f"{i}{'x' * 100}": torch.ones(1) for i in range(500)},
                }
            },
        ),
        "too many names",
    ),
    "texts as names of numbers": (
        lambda answer: [
            add(f"scalars/{i}{'x' * 100}", torch.tensor(1.0))(answer) for i in range(500)
        ],
        "too many names",
    ),
    "no state": (put("state", [1]), "no result of a training"),
    "no cases": (put("cases", {"validate": {"ids": 3}}), "no outcomes of cases"),
    "cases of other counts": (
        put("cases", {"validate": {"ids": ["a"], "values": {"loss": torch.ones(2)}}}),
        "no outcomes of cases",
    ),
}


@pytest.mark.parametrize("what", LIES)
def test_a_worker_that_lies_is_refused_and_nothing_leaves(what: str, tmp_path: Path) -> None:
    change, text = LIES[what]
    made = federation()
    algo = MedflClientAlgo(lambda: held(made, change), "x", audit=tmp_path / "audit.jsonl")
    algo.initialize()
    with pytest.raises(RunError, match=re.escape(text)):
        algo.train(broadcast(made, "x"), {"judge": ("validate",)})

    with pytest.raises(RunError, match="nothing to send"):
        algo.get_weights()
    assert algo.states.last == 0
    log = (tmp_path / "audit.jsonl").read_text()
    assert '"refused"' in log
    assert '"left"' not in log
    assert not verify(tmp_path / "audit.jsonl").problems


ODD: dict[str, Any] = {
    "run_hash": 3,
    "training_items": "many",
    "leaves": [["weights", [1], "torch.load"]],
    "network": [[1, 2, 3]],
    "facts": {"labels": ["patient 17"]},
}


@pytest.mark.parametrize("name", ODD)
def test_a_worker_that_says_odd_things_of_itself_is_not_taken(name: str) -> None:
    with pytest.raises(RunError, match="odd|tensor"):
        held(federation(), put(name, ODD[name]))


@pytest.mark.parametrize(
    "facts",
    [{"labels": [2, 1]}, {"labels": [1, 1]}, {"labels": [10**6]}, {"patients": [1]}],
    ids=["descending", "twice", "no position", "of its own"],
)
def test_what_a_worker_says_of_its_data_is_positions_of_a_kind_that_is_known(
    facts: dict[str, list[int]],
) -> None:
    with pytest.raises(RunError, match="odd"):
        held(federation(), put("facts", facts))


@pytest.mark.parametrize("rules", [None, Outbound(clip=1.0)], ids=["as it is", "clipped"])
def test_what_was_not_sent_is_added_as_the_keeper_kept_it_whatever_a_worker_says(
    rules: Outbound | None,
) -> None:
    """It joins a reply behind the checks: tensors of other forms, or of no number, would leave."""
    made = federation(messages="topk:0.1")

    def lie(answer: State) -> None:
        if "state" in answer:
            answer["state"]["unsent"] = {"0.weight": torch.full((64, 64), float("nan"))}

    changes: tuple[Change, ...] = (lambda answer: None, lie)
    told = []
    for change in changes:
        algo = MedflClientAlgo(lambda change=change: held(made, change), "x", outbound=rules)
        algo.initialize()
        for round_ in (1, 2):
            algo.train(broadcast(made, "x", round_))
        told.append(bits(algo.get_weights().weights))

    assert told[0] == told[1]


def test_a_worker_gets_no_state_of_another_run_whatever_run_it_says_it_works_for(
    tmp_path: Path,
) -> None:
    folders = []
    for method in ("fedavg", "scaffold"):
        made = federation(method)
        site = held(made, put("run_hash", "../../../../" + "0" * 52))
        algo = MedflClientAlgo(lambda site=site: site, "x", folder=tmp_path)
        algo.initialize()
        algo.train(broadcast(made, "x"))
        folders.append(algo.states.folder)

    assert folders[0] != folders[1]
    assert {folder.parent.parent for folder in folders} == {tmp_path}


def test_a_worker_introduces_itself_without_tensors_as_no_server_has_named_them_yet() -> None:
    site = held(federation(), add("weights/0.weight", torch.ones(1)))
    site.rules.leaves["0.weight"] = (torch.Size([1]), torch.float32)  # type: ignore[index]
    with pytest.raises(RunError, match="introduces itself with tensors"):
        site.introduction(introduce)


def test_a_worker_begun_anew_has_to_say_the_same(tmp_path: Path) -> None:
    made = federation()
    site = held(made)
    site._stated = {**site._stated, "training_items": 7}
    site._worker.close()
    with pytest.raises(RunError, match="something else than before"):
        site.introduction(None)


def test_only_what_a_site_may_tell_is_asked_of_a_worker() -> None:
    site = held(federation())
    with pytest.raises(RunError, match="not asked for statistics"):
        site.statistics(None, 0)
    with pytest.raises(RunError, match="is not asked for copy_site_weights"):
        site.call(copy_site_weights, 1, None, Message())


@pytest.mark.parametrize(("reviewed", "passes"), [(True, True), (False, False)])
def test_scores_under_a_budget_are_believed_of_a_reviewed_bundle_alone(
    reviewed: bool, passes: bool
) -> None:
    """A bundle that says that its validation images are others could show training images in their scores."""
    made = federation()
    site = held(made, put("held_out", ["validate"]), reviewed)
    rules = Outbound(clip=1.0, noise=8.0, epsilon=50.0, answers=5)
    algo = MedflClientAlgo(lambda: site, "x", outbound=rules)
    algo.initialize()
    if passes:
        assert algo.evaluate(broadcast(made, "x")).metrics
    else:
        with pytest.raises(RunError, match="would leave without noise"):
            algo.evaluate(broadcast(made, "x"))


# Processes


def worker(task: str, folder: Path, *told: Path) -> tuple[Worker, list[str]]:
    """Return a worker of tests/support/held_worker.py, and the list that gets the lines it prints."""
    lines: list[str] = []
    private = folder / "worker"
    variables = {**private_folders(private), "PYTHONPATH": python_path()}
    allowed = Allowed(read=python_and_system(), write=(private, *devices()))
    job = {"task": task, "paths": [str(path) for path in (private, *told)]}
    return Worker("tests.support.held_worker", job, allowed, variables, lines.append), lines


@walls
@pytest.mark.slow
def test_law1_a_worker_s_process_gives_the_bits_of_a_site_in_this_process(tmp_path: Path) -> None:
    made = federation("scaffold", messages="topk:0.1")
    begun, _ = worker("scaffold", tmp_path)
    there = rounds(lambda: HeldSite("x", made.run, begun, is_reviewed=False), made)
    here = rounds(made, made)
    assert [one[:3] for one in there] == [one[:3] for one in here]
    begun.close()


@walls
@pytest.mark.slow
def test_a_worker_reaches_nothing_of_its_keeper(tmp_path: Path) -> None:
    account = tmp_path / "data-0.privacy.json"
    account.write_text("as it was")
    begun, lines = worker("attack", tmp_path, account)
    with pytest.raises(RunError, match="attacked: {'read': 'refused'") as error:
        begun.ask("begin")

    assert "done" not in str(error.value)
    assert str(error.value).count("refused") == 9
    assert account.read_text() == "as it was"
    begun.close()
    assert lines[0] == r"worker: a line with \x1b[31m of its own"


@walls
@pytest.mark.slow
def test_a_worker_that_ends_or_hangs_is_said_and_begun_anew(tmp_path: Path) -> None:
    begun, _ = worker("end", tmp_path)
    for _ in range(2):
        with pytest.raises(RunError, match="the worker has ended: exit code 7"):
            begun.ask("begin")

    begun, _ = worker("garbage", tmp_path)
    with pytest.raises(RunError, match="at most 67,108,864"):
        begun.ask("begin")
    assert not begun.is_running

    begun, _ = worker("hang", tmp_path)
    threading.Timer(8.0, begun.stop.set).start()
    started = time.monotonic()
    with pytest.raises(Aborted):
        begun.ask("begin")
    assert time.monotonic() - started < 60
    begun.close()

    begun, lines = worker("talk", tmp_path)
    with pytest.raises(RunError, match="has ended"):
        begun.ask("begin")
    assert len(lines) == 10_000
    assert lines[-1] == "worker: more than 10,000 lines, of which no others follow"


def test_cases_cross_the_pipe() -> None:
    made = federation()
    algo = MedflClientAlgo(made, "x")
    algo.initialize()
    algo.train(broadcast(made, "x"), {"judge": ("validate",)})
    state = join_state(*split_state(cases_state(algo.cases)))
    assert state["validate"]["ids"] == list(algo.cases["validate"].ids)
    assert bits(state["validate"]["values"]) == bits(dict(algo.cases["validate"].values))


def test_a_host_of_monai_fl_gets_what_the_site_s_policy_allows() -> None:
    made = federation("fedavg")
    for jobs, allowed in ((("train",), "train"), (("evaluate",), "evaluate"), ((), "")):
        site = MedflClientAlgo(made, "x", jobs=jobs)
        site.initialize()
        for kind, work in (("train", site.train), ("evaluate", site.evaluate)):
            data = broadcast(made, "x", 1)
            if allowed in (kind, ""):
                work(data)
                continue
            with pytest.raises(InputError, match=f"^site 'x': {kind}; {allowed}, as its policy"):
                work(data)
