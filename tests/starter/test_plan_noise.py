"""Fingerprints with noise: what one case changes is bounded, nothing else is told, the plan tells the noise."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medfl.cli import verbs as cli
from medfl.core.errors import InputError, RunError
from medfl.data import fingerprint
from medfl.data.fingerprint import Fingerprint, Tally
from medfl.policy.policy import Outbound
from medfl.problem.fingerprint import Cases, gather
from medfl.problem.noised_fingerprint import numbers, with_noise
from medfl.runtimes.monai_fl.guard import Activity, Guard
from medfl.starter.plan import plan
from tests.starter.test_plan import EMPTY, cases, folder, hospital

__all__ = ["cases", "folder"]
NUMBERS = 1 + 3 * (1 + 2) + 2 + 2
"""The case; of each axis its size, and twice its spacing; of the channel two; of each of two classes one."""


def single(
    size: float = 64, spacing: float = 1, value: float = 40, classes: int = 2
) -> Fingerprint:
    case = hospital((size,) * 3, (spacing,) * 3, cases=1)
    volumes = {
        1: Tally.of_lengths(np.full(int(classes > 0), 9.0)),
        2: Tally.of_lengths(np.full(int(classes > 1), 9.0)),
    }
    return replace(case, volumes=volumes, foreground=(Tally.of_intensities(np.full(5, value)),))


@pytest.mark.parametrize("value", [-1e30, -1024.0, 40.0, 1e30])
@pytest.mark.parametrize("length", [1.0, 1e-20, 1e20])
def test_one_case_changes_all_numbers_by_at_most_their_number(value: float, length: float) -> None:
    changes = numbers(single(length, length, value))
    assert len(changes) == NUMBERS
    assert np.abs(changes).max() == 1
    assert np.isfinite(changes).all()


def test_numbers_are_those_of_the_formula_by_hand() -> None:
    """log2(512) = 9: (9 - 7) / 3; log2(2) = 1: 1/3 and 2/9 - 1; (2048 - 1024) / 2048 = 1/2 and 2/4 - 1; one class."""
    third = 1 / 3
    expected = [1, 2 / 3, 2 / 3, 2 / 3, *[third, 2 / 9 - 1] * 3, 0.5, -0.5, 1, 0]
    assert numbers(single(512, 2, 2048, classes=1)) == pytest.approx(expected, abs=1e-6)


def test_noise_is_of_the_epsilon_and_of_fresh_bytes() -> None:
    """Each of d numbers has noise of scale d / epsilon, whose standard deviation is 2^0.5 d / epsilon."""
    told = [with_noise(EMPTY, [numbers(single())] * 60, 2.0) for _ in range(50)]
    assert told[0].noise == pytest.approx(2**0.5 * NUMBERS / 2)
    counts = [one.cases for one in told]
    assert np.mean(counts) == pytest.approx(60, abs=7)
    assert np.std(counts) == pytest.approx(told[0].noise, rel=0.6)


def test_almost_no_noise_tells_the_exact_means(cases: Cases) -> None:
    exact = gather(EMPTY, cases, 0)
    told = gather(EMPTY, cases, 10, 1e9)
    assert told.cases == 12
    assert not told.orders
    assert [volume.count for volume in told.volumes.values()] == [12, 8]
    for name in ("sizes", "spacings", "extents", "foreground"):
        for tally in getattr(told, name):
            assert not tally.cells

    for axis in range(3):
        assert told.spacings[axis].mean == pytest.approx(exact.spacings[axis].mean, abs=1e-4)
        assert told.spacings[axis].sd == pytest.approx(exact.spacings[axis].sd, abs=1e-3)
        assert told.extents[axis].mean == pytest.approx(exact.extents[axis].mean, abs=1e-4)

    with pytest.raises(InputError, match="fewer than 13 training cases"):
        gather(EMPTY, cases, 13, 1e9)


def test_what_is_told_is_read_as_it_was(cases: Cases, tmp_path: Path) -> None:
    for epsilon in (0.01, 1, 1e9):
        told = gather(EMPTY, cases, 0, epsilon)
        assert fingerprint.read(told.encoded(), "x") == told

    assert b"noise" not in gather(EMPTY, cases, 0).encoded()
    with pytest.raises(InputError, match=r"x: \$.noise is -1"):
        fingerprint.read(told.encoded().replace(b'"noise": ', b'"noise": -'), "x")


def test_a_plan_says_how_much_noise_its_figures_have(cases: Cases) -> None:
    (told,) = plan({"a": gather(EMPTY, cases, 0, 1e9)}, memory=1).differences
    assert f"noise with a deviation of {2**0.5 * NUMBERS / 1e9:.3g} cases in 12;" in told

    noised = plan({"a": gather(EMPTY, cases, 0, 10), "b": gather(EMPTY, cases, 0, 10)}, memory=1)
    assert noised.pooled.noise == pytest.approx(2 * NUMBERS / 10)
    said = f"noise with a deviation of {2 * NUMBERS / 10:.3g} cases in {noised.pooled.cases}; choices near a limit"
    assert any(said in line for line in noised.differences)

    assert not any("noise" in line for line in plan({"a": gather(EMPTY, cases, 0)}).differences)
    with pytest.raises(InputError, match="with and without noise"):
        plan({"a": gather(EMPTY, cases, 0, 10), "b": gather(EMPTY, cases, 0)})


def test_over_a_wire_it_is_drawn_and_paid_once(cases: Cases, tmp_path: Path) -> None:
    def told(**rules: Any) -> tuple[Fingerprint, Any]:
        outbound = Outbound(fingerprint_epsilon=5.0, **rules)
        guard = Guard(outbound, tmp_path / "log", tmp_path / "state", str, "x")
        guard.open_account("x", "data")
        answer = guard.fingerprint(Activity("plan", 0), "ab12", partial(gather, EMPTY, cases, 10))
        return answer, guard.privacy

    first, account = told()
    assert first.noise == pytest.approx(2**0.5 * NUMBERS / 5)
    assert account["case_epsilon"] == 5
    assert told() == (first, account)
    assert '"privacy": "0 replies: ' in (tmp_path / "log").read_text()
    assert "fingerprints with noise: epsilon 5 for one case" in (tmp_path / "log").read_text()
    with pytest.raises(RunError, match="'fingerprint/form' is not among its keys"):
        told(keys=("weights",))

    pytest.importorskip("dp_accounting")
    with pytest.raises(RunError, match="is of one case, the budget's of all images"):
        told(clip=1.0, noise=1.0, epsilon=8.0)


def test_the_preview_the_file_and_the_account_say_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--images", str(folder / "images"), "--masks", str(folder / "masks")]
    command = [
        "site",
        "fingerprint",
        *where,
        "--min-count",
        "3",
        "--epsilon",
        "2",
        "--folder",
        str(tmp_path),
    ]
    assert cli.main(command) == 0
    preview = capsys.readouterr().out
    assert "Noise of epsilon 2 for one case" in preview
    assert "fingerprints with noise" not in preview  # nothing is written, nothing is charged
    for index, total in ((1, 2), (2, 4)):
        out = tmp_path / f"site-{index}.json"
        assert cli.main([*command, "--out", str(out)]) == 0
        words = f"fingerprints with noise: epsilon {total} for one case"
        assert words in " ".join(capsys.readouterr().out.split())
        assert fingerprint.read(out).noise

    assert cli.main(["site", "fingerprint", *where, "--epsilon", "0"]) == 2
    assert "--epsilon 0" in capsys.readouterr().err
