"""What there is to choose from: the methods and the bundles, as JSON-able documents, terminal text and Markdown tables.

Everything is read from the classes and configurations themselves.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from medfl import datasets
from medfl import methods as registry
from medfl.bundle.bundle import Bundle, shipped
from medfl.bundle.configuration import read
from medfl.core import terminal
from medfl.core.errors import InputError, did_you_mean
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.methods.base import Method
from medfl.training.site import Host, LocalSettings, Networks, Site

_JUDGED = {"global": "the server's model is the product", "personal": "each site's own model is the product"}
_SHOWN = 4  # options of a method in a table; its own page has them all
_TASKS = Method.tasks

Document = dict[str, Any]


# Methods


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
    found = []
    for prefix, module in _toy_network().named_modules():
        own = {f"{prefix}.{name}" for name in module.state_dict()}
        if prefix and own and own <= personal:
            found.append(re.sub(r"\dd$", "", type(module).__name__))
    return found


def _travels_text(entry: Document) -> str:
    facts = entry["travels"]
    if facts["pooled"]:
        return "all images, to one place"
    up, down = (" + ".join(facts[way]) or "nothing" for way in ("up", "down"))
    text = up if up == down else f"{up} up, {down} down"
    text += f" but {', '.join(facts['withheld'])}" if facts["withheld"] else ""
    return text + (f"; once {' + '.join(facts['start'])}" if facts["start"] else "")


def _tasks_text(entry: Document) -> str:
    return "any" if set(entry["tasks"]) >= set(_TASKS) else ", ".join(entry["tasks"])


def _defaults(entry: Document) -> list[str]:
    """Return the first options of a method with their defaults; of prototype sharing only that it can be had."""
    given = [f"{option['name']}={_plain(option['default'])}" for option in entry["options"]]
    return [*given[:_SHOWN], *(["prototypes=false"] if entry["prototype_options"] else [])]


def _more(entry: Document) -> str:
    hidden = len(entry["options"]) - _SHOWN
    return f" and {hidden} more" if hidden > 0 else ""


def _authors(paper: str) -> str:
    """Return the authors and the year that end a paper's title in brackets; the whole text where there are none."""
    found = re.search(r"\(([^()]*\d{4})\)$", paper)
    return found[1] if found else paper


def methods_text(document: Document, width: int = terminal.WIDTH) -> str:
    """Return the table of methods, or the page of one, at most `width` columns wide."""
    if "methods" not in document:
        return _method_page(document, width)
    head = ["method", "tasks", "judged", "what travels", "plain host", "options and defaults", "paper"]
    rows = [
        [e["name"], _tasks_text(e), e["judged"], _travels_text(e), _yes(e["plain_host"]),
         " ".join(_defaults(e)) + _more(e) or "-", _authors(e["paper"])]
        for e in document["methods"]
    ]  # fmt: skip
    return "\n".join(
        [
            *terminal.table(head, rows, width, ("tasks", "plain host", "paper")),
            "",
            *textwrap.wrap("judged: whether the server's model or each site's own model is the product", width),
            *textwrap.wrap("plain host: whether a server that only averages (MONAI FL, NVIDIA FLARE) will do", width),
            *textwrap.wrap("one method with its options and equations: medfl methods NAME", width),
        ]
    )


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
    rows = [[o["name"], _type(o), _plain(o["default"]), o["help"]] for o in options]
    return [title, *terminal.table(["name", "value", "default", "what it does"], rows, width)] if rows else []


def _type(option: Document) -> str:
    if option["choices"]:
        return " | ".join(_plain(choice) for choice in option["choices"])
    return str(option["type"]) + (f" >= {option['minimum']:g}" if option["minimum"] is not None else "")


def methods_markdown() -> str:
    """Return the table of methods for docs."""
    head = ["Method", "Tasks", "Judged", "What travels", "Plain averaging host", "Options (defaults)", "Paper"]
    rows = [
        [f"`{e['name']}`", _tasks_text(e), e["judged"], _travels_text(e), _yes(e["plain_host"]),
         " ".join(f"`{text}`" for text in _defaults(e)) + _more(e) or "–", e["paper"]]
        for e in methods()["methods"]
    ]  # fmt: skip
    return terminal.markdown_table(head, rows)


# Bundles


def bundles(name: str | None = None) -> Document:
    """Return {"bundles": [...]}, or what is known of one shipped bundle.

    Raises:
        InputError: unknown bundle.
    """
    if name is None:
        return {"bundles": [_bundle(known) for known in shipped()]}
    if name not in shipped():
        raise InputError(
            f"bundle {name!r}",
            f"shipped bundles are {', '.join(shipped())}",
            did_you_mean(name, shipped(), "pick one (medfl run takes any folder)"),
        )
    data = datasets.get(name)
    return {
        **_bundle(name),
        "class_names": list(data.classes),
        "concepts": list(data.concepts),
        "centre_names": list(data.centres),
        "splits": list(data.splits),
        "layouts": list(data.layouts),
        "can_fetch": bool(data.downloads),
        "source": data.source,
        "citation": data.citation,
        "notes": list(data.notes),
    }


def _bundle(name: str) -> Document:
    bundle, data = Bundle(name), datasets.get(name)
    training = read(bundle.root / "configs" / "train.yaml")
    settings = ("sites", "partition", "cohort", "rounds", "local_epochs", "batch_size", "lr", "lr_decay", "split")
    return {
        "name": name,
        "title": data.title,
        "task": data.task,
        "classes": len(data.classes),
        "centres": len(data.centres),
        "channels": data.channels,
        "image_size": training["image_size"],
        "patch_size": training.get("patch_size"),
        "network": training["network"],
        "protocol": bundle.protocol.get("protocol", ""),
        "defaults": {key: bundle.protocol[key] for key in settings if bundle.protocol.get(key) is not None},
        "presets": {name: preset.get("about", "") for name, preset in (bundle.protocol.get("presets") or {}).items()},
        "data": _status(name),
        "licence": data.licence,
    }


def _status(name: str) -> dict[str, str | None]:
    """Tell whether $MEDFL_DATA holds the images."""
    try:
        folder = datasets.locate(name)
    except InputError:
        return {"status": "phantom only", "folder": None}
    return {"status": "phantom" if datasets.is_phantom(folder) else "real", "folder": str(folder)}


def _short(text: str) -> str:
    """Cut a licence or protocol after its first part; "FedBM (Medical Image Analysis 2025)" becomes "FedBM 2025"."""
    return re.sub(r" \([^()]*(\d{4})\)", r" \1", re.split(r"[,;:] | as ", text)[0])


def _classes(entry: Document) -> str:
    """Return the number of classes; of masks with the background."""
    return f"{entry['classes']} (masks)" if entry["task"] == "segmentation" else str(entry["classes"])


def _is_volume(entry: Document) -> bool:
    return isinstance(entry["patch_size"] or entry["image_size"], list)


def _sides(entry: Document) -> str:
    """Return the size of what enters the network: the images', or of volumes with patches the patches'."""
    size = entry["patch_size"] or entry["image_size"]
    return "x".join(map(str, size)) if isinstance(size, list) else str(size)


def bundles_text(document: Document, width: int = terminal.WIDTH) -> str:
    """Return the table of bundles, or the page of one, at most `width` columns wide."""
    if "bundles" not in document:
        return _bundle_page(document, width)
    head = ["bundle", "images", "classes", "centres", "pixels", "network", "protocol", "data", "licence"]
    rows = [
        [e["name"], e["title"].rpartition(": ")[2], _classes(e), str(e["centres"]), _sides(e),
         e["network"], _short(e["protocol"]), e["data"]["status"].replace("phantom only", "none"), _short(e["licence"])]
        for e in document["bundles"]
    ]  # fmt: skip
    legend = (
        "data: what $MEDFL_DATA holds: real images, a phantom cohort (drawn images) or none; then runs draw a phantom",
        "one bundle with its classes, defaults and data layouts: medfl bundles NAME",
    )
    return "\n".join(
        [
            *terminal.table(head, rows, width, ("licence", "pixels", "network")),
            "",
            *(line for text in legend for line in textwrap.wrap(text, width)),
        ]
    )


def _bundle_page(entry: Document, width: int) -> str:
    data, name = entry["data"], entry["name"]
    status = {
        "real": f"real images in {data['folder']}",
        "phantom": f"a PHANTOM cohort in {data['folder']}",
        "phantom only": "no images below $MEDFL_DATA: runs use a PHANTOM cohort unless --data names a folder",
    }[data["status"]]
    concepts = entry["concepts"] or entry["class_names"]  # a mask's values have no other words
    named = zip(entry["class_names"], concepts, strict=True)
    classes = [key if concepts == entry["class_names"] else f"{key} ({words})" for key, words in named]
    facts = {
        "task": f"{entry['task']}, {entry['channels']} channel{'s' * (entry['channels'] > 1)}, "
        f"{_sides(entry)} {'voxels' if _is_volume(entry) else 'pixels a side'}",
        "classes": ", ".join(classes),
        "centres": ", ".join(entry["centre_names"]),
        "network": entry["network"],
        "protocol": entry["protocol"],
        "defaults": ", ".join(f"{key} {_plain(value)}" for key, value in entry["defaults"].items()),
        "presets": "; ".join(f"{name}: {about}" for name, about in entry["presets"].items()) or "none",
        "splits": ", ".join(entry["splits"]),
        "data": status,
        "layouts": " | ".join(entry["layouts"]),
        "fetch": f"medfl data fetch {name} --out DIR" if entry["can_fetch"] else "by hand, from the source",
        "licence": entry["licence"],
        "source": entry["source"],
        "cite": entry["citation"],
    }
    notes = [line for note in entry["notes"] for line in terminal.hanging_indent("note: ", note, width)]
    return "\n".join(
        [*textwrap.wrap(f"{name}: {entry['title']}", width), "", *terminal.definitions(facts, width), *notes]
    )


def check_text(document: Mapping[str, Any], width: int = terminal.WIDTH) -> str:
    """Return the text of a data set's check (`CheckReport.as_dict`): where, how many, what is wrong."""
    source = {"phantom": "PHANTOM: drawn images", "real": "real images"}[document["source"]]
    facts = {
        "data set": f"{document['name']}, {source}",
        "folder": document["folder"],
        "layout": document["layout"],
        "split": document["split"],
        "images": str(document["images"]),
    }
    several = any(len(centres) > 1 for centres in document["counts"].values())
    rows = [
        [section, *([centre] if several else []), str(sum(row)), *(str(count) if count else "-" for count in row)]
        for section, centres in document["counts"].items()
        for centre, row in centres.items()
    ]
    head = ["section", *(["centre"] if several else []), "all", *document["classes"]]
    lines = [*terminal.definitions(facts, width), "", *terminal.table(head, rows, width), ""]
    for label, kind in (("note: ", "notes"), ("warning: ", "warnings"), ("problem: ", "problems")):
        lines += [line for text in document[kind] for line in terminal.hanging_indent(label, text, width)]
    return "\n".join([*lines, "the data can be used" if document["ok"] else "the data cannot be used as they are"])


def bundles_markdown() -> str:
    """Return the table of bundles for docs; without the data status, which is this machine's."""
    head = ["Bundle", "Images", "Classes", "Centres", "Pixels", "Network", "Protocol", "Licence of the images"]
    rows = [
        [f"`{e['name']}`", e["title"], _classes(e), str(e["centres"]), _sides(e), f"`{e['network']}`", e["protocol"],
         e["licence"]]
        for e in bundles()["bundles"]
    ]  # fmt: skip
    return terminal.markdown_table(head, rows)


# Small helpers


def _plain(value: Any) -> str:
    """Write a value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
