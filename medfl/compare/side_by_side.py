"""Several runs of one bundle on one page, side by side: who reaches what, at which site, at what cost."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medfl import methods
from medfl.compare import curves
from medfl.core.errors import InputError
from medfl.core.storage import write_atomic
from medfl.evaluation import bootstrap, metrics, roc
from medfl.report import RunFolder, charts
from medfl.report.outcomes import Outcomes, outcomes
from medfl.report.page import context, environment
from medfl.report.run_folder import KINDS
from medfl.report.words import setting

_SETTINGS = ("rounds", "local_epochs", "batch_size", "lr", "lr_decay", "cohort", "eval_every", "messages", "device")


def write_page(folders: Sequence[Path], file: Path) -> Path:
    """Write one page of these run folders, unfinished ones too, and return its path.

    Raises:
        InputError: a folder is not a run's or damaged, the file is no HTML file, or the runs are of different bundles,
            tasks, key metrics or kinds of data, or more than can be told apart.
    """
    if file.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out {file}", "the page is an HTML file", "name it so")
    runs = [RunFolder.read(Path(folder)) for folder in folders]
    name, given = ("report.html.j2", context(runs[0])) if len(runs) == 1 else ("several.html.j2", _context(runs))
    page = environment().get_template(name).render(given)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, page.encode())
    return file


def names(runs: Sequence[RunFolder]) -> list[str]:
    """Return a name for each run: its method and what sets it apart; of runs that nothing does, the folder."""
    found = curves.labels(runs)
    parts: tuple[Callable[[RunFolder], str], ...] = (
        lambda run: str((run.run.get("partition") or {}).get("spec")),
        lambda run: f"seed {run.run.get('seed')}",
        lambda run: run.path.name,
        lambda run: str(run.path),
    )
    for part in parts:
        twins = {name for name, times in Counter(found).items() if times > 1}
        for twin in twins:
            own = [i for i, name in enumerate(found) if name == twin]
            if len({part(runs[i]) for i in own}) > 1:
                for i in own:
                    found[i] = f"{twin}, {part(runs[i])}"
    times = Counter(found)
    return [f"{name} ({i})" if times[name] > 1 else name for i, name in enumerate(found, 1)]


def _check(runs: Sequence[RunFolder]) -> None:
    for what, values in (
        ("bundles", {str(run.run["bundle"]) for run in runs}),
        ("tasks", {str(run.run["task"]) for run in runs}),
        ("key metrics", {run.key for run in runs}),
        ("kinds of data", {str(run.run["data"]["source"]) for run in runs}),
        ("classes", {", ".join(run.run.get("classes") or ()) for run in runs}),
    ):
        if len(values) > 1:
            told = "; ".join(sorted(values)).replace("; ", " and ")
            raise InputError(f"runs of different {what}: {told}", "one page compares like with like", "give them apart")
    if len(runs) > charts.TONES:
        raise InputError(
            f"{len(runs)} runs",
            f"one page tells {charts.TONES} apart",
            "give fewer; medfl compare makes tables of more",
        )


def _context(runs: Sequence[RunFolder]) -> dict[str, Any]:
    _check(runs)
    key, higher = runs[0].key, metrics.higher_is_better(runs[0].key)
    named = names(runs)
    found = [outcomes(run) for run in runs]
    rows = [_row(run, name, f"tone-{i}", found[i]) for i, (run, name) in enumerate(zip(runs, named, strict=True))]
    titles = {run.title(key) for run in runs}
    sums = {str(run.run["data"].get("checksum") or "") for run in runs}
    return {
        "run": runs[0].run,
        "key": key,
        "key_title": titles.pop() if len(titles) == 1 else metrics.title(key),
        "higher": higher,
        "phantom": runs[0].phantom,
        "rows": rows,
        "differing": _differing(runs),
        "same_images": len(sums) == 1,
        "classes": runs[0].run.get("classes") or [],
        "level": f"{100 * bootstrap.LEVEL:g} %",
        "learning": _learning(runs, named),
        "cost_curves": _cost_curves(runs),
        "sites": _sites(runs),
        "confusions": [(row["name"], one.confusion()) for row, one in zip(rows, found, strict=True) if one],
        "roc": _roc(rows, found),
        "calibrations": [
            (row["name"], row["tone"], made)
            for row, one in zip(rows, found, strict=True)
            if one is not None and (made := one.calibration()) is not None
        ],
        "silent": [row["name"] for row, one in zip(rows, found, strict=True) if one is None],
    }


def _row(run: RunFolder, name: str, tone: str, found: Outcomes | None) -> dict[str, Any]:
    """Return what the table of runs says of one."""
    judged = {when: values for kind, when, values in run.pooled() if kind == run.judged}
    summary = run.summary or {}
    sent = [entry.get("bytes_up", 0) + entry.get("bytes_down", 0) for entry in run.rounds]
    return {
        "name": name,
        "tone": tone,
        "run": run.run,
        "done": len(run.rounds),
        "finished": run.finished,
        "judged": dict(KINDS)[run.judged],
        "sites": len(run.site_names),
        "last": (judged.get("last") or {}).get(run.key),
        "best": (judged.get("best") or {}).get(run.key),
        "ends": found.intervals.get(run.key) if found and run.finished else None,
        "spread": metrics.spread(run.site_values(run.judged, run.key), metrics.higher_is_better(run.key)),
        "bytes": sum(summary.get(way, 0) for way in ("bytes_up", "bytes_down")) or sum(sent),
        "seconds": summary.get("seconds") or sum(entry.get("seconds", 0) for entry in run.rounds),
        "weights": summary.get("weights_sha256"),
    }


def _differing(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ, each with its value in every run."""
    every: list[dict[str, str]] = []
    for run in runs:
        own = {name: setting(run.run[name]) for name in _SETTINGS if name in run.run}
        own |= {"partition": str((run.run.get("partition") or {}).get("spec")), "seed": str(run.run.get("seed"))}
        for section in ("options", "config"):
            own |= {f"{name} ({section[:6]})": setting(v) for name, v in (run.run.get(section) or {}).items()}
        every.append(own)
    known = dict.fromkeys(name for own in every for name in own)
    table = [(name, [own.get(name, "–") for own in every]) for name in known]
    usual = {f"{name} (option)": setting(value) for run in runs for name, value in _defaults(run).items()}
    return [
        (name, values)
        for name, values in table
        if len(set(values)) > 1 and not set(values) <= {"–", usual.get(name, "")}
    ]


def _defaults(run: RunFolder) -> dict[str, Any]:
    """Return the defaults of a shipped method; none of another, whose module a report does not import."""
    name = str(run.run["method"])
    if name not in methods.names():
        return {}
    return {entry["name"]: entry["default"] for entry in methods.options_of(methods.method_class(name))}


def _learning(runs: Sequence[RunFolder], named: Sequence[str]) -> list[dict[str, Any]]:
    """Draw the runs' key metric and loss over the rounds."""
    numbers = sorted({entry["round"] for run in runs for entry in run.rounds})
    read: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None]], ...] = (
        (f"{metrics.title(runs[0].key)} on the validation set", lambda e: (e.get("val") or {}).get(runs[0].key)),
        ("Training loss", lambda e: e.get("train_loss")),
    )
    legend, found = [(f"tone-{i}", name) for i, name in enumerate(named)], []
    for title, value in read:
        lines = {}
        for i, run in enumerate(runs):
            own = {entry["round"]: value(entry) for entry in run.rounds}
            lines[f"tone-{i}"] = [own.get(number) for number in numbers]
        svg = charts.lines(title, numbers, lines, [[] for _ in numbers], band_of="local") if numbers else None
        if svg is not None:
            caption = "Each method's own loss: compare runs of one method only." if title == "Training loss" else ""
            found.append({"title": title, "legend": legend, "svg": svg, "caption": caption})
    return found


def _cost_curves(runs: Sequence[RunFolder]) -> tuple[str, str, str] | None:
    """Return the picture of the key metric over bytes and seconds, None where no run was scored."""
    try:
        drawn = curves.curves(runs)
    except InputError:
        return None
    return drawn.title, drawn.caption, base64.b64encode(drawn.png).decode()


def _sites(runs: Sequence[RunFolder]) -> dict[str, Any] | None:
    """Return each site's metric in each run, None where the runs have different sites."""
    if len({tuple(run.site_names) for run in runs}) > 1:
        return None
    columns = _columns(runs)
    sizes = {tuple((run.size(site, "train"), run.size(site, "test")) for site in run.site_names) for run in runs}
    rows = [
        (
            site,
            runs[0].size(site, "train"),
            runs[0].size(site, "test"),
            [(tone, own.get(site)) for tone, own in columns],
        )
        for site in runs[0].site_names
    ]
    scale = max([1.0, *(value for _, own in columns for value in own.values())])
    local = any(tone == "local" for tone, _ in columns)
    told = any(own for _, own in columns)
    return {"rows": rows, "scale": scale, "local": local, "same": len(sizes) == 1} if told else None


def _columns(runs: Sequence[RunFolder]) -> list[tuple[str, dict[str, float]]]:
    """Return (colour, site -> value) of each bar of a site: the runs', and what the site reaches alone.

    A Local reference that all runs share comes last; of several each follows the run that it is the reference of. One
    that stands on the page as a run of its own is not drawn again.
    """
    columns = [(f"tone-{i}", run.site_values(run.judged, run.key)) for i, run in enumerate(runs)]
    there = [own for (_, own), run in zip(columns, runs, strict=True) if run.run["method"] == "local"]
    alone = [run.site_values("local", run.key) for run in runs]
    if alone[0] and all(own == alone[0] for own in alone):
        return columns if alone[0] in there else [*columns, ("local", alone[0])]
    beside = [[("local", local)] if local and local not in there else [] for local in alone]
    return [column for own, local in zip(columns, beside, strict=True) for column in (own, *local)]


def _roc(rows: Sequence[Mapping[str, Any]], found: Sequence[Outcomes | None]) -> dict[str, Any] | None:
    """Draw each run's curve: that of the second of two classes, else the mean of the classes'."""
    known = [(row, one, made) for row, one in zip(rows, found, strict=True) if one and (made := one.roc())]
    if not known:
        return None
    each = {
        row["tone"]: roc.macro(one.curves) if made["mean"] else (one.curves[0].false, one.curves[0].true)
        for row, one, made in known
    }
    table = [(row["name"], row["tone"], made["mean"] or made["rows"][0]) for row, _, made in known]
    one_class = "" if known[0][2]["mean"] else known[0][2]["rows"][0]["name"]
    title = f"ROC curve of {one_class}" if one_class else "Mean ROC curve over the classes"
    return {"title": title, "svg": charts.roc(title, each), "rows": table}
