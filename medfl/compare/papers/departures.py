"""What is ours and not the paper's in a published table's runs: from the methods' own docstrings and options."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping

from medfl.methods import method_class, options_of

_OURS = re.compile(r"\(ours\b|\bours[;)]")


def departures(
    methods: Iterable[str], protocols: Mapping[str, str], notes: Iterable[str]
) -> list[str]:
    """Return lines of a list: the notes, what protocols and presets say of themselves, and each method's departures."""
    lines = [f"- {note}" for note in notes]
    lines += [f"- {whose}: {text}" for whose, text in protocols.items() if text]
    for name in dict.fromkeys(methods):
        paragraphs = (
            inspect.getdoc(importlib.import_module(method_class(name).__module__)) or ""
        ).split("\n\n")
        passages = [
            " ".join(part[part.index("Departures") :].split())
            for part in paragraphs
            if "Departures" in part
        ]
        lines += [f"- {name}: {text}" for text in passages]
        chosen = [one for one in options_of(method_class(name)) if _OURS.search(one["help"])]
        lines += [f"- {name}: {one['name']}={one['default']}: {one['help']}" for one in chosen]

    return lines or ["- nothing that is known"]
