"""The available methods as JSON-able documents, terminal text and a Markdown table, read from the catalogue."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import medfl
from medfl.cli.arguments import as_flag_text
from medfl.core import (
    TASKS,
    Config,
    Declared,
    Document,
    check_method_name,
    method_names,
    read_options,
    tables,
    terminal,
    without,
)

CATALOGUE = Path(__file__).with_name("methods.json")
"""Facts about the shipped methods and their messages; `make docs` refreshes it, a test compares it with the classes."""
_JUDGED = {
    "global": "the server's model is the product",
    "personal": "each site's own model is the product",
}
_SHOWN = 4  # options of a method in a table; its own page has them all


def methods(name: str | None = None) -> Document:
    """Return {"methods": [...]}, or the facts about one, shipped or a dotted path; InputError if there is none."""
    catalogue = _catalogue()
    if name is None:
        return {"methods": [_entry(catalogue[shipped]) for shipped in method_names()]}

    check_method_name(name)
    if name in catalogue:
        return {**_entry(catalogue[name]), "docs": _docstring(catalogue[name]["module"])}

    return facts(name)


def facts(name: str) -> Document:
    """Return the facts that a method's class states, shipped or a dotted path; InputError if there is none."""
    from medfl import methods as registry  # imports PyTorch

    cls = registry.method_class(name)
    return {
        "name": name,
        "summary": (cls.__doc__ or "").partition("\n")[0],
        "paper": cls.paper,
        "tasks": list(cls.tasks),
        "judged": cls.judged,
        "plain_host": registry.has_fedavg_server(cls),
        "options": registry.options_of(cls),
        "prototype_options": registry.prototype_options(cls),
        "docs": sys.modules[cls.__module__].__doc__ or "",
    }


def check_options(name: str, options: Config) -> None:
    """Raise an InputError for an option that a shipped method does not have, or for a value that it does not allow.

    Rules beyond an option's limits, such as two options that exclude each other, are checked later by the method's
    class.
    """
    check_method_name(name)
    if options and name in method_names():
        entry = _catalogue()[name]
        declared = [
            Declared(**option) for option in [*entry["options"], *entry["prototype_options"]]
        ]
        read_options(name, {option.name: option for option in declared}, options)


def _catalogue() -> dict[str, Document]:
    return {entry["name"]: entry for entry in json.loads(CATALOGUE.read_text("utf-8"))}


def _entry(stored: Document) -> Document:
    """Return an entry of the catalogue as `facts` gives it, but for the docstring."""
    entry = without(stored, ["module"])
    for key in ("options", "prototype_options"):
        entry[key] = [Declared(**option).document for option in stored[key]]
    return entry


def _docstring(module: str) -> str:
    """Return the docstring of a module of medfl, read without importing it, since that would import PyTorch."""
    path = Path(medfl.__file__).parents[1].joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text("utf-8")), clean=False) or ""


def travels_text(entry: Document) -> str:
    """Describe in words what a method's messages contain."""
    facts = entry["travels"]
    if facts["pooled"]:
        return "all images, to one place"

    up, down = (" + ".join(facts[way]) or "nothing" for way in ("up", "down"))
    text = up if up == down else f"{up} up, {down} down"
    if facts["withheld"]:
        text += f" but {', '.join(facts['withheld'])}"
    return text + (f"; once {' + '.join(facts['start'])}" if facts["start"] else "")


def tasks_text(entry: Document) -> str:
    """Return the tasks that a method supports."""
    if set(entry["tasks"]) >= set(TASKS):
        return "any"

    return ", ".join(entry["tasks"])


def _defaults(entry: Document) -> str:
    """Return the first options of a method with their defaults; for prototype sharing only that it is available."""
    defaults = []
    for option in entry["options"][:_SHOWN]:
        defaults.append(f"{option['name']}={as_flag_text(option['default'])}")

    if entry["prototype_options"]:
        defaults.append("prototypes=false")

    hidden = len(entry["options"]) - _SHOWN
    if hidden > 0:
        defaults.append(f"and {hidden} more")

    return " ".join(defaults) or "-"


def methods_text(document: Document) -> str:
    """Return the table of methods, or the page of one, as wide as the screen at most."""
    if "methods" not in document:
        return _method_page(document)

    head = [
        "method",
        "tasks",
        "judged",
        "what travels",
        "plain host",
        "options and defaults",
        "paper",
    ]
    rows = [
        [
            e["name"],
            tasks_text(e),
            e["judged"],
            travels_text(e),
            "yes" if e["plain_host"] else "no",
            _defaults(e),
            # authors and year in brackets at its end, the whole title without brackets
            re.sub(r".*\(([^()]*\d{4})\)$", r"\1", e["paper"]),
        ]
        for e in document["methods"]
    ]
    legend = (
        "judged: whether the server's model or each site's own model is the product",
        "plain host: whether a server that only averages (MONAI FL, NVIDIA FLARE) will do",
        "one method with its options and equations: medfl methods NAME",
    )
    lines = [*tables.text_table(head, rows, ("tasks", "plain host", "paper")), ""]

    return "\n".join([*lines, *(line for text in legend for line in tables.wrap(text))])


def _method_page(entry: Document) -> str:
    host = "yes" if entry["plain_host"] else "no, the server has work of its own"
    messages = {}
    if travels := entry.get("travels"):  # not of a method of one's own
        if travels["pooled"]:
            host = "no, there is nothing to average"

        stays = ", ".join(travels["kept"])
        messages = {
            "travels": travels_text(entry),
            "stays": f"{stays} (kept at a site from round to round)" if stays else "nothing",
        }

    page_facts = {
        "paper": entry["paper"] or "-",
        "tasks": ", ".join(entry["tasks"]),
        "judged": f"{entry['judged']}: {_JUDGED[entry['judged']]}",
        **messages,
        "plain host": f"{host} (a server that only averages, as of MONAI FL or NVIDIA FLARE)",
    }
    lines = [
        *tables.wrap(f"{entry['name']}: {entry['summary']}"),
        "",
        *terminal.definitions(page_facts),
        "",
    ]
    lines += _options("options, each given as --set NAME=VALUE", entry["options"]) or ["no options"]
    shared = _options("options of prototype sharing, as in FedMR", entry["prototype_options"])
    if shared:
        lines += ["", *shared]

    return "\n".join([*lines, "", *terminal.wrap_docstring(entry["docs"])])


def _options(title: str, options: list[Document]) -> list[str]:
    rows = [[o["name"], _type(o), as_flag_text(o["default"]), o["help"]] for o in options]

    if rows:
        return [
            title,
            *tables.text_table(["name", "value", "default", "what it does"], rows),
        ]

    return []


def _type(option: Document) -> str:
    if option["choices"]:
        return " | ".join(map(as_flag_text, option["choices"]))
    return str(option["type"]) + Declared(**option).bounds(">=", "<=")
