"""What is known of each method, read from the classes themselves and from a round of two toy sites.

Finding it out needs PyTorch and seconds, so `docs/site/generate.py` keeps it for the command line in `CATALOGUE`.
"""

from __future__ import annotations

import re
import sys

import torch
from torch import nn

from medfl import methods as registry
from medfl.core.documents import Config, Document
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.methods.base import Method
from medfl.training.local_settings import LocalSettings
from medfl.training.network_pool import Networks
from medfl.training.site import Host, Site


def catalogue() -> list[Document]:
    """Return what `CATALOGUE` has of every shipped method: what `method` says, but for what its file says as well."""
    entries = []
    for name in registry.names():
        entry = method(name)
        del entry["docs"]
        entry["module"] = registry.method_class(name).__module__
        for key in ("options", "prototype_options"):
            entry[key] = [
                {field: value for field, value in option.items() if value is not None}
                for option in entry[key]
            ]

        entries.append(entry)

    return entries


def method(name: str) -> Document:
    """Return what is known of a shipped method, or of the dotted path of one's own; InputError if there is none."""
    cls = registry.method_class(name)
    return {
        "name": name,
        "summary": (cls.__doc__ or "").partition("\n")[0],
        "paper": cls.paper,
        "tasks": list(cls.tasks),
        "judged": cls.judged,
        "travels": travels(cls),
        "plain_host": registry.has_fedavg_server(cls),
        "options": registry.options_of(cls),
        "prototype_options": registry.prototype_options(cls),
        "docs": sys.modules[cls.__module__].__doc__ or "",
    }


def travels(cls: type[Method]) -> Document:
    """Tell what crosses the wire, by running one round of two toy sites.

    The options are the defaults, but for those that the class names in `shown`.

    Returns:
        `start`, `up` and `down`: tensor groups of the introductions, replies and broadcasts; `withheld`: layer types
        whose weights never leave; `kept`: what a site keeps from round to round; `pooled`: whether images are pooled.
    """
    method = cls(**cls.shown)
    task = Task("classification", ("p", "q"), lambda plm: torch.eye(8).reshape(2, 4, 8))
    networks = Networks(lambda: method.adapt(_toy_network(), task), 0, torch.device("cpu"))
    images = torch.eye(8).repeat(1, 32).reshape(8, 1, 16, 16)
    items = Stacked([{"id": str(i), "label": i % 2} for i in range(8)], images, torch.arange(8) % 2)
    public = Public("toy", Shard.of(items, range(8)), task)
    settings = LocalSettings(1, 4, lambda network: torch.optim.SGD(network.parameters(), 0.1))
    sites = []

    for index, name in enumerate(("a", "b")):
        shard = Shard.of(items, range(4 * index, 4 * index + 4))
        loss = nn.functional.cross_entropy
        sites.append(
            Site(name, index, shard, shard, shard, loss, settings, networks, 1, public=public)
        )

    with networks.scope():
        host = Host(0, networks, 1, public=public)
        personal = method.personal_names(host.model(networks.initial))
        introductions = {site.name: method.introduce(site) for site in sites}
        server = method.init_server(host, networks.initial, introductions)
        down = {site.name: method.broadcast(host, server, site.name) for site in sites}
        results = {
            site.name: method.local_update(site, method.init_site(site), down[site.name])
            for site in sites
        }
        method.aggregate(
            host, server, {name: reply for name, (_, reply) in results.items()}, len(sites)
        )

    state, reply = results["a"]
    return {
        "start": sorted(introductions["a"].tensors),
        "up": _in_order(reply.tensors),
        "down": _in_order(down["a"].tensors),
        "withheld": _withheld(personal) if reply.tensors else [],
        "kept": sorted(state),
        "pooled": cls.pools_data,
    }


def _toy_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 5, 4), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2)
    )


def _in_order(groups: Config) -> list[str]:
    return sorted(groups, key=lambda group: (group != "weights", group))


def _withheld(personal: frozenset[str]) -> list[str]:
    """Name the layer types of the toy network all of whose tensors stay."""
    withheld = []
    for prefix, module in _toy_network().named_modules():
        tensor_names = {f"{prefix}.{name}" for name in module.state_dict()}
        if prefix and tensor_names and tensor_names <= personal:
            withheld.append(re.sub(r"\dd$", "", type(module).__name__))
    return withheld
