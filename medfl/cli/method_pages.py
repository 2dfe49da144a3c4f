"""The methods there are, as JSON-able documents, terminal text and a Markdown table, read from the catalogue."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medfl.cli.arguments import as_flag_text
from medfl.core import tables, terminal
from medfl.core.names import check_method_name, method_names
from medfl.core.option_values import OptionForm, read_options
from medfl.core.task import TASKS

CATALOGUE = Path(__file__).with_name("methods.json")
"""What `method_facts` found out; `make docs` refreshes it, and a test holds it to the classes."""
_JUDGED = {"global": "the server's model is the product", "personal": "each site's own model is the product"}
_SHOWN = 4  # options of a method in a table; its own page has them all

Document = dict[str, Any]


def methods(name: str | None = None) -> Document:
    """Return {"methods": [...]}, or what is known of one, shipped or a dotted path; InputError if there is none."""
    catalogue = _catalogue()
    if name is None:
        return {"methods": [{k: v for k, v in _entry(catalogue, one).items() if k != "docs"} for one in method_names()]}
    check_method_name(name)
    return _entry(catalogue, name)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise an InputError if a shipped method has not one of these options, or not with this value.

    What an option's limits do not say, as two options that exclude each other, the method's class checks later.
    """
    check_method_name(name)
    if options and name in method_names():
        entry = _entry(_catalogue(), name)
        forms = [
            OptionForm(**{key: one[key] for key in ("name", "type", "choices", "minimum", "maximum")})
            for one in [*entry["options"], *entry["prototype_options"]]
        ]
        read_options(name, {form.name: form for form in forms}, options)


def _catalogue() -> dict[str, Document]:
    return {entry["name"]: entry for entry in json.loads(CATALOGUE.read_text("utf-8"))}


def _entry(catalogue: Mapping[str, Document], name: str) -> Document:
    """Return what the catalogue says; of a method that it does not have, what its class says."""
    if name in catalogue:
        return catalogue[name]
    from medfl.cli import method_facts

    return method_facts.method(name)


def travels_text(entry: Document) -> str:
    """Return what a method's messages carry, in words."""
    facts = entry["travels"]
    if facts["pooled"]:
        return "all images, to one place"
    up, down = (" + ".join(facts[way]) or "nothing" for way in ("up", "down"))
    text = up if up == down else f"{up} up, {down} down"
    text += f" but {', '.join(facts['withheld'])}" if facts["withheld"] else ""
    return text + (f"; once {' + '.join(facts['start'])}" if facts["start"] else "")


def tasks_text(entry: Document) -> str:
    """Return the tasks that a method is for."""
    return "any" if set(entry["tasks"]) >= set(TASKS) else ", ".join(entry["tasks"])


def _defaults(entry: Document) -> list[str]:
    """Return the first options of a method with their defaults; of prototype sharing only that it can be had."""
    defaults = [f"{option['name']}={as_flag_text(option['default'])}" for option in entry["options"]]
    return [*defaults[:_SHOWN], *(["prototypes=false"] if entry["prototype_options"] else [])]


def _more(entry: Document) -> str:
    hidden = len(entry["options"]) - _SHOWN
    return f" and {hidden} more" if hidden > 0 else ""


def _authors(paper: str) -> str:
    """Return the authors and the year that end a paper's title in brackets; the whole text where there are none."""
    authors = re.search(r"\(([^()]*\d{4})\)$", paper)
    return authors[1] if authors else paper


def methods_text(document: Document, width: int = tables.WIDTH) -> str:
    """Return the table of methods, or the page of one, at most `width` columns wide."""
    if "methods" not in document:
        return _method_page(document, width)
    head = ["method", "tasks", "judged", "what travels", "plain host", "options and defaults", "paper"]
    rows = [
        [e["name"], tasks_text(e), e["judged"], travels_text(e), "yes" if e["plain_host"] else "no",
         " ".join(_defaults(e)) + _more(e) or "-", _authors(e["paper"])]
        for e in document["methods"]
    ]  # fmt: skip
    legend = (
        "judged: whether the server's model or each site's own model is the product",
        "plain host: whether a server that only averages (MONAI FL, NVIDIA FLARE) will do",
        "one method with its options and equations: medfl methods NAME",
    )
    lines = [*tables.text_table(head, rows, width, ("tasks", "plain host", "paper")), ""]
    return "\n".join([*lines, *(line for text in legend for line in textwrap.wrap(text, width))])


def _method_page(entry: Document, width: int) -> str:
    host = "yes" if entry["plain_host"] else "no, the server has work of its own"
    if entry["travels"]["pooled"]:
        host = "no, there is nothing to average"
    stays = ", ".join(entry["travels"]["kept"])
    facts = {
        "paper": entry["paper"] or "-",
        "tasks": ", ".join(entry["tasks"]),
        "judged": f"{entry['judged']}: {_JUDGED[entry['judged']]}",
        "travels": travels_text(entry),
        "stays": f"{stays} (kept at a site from round to round)" if stays else "nothing",
        "plain host": f"{host} (a server that only averages, as of MONAI FL or NVIDIA FLARE)",
    }
    lines = [*textwrap.wrap(f"{entry['name']}: {entry['summary']}", width), "", *terminal.definitions(facts, width), ""]
    lines += _options("options, each given as --set NAME=VALUE", entry["options"], width) or ["no options"]
    shared = _options("options of prototype sharing, as in FedMR", entry["prototype_options"], width)
    lines += ["", *shared] if shared else []
    return "\n".join([*lines, "", *terminal.wrap_docstring(entry["docs"], width)])


def _options(title: str, options: list[Document], width: int) -> list[str]:
    rows = [[o["name"], _type(o), as_flag_text(o["default"]), o["help"]] for o in options]
    return [title, *tables.text_table(["name", "value", "default", "what it does"], rows, width)] if rows else []


def _type(option: Document) -> str:
    if option["choices"]:
        return " | ".join(as_flag_text(choice) for choice in option["choices"])
    least = f" >= {option['minimum']:g}" if option["minimum"] is not None else ""
    return str(option["type"]) + least + (f" and <= {option['maximum']:g}" if option["maximum"] is not None else "")
