"""What files of others say may not steer the terminal that it is told on, nor fill the memory without a word."""

from __future__ import annotations

import argparse

import pytest

from medfl.cli import verbs
from medfl.cli.parser import show, warn


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
