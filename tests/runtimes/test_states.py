"""Where a site keeps its States, and which of them it goes on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medfl.core.errors import RunError
from medfl.runtimes.monai_fl.states import States, StatesInFolder
from medfl.storage.files import save_state

Make = Callable[[], States]


@pytest.fixture(params=["memory", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """The States of one site; those in a folder are opened anew each time."""
    held = States()
    return lambda: (
        held if request.param == "memory" else StatesInFolder(tmp_path / "s", torch.device("cpu"))
    )


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.tensor(value)}


def test_in_the_beginning_there_is_none(make: Make) -> None:
    states = make()
    assert (states.last, states.newest(9), states.of(0)) == (0, None, None)


def test_a_round_keeps_its_state_and_the_one_that_it_was_made_from(make: Make) -> None:
    for round_, base in ((1, 0), (2, 1), (3, 1)):  # the reply of round 2 was refused
        make().keep(round_, state(round_), base)
    assert (make().of(1), make().of(3), make().last) == (state(1), state(3), 3)
    with pytest.raises(
        RunError, match=r"this site's State of round 2, which is not here \(those that are: 1, 3\)"
    ):
        make().of(2)
    make().keep(4, state(4), 3)
    with pytest.raises(RunError, match="State of round 1"):
        make().of(1)


def test_a_round_may_be_repeated_as_often_as_the_server_is_killed(make: Make) -> None:
    make().keep(1, state(1), 0)
    for value in (2.0, 2.5, 2.75):
        assert make().of(1) == state(1)
        make().keep(2, state(value), 1)
    assert (make().of(1), make().of(2)) == (state(1), state(2.75))


def test_after_a_past_that_is_no_more_the_later_states_are_gone(make: Make) -> None:
    for round_ in (1, 2, 3):
        make().keep(round_, state(round_), round_ - 1)
    make().keep(3, state(30), 2)
    make().keep(3, state(31), 0)
    assert (make().last, make().of(3)) == (3, state(31))
    with pytest.raises(RunError, match="State of round 2"):
        make().of(2)


def test_a_round_that_leaves_no_state_is_over_and_the_one_before_stays(make: Make) -> None:
    make().keep(1, state(1), 0)
    make().keep(2, {}, 1)
    assert (make().last, make().of(2), make().of(1)) == (2, None, state(1))


def test_a_host_that_does_not_say_goes_on_from_the_newest(make: Make) -> None:
    for round_ in (1, 3, 4):
        make().keep(round_, state(round_))
    assert [make().newest(r) for r in (2, 3, 4, 9)] == [None, state(3), state(4), state(4)]
    make().keep(4, state(5))
    assert (make().newest(3), make().newest(4)) == (state(3), state(5))


def test_a_state_that_cannot_be_read_is_an_error_and_not_a_new_beginning(tmp_path: Path) -> None:
    states = StatesInFolder(tmp_path, torch.device("cpu"))
    states.keep(1, state(1), 0)
    (tmp_path / "000001.safetensors").write_bytes(b"half")
    with pytest.raises(RunError, match="cannot read the saved state"):
        states.of(1)


def test_a_folder_of_medfl_0_6_is_gone_on_with(tmp_path: Path) -> None:
    """Its files do not say their rounds, which are in their names."""
    for round_ in (1, 2):
        save_state(tmp_path / f"{round_:06d}.safetensors", state(round_))
    states = StatesInFolder(tmp_path, torch.device("cpu"))
    assert (states.last, states.of(1), states.newest(9)) == (2, state(1), state(2))
    states.keep(3, state(3), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000002.safetensors",
        "000003.safetensors",
    ]
    (tmp_path / "000002.safetensors").write_bytes(b"half")
    assert (states.last, states.of(3)) == (3, state(3)), (
        "the damage of a State that is not needed stops nothing"
    )
