from __future__ import annotations

import gc
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
