"""What only some methods have: asked for with `extra`, refused where a class defines it without deriving from it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from medfl import methods
from medfl.core.errors import InputError
from medfl.methods import Method
from medfl.methods.base import Group


def test_prototype_sharing_is_looked_through() -> None:
    """Its wrapper has what the method in it has, and has FedAvg's server half no more."""
    plain, sharing = methods.load("fedprox"), methods.load("fedprox", {"prototypes": True})
    assert methods.has_fedavg_server(plain)
    assert not methods.has_fedavg_server(sharing)
    assert methods.extra(sharing, type(plain)) == plain


@dataclass(frozen=True)
class OwnMean(Method):
    """A method of one's own whose server half is the default one, with another mean."""

    weights: str = "uniform"


class OwnGroup(Method):
    """A method of one's own that sends a group both ways beside the weights."""

    def groups(self) -> tuple[Group, ...]:
        return (Group("scale"),)


@pytest.mark.parametrize("kind", [OwnMean, OwnGroup])
def test_a_host_that_averages_weights_by_samples_does_not_do_for_more(kind: type[Method]) -> None:
    assert methods.has_fedavg_server(Method)
    assert not methods.has_fedavg_server(kind)


@pytest.mark.parametrize("name", methods.names())
def test_sites_have_the_bundles_network_unless_options_say_otherwise(name: str) -> None:
    options = {"large": "b"} if name == "fedhelp" else {}
    dealt = methods.site_networks(methods.load(name, options), ["a", "b"])
    assert dict(dealt) == ({"a": {}, "b": dealt["b"]} if name == "fedhelp" else {"a": {}, "b": {}})


@pytest.mark.parametrize(
    ("name", "hook", "todo"),
    [
        ("sends", lambda self: ("control",), r"declare the groups with groups\(\)"),
        ("has_site_models", lambda self: True, "derive from medfl.methods.SiteModels too"),
        ("site_networks", lambda self, names: {}, "derive from medfl.methods.SiteNetworks too"),
        (
            "language_model",
            property(lambda self: "minilm"),
            "derive from medfl.methods.TextEmbeddings too",
        ),
    ],
)
def test_a_hook_that_nobody_would_call_is_refused(
    name: str, hook: Any, todo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("tests_own_method")
    module.METHOD = dataclass(frozen=True)(type("Own", (Method,), {name: hook}))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests_own.method", module)
    monkeypatch.setitem(sys.modules, "tests_own", ModuleType("tests_own"))
    with pytest.raises(InputError, match=f"{name}.*{todo}"):
        methods.load("tests_own.method")


@pytest.mark.parametrize(
    ("base", "hook"),
    [
        (methods.SiteNetworks, "site_networks"),
        (methods.TextEmbeddings, "language_model"),
        (methods.MakesImages, "synthetic"),
    ],
)
def test_a_method_without_a_hook_of_its_base_class_is_refused(
    base: type, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("tests_own_method")
    module.METHOD = dataclass(frozen=True)(type("Own", (base, Method), {}))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests_own.method", module)
    monkeypatch.setitem(sys.modules, "tests_own", ModuleType("tests_own"))
    methods.method_class.cache_clear()
    with pytest.raises(InputError, match=f"without '{hook}'"):
        methods.load("tests_own.method")
