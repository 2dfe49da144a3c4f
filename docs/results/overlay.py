"""Draw chosen pictures of a segmentation run: python docs/results/overlay.py RUN OUT.png TITLE ID...

A run's own `pictures/` show its best, median and worst cases; this is for those whose licence lets them be shown here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

import medfl
from medfl import datasets
from medfl.report import overlays
from medfl.report.overlays import Example


def examples(run: medfl.Result, wanted: list[str]) -> list[Example]:
    """Return the cases of these ids, pictures among the run's test or validation items, on the grids of their files."""
    found = []
    for section in ("test", "validate"):
        listed = datasets.datalist(run.run.bundle, run.run.data.folder, section)
        items = {item["id"]: item for item in listed if item["id"] in wanted}
        for row in run.predict(section=section) if items else []:
            if row["id"] in items:
                image, mask = (np.asarray(Image.open(items[row["id"]][key]).convert("L")) for key in ("image", "label"))
                reference, prediction = (mask > 0).astype(np.uint8), np.asarray(row["mask"])
                scores = {"dice": float(row["dice"])}
                found.append(Example(section, row["id"], scores, image.T[None] / 255, reference.T, prediction.T, None))
    return found


def main(folder: str, out: str, title: str, *wanted: str) -> None:
    """Write the picture."""
    run = medfl.load_run(folder)
    cases = examples(run, list(wanted))
    missing = set(wanted) - {case.ident for case in cases}
    if missing:
        raise SystemExit(f"not among the held-out items of {folder}: {', '.join(sorted(missing))}")
    structures = run.plan.bundle.structures[1:]
    median = float(np.median([row["dice"] for row in run.predict()]))
    Path(out).write_bytes(overlays.mask_overlays(Path(out).stem, run.run.bundle, cases, structures, median, title).png)


if __name__ == "__main__":
    main(*sys.argv[1:])
