"""Tables as text."""

from __future__ import annotations

import pytest

from medfl.core.tables import markdown_table, on_screen

HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "a | b",
    "a\\| 0.99 ", "a\\", "a\n\n# b",
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
        "method               fedavg  a \\| b",
        "-------------------  ------  ------",
        *(f"metric_{number}_last_round       {number}       {number + 5}" for number in range(5)),
        "",
        "written: tables.md",
    ]
    narrow = markdown_table(["site", "dice"], [["north", "0.5 ± 0.1"]])
    assert on_screen(narrow).splitlines() == ["site   dice", "-----  ---------", "north  0.5 ± 0.1"]
