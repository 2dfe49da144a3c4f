"""Mistakes in a method of one's own: each is a line that names the method and the rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.methods import Method, load
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.registry import Execution
from medfl.runtimes.rules import check_state
from medfl.runtimes.simulator import Simulator
from medfl.storage.run_folder import RunFolder
from medfl.training.site import fit
from tests.support.toy import ToyBundle, run_record


class Forgetful(Method):
    def train(self, model: Any, site: Any, state: Any, down: Any) -> Any:
        fit(model, site)


class Idle(Method):
    def local_update(self, site: Any, state: Any, down: Any) -> Any:
        return state, Message({"weights": down["weights"]}, {"samples": 1})


class Curt(Method):
    def local_update(self, site: Any, state: Any, down: Any) -> Any:
        return super().local_update(site, state, down)[1]


class Hoarding(Method):
    def local_update(self, site: Any, state: Any, down: Any) -> Any:
        _, reply = super().local_update(site, state, down)
        return {"kept": {"models": [site.network()]}}, reply


class Hoarder(Method):
    def aggregate(self, host: Any, server: Any, replies: Any, num_sites: int) -> Any:
        return {**super().aggregate(host, server, replies, num_sites), "seen": set(replies)}


class Starting(Method):
    def init_server(self, host: Any, weights: Any, introductions: Any) -> Any:
        return {
            **super().init_server(host, weights, introductions),
            "by_class": {0: torch.zeros(1)},
        }


class Vector(Method):
    def train(self, model: Any, site: Any, state: Any, down: Any) -> Any:
        def each(network: Any, x: Tensor, y: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(network(x), y, reduction="none")

        return fit(model, site, objective=each)


class Silent(Method):
    def train(self, model: Any, site: Any, state: Any, down: Any) -> Any:
        return fit(model, site, objective=lambda network, x, y: None)


class Writing(Method):
    def aggregate(
        self, host: Any, server: Any, replies: Mapping[str, Message], num_sites: int
    ) -> Any:
        server["weights"]["4.bias"] += 1
        return super().aggregate(host, server, replies, num_sites)


class Adding(Method):
    def aggregate(
        self, host: Any, server: Any, replies: Mapping[str, Message], num_sites: int
    ) -> Any:
        server["rounds"] = server.get("rounds", 0) + 1
        return super().aggregate(host, server, replies, num_sites)


class WritingAndFailing(Method):
    def aggregate(
        self, host: Any, server: Any, replies: Mapping[str, Message], num_sites: int
    ) -> Any:
        server["weights"].pop("4.bias")
        raise KeyError("4.bias")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Forgetful, "train of method 'mine' returned a NoneType; train returns the FitReport of fit"),
        (Idle, "local_update of method 'mine' trained nothing; a site is trained by medfl.training.site.fit"),
        (Curt, "local_update of method 'mine' returned a Message; it returns the site's next State and the reply"),
        (Hoarding, "a site's State of method 'mine': 'kept/models/0' is a Sequential; a State is a plain dict of"),
        (Hoarder, "the server's State of method 'mine': 'seen' is a set; a State is a plain dict of"),
        (Starting, "the server's State of method 'mine': the key 0 in 'by_class' is a int; a State is a plain dict of"),
        (Vector, r"the loss of method 'mine' has the shape \(3,\); a loss is one number, the mean over the batch"),
        (Silent, "the loss of method 'mine' is a NoneType; a loss is one number"),
        (Writing, "aggregate of method 'mine' changed 'weights/4.bias' of the server's State in place; State in, "),
        (Adding, "aggregate of method 'mine' changed 'rounds' of the server's State in place"),
        (WritingAndFailing, "aggregate of method 'mine' changed 'weights/4.bias' of the server's State in place"),
    ],
)  # fmt: skip
def test_a_mistake_ends_the_run_in_one_line(
    tmp_path: Path, method: type[Method], said: str
) -> None:
    """Also where sites may be missing: it is no site's fault."""
    record = run_record(method="mine", rounds=2)
    folder = RunFolder.create(tmp_path / "run")
    folder.write_run(record, {})
    with pytest.raises(InputError, match=said) as caught:
        Simulator(
            Execution(Federation(ToyBundle(), method(), record), folder, Launch(min_replies=1))
        ).execute()
    assert "\n" not in str(caught.value)


def test_what_a_state_may_hold() -> None:
    kept = {"a": torch.zeros(1), "b": {"c": [1, 2.0, "x", None, True]}, "d": ()}
    check_state("mine", "a State", kept)
    with pytest.raises(InputError, match="a State of method 'mine': it is a list"):
        check_state("mine", "a State", [kept])
    with pytest.raises(InputError, match="'b/1' is a dtype"):
        check_state("mine", "a State", {"b": [1, torch.float32]})


@pytest.mark.parametrize(
    ("decorated", "said"),
    [
        ("", "class Mine of method 'mymethod.mine' has the option 'part' but is no dataclass; a method"),
        ("@dataclass", "the class of method 'mymethod.mine' is a dataclass that is not frozen; a method is"),
        ("@dataclass(frozen=True)", ""),
    ],
)  # fmt: skip
def test_a_class_with_options_is_a_frozen_dataclass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decorated: str, said: str
) -> None:
    name = f"mymethod{len(decorated)}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom medfl import Method, option\n"
        f"{decorated}\nclass Mine(Method):\n    part: float = option(0.5, 'a part')\nMETHOD = Mine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    if not said:
        assert load(f"{name}.mine", part=0.1).part == 0.1  # type: ignore[attr-defined]
        return
    with pytest.raises(InputError, match=said.replace("mymethod", name)):
        load(f"{name}.mine", part=0.1)


def test_a_class_without_options_needs_no_decoration() -> None:
    """It is the dataclass that it derives from."""

    @dataclass(frozen=True)
    class Base(Method):
        size: int = 2

    class Mine(Base):
        pass

    assert Mine(size=3).size == 3
