from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import pytest

from medfl.core.importing import without_gc


def test_the_collector_rests_inside_and_is_as_before_after() -> None:
    seen = []

    def failing() -> None:
        with without_gc():
            seen.append(gc.isenabled())
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_torch_and_monai_are_imported_without_a_full_collection() -> None:
    code = (
        "import gc, medfl; before = gc.get_stats()[2]['collections']; medfl.federate;"
        "print(gc.get_stats()[2]['collections'] - before, gc.isenabled())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == ["0", "True"]


@pytest.mark.parametrize("room", ["medfl", "medfl.core", "medfl.runs", "medfl.runtimes"])
def test_a_room_hands_out_its_public_names_when_they_are_first_used(room: str) -> None:
    module = importlib.import_module(room)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name).__name__ == name or name == "State"
    with pytest.raises(AttributeError, match=f"'{room}' has no attribute 'nothing'; its public names are .*{name}"):
        module.nothing  # noqa: B018
