"""Synthetic run folders of every shape that a run can leave behind, and what a browser would make of their pages."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from medfl.report import write_report

Make = Callable[..., Path]
CLASSES = ["normal", "bacterial pneumonia", "viral pneumonia"]
HEADER = ",".join(["id,site,label,predicted", *(f"p_{name}" for name in CLASSES)])
"""Of their predictions.csv."""


def metrics_at(level: float, draw: np.random.Generator) -> dict[str, float]:
    """Invented metrics around a level."""
    names = ("accuracy", "balanced_accuracy", "f1_macro", "auroc")
    values = {name: float(np.clip(level + draw.normal(0, 0.01), 0, 1)) for name in names}
    return values | {"loss": float(2 * (1 - level))}


def make_rounds(
    sites: list[str], rounds: int, judged: str, draw: np.random.Generator
) -> list[dict[str, Any]]:
    skill = {site: float(draw.normal(0, 0.06)) for site in sites}
    entries = []
    for number in range(1, rounds + 1):
        level = 0.85 - 0.5 * float(np.exp(-number / 5))
        site_values = {
            site: {
                "train_loss": 1.2 - level - skill[site],
                "steps": 12,
                "received": metrics_at(level + skill[site], draw) if judged == "global" else None,
                "personal": metrics_at(level + 0.05 + skill[site] / 2, draw),
            }
            for site in sites
        }
        found = {
            "global": metrics_at(level, draw) if judged == "global" else None,
            "personal": metrics_at(level + 0.05, draw),
        }
        entries.append(
            {
                "round": number,
                "cohort": sites,
                "seconds": 2.5,
                "seconds_train": 1.8 + float(draw.normal(0, 0.1)),
                "seconds_server": 0.1,
                "seconds_eval": 0.6,
                "bytes_up": 44_800_000 * len(sites),
                "bytes_down": 44_800_000 * len(sites),
                "train_loss": 1.2 - level,
                "val": found[judged],
                "judged": judged,
                "val_global": found["global"],
                "val_personal": found["personal"],
                "sites": site_values,
            }
        )
    return entries


def make_run(
    sites: list[str], classes: list[str], rounds: int, source: str, draw: np.random.Generator
) -> dict[str, Any]:
    counts = {
        site: [
            int(n)
            for n in draw.multinomial(draw.integers(20, 400), draw.dirichlet([0.4] * len(classes)))
        ]
        for site in sites
    }
    parts = {
        site: {
            "train": [f"{site}/{i}" for i in range(sum(n))],
            "validate": [f"{site}/v{i}" for i in range(9)],
            "test": [f"{site}/t{i}" for i in range(20)],
        }
        for site, n in counts.items()
    }
    return {
        "medfl": "0.1.0",
        "bundle": "pneumonia",
        "bundle_path": "bundles/pneumonia",
        "task": "classification",
        "classes": classes,
        "key_metric": "balanced_accuracy",
        "method": "fedprox",
        "options": {"mu": 0.1},
        "config": {"image_size": 64, "network": "resnet18"},
        "data": {
            "source": source,
            "folder": "/secret/hospital/folder",
            "checksum": "5f2c" * 16,
            "split": "official",
            "counts": {
                section: sum(len(p[section]) for p in parts.values())
                for section in ("train", "validate", "test")
            },
        },
        "partition": {
            "spec": "dirichlet:0.4",
            "seed": 0,
            "notes": ["re-drawn 2 times: a site was empty"],
            "sites": parts,
        },
        "site_class_counts": counts,
        "cohort": 1.0,
        "rounds": rounds,
        "local_epochs": 2,
        "batch_size": 16,
        "lr": 0.01,
        "lr_decay": 0.98,
        "seed": 0,
        "device": "cpu",
        "amp": False,
        "threads": 1,
        "versions": {"python": "3.11", "torch": "2.15.0", "monai": "1.6.1"},
        "command": "medfl run pneumonia --method fedprox --set mu=0.1 --partition dirichlet:0.4 --sites 6 --out runs/a",
        "run_hash": "c0ffee" * 10 + "abcd",
    }


def make_summary(entries: list[dict[str, Any]], source: str, judged: str) -> dict[str, Any]:
    best = max(entries, key=lambda entry: entry["val"]["balanced_accuracy"])
    found = {
        kind: {
            when: {"round": entry["round"], **entry[f"val_{kind}"]}
            for when, entry in (("last", entries[-1]), ("best", best))
        }
        if entries[-1][f"val_{kind}"]
        else None
        for kind in ("global", "personal")
    }
    return {
        "method": "fedprox",
        "bundle": "pneumonia",
        "seed": 0,
        "rounds": len(entries),
        "status": "finished",
        "data_source": source,
        "judged": judged,
        **found[judged],
        **found,
        "bytes_up": sum(entry["bytes_up"] for entry in entries),
        "bytes_down": sum(entry["bytes_down"] for entry in entries),
        "seconds": 2.5 * len(entries),
        "seconds_per_round": 2.5,
        "peak_memory_bytes": 812_000_000,
        "weights_sha256": "ab12" * 16,
        "run_hash": "c0ffee" * 10 + "abcd",
    }


def write_tables(
    folder: Path, run: dict[str, Any], entries: list[dict[str, Any]], draw: np.random.Generator
) -> None:
    rows = []
    for site, parts in run["partition"]["sites"].items():
        row: dict[str, Any] = {
            "site": site,
            **{section: len(ids) for section, ids in parts.items()},
        }
        row |= {
            f"train_{name}": n
            for name, n in zip(run["classes"], run["site_class_counts"][site], strict=True)
        }
        found = entries[-1]["sites"][site]
        local = {name: value - 0.08 for name, value in found["personal"].items()}
        for kind, values in (
            ("received", found["received"]),
            ("personal", found["personal"]),
            ("local", local),
        ):
            names = found["personal"]
            row |= {f"{kind}_{name}": values[name] if values else "" for name in names}
        rows.append(row)
    with (folder / "sites.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    k = len(run["classes"])
    with (folder / "predictions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            ["id", "site", "label", "predicted", *(f"p_{name}" for name in run["classes"])]
        )
        for site, parts in run["partition"]["sites"].items():
            for name in parts["test"]:
                label = int(draw.integers(0, k))
                predicted = label if draw.random() < 0.8 else int(draw.integers(0, k))
                table.writerow(
                    [name, site, label, predicted, *np.round(draw.dirichlet([1.0] * k), 4)]
                )


def build(
    place: Path,
    name: str = "run",
    *,
    sites: list[str] | int = 6,
    classes: list[str] = CLASSES,
    rounds: int = 20,
    done: int | None = None,
    source: str = "real",
    judged: str = "global",
    **changes: Any,
) -> Path:
    """Write a synthetic run folder below a place, formatted as real runs are."""
    draw = np.random.default_rng(7)
    folder = place / name
    folder.mkdir()
    names = [f"site-{i + 1}" for i in range(sites)] if isinstance(sites, int) else sites
    run = make_run(names, classes, rounds, source, draw) | changes
    entries = make_rounds(names, rounds if done is None else done, judged, draw)
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    if done is None:
        (folder / "summary.json").write_text(json.dumps(make_summary(entries, source, judged)))
        write_tables(folder, run, entries, draw)
    return folder


class Page(HTMLParser):
    """What a browser would load, run and show, and whether the tags nest."""

    VOID = ("meta", "img", "br", "use", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "data", "action")
        ]
        self.tags += [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def render(folder: Path) -> tuple[str, Page]:
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    return text, page
