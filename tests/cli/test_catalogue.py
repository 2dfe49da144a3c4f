"""The tables of methods and bundles, and that README.md has them as they are."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from medfl import datasets, methods
from medfl.bundle.bundle import shipped
from medfl.cli import bundle_pages, method_pages
from medfl.core import tables, terminal
from medfl.methods.base import Method, option


def _methods() -> dict[str, dict]:
    return {entry["name"]: entry for entry in method_pages.methods()["methods"]}


def test_every_method_is_listed_with_its_facts() -> None:
    listed = _methods()
    assert tuple(listed) == methods.names()
    for name, entry in listed.items():
        cls = methods.method_class(name)
        assert (entry["paper"], entry["judged"], tuple(entry["tasks"])) == (
            cls.paper,
            cls.judged,
            cls.tasks,
        )
        assert entry["paper"]
        assert entry["summary"].endswith(".")
    json.dumps(method_pages.methods(), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "up", "down", "withheld", "kept"),
    [
        ("fedavg", ["weights"], ["weights"], [], []),
        ("fedprox", ["weights"], ["weights"], [], []),
        ("scaffold", ["weights", "control"], ["weights", "control"], [], ["control"]),
        ("fedbn", ["weights"], ["weights"], ["BatchNorm"], ["weights"]),
        ("ditto", ["weights"], ["weights"], [], ["personal"]),
        ("local", [], [], [], ["weights"]),
        ("fedcb", ["weights"], ["weights", "text"], [], ["embeddings"]),
        (
            "fedbm", ["weights"], ["weights", "generator", "text"], [],
            ["channels", "embeddings", "generator", "height", "version", "width"],
        ),
    ],
)  # fmt: skip
def test_what_travels_is_found_out_by_a_round(
    name: str, up: list[str], down: list[str], withheld: list[str], kept: list[str]
) -> None:
    facts = _methods()[name]["travels"]
    assert (facts["up"], facts["down"], facts["withheld"], facts["kept"]) == (
        up,
        down,
        withheld,
        kept,
    )
    assert (facts["start"], facts["pooled"]) == ([], False)


def test_a_plain_host_suffices_where_broadcast_and_aggregate_are_fedavgs() -> None:
    plain = {name for name, entry in _methods().items() if entry["plain_host"]}
    assert {"fedavg", "fedprox", "ditto"} <= plain
    assert plain.isdisjoint({"scaffold", "fedbn", "local", "central"})


def test_options_carry_type_default_limits_and_help() -> None:
    page = method_pages.methods("scaffold")
    options = {entry["name"]: entry for entry in page["options"]}
    assert (
        options["server_lr"]["type"],
        options["server_lr"]["default"],
        options["server_lr"]["minimum"],
    ) == (
        "float",
        1.0,
        0.0,
    )
    assert tuple(options["control"]["choices"]) == ("auto", "difference", "gradient")
    text = method_pages.methods_text(page)
    for part in (
        "float >= 0",
        "auto | difference | gradient",
        "eta_g, the server's step",
        "c_i+ = c_i - c + (x - y) / (R eta)",
    ):
        assert part in text


def test_a_method_of_your_own_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "half.py").write_text(
        '"""Half: w <- w / 2."""\n'
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from medfl.methods import Method, option\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Half(Method):\n"
        '    """Halve."""\n\n'
        '    part: float = option(0.5, "the part that is kept")\n\n\n'
        "METHOD = Half\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = method_pages.methods_text(method_pages.methods("mine.half"))
    for part in ("mine.half: Halve.", "part", "0.5", "the part that is kept", "Half: w <- w / 2."):
        assert part in text


def test_every_bundle_is_listed_with_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEDFL_DATA", raising=False)
    listed = {entry["name"]: entry for entry in bundle_pages.bundles()["bundles"]}
    assert tuple(listed) == shipped()
    for name, entry in listed.items():
        data = datasets.get(name)
        assert (entry["classes"], entry["centres"], entry["licence"]) == (
            len(data.classes),
            len(data.centres),
            data.licence,
        )
        assert entry["data"] == {"status": "phantom only", "folder": None}
        assert entry["protocol"]
        assert entry["defaults"].keys() >= {"sites", "partition", "rounds", "lr"}
    assert (listed["ham10000"]["image_size"], listed["ham10000"]["network"]) == (128, "resnet18")
    json.dumps(bundle_pages.bundles(), allow_nan=False)


def test_the_status_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = datasets.write_phantom("pneumonia", tmp_path / "pneumonia", per_class=10, size=16)
    monkeypatch.setenv("MEDFL_DATA", str(tmp_path))
    assert bundle_pages.bundles("pneumonia")["data"] == {"status": "phantom", "folder": str(folder)}
    page = bundle_pages.bundles_text(bundle_pages.bundles("pneumonia"))
    assert f"a PHANTOM cohort in {folder}" in " ".join(page.split())
    (folder / "PHANTOM.json").unlink()
    assert bundle_pages.bundles("pneumonia")["data"] == {"status": "real", "folder": str(folder)}
    page = bundle_pages.bundles_text(bundle_pages.bundles("pneumonia"))
    assert f"real images in {folder}" in " ".join(page.split())


def test_a_bundles_page_names_classes_layouts_and_licence() -> None:
    page = bundle_pages.bundles("ham10000")
    text = " ".join(bundle_pages.bundles_text(page).split())
    for part in (
        *page["class_names"],
        *page["centre_names"],
        *page["notes"],
        *page["layouts"],
        page["licence"],
    ):
        assert part in text
    assert "by hand" in text
    assert "medfl data fetch pneumonia --out DIR" in bundle_pages.bundles_text(
        bundle_pages.bundles("pneumonia")
    )


def _as_wide(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    for module in (tables, terminal):
        monkeypatch.setattr(module, "screen_width", lambda: width)


def test_text_keeps_to_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    of_methods = [method_pages.methods(name) for name in (None, *methods.names())]
    of_bundles = [bundle_pages.bundles(name) for name in (None, *shipped())]
    for width in (72, 80, 100):
        _as_wide(monkeypatch, width)
        pages = [method_pages.methods_text(found) for found in of_methods]
        pages += [bundle_pages.bundles_text(found) for found in of_bundles]
        for page in pages:
            words = [line.split() for line in page.splitlines() if len(line) > width]
            assert all(len(line[-1]) > width - 24 for line in words), (
                page
            )  # an address or a path is not broken
            assert not [line for line in page.splitlines() if line != line.rstrip()]


# Text


def test_a_table_wraps_its_widest_column(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_wide(monkeypatch, 20)
    lines = tables.text_table(
        ["name", "n", "words"], [["a", "7", "one two three four"], ["bb", "12", "-"]]
    )
    assert lines == [
        "name   n  words", "----  --  ----------", "a      7  one two", "          three four", "bb    12  -",
    ]  # fmt: skip


def test_a_table_leaves_out_spare_columns_before_it_overflows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, rows = ["name", "spare", "other"], [["aaaa", "bbbbbb", "cccc"]]
    for width, first in ((19, "name  spare   other"), (18, "name  other"), (8, "name  other")):
        _as_wide(monkeypatch, width)
        assert tables.text_table(head, rows, ["spare"])[0] == first


def test_equations_keep_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_wide(monkeypatch, 30)
    text = "Title\n\nstep:   x <- x - 1\nserver: y <- the mean of all x\n\nSome words that are too long for it."
    assert terminal.wrap_docstring(text) == [
        "Title", "", "step:   x <- x - 1", "server: y <- the mean of all x", "", "Some words that are too long",
        "for it.",
    ]  # fmt: skip


def test_markdown_keeps_bars_inside_cells() -> None:
    assert tables.markdown_table(["a"], [["x | y"]]) == "| a |\n|---|\n| x \\| y |"


def test_the_tables_of_the_docs_do_not_depend_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "docs/site"))
    generate: Any = importlib.import_module("generate")
    before = generate.bundle_table()
    datasets.write_phantom("pneumonia", tmp_path / "pneumonia", per_class=10, size=16)
    monkeypatch.setenv("MEDFL_DATA", str(tmp_path))
    assert generate.bundle_table() == before
    for table, count in ((before, len(shipped())), (generate.method_table(), len(methods.names()))):
        rows = table.splitlines()
        assert len(rows) == count + 2
        assert len({row.count("|") - row.count("\\|") for row in rows}) == 1


def test_the_toy_round_tells_a_withheld_layer_and_an_introduction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "docs/site"))
    messages: Any = importlib.import_module("method_messages")

    class Odd(Method):
        """A method that keeps convolutions and introduces its sites."""

        level: int = option(1, "nothing")

        def personal_names(self, network):  # noqa: ANN001, ANN202
            return frozenset(name for name in network.state_dict() if name.startswith("0."))

        def introduce(self, site):  # noqa: ANN001, ANN202
            return type(super().introduce(site))({"counts": {"n": site.train.indices}})

    facts = messages.travels(Odd)
    assert (facts["withheld"], facts["start"], facts["kept"]) == (["Conv"], ["counts"], ["weights"])
