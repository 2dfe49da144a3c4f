"""The methods: one file or package each, found by name. `load` also takes the dotted path of your own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

from medfl.core import (
    Config,
    Declared,
    Document,
    InputError,
    check_method_name,
    fields_of,
    map_values,
    method_names as names,
    read_options,
    within,
    without,
)
from medfl.methods._parts.extras import (
    Bodies,
    MakesImages,
    PublicData,
    SiteModels,
    SiteNetworks,
    TextEmbeddings,
    WholeCohort,
    WithoutLabels,
)
from medfl.methods._parts.prototype_sharing import Sharing, WithPrototypes
from medfl.methods.base import Group, Method, group_names, option, sample_shares, weighted_mean

Extra = TypeVar("Extra")
_DECORATE = "write @dataclass(frozen=True) above the class"


@lru_cache(maxsize=1)
def method_class(name: str) -> type[Method]:
    """Return a shipped method's class, or that of a dotted path `mypkg.mymethod` (a module with `METHOD`).

    Raises:
        InputError: unknown name, or a module without a `METHOD` that derives from `Method`.
    """
    check_method_name(name)
    path = f"{__name__}.{name}" if name in names() else name
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path + ".").startswith(error.name + "."):
            raise  # the module exists but lacks one of its own imports: show that
        raise InputError(
            f"method {name!r}",
            "a dotted path names an importable module",
            "install it or set PYTHONPATH",
        ) from error
    except TypeError as error:
        if "non-frozen dataclass" not in str(error):
            raise
        raise InputError(
            f"the class of method {name!r} is a dataclass that is not frozen",
            "a method is frozen",
            _DECORATE,
        ) from error

    method_type = getattr(module, "METHOD", None)
    if not (isinstance(method_type, type) and issubclass(method_type, Method)):
        raise InputError(
            f"module {path!r}",
            "a method module has METHOD = <subclass of medfl.Method>",
            "add that line",
        )

    _refuse_odd_hooks(name, method_type)
    # the decorator turns fields into options: a field left over was never declared as one
    for key, value in vars(method_type).items():
        if isinstance(value, dataclasses.Field):
            raise InputError(
                f"class {method_type.__name__} of method {name!r} has the option {key!r} but is no dataclass",
                "a method with options is a frozen dataclass",
                _DECORATE,
            )

    return method_type


def load(name: str, options: Config | None = None, /, **more: Any) -> Method:
    """Build a method with options; values may be text as typed on a command line.

    `prototypes=true` and the other options of `prototype_options` wrap a method that takes prototypes.

    Raises:
        InputError: unknown method or option, or a value that the option does not allow; the valid ones are listed.
    """
    cls = method_class(name)
    own_fields = fields_of(cls)
    shared_fields = {}
    if cls.takes_prototypes:
        shared_fields = fields_of(Sharing)

    if not isinstance(options, Mapping | None):
        raise InputError(
            f"options {options!r:.60} of method {name!r}", "a dict of its options", "as {'mu': 0.1}"
        )

    # A method's option hides a prototype-sharing option with the same name.
    fields = {**shared_fields, **own_fields}
    declared = map_values(Declared.of, fields)
    values = read_options(name, declared, {**(options or {}), **more})
    method = cls(**within(values, own_fields))
    sharing = Sharing(**without(values, own_fields))

    if sharing.prototypes:
        return WithPrototypes(method, sharing)

    # an option without effect would mislead whoever set it
    for key, field in shared_fields.items():
        if getattr(sharing, key) != field.default:
            raise InputError(
                f"{key}={getattr(sharing, key)} for method {name!r} without prototypes",
                f"{key} belongs to prototypes=true",
                "add that, or leave it out",
            )

    return method


def extra(method: Method, kind: type[Extra]) -> Extra | None:
    """Return a method as one with an optional extension, such as `SiteNetworks`; None if it does not have it."""
    inner = method.inner if isinstance(method, WithPrototypes) else method
    return inner if isinstance(inner, kind) else None


def settled(method: Method, sizes: Mapping[str, int]) -> Method:
    """Return a method with the options that depend on the sites' sizes, by name; see `SiteNetworks`."""
    by_site = extra(method, SiteNetworks)
    if by_site is None:
        return method

    return cast(Method, by_site.settled(sizes))


def site_networks(method: Method, names: Sequence[str]) -> Mapping[str, Config]:
    """Return the configuration ids with which each participant's network is built, usually none.

    Raises:
        InputError: the method's options do not fit these participants.
    """
    by_site = extra(method, SiteNetworks)
    if by_site is not None:
        return by_site.site_networks(names)

    return {name: {} for name in names}


def keeps_network(method: Method, config: Config) -> bool:
    """Tell whether a site with a network of this configuration keeps it whole; see `SiteNetworks`."""
    by_site = extra(method, SiteNetworks)
    return by_site is not None and by_site.keeps_network(config)


def has_site_models(method: Method) -> bool:
    """Tell whether `predictor` returns a model of the site's own, on which it is scored at the end of a run."""
    beside = extra(method, SiteModels)
    return method.judged == "personal" or (beside is not None and beside.has_site_models())


def has_fedavg_server(method: Method | type[Method]) -> bool:
    """Tell whether a host that averages weights by sample counts does everything that this server half does."""
    cls = method if isinstance(method, type) else type(method)
    return (
        not cls.pools_data
        and not hasattr(cls, "weights")  # an option for another mean
        and cls.groups is Method.groups
        and cls.broadcast is Method.broadcast
        and cls.aggregate is Method.aggregate
    )


def values_of(method: Method) -> Document:
    """Return a method's options with their values, flat, as accepted by `load`."""
    if isinstance(method, WithPrototypes):
        return {**dataclasses.asdict(method.inner), **dataclasses.asdict(method.sharing)}
    return dataclasses.asdict(method)


def options_of(cls: type[Method] | type[Sharing]) -> list[Document]:
    """Return the declaration of each option of a method: its own first, then shared ones."""
    order: list[str] = []
    for base in cls.__mro__:
        order += inspect.get_annotations(base)

    fields = sorted(dataclasses.fields(cls), key=lambda field: order.index(field.name))
    return [Declared.of(field).document for field in fields]


def has_option(name: str, option_name: str) -> bool:
    """Tell whether a method has an option of its own by this name."""
    return option_name in fields_of(method_class(name))


def prototype_options(cls: type[Method]) -> list[Document]:
    """Return the declarations of the prototype-sharing options, like `options_of`; [] if the method has none."""
    return options_of(Sharing) if cls.takes_prototypes else []


def _refuse_odd_hooks(name: str, cls: type[Method]) -> None:
    """Raise an InputError if a method defines a hook that no runtime calls, or lacks one that a runtime calls."""
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise InputError(
            f"method {name!r} without {missing[0]!r}",
            "its base class requires this hook",
            "write it",
        )

    # a hook that nobody asks for would leave the run at FedAvg without a word
    kinds = (SiteNetworks, SiteModels, PublicData, TextEmbeddings, MakesImages)
    owners = {}
    for kind in kinds:
        owners.update({hook: kind for hook in vars(kind) if not hook.startswith("_")})

    remedies = {}
    for hook, kind in owners.items():
        if hasattr(cls, hook) and not issubclass(cls, kind):
            remedies[hook] = f"derive from medfl.methods.{kind.__name__} too"

    if hasattr(cls, "sends"):  # the hook that `groups` replaced
        remedies["sends"] = "declare the groups with groups()"

    for hook, remedy in remedies.items():
        raise InputError(
            f"method {name!r} with {hook!r}, which no runtime asks a Method for",
            "hooks are those of Method and of the classes that docs/extend.md lists",
            remedy,
        )
