"""The verbs `medfl methods` and `medfl bundles`: what is available."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from medfl.cli.parser import add_verb, show


def add(verbs: Any) -> None:
    """Add both verbs to the command line."""
    for name, text, function in (
        ("methods", "list the methods, or show one with its options and equations", _methods),
        ("bundles", "list the bundles, or show one with its classes, protocol and data", _bundles),
    ):
        verb = add_verb(verbs, name, text, function)
        verb.add_text("name", "NAME", f"one of the {name}; all of them if left out", nargs="?")


def _methods(args: Namespace) -> int:
    from medfl.cli import method_pages

    document = method_pages.methods(args.name)
    return show(args, document, [method_pages.methods_text(document)])


def _bundles(args: Namespace) -> int:
    from medfl.cli import bundle_pages

    document = bundle_pages.bundles(args.name)
    return show(args, document, [bundle_pages.bundles_text(document)])
