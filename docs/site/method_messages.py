"""What the messages of each method contain, found by a round of two toy sites: part of the catalogue of methods.

It needs PyTorch and seconds, so `generate.py` stores it for the command line in `medfl/cli/methods.json`.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from medfl import methods as registry
from medfl.cli.method_pages import facts
from medfl.core.documents import Config, Document
from medfl.core.mappings import present
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.methods.base import Method
from medfl.training.local_settings import LocalSettings
from medfl.training.network_pool import Networks
from medfl.training.site import Host, Site


def catalogue() -> list[Document]:
    """Return the content of `methods.json`: facts about every shipped method, without what its file also says."""
    entries = []
    for name in registry.names():
        cls = registry.method_class(name)
        entry = {**facts(name), "travels": travels(cls), "module": cls.__module__}
        del entry["docs"]
        for key in ("options", "prototype_options"):
            entry[key] = list(map(present, entry[key]))

        entries.append(entry)

    return entries


def travels(cls: type[Method]) -> Document:
    """Determine what is sent, by running one round of two toy sites.

    The options are the defaults, except those that the class names in `shown`.

    Returns:
        `start`, `up` and `down`: tensor groups of the introductions, replies and broadcasts; `withheld`: layer types
        whose weights never leave; `kept`: what a site keeps between rounds; `pooled`: whether images are pooled.
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
        results = {}
        for site in sites:
            results[site.name] = method.local_update(site, method.init_site(site), down[site.name])

        method.aggregate(
            host, server, {name: reply for name, (_, reply) in results.items()}, len(sites)
        )

    state, reply = results["a"]
    sent = [tensor for group in reply.tensors.values() for tensor in group.values()]
    # a method may send a tensor that it keeps under another heading
    for name, tensor in state.get("weights", {}).items():
        if any(torch.equal(tensor, other) for other in sent):
            personal -= {name}

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
    """Name the layer types of the toy network whose tensors all stay."""
    withheld = []
    for prefix, module in _toy_network().named_modules():
        tensor_names = {f"{prefix}.{name}" for name in module.state_dict()}
        if prefix and tensor_names and tensor_names <= personal:
            withheld.append(re.sub(r"\dd$", "", type(module).__name__))
    return withheld
