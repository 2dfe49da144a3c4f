"""A run is gone on with from what its folder holds: States that were rewritten with their sums are told in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medfl.core.errors import InputError, MedflError, RunError
from medfl.runtimes.server.next_state import resumed_state
from medfl.runtimes.tasks import Train
from medfl.storage.files import State, file_sha256, load_state, save_state
from medfl.storage.run_folder import RunFolder
from tests.runtimes.test_next_state import federation, played
from tests.runtimes.test_simulator import simulate
from tests.support.toy import CLASSIFYING


def rewritten(
    folder: Path, which: Callable[[dict[str, Any]], str], change: Callable[[State], object]
) -> Path:
    """Change a State of the last round, and its sum in the manifest."""
    manifest = json.loads((folder / "state" / "manifest.json").read_text())
    path = folder / "state" / which(manifest)
    state = load_state(path)
    change(state)
    save_state(path, state, manifest["round"])
    manifest["sha256"][path.name] = file_sha256(path)
    (folder / "state" / "manifest.json").write_text(json.dumps(manifest))
    return path


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "state" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def first_weight(state: State) -> str:
    return min(state["weights"])


def replaced(state: State, value: Any) -> None:
    state["weights"][first_weight(state)] = value


SERVER: dict[str, Callable[[State], object]] = {
    "nothing": lambda s: s.clear(),
    "no weights": lambda s: s.pop("weights"),
    "weights that are a number": lambda s: s.update(weights=3),
    "weights that are a list": lambda s: s.update(weights=[torch.zeros(2)]),
    "a tensor that is missing": lambda s: s["weights"].pop(first_weight(s)),
    "a tensor that is no tensor": lambda s: replaced(s, 3),
    "a tensor of another shape": lambda s: replaced(s, torch.zeros(1, 2, 3)),
    "a tensor of another type": lambda s: replaced(s, torch.zeros(6, dtype=torch.int64)),
    "a tensor more": lambda s: s["weights"].update(other=torch.zeros(2)),
    "a tensor that is not finite": lambda s: s["weights"][first_weight(s)].fill_(float("nan")),
}


@pytest.mark.parametrize("name", SERVER)
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_servers_state_of_another_form(tmp_path: Path, name: str, method: str) -> None:
    simulate(tmp_path / "run", method, rounds=1)
    path = rewritten(tmp_path / "run", lambda m: str(m["server"]), SERVER[name])
    with pytest.raises(InputError, match=f"{path.name} is no State of method '{method}'") as error:
        simulate(tmp_path / "run", method, rounds=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["scaffold", "ditto", "local", "fedproto"])
def test_a_sites_state_of_another_form(tmp_path: Path, method: str) -> None:
    simulate(tmp_path / "run", method, rounds=1, cohort=1.0)

    def spoil(state: State) -> None:
        for key in list(state):
            state[key] = 3

    path = rewritten(tmp_path / "run", lambda m: str(m["sites"]["s0"]), spoil)
    with pytest.raises(RunError, match=rf"site 's0': .*{path.name} is no State of method") as error:
        simulate(tmp_path / "run", method, rounds=2, cohort=1.0)
    assert "\n" not in str(error.value)


def test_a_mistake_of_the_methods_own_is_no_fault_of_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tmp_path / "run", "scaffold", rounds=1, cohort=1.0)

    def failing(*_: Any) -> None:
        raise ZeroDivisionError("own")

    monkeypatch.setattr(Train, "function", staticmethod(failing))
    with pytest.raises(ZeroDivisionError, match="own"):
        simulate(tmp_path / "run", "scaffold", rounds=2, cohort=1.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["record"].update(absent={f"s{i}": "gone" for i in range(20)}),
        lambda m: m["record"].update(left_out=[1]),
        lambda m: m["record"].update(bytes_up="many"),
        lambda m: m["record"].update(best_test={"accuracy": []}),
        lambda m: m.update(sites={"s0": 7}),
        lambda m: m.update(round=10**9),
    ],
)
def test_a_manifest_of_another_form(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    simulate(tmp_path / "run", rounds=1)
    edited(tmp_path / "run", change)
    with pytest.raises(InputError, match=r"manifest\.json"):
        simulate(tmp_path / "run", rounds=2)


@pytest.mark.parametrize("method", CLASSIFYING)
def test_every_methods_own_state_is_gone_on_from(tmp_path: Path, method: str) -> None:
    made, last = federation(method), played(method)[-1]
    folder = RunFolder.create(tmp_path / "run")
    folder.commit(last.round, last.server, {})
    manifest = folder.manifest()
    assert manifest is not None
    assert resumed_state(made, folder, manifest).keys() == last.server.keys()


def test_a_damaged_file_is_told_as_one(tmp_path: Path) -> None:
    simulate(tmp_path / "run", rounds=1)
    manifest = json.loads((tmp_path / "run" / "state" / "manifest.json").read_text())
    path = tmp_path / "run" / "state" / manifest["server"]
    path.write_bytes(path.read_bytes()[:40])
    manifest["sha256"][path.name] = file_sha256(path)
    (tmp_path / "run" / "state" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MedflError, match="cannot read the saved state"):
        simulate(tmp_path / "run", rounds=2)
