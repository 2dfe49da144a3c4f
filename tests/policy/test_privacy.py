"""The account: epsilon against an independent formula, words that are true, and a file that lasts."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from medfl.core.errors import RunError
from medfl.policy.gate import Gate
from medfl.policy.policy import Outbound
from medfl.policy.privacy import Account, account_file, epsilon_of

pytest.importorskip("dp_accounting")


def exact(multiplier: float, replies: int, delta: float) -> float:
    """Epsilon of the Gaussian mechanism, exactly (Balle and Wang, 2018, Theorem 8).

    So many replies with noise multiplier z are one with z / sqrt(n): with m = sqrt(n) / z,
    delta = Phi(m/2 - epsilon/m) - exp(epsilon) Phi(-m/2 - epsilon/m).
    """
    m = math.sqrt(replies) / multiplier

    def excess(epsilon: float) -> float:
        tail = math.exp(epsilon + norm.logcdf(-m / 2 - epsilon / m))
        return float(norm.cdf(m / 2 - epsilon / m) - tail - delta)

    return float(brentq(excess, 0.0, 500.0, xtol=1e-9))


@pytest.mark.parametrize("delta", [1e-5, 1e-7])
@pytest.mark.parametrize(
    ("multiplier", "replies"), [(0.5, 1), (1.0, 1), (2.0, 1), (5.0, 1), (10.0, 1), (4.0, 20)]
)
def test_epsilon_is_at_least_the_exact_one_and_close_to_it(
    multiplier: float, replies: int, delta: float
) -> None:
    found, least = epsilon_of({multiplier: replies}, delta), exact(multiplier, replies, delta)
    assert least <= found <= 1.25 * least + 0.05


def test_replies_with_different_noise_are_composed() -> None:
    """Gaussian mechanisms of multipliers 3 and 4 together are one of 1 / sqrt(1/9 + 1/16) = 2.4."""
    assert epsilon_of({3.0: 1, 4.0: 1}, 1e-5) == pytest.approx(epsilon_of({2.4: 1}, 1e-5))


def test_nothing_is_told_before_the_first_reply_and_more_with_each() -> None:
    account, found = Account(), [0.0]
    assert account.epsilon() == 0
    for _ in range(3):
        expected = account.epsilon(4.0)
        account.spend(4.0)
        assert account.epsilon() == expected > found[-1]
        found.append(account.epsilon())
    assert account.words().startswith(
        f"3 replies: epsilon {found[-1]:.3g} at delta 1e-05 for all training images"
    )


def test_the_words_are_no_formal_privacy_once_something_was_not_covered() -> None:
    plain = Account()
    plain.spend(None)
    assert (
        plain.words() == "1 reply: no formal privacy, for replies left without clipping and noise"
    )
    plain.spend(4.0)
    assert "for 1 of the replies left without" in plain.words()
    other = Account()
    other.spend(4.0)
    other.add({"prototypes/*": 1, "scalars/steps": 1})
    assert other.words() == (
        "1 reply: no formal privacy, for these left without noise: prototypes/*, scalars/steps"
    )
    assert math.isinf(other.epsilon())
    assert other.as_dict()["epsilon"] is None


def test_an_account_lasts_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.privacy.json"
    account = Account.open(path, 1e-5)
    account.spend(4.0)
    account.spend(8.0)
    again = Account.open(path, 1e-5)
    assert (again.noised, again.plain, again.epsilon()) == (account.noised, 0, account.epsilon())
    again.spend(None)
    again.add({"scalars/steps": 2})
    last = Account.open(path, 1e-5)
    assert (last.replies, last.plain, dict(last.uncovered)) == (3, 1, {"scalars/steps": 2})
    assert json.loads(path.read_text())["words"] == last.words()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"noised": 3}', '{"noised": [], "uncovered": {}, "plain": "x"}']
)
def test_a_damaged_account_is_told_and_never_begun_anew(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.privacy.json"
    path.write_text(text)
    with pytest.raises(RunError, match=r"the privacy account .* cannot be read"):
        Account.open(path, 1e-5)


@pytest.mark.parametrize(
    "edited",
    [
        {"noised": [{"multiplier": math.nan, "replies": 3}]},
        {"noised": [{"multiplier": math.inf, "replies": 3}]},
        {"noised": [{"multiplier": -1.0, "replies": 3}]},
        {"noised": [{"multiplier": "1", "replies": 3}]},
        {"noised": [{"multiplier": 1.0, "replies": -3}]},
        {"noised": [{"multiplier": 1.0, "replies": 0.9}]},
        {"noised": [{"multiplier": 1.0, "replies": 3}, {"multiplier": 1.0, "replies": 0}]},
        {"plain": -1},
        {"plain": 0.9},
        {"uncovered": {"scalars/steps": -1}},
        {"answers": -1000},
        {"answers": 2**200},
        {"case_epsilon": -5.0},
        {"case_epsilon": math.nan},
    ],
)
def test_numbers_that_no_account_has_give_back_no_budget(
    edited: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "x.privacy.json"
    Account.open(path, 1e-5).spend(1.0)
    path.write_text(json.dumps({**json.loads(path.read_text()), **edited}))
    with pytest.raises(RunError, match=r"the privacy account .* cannot be read"):
        Account.open(path, 1e-5)


PLACES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_what_stands_in_the_place_of_an_account_is_no_new_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.privacy.json"
    PLACES[kind](path)
    with pytest.raises(RunError, match=r"the privacy account .* cannot be read"):
        Account.open(path, 1e-5)
    with pytest.raises(RunError, match=r"the privacy account .* cannot be read"):
        Account.open(tmp_path / "data.privacy.json", 1e-5).merge_site_account(path)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".x.privacy.json.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"the privacy account .* cannot be locked"):
        Account.open(tmp_path / "x.privacy.json", 1e-5).spend(None)
    assert not (tmp_path / "elsewhere").exists()


def test_two_jobs_on_the_same_images_spend_from_one_account_and_never_beyond_the_budget(
    tmp_path: Path,
) -> None:
    """Each has read the account before the other spends; only what is left at the moment of spending counts."""
    rules = Outbound(clip=1.0, noise=8.0, epsilon=epsilon_of({4.0: 3}, 1e-5) + 1e-6)
    path = account_file(tmp_path, str(tmp_path / "images"))
    gates = [Gate(rules, Account.open(path, 1e-5), name) for name in ("a", "b")]
    left = 0
    for each in gates * 2:
        if left < 3:
            each.charge_noised_reply()
            left += 1
        else:
            with pytest.raises(RunError, match="another reply would make it"):
                each.charge_noised_reply()
    assert (left, Account.open(path, 1e-5).replies) == (3, 3)


def _spends(path: Path) -> None:
    account = Account.open(path, 1e-5)
    for _ in range(10):
        account.spend(None)


def test_processes_that_spend_at_the_same_time_are_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.privacy.json"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_spends, args=(path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert Account.open(path, 1e-5).plain == 30


def test_an_account_is_of_a_data_folder_by_whatever_name_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "images")
    one, other = (account_file(tmp_path, str(tmp_path / name)) for name in ("images", "link"))
    assert one == other != account_file(tmp_path, str(tmp_path / "others"))


def test_the_account_of_an_earlier_version_is_taken_in_once(tmp_path: Path) -> None:
    old, path = tmp_path / "clinic.privacy.json", account_file(tmp_path, "images")
    account = Account.open(old, 1e-5)
    account.spend(4.0)
    account.add({"scalars/steps": 1})
    for _ in range(2):
        account = Account.open(path, 1e-5)
        account.merge_site_account(old)
        assert (account.replies, dict(account.uncovered)) == (1, {"scalars/steps": 1})
    assert Account.open(path, 1e-5).replies == 1
    assert not old.exists()
