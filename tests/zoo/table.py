"""docs/zoo.md: each bundle of the public zoo at hand inspected as published, and trained for a round on drawn data.

`python -m tests.zoo.table` runs them all, which takes minutes, and writes the page; tests
hold its rows to what they see.
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medfl.bundle.configuration import target_name
from medfl.bundle.files import config_file, read
from medfl.core.errors import InputError, MedflError
from medfl.core.tables import markdown_table
from medfl.policy import admission
from medfl.policy.inspection import inspect
from medfl.policy.policy import Policy
from medfl.runs.launch import federate
from medfl.storage.run_documents import read_run
from tests.support.own_trainers import hands, nodules, spleens
from tests.support.zoo_data import DRAW, ROOT

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
OWN = Policy(allow=frozenset({"scripts", "pickle"}))
HEAD = (
    "Bundle",
    "Trainer",
    "Accepted",
    "A round of FedAvg",
    "Overridden",
    "Put right for MONAI 1.6",
)


def bundles() -> list[str]:
    """Return the names of the bundles at hand."""
    return sorted(path.name for path in ROOT.glob("*") if (path / "configs").is_dir())


def trainer(name: str) -> str:
    """Return the class of a bundle's trainer, "none" without a training configuration."""
    file = config_file(ROOT / name, "train")
    content: Mapping[str, Any] = read(file) if file else {}
    found = (content.get("train") or {}).get("trainer") or content.get("trainer") or {}
    own = ", own iteration" if found.get("iteration_update") else ""
    return f"{target_name(found) or 'none'}{own}"


def verdict(name: str) -> str:
    """Return what inspection says: accepted without a word, with which words, or why not."""
    found = inspect(ROOT / name, OWN)
    words = sorted({word for word, _ in found.allowed})
    if not found.accepted:
        return f"refused: {found.refusals[0]}"
    return (
        f"with the word{'s' * (len(words) > 1)} {', '.join(f'`{word}`' for word in words)}"
        if words
        else "yes"
    )


def row(name: str) -> list[str]:
    """Inspect a bundle and train it for a round; return its row."""
    cells = [f"`{name}`", f"`{trainer(name)}`", verdict(name)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MONAI about the bundles, which are not ours
        data, out = Path(folder) / "data", Path(folder) / "out"
        data.mkdir()
        config = _drawn(name, data)
        requested: dict[str, Any] = {"sites": 2, "rounds": 1, "partition": "iid"}
        requested |= {} if "dataset_dir" in config else {"data": str(data)}
        requested |= {"batch_size": config.pop("--batch-size")} if "--batch-size" in config else {}
        try:
            with admission.trusting(not inspect(ROOT / name).accepted):
                summary = federate(
                    str(ROOT / name), config=config, requested=requested, out=out, jobs=1
                )
        except MedflError as error:
            kind = "refused" if isinstance(error, InputError) else "fails"
            return [
                *cells,
                re.sub(r"/\S*/(?=\S)", "", f"{kind}: {' '.join(str(error).split())}"),
                "",
                "",
            ]
        key = read_run(out / "run.json")[1]["key_metric"]
        value = (summary["last"] or {}).get(key)
        scores = "" if value is None else f"{key} {value:.2f}"
        changed = ", ".join(f"`{key}`" for key in config if key != "dataset_dir")
        adapted = ", ".join(f"`{one}`" for one in read_run(out / "run.json")[0].adapted)
    return [*cells, f"trains{f' ({scores})' if scores else ''}", changed, adapted]


def _drawn(name: str, data: Path) -> dict[str, Any]:
    """Draw a bundle's data into a folder; return what is overridden."""
    if name in DRAW:
        return dict(DRAW[name](data))
    if name == "mednist_gan":
        return {"dataset_dir": str(hands(data / "a", 12)), "--batch-size": 3}
    if name == "spleen_deepedit_annotation":
        reader = {"train#preprocessing_transforms#0#reader": "NibabelReader"}
        return {"dataset_dir": str(spleens(data / "a", 11)), "spatial_size": [64, 64, 32], **reader}
    if name == "lung_nodule_ct_detection":
        folder = nodules(data / "a", 3)
        sizes = {"batch_size": 1, "patch_size": [64, 64, 32], "val_patch_size": [64, 64, 32]}
        named = {"dataset_dir": str(folder), "data_list_file_path": str(folder / "list.json")}
        return {**named, **sizes}
    return {}


def page_rows() -> dict[str, list[str]]:
    """Return the cells of the page's table by bundle."""
    lines = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {one[0].strip("`"): one for one in cells}


def main(names: Sequence[str]) -> None:
    """Write the page, with the rows of these bundles made anew; without names, of all."""
    before, rows = page_rows(), []
    for name in bundles():
        rows.append(row(name) if not names or name in names else before[name])
        sys.stderr.write(" | ".join(rows[-1]) + "\n")
    accepted = [each[2] for each in rows]
    head, _, tail = PAGE.read_text(encoding="utf-8").partition("<!-- table -->")
    tail = tail.partition("<!-- /table -->")[2]
    said = (
        f"{len(rows)} bundles: {accepted.count('yes')} are accepted without a word, "
        f"{sum(text.startswith('with') for text in accepted)} with words, "
        f"{sum(text.startswith('refused') for text in accepted)} refused; "
        f"{sum(each[3].startswith('trains') for each in rows)} train."
    )
    table = markdown_table(list(HEAD), rows, is_markup=True)
    PAGE.write_text(
        f"{head}<!-- table -->\n\n{said}\n\n{table}\n\n<!-- /table -->{tail}", encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
