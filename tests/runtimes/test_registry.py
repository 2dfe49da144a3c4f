"""Runtimes by name, and one of a user's own that is found by its dotted path alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from medfl import datasets, federate
from medfl.core.errors import InputError
from medfl.runtimes import registry

OWN = """
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.registry import Runtime
from medfl.runtimes.simulator import Simulator

class Counted(Workers):
    tasks = 0

    def run(self, tasks, sizes=None):
        Counted.tasks += len(tasks)
        return super().run(tasks, sizes)

RUNTIME = Runtime(lambda execution: Simulator(execution, Counted).execute(), no_jobs="it counts in one process")
"""


@pytest.mark.parametrize(
    ("name", "remote"), [("simulator", False), ("monai-fl", False), ("flare", True)]
)
def test_the_runtimes_of_medfl_are_found_by_their_names(name: str, remote: bool) -> None:
    assert registry.load(name).remote is remote


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "simulater",
            "--runtime simulater; runtimes here are: simulator, monai-fl, flare, or a dotted path",
        ),
        (
            "nowhere.at_all",
            "--runtime nowhere.at_all (No module named 'nowhere'); a module that Python finds; check",
        ),
        (
            "medfl.core.errors",
            "module medfl.core.errors has a Runtime called RUNTIME; add it there",
        ),
    ],
)
def test_what_is_no_runtime_is_refused_in_a_line(name: str, text: str) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        registry.load(name)


def test_a_runtime_of_ones_own_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    scans = datasets.write_phantom("mednist", tmp_path / "scans", per_class=10, size=16)
    settings = {"data": str(scans), "sites": 2, "partition": "iid", "rounds": 1, "local_epochs": 1}
    config = {"network": "two_conv", "image_size": 28}
    one = federate("mednist", config=config, requested=settings, out=tmp_path / "one", jobs=1)
    ours = federate(
        "mednist",
        config=config,
        requested=settings,
        out=tmp_path / "ours",
        runtime="ours:RUNTIME",
        jobs=1,
    )
    assert one["weights_sha256"] == ours["weights_sha256"]
    assert sys.modules["ours"].Counted.tasks > 2
    with pytest.raises(
        InputError, match="--jobs 2 with --runtime ours:RUNTIME; it counts in one process"
    ):
        federate(
            "mednist", requested=settings, out=tmp_path / "two", runtime="ours:RUNTIME", jobs=2
        )
