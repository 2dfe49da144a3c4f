"""Coverage promised by `medfl calibrate` and reached, over many divisions of a run's validation and test images.

    python benchmarks/coverage.py RUN [--splits 200] [--coverage 0.9] [--scores aps] [--json | --markdown]

A run's model scores the validation and the test images of each site once. Each division takes one half of every site's
images to calibrate and the other half to test, first of the sites as they are, then of sites alike: all images dealt
out anew, as many to each. In the mean over the divisions pooled and shrunken thresholds keep the promise at every site
that is like the others; of the sites as they are the rows say where they do not.

A row has a site's mean coverage, its standard error over the divisions, and whether it is below the promise by more
than two of them; `ratio` is the coverage relative to the promise.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from medfl.core.seeding import derive
from medfl.core.setting_values import WAYS
from medfl.core.tables import markdown_table, text_table
from medfl.evaluation import conformal
from medfl.evaluation.conformal import Scored
from medfl.problem.tasks import KINDS
from medfl.runs.result import Result, load_run

Places = Mapping[str, Sequence[int]]


def scored(result: Result, scores: str) -> tuple[Scored, dict[str, list[int]]]:
    """Return all validation and test cases of a run and which of them each site has."""
    kind = KINDS[result.task]
    judges = result.judges()
    parts = []
    places: dict[str, list[int]] = {}
    first = 0
    for name, sections in result.run.partition.sites.items():
        places[name] = []
        for section in ("validate", "test"):
            if not sections.get(section):
                continue

            network = judges.get(name, judges.get(""))
            assert network is not None
            examined = result.examined(network, section, sections[section])
            parts.append(kind.scored(examined, scores or kind.set_scores[0]))
            places[name] += range(first, first + len(parts[-1]))
            first += len(parts[-1])

    arrays = {}
    for name in ("bins", "shares", "size", "complete", "empty"):
        arrays[name] = np.concatenate([getattr(part, name) for part in parts])

    ids = tuple(ident for part in parts for ident in part.ids)
    return replace(parts[0], ids=ids, **arrays), places


def divided(
    cases: Scored,
    places: Places,
    coverage: float,
    strength: float,
    draw: np.random.Generator,
) -> dict[tuple[str, str], float]:
    """Return (site, way) -> coverage of one half of a site's cases, by thresholds of the others."""
    sums = {}
    tests = {}
    for name, rows in places.items():
        order = draw.permutation(rows).tolist()
        half = len(order) // 2
        sums[name] = conformal.sums_of(cases.select(order[:half]))
        tests[name] = cases.select(order[half:])

    reached = {}
    for name, ways in conformal.shared(sums, strength).items():
        for way in WAYS:
            place = conformal.place_of(ways[way], coverage)
            if place is not None and len(tests[name]):
                reached[name, way] = 1 - float(tests[name].losses(place).mean())

    return reached


def rows_of(
    result: Result,
    splits: int = 200,
    coverage: float = 0.9,
    scores: str = "",
    strength: float = 100.0,
) -> list[dict[str, object]]:
    """Return a row for each site and way, of the sites as they are and of sites alike."""
    cases, places = scored(result, scores)
    rows: list[dict[str, object]] = []
    for title in ("as they are", "alike"):
        draw = np.random.default_rng(derive(result.run.seed, "coverage", title))
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(splits):
            dealt: Places = places
            if title == "alike":
                order = draw.permutation(len(cases)).tolist()
                dealt = {}
                for name, own in places.items():
                    dealt[name] = [order.pop() for _ in own]

            for key, value in divided(cases, dealt, coverage, strength, draw).items():
                found.setdefault(key, []).append(value)

        for (name, way), values in found.items():
            mean = float(np.mean(values))
            error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
            rows.append({
                "name": f"{name}, {way}", "relative_to": "the promise", "ratio": mean / coverage, "sites": title,
                "site": name, "way": way, "cases": len(places[name]), "promised": coverage, "reached": mean,
                "error": error, "below": bool(mean < coverage - 2 * error),
            })  # fmt: skip

    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Print the rows and, of each way, at how many sites the promise is not kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run")
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--scores", default="")
    parser.add_argument("--strength", type=float, default=100.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(words)
    rows = rows_of(
        load_run(options.run), options.splits, options.coverage, options.scores, options.strength
    )
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0

    head = ["sites", "site", "threshold of", "images", "promised", "reached", "below"]
    body = []
    for row in rows:
        cells = [row["sites"], row["site"], row["way"], row["cases"], row["promised"]]
        cells += [f"{row['reached']:.3f} ± {row['error']:.3f}", "below" if row["below"] else ""]
        body.append([str(cell) for cell in cells])

    if options.markdown:
        lines = [markdown_table(head, body)]
    else:
        lines = text_table(head, body)

    for title in ("as they are", "alike"):
        for way in WAYS:
            sites = [row for row in rows if (row["sites"], row["way"]) == (title, way)]
            below = [str(row["site"]) for row in sites if row["below"]]
            lines.append(
                f"{title}, {way}: below at {len(below)} of {len(sites)} sites {', '.join(below)}".rstrip()
            )

    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
