"""A problem is a value: parts are given or derived, nothing is changed, and what is lacking is said in one line."""

from __future__ import annotations

import pytest
import torch

from medfl.core.errors import InputError
from medfl.problem.problem import Problem
from tests.support.toy import ToyBundle


def test_it_is_not_changed_and_another_has_other_parts() -> None:
    problem = ToyBundle()
    start = {"0.weight": torch.zeros(1)}
    other = problem.replaced(start=start, task="other")
    assert (problem.start, problem.task) == (None, "classification")
    assert (other.start, other.task) == (start, "other")
    assert other.network is problem.network
    with pytest.raises(AttributeError, match=r"replaced\(task=...\)"):
        problem.task = "other"


def test_a_part_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(TypeError, match="'los' is no part"):
        Problem("toy", los=torch.nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("part", "ask"),
    [
        ("network", lambda problem: problem.network()),
        ("optimizers", lambda problem: problem.is_scheduled),
        ("evaluator", lambda problem: problem.evaluator),
    ],
)
def test_a_part_that_is_lacking_is_named(part: str, ask) -> None:
    with pytest.raises(
        InputError, match=f"problem 'bare' has no {part}; what is used is given: {part}="
    ):
        ask(Problem("bare"))


def test_without_a_configuration_no_id_is_overridden_and_no_class_is_described() -> None:
    problem = Problem("bare")
    assert problem.variant({}) is problem
    with pytest.raises(InputError, match="'width' of bare; it has no configuration"):
        problem.variant({"width": 5})
    with pytest.raises(InputError, match="which describes no class"):
        problem.embeddings("minilm")
