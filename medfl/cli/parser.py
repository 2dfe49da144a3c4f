"""The parser of the command line, with medfl's one-line errors, and how a verb prints its results."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from typing import Any, NoReturn

from medfl.cli.arguments import Flags
from medfl.core import (
    Config,
    Document,
    InputError,
    did_you_mean,
    either,
    on_screen,
    screen_width,
    terminal,
    visible,
    wrap,
)

_MARGIN = re.compile("^ *(?=[^ ])")


class Parser(Flags, argparse.ArgumentParser):
    """argparse with medfl's one-line errors."""

    def __init__(self, **settings: Any) -> None:
        """Accept full option names only: an abbreviation could mean something else in the next version."""
        super().__init__(**settings, allow_abbrev=False, formatter_class=_Help)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Refuse arguments unknown to this verb here, where its options can be named."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            problem = "unknown" if unknown[0].startswith("-") else "no option takes"
            self.error(f"{problem} {' '.join(unknown)}", unknown[0].partition("=")[0])

        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a verb or value that is not among the choices, and name the nearest."""
        if action.choices is not None and value not in action.choices:
            raise InputError(
                f"{'/'.join(action.option_strings) or action.metavar} {value!r}",
                f"one of {either(action.choices)}",
                did_you_mean(str(value), action.choices, f"see {self.prog} --help"),
            )

    def error(self, message: str, unknown: str = "") -> NoReturn:
        """Turn a usage error into an InputError."""
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise InputError(
            " ".join(message.split()),
            usage if len(usage) < 200 else f"{self.prog} has {len(flags)} options",
            did_you_mean(unknown, flags, f"see {self.prog} --help"),
        )


class _Help(argparse.HelpFormatter):
    """Help as wide as the terminal, at most 100 columns; the commands of examples are not wrapped."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=screen_width() - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for margin, block in groupby(text.splitlines(), _MARGIN.findall):
            if margin in ([], ["  "], ["    "]):
                lines += block
            else:
                lines += wrap(" ".join(map(str.strip, block)), margin[0], margin[0], width)

        return "\n".join(lines)


def add_verb(
    verbs: Any, name: str, text: str, function: Callable[[Any], int | None], examples: str = ""
) -> Any:
    """Add a verb, or an action of one, with the common flags; return its parser."""
    verb = verbs.add_parser(name, help=text, description=_sentence(text), epilog=examples or None)
    verb.set_defaults(verb=function)
    verb.add_switch("--json", "print one JSON document on stdout, logs on stderr")
    verb.add_switch("--debug", "show the traceback of an error")
    return verb


def add_actions(verbs: Any, name: str, text: str) -> Any:
    """Add a verb that has actions; return their subparsers."""
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
        text = "\n".join(lines)
        if sys.stdout.isatty():
            text = on_screen(text)

    # at last: what is unescaped for a screen could steer it
    sys.stdout.write(f"{visible(text)}\n")
    sys.stdout.flush()
    return 0


def intact(args: argparse.Namespace | None) -> str:
    """Return what is said of a command that was ended from outside."""
    return f"what was saved is intact{getattr(args, 'goes_on_by', '')}"


def telling(args: argparse.Namespace) -> Document:
    """Return a run's message settings as keyword arguments: `say` prints lines, `progress` allows bars."""
    return {"say": str if args.quiet else log, "progress": sys.stderr.isatty() and not args.quiet}


def log(text: str) -> None:
    """Print a line while running; on a terminal a long one is wrapped between words, a table is left unchanged."""
    if text and "\n" not in text and sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(wrap(text, others="  ", width=width))

    warn(text)


def warn(text: str) -> None:
    """Print a line on stderr unchanged."""
    with terminal.beside_bars():
        with suppress(OSError):  # nobody reads it any more: a run continues
            sys.stderr.write(visible(text) + "\n")
        terminal.flush(sys.stderr)
