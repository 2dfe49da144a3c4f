"""NVIDIA FLARE without its processes: both halves of the runtime, joined by a link of this process."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("nvflare")

from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.flare import wire
from medfl.flare.server import Answer, FlareWorkers
from medfl.flare.site import FlareSite
from medfl.flare.wire import Payload, from_model, to_model
from medfl.methods import load
from medfl.runtimes.attendance import FailedReply, Tolerance
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.client import MedflClientAlgo
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.runtimes.tasks import Introduce, Train
from medfl.storage.files import load_state, load_weights
from medfl.storage.run_folder import RunFolder
from tests.runtimes.test_smaller_messages import Wide
from tests.support.sweeps import FEW, mostly_slow
from tests.support.toy import CLASSIFYING, WITHOUT_IMAGES, ToyBundle, bits, public_blobs, run_record

NEED_A_BUNDLE = {"fedhelp"}
"""Methods whose sites have different networks."""


def federation(
    method: str = "fedavg", bundle: ToyBundle | None = None, **changes: Any
) -> Federation:
    made = load(method, WITHOUT_IMAGES.get(method))
    return Federation(
        bundle or ToyBundle(), made, run_record(method=method, **changes), public=public_blobs()
    )


class Near:
    """A link to sites in this process; what they say may be changed on its way.

    Attributes:
        asked: (word, sites) of every question.
    """

    def __init__(
        self,
        made: Federation,
        folder: RunFolder,
        change: Callable[[str, str, Payload], Payload | None] | None = None,
    ) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.dropped: list[int] = []
        self.gone: dict[str, str] = {}
        self.ended = False
        self._change = change or (lambda site, word, payload: payload)
        self.sites = {
            name: FlareSite(MedflClientAlgo(made, name, folder=folder.path / "sites"), name, folder)
            for name in made.participants
        }

    def ask(
        self, word: str, sites: Sequence[str], payload: Payload, answers: queue.SimpleQueue[Answer]
    ) -> int:
        self.asked.append((word, list(sites)))
        question = from_model(to_model(payload), "the server")
        for site in sites:
            answer = from_model(to_model(self.sites[site].answer(word, question)), site)
            changed = self._change(site, word, answer)
            if changed is not None:
                answers.put(Answer(len(self.asked), site, changed))
        return len(self.asked)

    def drop(self, question: int) -> None:
        self.dropped.append(question)

    def why_lost(self, site: str) -> str:
        return self.gone.get(site, "")

    def is_aborted(self) -> bool:
        return self.ended


def executed(
    out: Path,
    made: Federation,
    workers: Callable[[Federation, int], Workers],
    *,
    tolerance: Tolerance | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run, and return what is left but for times and for where States lie."""
    folder = RunFolder(out) if (out / "run.json").is_file() else RunFolder.create(out)
    folder.write_run(made.run, {})
    bearing = tolerance or Tolerance()
    launch = Launch(
        resume=True, min_replies=bearing.min_replies, deadline=bearing.deadline, **settings
    )
    Simulator(Execution(made, folder, launch, bearing.max_share), workers).execute()
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    return {
        "rounds": [
            {k: v for k, v in entry.items() if not k.startswith("seconds")} for entry in rounds
        ],
        "summary": {
            k: v
            for k, v in summary.items()
            if not k.startswith("seconds") and k != "peak_memory_bytes"
        },
        "tables": {path.name: path.read_text() for path in sorted(out.glob("*.csv"))},
        "weights": {
            path.name: bits(load_weights(path)) for path in sorted(out.glob("*.safetensors"))
        },
        "server": {
            p.name: bits(load_state(p)) for p in sorted((out / "state").glob("*server.safetensors"))
        },
    }


def near(
    out: Path, change: Callable[[str, str, Payload], Payload | None] | None = None, **seen: Any
) -> Any:
    """Return what makes the workers; `seen` takes the link and the workers."""

    def workers(made: Federation, _: int) -> FlareWorkers:
        seen.get("links", []).append(link := Near(made, RunFolder(out), change))
        return FlareWorkers(made, link)

    return workers


# The same results as the simulator's


@pytest.mark.parametrize(
    "method", mostly_slow(sorted(set(CLASSIFYING) - NEED_A_BUNDLE), (*FEW, "fedmd", "fedproto"))
)
def test_every_method_leaves_what_the_simulator_leaves(tmp_path: Path, method: str) -> None:
    settings = {"rounds": 2, "cohort": 0.67, "eval_every": 2}
    expected = executed(tmp_path / "simulator", federation(method, **settings), Workers)
    out = tmp_path / "flare"
    assert executed(out, federation(method, **settings), near(out)) == expected


@pytest.mark.parametrize("share", ["a", "stack", "svd"])
def test_adapters_of_several_ranks_too(tmp_path: Path, share: str) -> None:
    """FedLoRA; a reply has the factors of the 6 x 8 matrix by the site's rank, and the head of 3 x 6 and 3 numbers."""
    run = run_record(method="fedlora", rounds=2)

    def made() -> Federation:
        return Federation(ToyBundle(), load("fedlora", rank=2, ranks="x=1", share=share), run)  # type: ignore[arg-type]

    expected = executed(tmp_path / "simulator", made(), Workers)
    found = executed(tmp_path / "flare", made(), near(tmp_path / "flare"))
    assert found == expected
    size = 0
    for rank in (1, 2, 2):
        factors = {
            f"0.weight.lora_A.{rank}": torch.zeros(rank, 8),
            f"0.weight.lora_B.{rank}": torch.zeros(6, rank),
        }
        if share == "a":
            del factors[f"0.weight.lora_B.{rank}"]
        head = {"4.weight": torch.zeros(3, 6), "4.bias": torch.zeros(3)}
        size += len(Message({"weights": head, "adapters": factors}, {"samples": 1}).encode())
    assert [entry["bytes_up"] for entry in found["rounds"]] == [size, size]


@pytest.mark.parametrize("method", ["scaffold", "fedmd"])
def test_smaller_messages_too(tmp_path: Path, method: str) -> None:
    settings = {"rounds": 2, "messages": "int8", "bundle": Wide()}
    expected = executed(tmp_path / "simulator", federation(method, **settings), Workers)
    out = tmp_path / "flare"
    assert executed(out, federation(method, **settings), near(out)) == expected


def test_one_question_a_round_goes_to_all_sites_that_are_told_the_same(tmp_path: Path) -> None:
    links: list[Near] = []
    executed(tmp_path, federation("fedavg", rounds=2), near(tmp_path, links=links))
    (link,) = links
    assert link.asked == [
        ("introduce", ["x", "y", "z"]), ("train", ["x", "y", "z"]), ("train", ["x", "y", "z"]),
    ]  # fmt: skip
    assert link.dropped == [1, 2, 3]


def test_sites_that_are_told_something_else_are_asked_one_by_one(tmp_path: Path) -> None:
    links: list[Near] = []
    executed(
        tmp_path,
        federation("fedavg", Wide(), rounds=1, messages="int8"),
        near(tmp_path, links=links),
    )
    trained = [sites for word, sites in links[0].asked if word == "train"]
    assert trained == [["x"], ["y"], ["z"]]


def test_a_run_goes_on_after_its_server_was_lost_in_a_round(tmp_path: Path) -> None:
    """The sites have trained round 2 and keep its States; the server that went had not committed it."""
    whole = executed(tmp_path / "whole", federation("ditto", rounds=3), near(tmp_path / "whole"))
    out = tmp_path / "cut"

    class Killed(BaseException):
        pass

    def kill(site: str, word: str, payload: Payload) -> Payload:
        if (site, word) == ("z", "train") and (out / "state" / "manifest.json").is_file():
            raise Killed
        return payload

    with pytest.raises(Killed):
        executed(out, federation("ditto", rounds=3), near(out, kill))
    assert json.loads((out / "state" / "manifest.json").read_text())["round"] == 1
    assert sorted(p.stem for p in next((out / "sites").rglob("x")).iterdir()) == [
        "000001",
        "000002",
    ]
    assert executed(out, federation("ditto", rounds=3), near(out)) == whole


def test_a_run_that_ends_where_its_server_was_lost_tries_from_the_last_committed_state(
    tmp_path: Path,
) -> None:
    """FedAvg's sites have no State, SCAFFOLD's have: round 2 was trained there, but never happened."""
    whole = executed(tmp_path / "whole", federation("scaffold", rounds=1), near(tmp_path / "whole"))
    out = tmp_path / "cut"

    class Killed(BaseException):
        pass

    def kill(site: str, word: str, payload: Payload) -> Payload:
        if (site, word) == ("z", "train") and (out / "state" / "manifest.json").is_file():
            raise Killed
        return payload

    with pytest.raises(Killed):
        executed(out, federation("scaffold", rounds=2), near(out, kill))
    assert executed(out, federation("scaffold", rounds=1), near(out)) == whole


# Sites that fail


def training(
    change: Callable[[Payload], Payload | None],
) -> Callable[[str, str, Payload], Payload | None]:
    """Change what site y says of its training."""
    return lambda site, word, payload: (
        change(payload) if (site, word) == ("y", "train") else payload
    )


def tensors(**changes: Any) -> Callable[[Payload], Payload]:
    return lambda payload: replace(
        payload,
        tensors={
            **payload.tensors,
            **{f"message/{k.replace('__', '/')}": v for k, v in changes.items()},
        },
    )


def without(name: str) -> Callable[[Payload], Payload]:
    return lambda payload: replace(
        payload, tensors={k: v for k, v in payload.tensors.items() if k != name}
    )


BAD: Mapping[str, tuple[Callable[[Payload], Payload], str]] = {
    "fails": (lambda payload: wire.failure("the disk is full"), "the disk is full"),
    "nan": (
        lambda payload: tensors(**{"weights__0.bias": torch.full((6,), float("nan"))})(payload),
        "'weights/0.bias' has NaN or infinite values",
    ),
    "shape": (tensors(**{"weights__0.bias": torch.ones(7)}), "'weights/0.bias' is (7,)"),
    "type": (tensors(**{"weights__0.bias": torch.ones(6, dtype=torch.float64)}), "torch.float64"),
    "extra": (tensors(**{"weights__evil": torch.ones(1)}), "'weights/evil' must not leave it"),
    "missing": (without("message/weights/0.bias"), "'weights/0.bias' is missing"),
    "no group": (tensors(bias=torch.ones(1)), "'bias' is not named group/name"),
    "too much": (tensors(up__everything=torch.zeros(1).expand(2**29)), "bytes"),
    "steps": (lambda payload: replace(payload, numbers={**payload.numbers, "steps": -1}), "the number 'steps' is -1"),
    "no steps": (
        lambda payload: replace(payload, numbers={k: v for k, v in payload.numbers.items() if k != "steps"}),
        "the number 'steps' is None",
    ),
    "cases": (
        lambda payload: replace(payload, tensors={**payload.tensors, "cases/validate/loss": torch.ones(99)}),
        "has shape (99,) for 5 cases",
    ),
    "unasked": (
        lambda payload: replace(payload, tensors={**payload.tensors, "cases/test/loss": torch.ones(5)}),
        "outcomes of 'test', which it does not announce",
    ),
    "announced": (
        lambda payload: replace(payload, numbers={**payload.numbers, "test": 1}),
        "outcomes of 'test', which nobody asked for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_answer_ends_a_strict_run_and_is_left_out_of_a_tolerant_one(
    tmp_path: Path, what: str
) -> None:
    change, text = BAD[what]
    strict, lenient = tmp_path / "strict", tmp_path / "lenient"
    with pytest.raises(RunError) as caught:
        executed(strict, federation(rounds=1), near(strict, training(change)))
    assert text in str(caught.value)
    assert str(caught.value).startswith("site 'y'")
    assert "\n" not in str(caught.value)
    left = executed(
        lenient,
        federation(rounds=1),
        near(lenient, training(change)),
        tolerance=Tolerance(min_replies=2),
    )
    (entry,) = left["rounds"]
    assert list(entry["left_out"]) == ["y"]
    assert text in entry["left_out"]["y"]


# What a site tells of its images, which nobody else sees


def counting(site: str, *counts: int) -> Callable[[str, str, Payload], Payload]:
    """Let a site tell of so many images, one after the other, from its introduction on."""
    left = list(counts)

    def change(name: str, word: str, payload: Payload) -> Payload:
        if name != site or wire.SAMPLES not in payload.numbers:
            return payload
        count = left.pop(0)
        flat = {**payload.tensors}
        if "message/scalars/samples" in flat:
            flat["message/scalars/samples"] = torch.tensor(count, dtype=torch.float64)
        return replace(payload, tensors=flat, numbers={**payload.numbers, wire.SAMPLES: count})

    return change


def apart(out: Path, change: Any, roster: Mapping[str, int] | None = None) -> Any:
    return lambda made, _: FlareWorkers(made, Near(made, RunFolder(out), change), False, roster)


def test_a_site_may_not_grow_beyond_what_it_told_at_its_introduction(tmp_path: Path) -> None:
    """Whole numbers all: site y has 5 images, or says that it has 6, and then more of them; also after a resume."""
    tolerance = {"tolerance": Tolerance(min_replies=2)}
    told = executed(
        tmp_path / "told",
        federation(rounds=2),
        apart(tmp_path / "told", counting("y", 6, 6, 6)),
        **tolerance,
    )
    assert all("left_out" not in entry for entry in told["rounds"])
    out = tmp_path / "grown"
    first = executed(out, federation(rounds=1), apart(out, counting("y", 6, 6)), **tolerance)
    assert "left_out" not in first["rounds"][0]
    grown = executed(out, federation(rounds=3), apart(out, counting("y", 10**12, 6)), **tolerance)
    assert [list(entry.get("left_out", {})) for entry in grown["rounds"]] == [[], ["y"], []]
    why = "it tells of 1,000,000,000,000 training images; when it introduced itself it had 6"
    assert grown["rounds"][1]["left_out"]["y"] == why


def test_a_reply_that_claims_more_than_is_told_beside_it_is_refused(tmp_path: Path) -> None:
    change = training(tensors(scalars__samples=torch.tensor(1e12, dtype=torch.float64)))
    left = executed(
        tmp_path, federation(rounds=1), apart(tmp_path, change), tolerance=Tolerance(min_replies=2)
    )
    assert "expected a whole number from 1 to 5" in left["rounds"][0]["left_out"]["y"]


@pytest.mark.parametrize("cases", [-1.0, 2.5])
def test_numbers_of_cases_are_whole_ones(tmp_path: Path, cases: float) -> None:
    """They weigh the metrics that sites tell of their own images."""
    change = training(
        lambda payload: replace(
            payload, metrics={"validate/cases": cases, "validate/accuracy": 1.0}
        )
    )
    left = executed(
        tmp_path, federation(rounds=1), apart(tmp_path, change), tolerance=Tolerance(min_replies=2)
    )
    assert "'validate/cases' is" in left["rounds"][0]["left_out"]["y"]


def test_the_roster_of_the_server_bounds_what_a_site_tells(tmp_path: Path) -> None:
    tolerance = {"tolerance": Tolerance(min_replies=2)}
    workers = apart(tmp_path, counting("y", 10**6), {"y": 5})
    left = executed(tmp_path, federation(rounds=1), workers, **tolerance)
    assert left["summary"]["absent"] == {
        "y": "it tells of 1,000,000 training images; the server's roster has it with at most 5"
    }


def test_a_site_that_never_answers_misses_the_deadline(tmp_path: Path) -> None:
    dumb = training(lambda payload: None)
    tolerance = Tolerance(min_replies=2, deadline=0.3)
    left = executed(tmp_path, federation(rounds=2), near(tmp_path, dumb), tolerance=tolerance)
    assert [entry["left_out"] for entry in left["rounds"]] == 2 * [{"y": "no answer within 0.3 s"}]
    assert left["summary"]["left_out"] == {"y": 2}


def test_a_site_that_has_vanished_is_not_waited_for(tmp_path: Path) -> None:
    made, links = federation(), []
    workers = near(
        tmp_path, lambda site, word, payload: None if site == "y" else payload, links=links
    )(made, 1)
    links[0].gone["y"] = "it has vanished"
    found = dict(workers.run([partial(Introduce, name) for name in "xyz"]))
    assert found[1] == FailedReply("y", "site 'y': it has vanished")
    assert not isinstance(found[0], FailedReply)


def test_a_job_that_is_ended_from_outside_ends_the_run(tmp_path: Path) -> None:
    made, links = federation(), []
    workers = near(tmp_path, lambda *_: None, links=links)(made, 1)
    links[0].ended = True
    with pytest.raises(RunError, match="the job was ended from outside; the last round is intact"):
        list(workers.run([partial(Introduce, "x")]))
    assert links[0].dropped == [1]


# A reply that is refused never happened, and neither did the State that came with it


class Spoilt(Workers):
    """The simulator's, whose site y replies without a tensor in round 2, with its State saved."""

    def run(self, tasks: Sequence[Any], sizes: Sequence[float] | None = None) -> Any:
        made = [make() for make in tasks]
        for index, answer in super().run(
            [partial(lambda task: task, task) for task in made], sizes
        ):
            if isinstance(made[index], Train) and (made[index].round, made[index].site) == (2, "y"):
                result, saved = answer
                weights = {n: t for n, t in result.reply["weights"].items() if n != "0.bias"}
                reply = Message({**result.reply.tensors, "weights": weights}, result.reply.scalars)
                answer = replace(result, reply=reply), saved
            yield index, answer


def second(
    change: Callable[[Payload], Payload | None],
) -> Callable[[str, str, Payload], Payload | None]:
    """Change what site y says of its second training."""
    said = []

    def changed(site: str, word: str, payload: Payload) -> Payload | None:
        said.extend([word] if (site, word) == ("y", "train") else [])
        return change(payload) if (site, word) == ("y", "train") and len(said) == 2 else payload

    return changed


def outcome(left: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the reason of a refusal."""
    rounds = [{k: v for k, v in entry.items() if k != "left_out"} for entry in left["rounds"]]
    return {**left, "rounds": rounds}


@pytest.mark.parametrize(
    "method", ["scaffold", "ditto", pytest.param("fedrep", marks=pytest.mark.slow)]
)
def test_a_site_goes_on_from_the_state_before_a_reply_that_was_refused(
    tmp_path: Path, method: str
) -> None:
    """The same as in the simulator, whether the server refused it, or it came too late, or the server was replaced."""
    bearing = {"tolerance": Tolerance(min_replies=2)}
    expected = executed(tmp_path / "simulator", federation(method, rounds=4), Spoilt, **bearing)
    assert [list(entry.get("left_out", {})) for entry in expected["rounds"]] == [[], ["y"], [], []]
    wrong, out = second(without("message/weights/0.bias")), tmp_path / "refused"
    assert executed(out, federation(method, rounds=4), near(out, wrong), **bearing) == expected

    out = tmp_path / "late"
    late = {"tolerance": Tolerance(min_replies=2, deadline=1.0)}
    left = executed(out, federation(method, rounds=4), near(out, second(lambda _: None)), **late)
    assert left["rounds"][1]["left_out"] == {"y": "no answer within 1 s"}
    assert outcome(left) == outcome(expected)

    out = tmp_path / "replaced"
    executed(
        out,
        federation(method, rounds=2),
        near(out, second(without("message/weights/0.bias"))),
        **bearing,
    )
    assert executed(out, federation(method, rounds=4), near(out), **bearing) == expected


def test_the_state_of_a_refused_reply_would_make_a_difference(tmp_path: Path) -> None:
    """So that the test above cannot pass by chance."""
    whole = executed(tmp_path / "whole", federation("ditto", rounds=4), Workers)
    spoilt = executed(
        tmp_path / "spoilt",
        federation("ditto", rounds=4),
        Spoilt,
        tolerance=Tolerance(min_replies=2),
    )
    assert whole["weights"] != spoilt["weights"]


def test_a_site_that_has_lost_its_state_says_so_and_is_left_out(tmp_path: Path) -> None:
    links: list[Near] = []
    executed(tmp_path, federation("ditto", rounds=1), near(tmp_path))

    def losing(made: Federation, jobs: int) -> FlareWorkers:
        workers = near(tmp_path, links=links)(made, jobs)
        (file,) = (tmp_path / "sites").rglob("y/*.safetensors")
        file.unlink()
        return workers

    left = executed(
        tmp_path, federation("ditto", rounds=2), losing, tolerance=Tolerance(min_replies=2)
    )
    assert left["rounds"][1]["left_out"] == {
        "y": "the server goes on from this site's State of round 1, which is not here (those that are: none); "
        "put back the folder of the States, or start the run anew"
    }


def test_the_server_knows_from_its_own_folder_which_states_count(tmp_path: Path) -> None:
    out, bearing = tmp_path / "run", {"tolerance": Tolerance(min_replies=2)}
    executed(out, federation("ditto", rounds=2), near(out, second(wire.failure)), **bearing)
    counted = json.loads((out / "state" / "manifest.json").read_text())["sites"]
    assert {name: file[:6] for name, file in counted.items()} == {
        "x": "000002",
        "y": "000001",
        "z": "000002",
    }
    assert not list((out / "state").glob("*-site-*"))
    executed(tmp_path / "without", federation("fedavg", rounds=1), near(tmp_path / "without"))
    assert json.loads((tmp_path / "without" / "state" / "manifest.json").read_text())["sites"] == {}


# The site's half


def site(folder: Path | None = None, shows: bool = False, **changes: Any) -> FlareSite:
    algo = MedflClientAlgo(federation(**changes), "x", folder=folder)
    return FlareSite(algo, "x", RunFolder(folder) if shows and folder else None)


def down(made: Federation, round_: int = 1, sections: Sequence[str] = ()) -> Payload:
    """What the server of a run that has just begun says."""
    with made.scope():
        server = made.method.init_server(made.host(0), made.networks.initial, {})
        message = made.method.broadcast(made.host(round_), server, "x")
        return wire.message_payload(
            message, wire.question_numbers(round_, sections), wire.state_rounds({"x": 0})
        )


def test_a_site_with_its_own_data_tells_numbers_and_nothing_of_single_cases() -> None:
    here, said = site(), down(federation(), 1, ("validate",))
    told = here.answer(wire.TRAIN, said)
    assert told.failure_reason == ""
    assert {name.partition("/")[0] for name in told.tensors} == {"message"}
    assert {"validate/cases", "validate/balanced_accuracy", "validate/loss"} <= set(told.metrics)
    assert told.metrics["validate/cases"] == 3
    judged = here.answer(wire.SCORE_SITE, down(federation(), 1, ("validate", "test")))
    assert judged.tensors == {}
    assert judged.metrics["test/cases"] == 3
    assert {k: v for k, v in judged.metrics.items() if k.startswith("validate/")} == told.metrics


@pytest.mark.parametrize("word", [wire.SCORE_ON_ALL, wire.COPY_WEIGHTS, wire.SEGMENT])
def test_what_only_a_simulation_shows_is_refused_elsewhere(word: str) -> None:
    told = site().answer(word, down(federation()))
    assert told.failure_reason.startswith(
        f"site 'x' is asked for {word}; sites of a simulation alone answer it"
    )
    assert not told.tensors


def test_a_site_of_a_job_trains_once_for_each_of_its_rounds() -> None:
    """Of repeated rounds a server could take the mean, and go on after the last that the site agreed to."""
    here = FlareSite(MedflClientAlgo(federation(), "x"), "x", rounds=1)
    assert here.answer(wire.TRAIN, down(federation())).failure_reason == ""
    for round_ in (1, 2):
        told = here.answer(wire.TRAIN, down(federation(), round_))
        assert told.failure_reason == f"site 'x' tells a job of 1 rounds once: {round_}"


def kept(round_: int | Tensor, **more: Tensor) -> Payload:
    """What the server says in round 1 to site x, but for its message."""
    return Payload({"kept/x": torch.as_tensor(round_), **more}, {"round": 1})


@pytest.mark.parametrize(
    ("word", "payload", "text"),
    [
        ("shell", Payload(), "site 'x' is asked for 'shell'; it answers introduce, train"),
        ("../../x\n", Payload(), "site 'x' is asked for '../../x\\n'"),
        (wire.TRAIN, Payload(), "the number 'round' is None"),
        (wire.TRAIN, Payload(numbers={"round": 1.5}), "the number 'round' is 1.5"),
        (
            wire.TRAIN,
            Payload(numbers={"round": 1}),
            "site 'x': the server does not say from which of the site's States",
        ),
        (wire.TRAIN, kept(0), "site 'x' could not answer; its administrator finds failure"),
        (wire.TRAIN, kept(1), "its round is 1, after a State of round 1"),
        (wire.TRAIN, kept(-1), "does not say from which of the site's States"),
        (
            wire.TRAIN,
            kept(torch.zeros(2, dtype=torch.int64)),
            "does not say from which of the site's States",
        ),
        (wire.TRAIN, kept(torch.tensor(0.0)), "does not say from which of the site's States"),
        (
            wire.SCORE_SITE,
            kept(1),
            "site 'x': the server goes on from this site's State of round 1, which is not here",
        ),
        (
            wire.SCORE_SITE,
            kept(0, **{"message/weights/0.bias": torch.ones(1)}),
            "missing 'weights/",
        ),
    ],
)
def test_a_bad_question_is_answered_in_one_line(word: str, payload: Payload, text: str) -> None:
    told = site().answer(word, payload)
    assert text in told.failure_reason
    assert "\n" not in told.failure_reason


def test_a_site_that_cannot_be_prepared_says_so_and_tries_again() -> None:
    ready: list[Federation] = []

    def made() -> Federation:
        if not ready:
            raise OSError("no such folder")
        return ready[0]

    here = FlareSite(MedflClientAlgo(made, "x"), "x")
    failed = here.answer(wire.INTRODUCE, Payload()).failure_reason
    assert failed.startswith("site 'x' could not answer; its administrator finds")
    ready.append(federation())
    assert here.answer(wire.INTRODUCE, Payload()).failure_reason == ""


def test_a_site_stops_when_the_job_does() -> None:
    """The first pass takes longer than the site needs to hear of it."""
    begun = threading.Event()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not begun.is_set():
                begun.set()
                time.sleep(1.2)
            return x

    inner = ToyBundle(norm=False).network
    bundle = ToyBundle(network=lambda: nn.Sequential(inner(), Slow()))
    made = federation(bundle=bundle, batch_size=1)
    begun.clear()
    told = FlareSite(MedflClientAlgo(made, "x"), "x").answer(wire.TRAIN, down(made), begun.is_set)
    assert (
        told.failure_reason == "site 'x': training aborted; its State is that of the round before"
    )


# What crosses


def test_a_parcel_is_the_same_after_the_wire() -> None:
    sent = Payload(
        {"message/weights/a": torch.arange(3)}, {"round": 2, "train": 1}, "", {"validate/dice": 0.5}
    )
    arrived = from_model(to_model(sent), "x")
    assert (bits(arrived.tensors), arrived.numbers, arrived.metrics) == (
        bits(sent.tensors),
        sent.numbers,
        sent.metrics,
    )
    assert arrived.sections == ("train",)
    assert (
        from_model(to_model(wire.failure("why\nnot\x1b[31m")), "x").failure_reason == "why not?[31m"
    )


@pytest.mark.parametrize(
    ("params", "meta", "text"),
    [
        ({"a": "/etc/passwd"}, {}, "'a' is a str; expected a dense tensor"),
        ({"a": torch.ones(2).to_sparse()}, {}, "expected a dense tensor"),
        ({"a": torch.ones(2) * 1j}, {}, "expected a dense tensor of real numbers"),
        ({7: torch.ones(2)}, {}, "the name '7' is no text"),
        ({"a": torch.ones(2)}, {"round": "1"}, "the number 'round' is 1"),
        ({"a": torch.ones(2)}, {"round": float("nan")}, "the number 'round' is nan"),
        ({"a": torch.ones(2)}, {"failed": 3}, "the reason of its failure is no text"),
    ],
)
def test_what_is_no_tensor_or_number_is_refused(params: Any, meta: Any, text: str) -> None:
    from nvflare.app_common.abstract.fl_model import FLModel

    with pytest.raises(RunError, match="the server: ") as caught:
        from_model(FLModel(params=params, meta=meta), "the server")
    assert text in str(caught.value)


def test_only_numbers_of_the_list_are_read() -> None:
    from nvflare.app_common.abstract.fl_model import FLModel

    model = FLModel(params={}, meta={"round": 1, "script": "rm -rf /", "client_name": "x"})
    assert from_model(model, "x").numbers == {"round": 1}


def test_sites_are_called_in_flare_as_in_the_run_where_flare_can() -> None:
    assert wire.wire_names(["site-1", "b_2"]) == {"site-1": "site-1", "b_2": "b_2"}
    for odd in ("St. Mary's", "server", "a b", "../x", "é", "-x", "x" * 64):
        called = wire.wire_names(["site-1", odd])
        assert called == {"site-1": "participant-1", odd: "participant-2"}
