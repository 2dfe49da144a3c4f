"""The methods there are: what is known of each as JSON-able documents, terminal text and a Markdown table.

Everything is read from the classes themselves.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from medfl import methods as registry
from medfl.cli.arguments import typed
from medfl.core import terminal
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.methods.base import Method
from medfl.training.network_pool import Networks
from medfl.training.site import Host, LocalSettings, Site

_JUDGED = {"global": "the server's model is the product", "personal": "each site's own model is the product"}
_SHOWN = 4  # options of a method in a table; its own page has them all

Document = dict[str, Any]


def methods(name: str | None = None) -> Document:
    """Return {"methods": [...]}, or what is known of one method (a shipped one, or the dotted path of your own).

    Raises:
        InputError: unknown method.
    """
    if name is None:
        return {"methods": [_method(known) for known in registry.names()]}
    return {**_method(name), "docs": sys.modules[registry.method_class(name).__module__].__doc__ or ""}


def _method(name: str) -> Document:
    cls = registry.method_class(name)
    limits = {field.name: field.metadata.get("minimum") for field in dataclasses.fields(cls)}
    return {
        "name": name,
        "summary": (cls.__doc__ or "").partition("\n")[0],
        "paper": cls.paper,
        "tasks": list(cls.tasks),
        "judged": cls.judged,
        "travels": travels(cls),
        "plain_host": registry.has_fedavg_server(cls),
        "options": [{**option, "minimum": limits[option["name"]]} for option in registry.options_of(cls)],
        "prototype_options": registry.prototype_options(cls),
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
        sites.append(Site(name, index, shard, shard, shard, loss, settings, networks, 1, public=public))
    with networks.scope():
        host = Host(0, networks, 1, public=public)
        personal = method.personal_names(host.model(networks.initial))
        introductions = {site.name: method.introduce(site) for site in sites}
        server = method.init_server(host, networks.initial, introductions)
        down = {site.name: method.broadcast(host, server, site.name) for site in sites}
        results = {site.name: method.local_update(site, method.init_site(site), down[site.name]) for site in sites}
        method.aggregate(host, server, {name: reply for name, (_, reply) in results.items()}, len(sites))
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
    return nn.Sequential(nn.Conv2d(1, 2, 5, 4), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2))


def _in_order(groups: Mapping[str, Any]) -> list[str]:
    return sorted(groups, key=lambda group: (group != "weights", group))


def _withheld(personal: frozenset[str]) -> list[str]:
    """Name the layer types of the toy network all of whose tensors stay."""
    withheld = []
    for prefix, module in _toy_network().named_modules():
        own = {f"{prefix}.{name}" for name in module.state_dict()}
        if prefix and own and own <= personal:
            withheld.append(re.sub(r"\dd$", "", type(module).__name__))
    return withheld


def _travels_text(entry: Document) -> str:
    facts = entry["travels"]
    if facts["pooled"]:
        return "all images, to one place"
    up, down = (" + ".join(facts[way]) or "nothing" for way in ("up", "down"))
    text = up if up == down else f"{up} up, {down} down"
    text += f" but {', '.join(facts['withheld'])}" if facts["withheld"] else ""
    return text + (f"; once {' + '.join(facts['start'])}" if facts["start"] else "")


def _tasks_text(entry: Document) -> str:
    return "any" if set(entry["tasks"]) >= set(Method.tasks) else ", ".join(entry["tasks"])


def _defaults(entry: Document) -> list[str]:
    """Return the first options of a method with their defaults; of prototype sharing only that it can be had."""
    defaults = [f"{option['name']}={typed(option['default'])}" for option in entry["options"]]
    return [*defaults[:_SHOWN], *(["prototypes=false"] if entry["prototype_options"] else [])]


def _more(entry: Document) -> str:
    hidden = len(entry["options"]) - _SHOWN
    return f" and {hidden} more" if hidden > 0 else ""


def _authors(paper: str) -> str:
    """Return the authors and the year that end a paper's title in brackets; the whole text where there are none."""
    authors = re.search(r"\(([^()]*\d{4})\)$", paper)
    return authors[1] if authors else paper


def methods_text(document: Document, width: int = terminal.WIDTH) -> str:
    """Return the table of methods, or the page of one, at most `width` columns wide."""
    if "methods" not in document:
        return _method_page(document, width)
    head = ["method", "tasks", "judged", "what travels", "plain host", "options and defaults", "paper"]
    rows = [
        [e["name"], _tasks_text(e), e["judged"], _travels_text(e), "yes" if e["plain_host"] else "no",
         " ".join(_defaults(e)) + _more(e) or "-", _authors(e["paper"])]
        for e in document["methods"]
    ]  # fmt: skip
    legend = (
        "judged: whether the server's model or each site's own model is the product",
        "plain host: whether a server that only averages (MONAI FL, NVIDIA FLARE) will do",
        "one method with its options and equations: medfl methods NAME",
    )
    lines = [*terminal.table(head, rows, width, ("tasks", "plain host", "paper")), ""]
    return "\n".join([*lines, *(line for text in legend for line in textwrap.wrap(text, width))])


def _method_page(entry: Document, width: int) -> str:
    host = "yes" if entry["plain_host"] else "no, the server has work of its own"
    if entry["travels"]["pooled"]:
        host = "no, there is nothing to average"
    kept = ", ".join(entry["travels"]["kept"])
    facts = {
        "paper": entry["paper"] or "-",
        "tasks": ", ".join(entry["tasks"]),
        "judged": f"{entry['judged']}: {_JUDGED[entry['judged']]}",
        "travels": _travels_text(entry),
        "stays": f"{kept} (kept at a site from round to round)" if kept else "nothing",
        "plain host": f"{host} (a server that only averages, as of MONAI FL or NVIDIA FLARE)",
    }
    lines = [*textwrap.wrap(f"{entry['name']}: {entry['summary']}", width), "", *terminal.definitions(facts, width), ""]
    lines += _options("options, each given as --set NAME=VALUE", entry["options"], width) or ["no options"]
    shared = _options("options of prototype sharing, as in FedMR", entry["prototype_options"], width)
    lines += ["", *shared] if shared else []
    return "\n".join([*lines, "", *terminal.wrap_docstring(entry["docs"], width)])


def _options(title: str, options: list[Document], width: int) -> list[str]:
    rows = [[o["name"], _type(o), typed(o["default"]), o["help"]] for o in options]
    return [title, *terminal.table(["name", "value", "default", "what it does"], rows, width)] if rows else []


def _type(option: Document) -> str:
    if option["choices"]:
        return " | ".join(typed(choice) for choice in option["choices"])
    return str(option["type"]) + (f" >= {option['minimum']:g}" if option["minimum"] is not None else "")


def methods_markdown() -> str:
    """Return the table of methods for docs."""
    head = ["Method", "Tasks", "Judged", "What travels", "Plain averaging host", "Options (defaults)", "Paper"]
    rows = [
        [f"`{e['name']}`", _tasks_text(e), e["judged"], _travels_text(e), "yes" if e["plain_host"] else "no",
         " ".join(f"`{text}`" for text in _defaults(e)) + _more(e) or "–", e["paper"]]
        for e in methods()["methods"]
    ]  # fmt: skip
    return terminal.markdown_table(head, rows)
