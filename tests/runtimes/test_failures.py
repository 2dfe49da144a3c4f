"""What a server learns of a site's failures: a word and an id; the text stays in the site's logs, under that id."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("nvflare")

from medfl.core.errors import InputError, RunError, error_id
from medfl.flare import wire
from medfl.flare.parts import RemoteExecutor
from medfl.flare.site import FlareSite
from medfl.flare.wire import Payload, message_payload, state_rounds
from medfl.policy.audit import verify
from medfl.runtimes.federation import Federation
from medfl.runtimes.monai_fl.client import MedflClientAlgo
from tests.flare.test_parts import Workspace, asked, job, local
from tests.runtimes.test_monai_fl import federation

__all__ = ["job"]
WORDS = r"site 'x' could not answer; its administrator finds failure ([0-9a-f]{8}) in its log"
NAME = "/data/clinic/Doe_John_1951.nii.gz"


def question(made: Federation, round_: int = 1) -> Payload:
    host = made.host(round_)
    down = made.method.broadcast(
        host, made.method.init_server(host, made.networks.initial, {}), "x"
    )
    return message_payload(down, wire.question_numbers(round_), state_rounds({"x": 0}))


def site(made: Any, log: Path | None = None, **settings: Any) -> FlareSite:
    return FlareSite(MedflClientAlgo(made, "x", audit=log, **settings), "x")


@pytest.mark.parametrize("kind", [OSError, RunError])
def test_the_text_of_a_failure_stays_at_the_site_under_its_id(
    kind: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> None:
        raise kind(f"cannot read {NAME}")

    made = federation()
    monkeypatch.setattr("medfl.runtimes.monai_fl.client.site_step", broken)
    with caplog.at_level(logging.ERROR):
        told = site(made, tmp_path / "log").answer(wire.TRAIN, question(made))
    found = re.fullmatch(WORDS, told.failure_reason)
    assert found is not None, told.failure_reason
    entry = verify(tmp_path / "log").entries[-1]
    assert (entry["direction"], entry["kind"], entry["failure"]) == ("refused", "train", found[1])
    assert NAME in entry["reason"]
    assert NAME in caplog.text
    assert found[1] in caplog.text


def test_what_fails_before_the_site_is_ready_is_in_its_log_once(tmp_path: Path) -> None:
    def broken() -> Federation:
        raise ValueError(f"no image {NAME}")

    told = site(broken, tmp_path / "log").answer(wire.INTRODUCE, Payload({}, {"round": 0}))
    found = re.fullmatch(WORDS, told.failure_reason)
    assert found is not None
    (entry,) = verify(tmp_path / "log").entries
    assert (entry["site"], entry["failure"], entry["reason"]) == (
        "x",
        found[1],
        f"ValueError: no image {NAME}",
    )


def test_texts_about_the_server_s_own_message_are_told(tmp_path: Path) -> None:
    made = federation()
    good = question(made)
    name = next(name for name in good.tensors if name.startswith("message/weights/"))
    for change, text in (
        ({name: torch.full_like(good.tensors[name], torch.nan)}, "has NaN or infinite values"),
        ({name: torch.ones(1)}, "expected"),
        ({"message/other": torch.ones(1)}, "is not named group/name"),
        ({"kept/x": torch.tensor(-1)}, "does not say from which of the site's States"),
    ):
        told = site(made).answer(wire.TRAIN, Payload({**good.tensors, **change}, good.numbers))
        assert text in told.failure_reason
    assert "is asked for 'hack'" in site(made).answer("hack", good).failure_reason
    assert (
        "sites of a simulation alone answer it"
        in site(made).answer(wire.COPY_WEIGHTS, good).failure_reason
    )


def test_an_executor_tells_no_path_of_the_site_s_own_files(job: Path, tmp_path: Path) -> None:
    told = asked(
        RemoteExecutor(),
        wire.TRAIN,
        Payload({}, {"round": 1}),
        Workspace(job, tmp_path / "nowhere"),
    )
    assert re.fullmatch(WORDS.replace("'x'", "'north'"), told.failure_reason)
    place = local(tmp_path / "local", policy="missing.yaml", audit="audit.jsonl")
    told = asked(RemoteExecutor(), wire.TRAIN, Payload({}, {"round": 1}), Workspace(job, place))
    assert str(tmp_path) not in told.failure_reason
    (entry,) = verify(place / "audit.jsonl").entries
    assert entry["site"] == "north"
    assert "missing.yaml: it cannot be read" in entry["reason"]
    assert told.failure_reason.endswith(f"failure {entry['failure']} in its log")


def test_what_a_site_says_reaches_the_log_of_flare(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("medfl.flare.parts.accepted_run", lambda *_: None)
    part = RemoteExecutor()
    place = local(tmp_path / "local", data=str(tmp_path))
    made = part._opened(SimpleNamespace(rounds=1), "north", Workspace(job, place))
    with caplog.at_level(logging.INFO):
        made.algo._guard._say("site 'north', round 1: epsilon 3")
    assert "round 1: epsilon 3" in caplog.text


def test_an_error_has_one_id() -> None:
    one, other = InputError("a", "b", "c"), OSError("d")
    assert error_id(one) == error_id(one) != error_id(other)
    assert not one.safe_to_send
