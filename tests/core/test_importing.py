from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from types import FunctionType

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


@pytest.mark.slow
def test_a_run_begins_without_a_full_collection_and_without_a_language_model() -> None:
    """In one new process: torch and MONAI are imported, then shipped embeddings read, which imports neither of two."""
    code = (
        "import gc, sys, medfl\n"
        "sys.modules['transformers'] = sys.modules['open_clip'] = sys.modules['huggingface_hub'] = None\n"
        "before = gc.get_stats()[2]['collections']\n"
        "medfl.federate\n"
        "print(gc.get_stats()[2]['collections'] - before, gc.isenabled())\n"
        "from medfl.bundle.bundle import Bundle\n"
        "print(*Bundle('ham10000').embeddings('minilm').shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["0", "True", "7", "24", "384"], done.stderr


@pytest.mark.parametrize(
    "room",
    [
        "medfl", "medfl.core", "medfl.data", "medfl.evaluation", "medfl.problem", "medfl.runs", "medfl.runtimes",
        "medfl.storage",
    ],
)  # fmt: skip
def test_a_room_hands_out_its_public_names_when_they_are_first_used(room: str) -> None:
    module = importlib.import_module(room)
    assert module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, FunctionType):
            assert value.__name__ == name
    with pytest.raises(
        AttributeError, match=f"'{room}' has no attribute 'nothing'; its public names are .*{name}"
    ):
        module.nothing  # noqa: B018
