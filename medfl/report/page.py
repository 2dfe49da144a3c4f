"""report.html of a run: the template's context, and the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from medfl.core import COMPUTING, SECTIONS, SETTINGS, Config, Document, Metrics, slug, words_of
from medfl.evaluation import bootstrap, metrics
from medfl.report import charts, coverage, cross_site, folds
from medfl.report.charts import Chart
from medfl.report.differences import LEAST_OF_CLASS, Differences
from medfl.report.formatting import setting
from medfl.report.picture import Picture, mask_pictures, model_pictures, worst_images
from medfl.report.prediction_analysis import analyse_predictions
from medfl.report.run_files import MODEL_KINDS, RunFiles
from medfl.report.templating import rendered
from medfl.storage import CONTRIBUTION, FOLDS, Table, read_rows, write_atomic
from medfl.storage.run_documents import damaged, plan_in
from medfl.storage.run_reader import SUMMARY_KINDS

_SHOWN = words_of("""
    promised key judged personal_model phantom public finished rise rounds summary undefined
    unequal_classes
""")
"""Entries of the page taken from `RunFiles` under the same name."""


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder, or that of a cross-validation, and return its path.

    The page is self-contained: no script, no file, no network. The same folder gives the same bytes.

    Raises:
        InputError: the folder is not a run's, or a file in it is damaged.
    """
    if (Path(run_folder) / FOLDS).is_file():
        return folds.write(Path(run_folder)).path / "report.html"

    run = RunFiles(Path(run_folder))
    path = run.path / "report.html"
    write_atomic(path, rendered("report.html.j2", context(run)))

    return path


def context(run: RunFiles) -> Document:
    """Return what the page of one run shows.

    Raises:
        InputError: a picture in the run folder is damaged.
    """
    record = run.record
    judged = run.judged
    higher = metrics.higher_is_better(run.key)
    kinds = []
    spreads = []
    scale = 1.0
    for kind, title in MODEL_KINDS:
        if by_site := run.site_values(kind, run.key):
            kinds.append((kind, title, by_site))
            spreads.append((kind, title, run.spread(kind, run.key)))
            # bars are scaled to the largest value, which for distances is above 1
            scale = max(scale, *by_site.values())

    gains = {}
    if judged != "local":
        local = run.site_values("local", run.key)
        for site, value in run.site_values(judged, run.key).items():
            if site in local:
                gains[site] = value - local[site]

    pooled = run.pooled()
    sizes = []
    for site in run.site_names:
        sizes.append((site, *(run.size(site, section) for section in SECTIONS)))

    return {
        "run": {**record, "data": {**record["data"], "notes": _notes(record["data"])}},
        "titles": {name: run.title(name) for name in (run.key, *run.metric_names())},
        "higher": higher,
        **{name: getattr(run, name) for name in _SHOWN},
        "sites": sizes,
        "classes_of": {site: run.classes_of(site) for site in run.site_names},
        **{kind: run.summary.get(kind) or {} for kind in ("labels", "channels")},
        "metric_names": run.metric_names(),
        "definitions": metrics.METRICS,
        "pooled": pooled,
        "pooled_titles": {kind: title for kind, (_, title, _) in SUMMARY_KINDS.items()},
        "headline": {when: entry for kind, when, entry in pooled if kind == judged},
        "kinds": kinds,
        "spreads": spreads,
        "scale": scale,
        "gains": gains,
        "site_ends": _site_ends(run),
        **_differences(run),
        "cross_site": cross_site.read(run),
        "contribution": contribution_of(run),
        "learning": learning_curves(run),
        "costs": costs(run),
        "traffic": _traffic(run),
        "changes": _changes(run),
        "class_counts": _class_counts(run),
        **_predicted(run),
        "coverage_tables": coverage.tables_of(run.promised) if run.promised else [],
        **_pictures(run),
        "settings": _settings(record),
        "plan": plan_in(run.path),
    }


def _site_ends(run: RunFiles) -> dict[str, tuple[float, float]]:
    """Return the interval of the key metric at each site that reported it."""
    low = run.site_values(run.judged, f"{run.key}_low")
    high = run.site_values(run.judged, f"{run.key}_high")
    return {site: (low[site], high[site]) for site in low}


def _differences(run: RunFiles) -> Document:
    """Return the page's statements on differences from Local models and between sites."""
    differences = Differences(run)
    tested = Counter(run.predictions.sites if run.predictions else ())
    rows = []
    for site in run.site_names:
        local = differences.against_local.get(site)
        sites = differences.against_others.get(site)
        if local or sites:
            rows.append((site, tested[site], local, sites))

    return {
        "answers": differences.answers(),
        "against_local": bool(differences.against_local),
        "differences": rows,
        "pooled_difference": differences.pooled,
    }


def contribution_of(run: RunFiles) -> list[tuple[str, Metrics]]:
    """Return each site with its contribution, [] if that was not estimated."""
    path = run.path / CONTRIBUTION
    if not path.is_file():
        return []

    table = Table(path, read_rows(path, ("site", "rounds")))
    columns = {}
    for name in table.columns:
        if name != "site":
            columns[name] = table.numbers(name)

    rows = []
    for index, site in enumerate(table.texts("site")):
        rows.append((site, {name: float(values[index]) for name, values in columns.items()}))

    return rows


def _notes(data: Config) -> list[str]:
    """Return the notes on the images without the path of the data folder, because reports are shared."""
    notes = list(data.get("notes") or ())
    if folder := str(data.get("folder") or ""):
        notes = [note.replace(folder, "the data folder") for note in notes]

    return notes


def _predicted(run: RunFiles) -> Document:
    """Return what the page shows of the test predictions."""
    last = run.summary.get("rounds")  # the round of the predictions
    exact = []  # columns whose numbers come from the predictions
    for kind, when, values in run.pooled():
        if kind == run.judged and values.get("round") == last:
            exact.append(when)

    entries = {
        "classes": run.classes,
        "classified": bool(run.classes) and run.record["task"] == "classification",
        "level": f"{100 * bootstrap.LEVEL:g} %",
        "least": bootstrap.LEAST,
        "least_of_class": LEAST_OF_CLASS,
        "exact": exact,
        "noun": run.kind.noun,
    }
    analysis = analyse_predictions(run)
    if analysis is None:
        absent = ("confusion", "roc", "calibration", "few_cases", "worst")
        examined = run.summary.get("examined") or {}
        empty = {
            "predictions": False,
            "intervals": examined.get("intervals") or {},
            "intervals_method": _TOLD.format(**examined) if examined else "",
            "each": {},
            "told": bool(examined),
        }
        none = {"confusions": [], "numbers": [], **_structures(run, {})}
        return {**entries, **empty, **none, **dict.fromkeys(absent)}

    return {
        **entries,
        "predictions": True,
        "intervals": analysis.intervals,
        "intervals_method": analysis.describe_intervals() if analysis.intervals else "",
        "confusion": analysis.confusion(),
        "confusions": analysis.confusions(),
        "roc": analysis.roc(),
        "calibration": analysis.calibration(),
        "worst": analysis.worst(),
        "numbers": analysis.numbers(),
        **_structures(run, analysis.intervals),
        "each": analysis.each,
        "few_cases": analysis.cases(),
    }


def _structures(run: RunFiles, intervals: Config) -> Document:
    """Return the page's entries for single structures, findings or numbers: on all test cases, and at each site."""
    kinds = run.structure_metrics
    at_sites = next((kind for kind in (run.key, *kinds) if kind in kinds), "")
    structures = []
    columns = []
    for name, scores in run.structures.items():
        structure = slug(name)
        values = []
        for kind in kinds:
            structure_metric = f"{kind} of {name}"
            # findings and numbers have intervals by name, structures by slug
            if structure_metric not in intervals:
                structure_metric = f"{kind}_{structure}"

            values.append((scores.get(kind), structure_metric))

        structures.append((name, scores, values))
        of_site = run.site_values(run.judged, f"{at_sites}_{structure}")
        columns.append((of_site, run.site_values(run.judged, f"cases_{structure}")))

    sites = []
    for site in run.site_names:
        if any(site in cases for _, cases in columns):
            row = [(of_site.get(site), int(cases.get(site, 0))) for of_site, cases in columns]

            sites.append((site, row))

    titles = list(map(run.title, kinds))
    return {
        "structure_titles": titles,
        "structures": structures,
        "structure_sites": sites,
        "structure_metric": run.title(at_sites),
        "structure_counts": any("positives" in scores for scores in run.structures.values()),
    }


def _traffic(run: RunFiles) -> Document | None:
    """Return the mean bytes of a site's messages in a round, the number of messages, and the bytes before round 1."""
    rows = []
    for entry in run.rounds:
        sites = len(entry.get("cohort") or ()) - len(entry.get("left_out") or ())
        if sites > 0 and "bytes_up" in entry and "bytes_down" in entry:
            rows.append((entry["bytes_up"], entry["bytes_down"], sites))

    if not rows:
        return None

    up, down, visits = map(sum, zip(*rows, strict=True))
    # the rest of the total was sent for the introductions
    before = run.summary.get("bytes_up", up) - up
    return {
        "up": up / visits,
        "down": down / visits,
        "visits": visits,
        "rounds": len(rows),
        "before": before if run.finished and before > 0 else 0,
        "messages": run.record.get("messages", "lossless"),
    }


def _changes(run: RunFiles) -> list[tuple[str, float | None, float, float, int, int]]:
    """Return the effect of server rules that bound norms or shares on each site's changes.

    A row is: site; median norm of its changes, None without a bound on norms; its mean share of the average by images,
    and its effective share; rounds in which the change was clipped; rounds.
    """
    observed = [entry.get("observed") or {} for entry in run.rounds]
    rows = []
    for site in run.site_names:
        shares = []
        shares_by_images = []
        norms = []
        shortened = 0
        for values in observed:
            share = values.get(f"share/{site}")
            if share is None:  # the site was not in the cohort
                continue

            shares.append(share)
            shares_by_images.append(values.get(f"said/{site}", share))
            if "clip" in values:
                norms.append(values[f"norm/{site}"])
                shortened += norms[-1] > values["clip"]

        if shares:
            norm = median(norms) if norms else None
            by_images = fmean(shares_by_images)
            rows.append((site, norm, by_images, fmean(shares), shortened, len(shares)))

    return rows


def _settings(run: Config) -> list[tuple[str, str]]:
    """Return every setting of the run as text, except the data folder, because reports are shared."""
    computing = [name for name, entry in SETTINGS.items() if entry.group == COMPUTING]
    names = ("runtime", "seed", "device", *computing, "threads")
    rows = []
    # records of earlier versions lack later settings
    for name in names:
        if name in run:
            rows.append((name, setting(run[name])))

    for section, label in (("options", "option"), ("config", "config")):
        for name, value in (run.get(section) or {}).items():
            rows.append((f"{name} ({label})", setting(value)))

    versions = dict(run.get("versions") or {})
    rows += [(name, setting(value)) for name, value in versions.items()]
    for entry in run.get("resumed") or ():
        for name, value in entry["versions"].items():
            if versions.get(name) != value:
                versions[name] = value
                rows.append((f"{name}, from round {entry['round'] + 1}", setting(value)))

    return rows


def _class_counts(run: RunFiles) -> Document | None:
    counts = run.record.get("site_class_counts") or {}
    rows = []
    most = 1
    for site in run.site_names:
        if site not in counts:
            continue
        if len(counts[site]) != len(run.classes):  # a table with other classes would mislead
            return None

        rows.append((site, counts[site], run.size(site, "train")))
        most = max(most, *counts[site])

    if not rows:
        return None

    return {"classes": run.classes, "rows": rows, "most": most}


def _pictures(run: RunFiles) -> Document:
    partition = run.path / "partition.png"
    try:
        sites = None
        if partition.is_file():
            sites = Picture.read(partition).embedded[2]

        models, more_grids = model_pictures(run.path)
        masks, more_sites = mask_pictures(run.path)
        worst = worst_images(run.path)
    except (OSError, ValueError) as error:  # a mark that is not a number
        raise damaged(run.path / "pictures", f"cannot be shown: {error}") from None

    return {
        "partition_picture": sites,
        "pictures": [picture.embedded for picture in models],
        "more_pictures": more_grids,
        "segmented": [picture.embedded for picture in masks],
        "more_sites": more_sites,
        "worst_images": [picture.embedded for picture in worst],
    }


# A report's charts of the rounds: learning curves and costs.


_TOLD = (
    "Of {cases} cases, by what the sites tell of them: 95 % bootstrap intervals over the counts, of means over cases "
    "the normal one; AUROC is computed from histograms of scores, and off by at most {auroc_error:.3f}."
)
_SECONDS = (
    ("received", "seconds_train", "training"),
    ("personal", "seconds_server", "server"),
    ("local", "seconds_eval", "evaluation"),
)
_BYTES = (
    ("received", "bytes_up", "to the server"),
    ("personal", "bytes_down", "to the sites"),
)
_COSTS = (("Seconds a round", 1, _SECONDS), ("Megabytes a round", 1e6, _BYTES))
"""Title, unit, and for each part its colour on the page, its entry of a round and its meaning."""


def learning_curves(run: RunFiles) -> list[Chart]:
    """Return the charts that have data: the key metric with a band over the sites, and the training loss."""
    rounds = run.rounds
    key = run.key
    judged = run.judged
    numbers = [entry["round"] for entry in rounds]
    # only the judged model, as in the tables: before averaging the sites do not have a model of their own
    curves = {judged: [_metric(entry, "val", key) for entry in rounds]}
    site_values = []
    for entry in rounds:
        site_values.append([_metric(site, judged, key) for site in _site_entries(entry)])

    chance = None
    if key == "balanced_accuracy" and run.classes:
        chance = 1 / len(run.classes)

    bounded = metrics.is_share(key)
    title = f"{run.title(key)} on the validation set"
    svg = charts.lines(
        title, numbers, curves, site_values, band_of=judged, bounded=bounded, chance=chance
    )
    model = dict(MODEL_KINDS)[judged]
    legend = [(judged, model)]
    caption = ""
    if any(map(any, site_values)):
        legend.append(("band", f"{model.lower()}, lowest to highest site"))
        caption = "Line: all validation images pooled. Band: each site's own validation images."

    if chance is not None:
        caption += " Dotted: guessing."

    scores = Chart(title, legend, svg, caption)
    site_losses = [[site.get("train_loss") for site in _site_entries(entry)] for entry in rounds]

    mean = {judged: [entry.get("train_loss") for entry in rounds]}
    svg = charts.lines("Training loss", numbers, mean, site_losses, band_of=judged)
    legend = [(judged, "mean over the cohort"), ("band", "lowest to highest site")]
    caption = "The method's own loss, as the sites report it while training."
    losses = Chart("Training loss", legend, svg, caption)
    return [chart for chart in (scores, losses) if chart.svg is not None]


def costs(run: RunFiles) -> list[Chart]:
    """Return the charts of seconds and megabytes of each round, where the rounds have them."""
    rounds = run.rounds
    drawn = []
    numbers = [entry["round"] for entry in rounds]
    for title, unit, names in _COSTS:
        parts = {}
        legend = []
        for colour, name, text in names:
            parts[colour] = [entry.get(name) for entry in rounds]
            legend.append((colour, text))

        if numbers and (svg := charts.stacked(title, numbers, parts, unit)) is not None:
            drawn.append(Chart(title, legend, svg))

    return drawn


def _metric(entry: Config, group: str, metric: str) -> float | None:
    return (entry.get(group) or {}).get(metric)


def _site_entries(entry: Config) -> Sequence[Config]:
    return tuple((entry.get("sites") or {}).values())
