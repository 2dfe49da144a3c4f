"""What FLARE has restored of another machine's answer is checked before anything is made of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medfl.core.errors import InputError, RunError
from medfl.flare import wire
from medfl.flare.files import raise_error
from medfl.flare.server import reported_metrics


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("params", torch.zeros(2)),
        ("meta", torch.zeros(2)),
        ("metrics", [1, 2]),
        ("params", "x"),
        ("meta", 0),
    ],
)
def test_a_part_that_has_no_names(part: str, value: Any) -> None:
    model = SimpleNamespace(**{"params": {}, "meta": {}, "metrics": {}, part: value})
    with pytest.raises(
        RunError, match=f"site 'a': a {type(value).__name__} in the place of names and values"
    ):
        wire.from_model(model, "site 'a'")


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), "3", None])
def test_a_number_that_is_none(value: Any) -> None:
    for part in ("meta", "metrics"):
        model = SimpleNamespace(
            **{"params": None, "meta": None, "metrics": None, part: {wire.ROUND: value}}
        )
        with pytest.raises(RunError, match="site 'a': the number 'round' is "):
            wire.from_model(model, "site 'a'")


@pytest.mark.parametrize("value", [2.0**53 + 2, 1e299, 10**290])
def test_a_whole_number_that_no_file_takes(value: float) -> None:
    with pytest.raises(RunError, match=f"expected a whole one from 0 to {2**53}"):
        wire.Payload(numbers={wire.STEPS: value}).whole_number(wire.STEPS)
    with pytest.raises(RunError, match="expected a whole number of at least 0"):
        reported_metrics(wire.Payload(metrics={"test/cases": value}), ["test"])


@pytest.mark.parametrize(
    ("metrics", "what"),
    [
        ({"test/\ud800": 1.0}, "a metric is called"),
        ({"test/\x1b": 1.0}, "a metric is called"),
        ({"test/" + "x" * 200: 1.0}, "a metric is called"),
        ({3: 1.0}, "a metric is called"),
        ({f"test/{number}": 1.0 for number in range(10_001)}, "it tells 10001 metrics"),
    ],
)
def test_metrics_that_a_run_folder_would_not_be_read_with(
    metrics: dict[Any, float], what: str
) -> None:
    model = SimpleNamespace(params=None, meta=None, metrics=metrics)
    with pytest.raises(RunError, match=f"site 'a': {what}"):
        wire.from_model(model, "site 'a'")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_of_tensors_or_without_numbers_is_not_dense() -> None:
    for value in (torch.nested.nested_tensor([torch.ones(2)]), torch.tensor(1, device="meta")):
        model = SimpleNamespace(params={"kept/a": value}, meta={}, metrics={})
        with pytest.raises(RunError, match="expected a dense tensor of real numbers"):
            wire.from_model(model, "site 'a'")


@pytest.mark.parametrize(
    "document", [[], None, {}, {"parts": 3}, {"parts": ["a"]}, {"parts": [1, 2, 3]}, {"text": []}]
)
def test_an_error_of_another_form_is_an_error_too(document: Any) -> None:
    with pytest.raises(RunError):
        raise_error(document)
    with pytest.raises(InputError, match="a; b; c"):
        raise_error({"parts": ["a", "b", "c"]})
