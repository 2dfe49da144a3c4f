"""What FLARE has restored of another machine's answer is checked before anything is made of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medfl.core.errors import InputError, RunError
from medfl.flare import wire
from medfl.flare.files import raise_error


@pytest.mark.parametrize(
    ("part", "value"),
    [("params", torch.zeros(2)), ("meta", torch.zeros(2)), ("metrics", [1, 2]), ("params", "x"), ("meta", 0)],
)
def test_a_part_that_has_no_names(part: str, value: Any) -> None:
    model = SimpleNamespace(**{"params": {}, "meta": {}, "metrics": {}, part: value})
    with pytest.raises(RunError, match=f"site 'a': a {type(value).__name__} in the place of names and values"):
        wire.from_model(model, "site 'a'")


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), "3", None])
def test_a_number_that_is_none(value: Any) -> None:
    for part in ("meta", "metrics"):
        model = SimpleNamespace(**{"params": None, "meta": None, "metrics": None, part: {wire.ROUND: value}})
        with pytest.raises(RunError, match="site 'a': the number 'round' is "):
            wire.from_model(model, "site 'a'")


@pytest.mark.parametrize("document", [[], None, {}, {"parts": 3}, {"parts": ["a"]}, {"parts": [1, 2, 3]}, {"text": []}])
def test_an_error_of_another_form_is_an_error_too(document: Any) -> None:
    with pytest.raises(RunError):
        raise_error(document)
    with pytest.raises(InputError, match="a; b; c"):
        raise_error({"parts": ["a", "b", "c"]})
