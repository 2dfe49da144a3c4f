"""docs/results.md is what its runs left: tables, figures of the text and hashes, all from committed summaries."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

from medfl.core.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DECIMAL = re.compile(r"(?<![\w.])\d[\d,]*\.\d+")
CODE = r"(?<!`)`(?![\d.,±% ]+`)[^`\n]+`"
"""Inline code that is more than a number."""
HASH = re.compile(r"`([0-9a-f]{12,64})`")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "results_make", ROOT / "docs" / "results" / "make.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["results_make"] = module  # dataclasses look there for their module
    spec.loader.exec_module(module)
    return module


make = _load()
PAGE = make.BREAK.join(path.read_text() for path in make.PAGES)
RESULTS = make.Results.read()
RECORDS = make.stored()
DATA = {str(record["run"]["data"]["checksum"]) for record in RECORDS}


def _blank(text: str, *patterns: str) -> str:
    """Overwrite what the patterns find, so that positions stay."""
    for pattern in patterns:
        text = re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found.group()), text, flags=re.S)
    return text


def _unaccounted(page: str) -> list[str]:
    """Return the decimal numbers of the text that no piece of tables.yaml holds."""
    prose = _blank(page, r"<!-- table.*?<!-- end -->", r"```.*?```", CODE)
    spans = RESULTS.spans(page)
    return [
        found.group()
        for found in DECIMAL.finditer(prose)
        if not any(start <= found.start() and found.end() <= end for start, end in spans)
    ]


def _unknown_hashes(page: str) -> list[str]:
    known = (*RESULTS.runs, *DATA, *RESULTS.asked["gone"])
    return [name for name in HASH.findall(page) if not any(full.startswith(name) for full in known)]


def _bumped(number: str) -> str:
    """Change the last digit."""
    return number[:-1] + str((int(number[-1]) + 1) % 10)


def test_making_the_page_again_changes_nothing() -> None:
    assert RESULTS.rewritten(PAGE) == PAGE


def test_every_changed_digit_that_a_run_gave_is_put_right() -> None:
    at = [
        (table.start() + number.start(), number.group())
        for table in re.finditer(r"<!-- table.*?<!-- end -->", PAGE, re.S)
        for number in DECIMAL.finditer(_blank(table.group(), r"\A[^\n]*"))
    ]
    for pattern, _ in RESULTS.said():
        found = pattern.search(PAGE)
        assert found is not None
        at += [(found.start(i), found[i].split()[0]) for i in range(1, pattern.groups + 1)]
    assert len(at) > 20
    changed = PAGE
    for start, number in at:
        changed = changed[:start] + _bumped(number) + changed[start + len(number) :]
    assert changed != PAGE
    assert RESULTS.rewritten(changed) == PAGE


def test_a_changed_digit_of_a_given_figure_is_refused() -> None:
    with pytest.raises(InputError, match="stands 0 times"):
        RESULTS.rewritten(PAGE.replace("by Dirichlet 0.3,", "by Dirichlet 0.4,"))


def test_every_decimal_number_of_the_text_is_accounted_for() -> None:
    assert _unaccounted(PAGE) == []
    assert _unaccounted(f"{PAGE}\nHere FedAvg reaches 0.123, a third of 1,234.5.\n") == [
        "0.123",
        "1,234.5",
    ]


def test_a_figure_cannot_hide_in_marks_code_or_templates() -> None:
    asked = RESULTS.asked["tables"]
    assert sorted(re.findall(r"<!-- table: (\S+) -->", PAGE)) == sorted([*asked, "claims"]), (
        "each once, and no other"
    )
    assert PAGE.count("<!-- end -->") == PAGE.count("<!--") / 2 == len(asked) + 1
    assert _unaccounted(f"{PAGE}\nIt reaches `0.987`.\n") == ["0.987"]
    shown = [
        line
        for block in re.findall(r"^```.*?^```$", PAGE, re.M | re.S)
        for line in block.splitlines()[1:-1]
    ]
    begun = ("medfl new ", "medfl run ", "medfl compare ", "medfl tune ", "  -")
    assert all(line.startswith(begun) for line in shown), "commands, and nothing that they printed"
    templates = [text for table in asked.values() for text in table["columns"].values()]
    for table in asked.values():
        for label, entry in table["rows"].items():
            templates += [
                label,
                *(entry.get("cells", {}).values() if isinstance(entry, dict) else ()),
            ]
    bare = [
        _blank(make._FIELD.sub("", str(text)), CODE, r"\([^)]*=[^)]*\)", r"topk:\S+")
        for text in templates
    ]
    assert [text for text in bare if DECIMAL.search(text)] == []


def test_a_figure_that_no_run_gave_says_whence_it_is() -> None:
    for entry in (entry for entry in RESULTS.asked["said"] if not entry.get("from")):
        assert all(make._FIELD.search(text) for text in entry["texts"]), entry
        bare = [
            _blank(make._FIELD.sub("", text), CODE, r"(?:both at|default of) [\d.]+")
            for text in entry["texts"]
        ]
        assert not any(map(DECIMAL.search, bare)), entry


def test_the_figures_of_the_readme_are_those_of_the_page() -> None:
    told = README.partition("<!-- result -->")[2].partition("<!-- /result -->")[0]
    figures, names = DECIMAL.findall(told), HASH.findall(told)
    assert len(figures) > 5
    assert names
    assert [figure for figure in figures if figure not in DECIMAL.findall(PAGE)] == []
    assert _unknown_hashes(told) == []


def test_every_hash_of_the_page_is_a_run_or_checksum_that_is_stored() -> None:
    assert len(HASH.findall(PAGE)) >= len(RESULTS.hashes()) > 2
    assert _unknown_hashes(PAGE) == []
    assert _unknown_hashes(PAGE.replace("`2d570d9c416f`", "`3d570d9c416f`")) == ["3d570d9c416f"]


def test_runs_that_are_gone_are_named_and_not_stored() -> None:
    for name in RESULTS.asked["gone"]:
        assert f"`{name}`" in PAGE
        assert not any(run_hash.startswith(name) for run_hash in RESULTS.runs)


def test_a_cell_is_what_the_stored_summaries_say() -> None:
    told = re.search(
        r"^\| FedAvg \| (\S+) ± (\S+) / .*`2d570d9c416f` `89b4621d8975` `d444eee29621`", PAGE, re.M
    )
    runs = [RESULTS.run(name) for name in ("2d570d9c416f", "89b4621d8975", "d444eee29621")]
    values = [100 * run.summary["global"]["last"]["accuracy"] for run in runs]
    assert told is not None
    assert told.groups() == (f"{statistics.mean(values):.1f}", f"{statistics.pstdev(values):.1f}")


def test_an_interval_is_of_the_differences_of_equal_seeds() -> None:
    told = [text for entry in RESULTS.asked["said"] for text in entry["texts"] if " - " in text]
    assert told
    for entry in RESULTS.asked["said"]:
        groups = [RESULTS._group(given).runs for given in entry.get("runs", {}).values()]
        assert len({tuple(run.record["seed"] for run in runs) for runs in groups}) <= 1, entry


EFFECTS = [0.01, 0.02, 0.03, 0.01, 0.02, 0.03]
"""Mean 0.02, sd 0.00894, half an interval of six t(0.975; 5) = 2.5706 times 0.00894 / sqrt(6) = 0.00939."""
WIDE = [-0.3, 0.3, -0.2, 0.2, 0.1, 0.0]
REFERENCE = [0.5, 0.52, 0.54, 0.5, 0.52, 0.54]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({}, "supported"),
        ({"expect": "lower"}, "contradicted"),
        ({"effects": [-value for value in EFFECTS]}, "contradicted"),
        ({"effects": [value - 0.015 for value in EFFECTS]}, "not shown"),
        ({"effects": [0.0] * 6}, "not shown"),
        ({"effects": [0.01] * 6}, "supported"),
        ({"effects": WIDE}, "cannot tell (too few seeds for so wide an interval)"),
        ({"effects": EFFECTS[:5], "reference": REFERENCE[:5]}, "cannot tell (5 seeds)"),
        ({"effects": [0.1], "reference": [0.5]}, "cannot tell (1 seed)"),
        ({"images": 19}, "cannot tell (19 images at a site)"),
        ({"images": None}, "cannot tell (images at the sites not recorded)"),
        ({"chance": 0.46}, "cannot tell (reference near chance)"),
        ({"reference": [0.94, 0.95, 0.96] * 2}, "cannot tell (reference near the ceiling)"),
        ({"reference": [0.94, 0.95, 0.96] * 2, "chance": None}, "supported"),
        ({"reference": [0.2, 0.8] * 3, "images": 4},
         "cannot tell (4 images at a site; reference near chance)"),
    ],
)  # fmt: skip
def test_a_verdict_is_by_rule(changed: dict, word: str) -> None:
    told = {"effects": EFFECTS, "reference": REFERENCE, "chance": 0.2, "images": 20, **changed}
    assert make.judged(told.pop("effects"), told.pop("reference"), **told).word == word


def test_the_smallest_effect_that_shows_is_of_six_seeds_or_more() -> None:
    """Of three seeds, sd 0.01, as six would have it: 2.5706 * 0.01 / sqrt(6); of eight t(0.975; 7) = 2.3646."""
    same = {"chance": 0.2, "images": 20}
    shown = [
        make.judged(effects, REFERENCE, **same).shows
        for effects in (EFFECTS, [0.01, 0.02, 0.03], [0.01, 0.03] * 4, [0.1])
    ]
    assert shown[:3] == pytest.approx([0.00939, 0.01049, 0.00894], abs=1e-5)
    assert shown[3] is None


def test_chance_and_the_smallest_site_are_what_the_runs_record() -> None:
    run = RESULTS.run(
        "a92a5da393ef"
    )  # sites of two, three, four and five classes, the smallest with 28 test images
    owned = [2, 2, 2, 3, 4, 5, 5, 5, 5, 5]
    counts = run.record["site_class_counts"].values()
    assert sorted(sum(map(bool, row)) for row in counts) == owned
    assert make.chance(run, "site_balanced_accuracy:mean") == pytest.approx(
        sum(1 / count for count in owned) / 10
    )
    assert make.chance(run, "global.last.balanced_accuracy") == pytest.approx(1 / 6)
    assert make.chance(run, "val:8") == pytest.approx(1 / 6)
    assert make.chance(run, "global.last.auroc") == 0.5
    assert make.chance(RESULTS.run("85ede805581a"), "site_dice:mean") is None
    assert make.fewest([run], "test") == 28
    record = {**RECORDS[0], "sites": [{"site": "a", "train": "3"}]}
    assert make.fewest([run, make._folder(record)], "test") is None


def test_the_claims_are_the_verdicts_of_the_runs() -> None:
    lines = RESULTS.claims().splitlines()
    assert RESULTS.claims() in PAGE
    assert len(lines) == 2 + sum(
        len(claim["metrics"]) * len(claim["against"]) for claim in RESULTS.asked["claims"]
    )
    for line in lines[2:]:
        cells = dict(zip(make.CLAIMS, line.strip("| ").split(" | "), strict=True))
        ends = [float(end) for end in re.findall(r"\[(\S+) to (\S+)\]", cells["effect"])[0]]
        clear = min(ends) > 0 or max(ends) < 0
        assert cells["verdict"].startswith(
            ("cannot tell (", "supported", "contradicted", "not shown")
        )
        if cells["verdict"] in ("supported", "contradicted"):
            assert clear, line
        if not cells["verdict"].startswith("cannot"):
            assert int(cells["seeds"]) >= 6, line
            assert int(cells["images at the smallest site"]) >= 20, line


def test_below_each_table_are_the_images_of_its_runs() -> None:
    """Of seeds that draw their sites, from the fewest to the most."""
    assert "Images of a run: 702 to train on, 106 to validate, 199 to test." in PAGE
    assert RESULTS.below("fedmr").startswith(
        "Images of a run: 400 to train on, 140 to 260 to validate"
    )
    assert RESULTS.below("partial").endswith("16 to train on, 2 to validate, 5 to test.")
    assert PAGE.count("Images of a run:") == len(RESULTS.asked["tables"])


def test_a_window_is_the_mean_of_its_rounds() -> None:
    row = make.Row("FedAvg", [RESULTS.run("2d570d9c416f")])
    rounds = [make.values(row, f"val:{number}")[0] for number in (6, 7, 8)]
    assert make.values(row, "val:6-8") == [pytest.approx(statistics.fmean(rounds))]


def test_rows_differ_in_their_seed_only() -> None:
    for name, table in RESULTS.asked["tables"].items():
        for label, entry in table["rows"].items():
            runs = [RESULTS.run(run_hash).record for run_hash in make._named(entry)]
            apart = {"seed", "command", "run_hash", "partition", "site_class_counts"}
            assert len({run["partition"]["spec"] for run in runs}) <= 1, (name, label)
            assert len({run["seed"] for run in runs}) == len(runs), (name, label)
            assert (
                len({json.dumps({k: v for k, v in run.items() if k not in apart}) for run in runs})
                <= 1
            ), label


def test_stored_runs_are_finished_real_in_order_and_free_of_folders() -> None:
    assert [r["run"]["run_hash"][:12] for r in RECORDS] == [name[:12] for name in RESULTS.hashes()]
    for record in RECORDS:
        run, summary = record["run"], record["summary"]
        ended = (
            "stopped"
            if "--patience" in run["command"] and summary["rounds"] < run["rounds"]
            else "finished"
        )
        assert (summary["run_hash"], summary["status"], run["data"]["source"]) == (
            run["run_hash"],
            ended,
            "real",
        )
        assert run["command"].startswith(("medfl run ", "a run of medfl compare "))
        assert {"seed", "options", "partition", "versions"} <= run.keys()
        assert make._FOLDER.search(json.dumps(record)) is None
    assert make.SUMMARIES.stat().st_size < 3_650_000


def _write_folder(path: Path, record: dict, /, **run: object) -> None:
    """Write a stored run as the folder that it came from."""
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({**record["run"], **run}))
    (path / "summary.json").write_text(json.dumps(record["summary"]))
    (path / "rounds.jsonl").write_text(
        "".join(json.dumps(entry) + "\n" for entry in record["rounds"])
    )
    with (path / "sites.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(record["sites"][0]))
        writer.writeheader()
        writer.writerows(record["sites"])


def test_a_run_folder_is_collected_without_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RECORDS[0]
    run, run_hash = record["run"], record["run"]["run_hash"]
    _write_folder(
        tmp_path / "below" / "here",
        record,
        command="medfl run ham10000 --out /srv/a-machine/first",
        data={**run["data"], "folder": "/srv/a-machine/images"},
        partition={**run["partition"], "sites": {"a": {"train": ["patient-1"]}}},
        bundle_path="/srv/a-machine/bundle",
    )
    monkeypatch.setattr(make, "stored", list)
    told = {**record, "run": {**run, "command": "medfl run ham10000 --out runs/first"}}
    assert make.collect([tmp_path], [run_hash[:12]]) == [told]
    with pytest.raises(InputError, match="runs 0123456789ab are not there"):
        make.collect([tmp_path], ["0123456789ab"])


def test_what_is_not_found_stays_as_it_is_stored(tmp_path: Path) -> None:
    assert make.collect([tmp_path], RESULTS.hashes()) == RECORDS


@pytest.mark.parametrize(
    ("values", "form", "text"),
    [
        ([0.5, 0.7], "%.1f±", "60.0 ± 10.0"),
        ([0.5], "%.1f±", "50.0"),
        ([0.5, 0.7], ".2f", "0.60"),
        ([0.5, 0.7], "%.1f,", "50.0, 70.0"),
        ([0.01, 0.02, 0.03], "%.1f~", "+2.0 [-0.5 to +4.5]"),
        ([-0.01], "%.1f~", "-1.0"),
        ([2_500_000, 3_500_000], "M.3g", "3"),
        (["b", "a", "b"], "names", "a, b"),
        (["0123456789abcdef"], "code12", "`0123456789ab`"),
        ([], ".3f", "–"),
    ],
)
def test_values_are_written_in_their_form(values: list, form: str, text: str) -> None:
    assert make.written(values, form, "x") == text


def test_a_form_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="forms such as"):
        make.written([1.0], "3 digits", "x")


def test_figures_of_the_papers_stand_as_they_are_printed() -> None:
    run = {**RECORDS[0]["run"], "bundle": "ham10000", "partition": {"spec": "dirichlet:0.05"}}
    row = make.Row("FedBM", [make._folder({**RECORDS[0], "run": run})])
    assert make.filled("{fedbm/table3::accuracy|%.2f±}", {"": row}) == "72.75 ± 0.88"
    assert make.filled("{fedbm/table3:FedETF:f1_macro|%.2f±}", {"": row}) == "33.67 ± 4.33"
    assert make.filled("{fedbm/table3:FedCB:f1_macro|%.2f±}", {"": row}) == "–"


def test_a_value_that_only_some_runs_of_a_row_have_is_refused() -> None:
    record = RECORDS[0]
    personal = {
        **record,
        "summary": {name: value for name, value in record["summary"].items() if name != "global"},
    }
    row = make.Row("mixed", [make._folder(record), make._folder(personal)])
    with pytest.raises(InputError, match=r"global\.last\.accuracy of mixed"):
        make.values(row, "global.last.accuracy")


@pytest.mark.parametrize("name", ["site_accuracy:nowhere", "val:99"])
def test_a_site_or_round_that_no_run_has_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} of FedAvg"):
        make.values(make.Row("FedAvg", [RESULTS.run("2d570d9c416f")]), name)


def test_the_command_writes_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [tmp_path / path.name for path in make.PAGES]
    for page, path in zip(pages, make.PAGES, strict=True):
        page.write_text(path.read_text())
    changed = next(page for page in pages if page.name == "fedcb-fedbm.md")
    right = changed.read_text()
    changed.write_text(right.replace("| 34.3 ± 4.1 |", "| 43.3 ± 4.1 |"))
    assert changed.read_text() != right
    monkeypatch.setattr(make, "PAGES", pages)
    assert make.main([]) == 0
    assert changed.read_text() == right
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.endswith(": rewritten")] == [
        "fedcb-fedbm.md: rewritten"
    ]
    assert len([line for line in printed if line.endswith(": up to date")]) == len(pages) - 1
    changed.write_text(right.replace("<!-- table: fedbm -->", ""))
    assert make.main([]) == 2
    assert "no table fedbm" in capsys.readouterr().err
