"""Tables as text."""

from __future__ import annotations

import csv
import io
import unicodedata

import pytest

from medfl.core.tables import (
    csv_text,
    formatted_table,
    latex_text,
    markdown_table,
    on_screen,
    text_table,
)

HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "a | b",
    "a\\| 0.99 ", "a\\", "a\n\n# b", "![x][y]\n\n[y]: javascript:alert(1)", "&#x202e;gnp", "\u202egnp", "\x1b[31mred",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_in_a_cell_of_markdown(name: str) -> None:
    """As Python-Markdown and markdown-it read it."""
    text = markdown_table(["site", name], [[name, "0.5"], ["north", "0.25"]])
    markdown = pytest.importorskip("markdown")
    commonmark = pytest.importorskip("markdown_it")
    plain = markdown.markdown(text, extensions=["tables"])
    for page in (plain, commonmark.MarkdownIt("commonmark").enable("table").render(text)):
        assert not any(tag in page for tag in ("<script", "<img", "<a ", "<h1"))
        assert page.count("<td") == 4
        assert all(unicodedata.category(sign) not in ("Cc", "Cf") for sign in page if sign != "\n")
        assert ">0.25<" in page


def test_a_wide_markdown_table_is_turned_on_its_side_on_a_screen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("medfl.core.tables.screen_width", lambda: 60)
    metrics = [f"metric_{number}_last_round" for number in range(5)]
    wide = markdown_table(["method", *metrics], [["fedavg", *"01234"], ["a | b", *"56789"]])
    text = on_screen(f"## Partition iid\n\n{wide}\n\nwritten: tables.md")
    assert text.splitlines() == [
        "## Partition iid",
        "",
        "method               fedavg  a | b",
        "-------------------  ------  -----",
        *(f"metric_{number}_last_round       {number}      {number + 5}" for number in range(5)),
        "",
        "written: tables.md",
    ]
    narrow = markdown_table(["site", "dice"], [["north", "0.5 ± 0.1"]])
    assert on_screen(narrow).splitlines() == ["site   dice", "-----  ---------", "north  0.5 ± 0.1"]


@pytest.mark.parametrize("format_", ["md", "tex", "html"])
@pytest.mark.parametrize("name", [*HOSTILE, "\\input{/etc/passwd}", "a\n\nb & c"])
def test_a_name_is_one_line_of_a_table_in_every_format(name: str, format_: str) -> None:
    made = formatted_table(["site", name], [[name, "1"]], format_)
    assert len(made.splitlines()) == len(
        formatted_table(["site", "x"], [["y", "1"]], format_).splitlines()
    )
    assert all(unicodedata.category(sign) not in ("Cc", "Cf") for sign in made if sign != "\n")
    assert format_ != "tex" or "\\input" not in made
    assert "<script" not in made


def test_a_caption_of_latex_is_one_line() -> None:
    assert latex_text("a\n\n\\b{\x1b}") == "a  \\textbackslash{}b\\{?\\}"


def test_csv_comes_back_and_is_no_formula_in_any_line() -> None:
    rows = [["a\rb", "a\r\n=c"], ["=1", 2.5]]
    made = csv_text(["x", "a;=b"], rows)
    assert [*csv.reader(io.StringIO(made, ""))] == [
        ["x", "a;'=b"], ["a\rb", "a\r\n'=c"], ["'=1", "2.5"]
    ]  # fmt: skip
    assert csv_text(["x"], [["y"]]) == "x\ny\n"


def test_a_column_without_a_name_stays_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medfl.core.tables.screen_width", lambda: 20)
    lines = text_table(["site", ""], [["n" * 30, "x" * 30]], spare=["none"])
    assert lines[-1].split() == ["n" * 30, "x" * 30]
