"""The parser of the command line, with medfl's errors in one line, and how a verb prints what it did."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn

from medfl.cli.arguments import Flags
from medfl.core import terminal
from medfl.core.documents import Config, Document
from medfl.core.errors import InputError, did_you_mean
from medfl.core.tables import screen_width


class Parser(Flags, argparse.ArgumentParser):
    """argparse with medfl's one-line errors."""

    def __init__(self, **settings: Any) -> None:
        """Take full option names only: a short form could mean something else in the next version."""
        super().__init__(**settings, allow_abbrev=False, formatter_class=_formatter)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Refuse what this verb does not know here, where its options can be named."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown {' '.join(unknown)}", unknown[0].partition("=")[0])

        return parsed, unknown

    def error(self, message: str, unknown: str = "") -> NoReturn:
        """Turn a usage error into an InputError."""
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise InputError(
            " ".join(message.split()),
            usage if len(usage) < 200 else f"{self.prog} has {len(flags)} options",
            did_you_mean(unknown, flags, f"see {self.prog} --help"),
        )


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return what writes help as wide as the terminal, at most 100 columns, with the examples kept as written."""
    return argparse.RawDescriptionHelpFormatter(
        prog, max_help_position=28, width=screen_width() - 2
    )


def add_verb(
    verbs: Any, name: str, text: str, function: Callable[[Any], int | None], examples: str = ""
) -> Any:
    """Add a verb, or an action of one, with the flags that all have; return its parser."""
    verb = verbs.add_parser(name, help=text, description=_sentence(text), epilog=examples or None)
    verb.set_defaults(verb=function)
    verb.add_switch("--json", "print one JSON document on stdout, logs on stderr")
    verb.add_switch("--debug", "show the traceback of an error")
    return verb


def add_actions(verbs: Any, name: str, text: str) -> Any:
    """Add a verb that has actions; return the subparsers that take them."""
    verb = verbs.add_parser(name, help=text, description=_sentence(text))
    return verb.add_subparsers(
        title="actions", metavar="ACTION", required=True, parser_class=Parser
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('?') else '.'}"


def show(args: argparse.Namespace, document: Config, lines: Iterable[str]) -> int:
    """Print a verb's result, the document with --json, else its lines; return exit code 0."""
    if args.json:
        text = json.dumps(document)
    else:
        text = terminal.visible("\n".join(lines))

    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return 0


def telling(args: argparse.Namespace) -> Document:
    """Return where a run tells of itself, as keyword arguments: `say` takes lines, `progress` allows bars."""
    return {"say": str if args.quiet else log, "progress": sys.stderr.isatty() and not args.quiet}


def log(text: str) -> None:
    """Print a line while running; on a terminal a long one is broken between words, a table is left as it is."""
    warn(
        "\n".join(terminal.wrap_to_terminal(text))
        if "\n" not in text and sys.stderr.isatty()
        else text
    )


def warn(text: str) -> None:
    """Print a line on stderr as it is."""
    with terminal.beside_bars():
        with suppress(OSError):  # nobody reads it any more: a run goes on
            sys.stderr.write(terminal.visible(text) + "\n")
        terminal.flush(sys.stderr)
