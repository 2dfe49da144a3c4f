"""What files of others say may not steer the terminal that it is told on, nor fill the memory without a word."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator

import pytest

from medfl.cli import verbs
from medfl.cli.parser import show, warn
from medfl.core.errors import either


def test_no_text_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    warn("a\x1b[31m\x9b\r\tb\nü")
    show(argparse.Namespace(json=False), {}, ["\x1b]0;x\x07"])
    assert (said := capsys.readouterr()).err == "a?[31m??\tb\nü\n"
    assert said.out == "?]0;x?\n"
    warn("gnp\u202egpj\u2066\u2028 \u05d1\u05d9\u05ea \u200d")
    assert capsys.readouterr().err == "gnp?gpj?? \u05d1\u05d9\u05ea \u200d\n"


def test_out_of_memory_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise MemoryError("8 GiB")

    monkeypatch.setattr("medfl.cli.report._report", fail)
    assert verbs.main(["report", "."]) == 1
    assert capsys.readouterr().err == "error: out of memory (8 GiB)\n"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from _parsers(part)


def test_help_is_as_wide_as_the_terminal_and_names_all_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commands of examples may be longer: a terminal wraps them so that they can be copied."""
    monkeypatch.setattr("medfl.cli.parser.screen_width", lambda: 80)
    texts = {parser.prog: parser.format_help() for parser in _parsers(verbs.parser())}
    assert len(texts) > 25
    for name, text in texts.items():
        for line in text.splitlines():
            is_command = re.match(r"  (  |medfl |python )", line)
            assert len(line) <= 80 or is_command, (name, line)

        assert not re.search(r"[;,] default (?!\()", text), name
        assert "{alone" not in text

    for flag in ("--sites N", "--rounds R", "--lr X", "--cohort FRACTION"):
        words = " ".join(texts["medfl tune"].split("\nwhat:")[1].split())
        assert re.search(rf"{flag} [^-]*; default: the bundle's protocol", words), flag


def test_an_error_is_wrapped_between_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert verbs.main(["report", "no_such_folder"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize(
    ("names", "text"), [("abc", "a, b or c"), ("ab", "a or b"), ("a", "a"), ("", "")]
)
def test_alternatives_end_with_or(names: str, text: str) -> None:
    assert either(names) == text


def test_a_library_s_warning_is_a_line_without_paths_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As scikit-learn's and MONAI's in a bundle's own metric: with paths, at every site."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    assert verbs.main(["methods", "fedavg"], own_process=True) == 0
    where = (UserWarning, "/usr/lib/site-packages/sklearn/metrics.py", 1192)
    assert warnings.formatwarning("no positive\nclass", *where) == "warning: no positive class\n"
    assert warnings.formatwarning("no positive\nclass", *where) == ""
