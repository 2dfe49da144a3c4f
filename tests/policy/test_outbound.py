"""What a policy says of what may leave: read strictly, said in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from medfl.core.errors import InputError
from medfl.policy.policy import Outbound, Policy


def read(tmp_path: Path, text: str) -> Outbound:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return Policy.read(path).outbound


def test_without_rules_everything_may_leave_and_nothing_is_written(tmp_path: Path) -> None:
    rules = read(tmp_path, "")
    assert rules == Outbound() == read(tmp_path, "outbound: {}\n")
    assert rules.refused(["weights/a", "anything/b", "scalars/c"]) == []
    assert "outbound" not in Policy().text()


def test_what_is_written_is_read_back_and_numbers_may_be_written_as_one_likes(
    tmp_path: Path,
) -> None:
    given = Outbound(("weights/*", "scalars/samples"), 10**6, 0.5, 2.0, 8.0, 1e-6, 5)
    assert read(tmp_path, Policy(outbound=given).text()) == given
    assert read(tmp_path, "outbound: {clip: 1, noise: 2, delta: 1e-6}") == Outbound(
        clip=1.0, noise=2.0, delta=1e-6
    )


def test_keys_are_patterns_of_names_or_whole_groups() -> None:
    rules = Outbound(keys=("weights", "scalars/samples", "metrics/*/accuracy"))
    names = [
        "weights/a.b",
        "scalars/samples",
        "scalars/steps",
        "weightsx/a",
        "metrics/test/accuracy",
        "metrics/test/f1",
    ]
    assert rules.refused(names) == ["scalars/steps", "weightsx/a", "metrics/test/f1"]
    assert Outbound(keys=()).refused(["weights/a"]) == ["weights/a"]
    assert Outbound(keys=("weights/[ab]*",)).refused(["weights/a1", "weights/c1"]) == ["weights/c1"]


def test_the_noise_multiplier_is_noise_over_twice_the_clip() -> None:
    assert Outbound(clip=0.5, noise=3.0).multiplier == 3.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("outbound: [clip]", "outbound is a list"),
        ("outbound: {clipp: 1}", "did you mean clip"),
        ("outbound: {clip: 0}", "a number above 0"),
        ("outbound: {clip: .inf}", "a number above 0"),
        ("outbound: {noise: .nan, clip: 1}", "a number above 0"),
        ("outbound: {noise: true, clip: 1}", "a number above 0"),
        ("outbound: {clip: [1]}", "a number above 0"),
        ("outbound: {delta: 1}", "above 0 and below 1"),
        ("outbound: {max_bytes: 1.5}", "a whole number of at least 1"),
        ("outbound: {min_count: -1}", "a whole number of at least 0"),
        ("outbound: {keys: weights}", "a list of patterns"),
        ("outbound: {keys: [1]}", "a list of patterns"),
        ("outbound: {epsilon: 1}", "epsilon without clip"),
        ("outbound: {epsilon: 1, clip: 1}", "epsilon without noise"),
    ],
)
def test_a_mistake_in_the_rules_is_refused_in_one_line(
    text: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_are_said_in_words_and_no_formal_privacy_where_there_is_none() -> None:
    assert "no formal privacy: nothing is clipped" in Outbound().lines()
    assert "no formal privacy: no noise is added" in Outbound(clip=1.0).lines()
    said = Outbound(("weights",), 1000, 1.0, 4.0, 8.0, min_count=10).lines()
    assert not any("no formal privacy" in line for line in said)
    assert [line.split()[0] for line in said] == ["may", "a", "the", "Gaussian", "the", "of"]
