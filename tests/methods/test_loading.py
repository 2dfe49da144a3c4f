"""Methods by name or dotted path, options as typed on a command line, and one line for whatever is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from medfl.core.errors import InputError
from medfl.methods import Method, load, method_class, names, options_of, site_networks
from medfl.methods.fedprox import FedProx


def message(call) -> str:
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text.split("; ")) == 3
    return text


@pytest.mark.parametrize("given", [0.5, "0.5", "5e-1", ".5", 1, "1", "0"])
def test_numbers_may_be_text(given) -> None:
    method = load("fedprox", mu=given)
    assert method == FedProx(mu=float(given))
    assert type(method.mu) is float


@pytest.mark.parametrize("given", ["true", True])
def test_truth_values_may_be_text(given) -> None:
    assert load("central", keep_optimizer=given).keep_optimizer is True
    assert load("central", {"keep_optimizer": "no"}).keep_optimizer is False


@pytest.mark.parametrize(
    "given", ["abc", "-1", -0.1, None, True, "nan", "", "[", "{a: ", "1,5", [0.1], "null"]
)
def test_a_wrong_number_is_refused_in_one_line(given) -> None:
    text = message(lambda: load("fedprox", mu=given))
    assert text.startswith("mu=")
    assert "mu is float >= 0" in text


@pytest.mark.parametrize(
    "given", ["inf", "-inf", ".inf", "nan", ".nan", "1e999", float("inf"), float("nan")]
)
@pytest.mark.parametrize(
    ("method", "option"), [("fedprox", "mu"), ("fednh", "scale"), ("fedhelp", "lambda_j")]
)
def test_a_number_is_finite(given, method: str, option: str) -> None:
    assert f"{option}=" in message(lambda: load(method, {option: given}))


def test_a_wrong_choice_lists_the_choices() -> None:
    assert "weights is one of samples or uniform" in message(
        lambda: load("fedbn", weights="median")
    )
    assert load("fedbn", weights="uniform").weights == "uniform"


@pytest.mark.parametrize("given", ["1", 1, "maybe", 0.0])
def test_a_wrong_truth_value_is_refused(given) -> None:
    assert "keep_optimizer is bool" in message(lambda: load("central", keep_optimizer=given))


@pytest.mark.parametrize("given", ["fedavgg", "FedAvg", "base", "", "."])
def test_an_unknown_method_lists_the_known(given: str) -> None:
    text = message(lambda: load(given))
    assert repr(given) in text
    assert all(name in text for name in names())


def test_an_unknown_option_lists_the_valid() -> None:
    assert "its options are: control, server_lr, weights" in message(
        lambda: load("scaffold", {"mu": 1})
    )
    assert "its options are: none" in message(lambda: load("fedavg", {"mu": 1}))


def test_a_method_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ownpkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "good.py").write_text(
        "from dataclasses import dataclass\n"
        "from medfl.methods import Method, option\n"
        "@dataclass(frozen=True)\n"
        "class Good(Method):\n"
        "    size: int = option(2, 'a size', minimum=1)\n"
        "METHOD = Good\n"
    )
    (package / "bad.py").write_text("METHOD = int\n")
    (package / "none.py").write_text("x = 1\n")
    (package / "broken.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    method = load("ownpkg.good", size="3")
    assert isinstance(method, Method)
    assert method.size == 3
    assert options_of(method_class("ownpkg.good"))[0] == {
        "name": "size", "type": "int", "default": 2, "help": "a size", "choices": None, "minimum": 1, "maximum": None,
    }  # fmt: skip
    for given in ("0", 2.5, "x"):
        assert "size is int >= 1" in message(lambda given=given: load("ownpkg.good", size=given))
    for name in ("ownpkg.bad", "ownpkg.none"):
        assert "METHOD = " in message(lambda name=name: load(name))
    for name in ("ownpkg.nosuch", "nopkg.x", ".relative"):
        assert name in message(lambda name=name: load(name))
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load("ownpkg.broken")
    sys.modules.pop("ownpkg", None)


@pytest.mark.parametrize(
    "text", ["[" * 3000, "&a [*a]", "2020-13-45", "1:" * 30_000 + "1", "!!set x", "0b"]
)
def test_a_typed_value_that_yaml_fails_with_is_bad_input(text: str) -> None:
    with pytest.raises(InputError, match="mu"):
        load("fedprox", {"mu": text})
    with pytest.raises(InputError, match="bodies"):
        site_networks(load("fedproto", {"bodies": f"x={text}]"}), ["a", "b"])
