"""The descriptions in an exported bundle: metadata.json, docs/README.md and docs/medfl.json, the record of the run.

They contain no path of the local machine and no item's name.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

from markupsafe import Markup

from medfl import methods
from medfl.bundle.configuration import target_name
from medfl.bundle.files import RESEARCH_ONLY, SCHEMA, read
from medfl.core import (
    DISTRIBUTION,
    SECTIONS,
    Config,
    Document,
    Run,
    map_values,
    markdown_text,
    pick,
    pip_install,
    slug,
    version_of,
    visible,
    without,
)
from medfl.evaluation.mask_metrics import KINDS
from medfl.export.configs import TORCHSCRIPT, templates
from medfl.export.formats import Agreement, ShapeRecorder, format_difference
from medfl.runs.networks_of_run import Model, RunNetworks
from medfl.storage import PHANTOM, config_file, file_sha256

PHANTOM_NOTE = "PHANTOM: images drawn by a program; these numbers say nothing about patients"
_PATH_TO_REMOVE = re.compile(
    r"""(?:(?<=[\s'"=(:,])|^)(?:~|[A-Za-z]:\\|/(?!/|workspace/))[\w.+%@~/\\-]+"""
)
"""A path of the local machine: not in the bundle, not a URL, not the zoo's /workspace."""
_DEFAULTS = {
    "supported_apps": {},
    "intended_use": RESEARCH_ONLY,
    **dict.fromkeys(
        ("data_source", "authors", "copyright", "task"), "not stated by the source bundle"
    ),
    "description": "A network trained across sites.",
}
_OF_FOLDERS = ("--out", "--data", "--from")
_TENSOR = {
    "type": "image",
    "format": "magnitude",
    "modality": "n/a",
    "spatial_shape": [],
    "dtype": "float32",
    "value_range": [],
    "is_patch_data": False,
}


# Numbers


def scores(trained: RunNetworks, model: Model) -> dict[str, float]:
    """Return the test metrics of a model; for an interrupted run the metrics of its last validation.

    A personal model is scored on its own site's items.
    """
    if model.site:
        if trained.which == "best" or not trained.finished:
            return {}

        row = next((row for row in trained.files.sites if row["site"] == model.site), {})
        personal = {}
        for column, text in row.items():
            if column.startswith("personal_"):
                personal[column.removeprefix("personal_")] = float(text)

        return _finite(personal)

    if trained.summary:
        pooled = (trained.summary.get("global") or {}).get(trained.which) or {}
        return _finite(without(pooled, ["round"]))

    # a run that was interrupted has no summary
    entry = next((entry for entry in trained.files.rounds if entry["round"] == trained.round), {})
    validation = entry.get("val_global") or {}
    return _finite({f"validation_{key}": value for key, value in validation.items()})


def structures(trained: RunNetworks, model: Model) -> dict[str, Document]:
    """Return the test metrics of each structure and its number of cases, {} if there are no structures."""
    flat = scores(trained, model)
    summary = trained.summary
    scope = "personal" if model.site else "global"
    metrics = (summary.get(scope) or {}).get(trained.which) or {}
    metrics = metrics.get("classes") or {}

    if not model.site or not flat:
        return map_values(dict, metrics)

    of_site = {}
    for name, values in metrics.items():
        of_structure = {kind: flat.get(f"{kind}_{slug(name)}") for kind in values}
        of_structure["cases"] = int(flat.get(f"cases_{slug(name)}", 0))
        of_site[name] = of_structure

    return of_site


def _finite(values: Config) -> dict[str, float]:
    finite = {}
    for key, value in values.items():
        if isinstance(value, int | float) and math.isfinite(value):
            finite[key] = round(float(value), 6)

    return finite


def counts(run: Run, model: Model) -> dict[str, int]:
    """Return the number of items in each section, at all sites or at the model's site."""
    if model.site:
        sites = [run.partition.sites[model.site]]
    else:
        sites = list(run.partition.sites.values())
    counts = {}
    for section in SECTIONS:
        counts[section] = sum(len(site.get(section, ())) for site in sites)

    return counts


# The record of the run


def run_record(trained: RunNetworks) -> Document:
    """Return run.json and summary.json without paths of the local machine and without the items' names."""
    device = trained.document.get("device", "cpu")
    run = {**trained.document, **trained.run.to_dict(), "device": device}
    run = without(run, ["bundle_path", "site_class_counts"])
    run["data"] = without(run["data"], ["folder"])
    sites = map_values(partial(map_values, len), run["partition"]["sites"])
    spec = _without_paths(run["partition"]["spec"])
    run["partition"] = {**run["partition"], "spec": spec, "notes": [], "sites": sites}
    run["command"] = _command(str(run.get("command", "")))

    if run.get("resumed"):
        resumed = []
        for entry in run["resumed"]:
            resumed.append({**entry, "command": _command(str(entry.get("command", "")))})

        run["resumed"] = resumed

    if run.get("public"):
        data = without(run["public"]["data"], ["folder"])
        teachers = [digest for _, digest in run["public"]["teachers"]]
        run["public"] = {**run["public"], "data": data, "teachers": teachers}

    run["run_hash"] = trained.run_hash
    return {"run": _without_paths(run), "summary": _without_paths(trained.summary or None)}


def _command(text: str) -> str:
    """Return a command with DIR instead of its folders."""
    try:
        words = shlex.split(text)
    except ValueError:  # an open quotation mark, in a record from elsewhere
        return ""

    replaced = []
    for before, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if before in _OF_FOLDERS and word != PHANTOM:
            replaced.append("DIR")
        elif equals and name in _OF_FOLDERS and value != PHANTOM:
            replaced.append(f"{name}=DIR")
        else:
            replaced.append(_without_paths(word))

    return shlex.join(replaced)


def _without_paths(node: Any) -> Any:
    """Return plain values with DIR in place of every absolute path."""
    if isinstance(node, Mapping):
        return map_values(_without_paths, node)
    if isinstance(node, list | tuple):
        return list(map(_without_paths, node))
    if isinstance(node, str):
        return _PATH_TO_REMOVE.sub("DIR", node)

    return node


def options(run: Run) -> Document:
    """Return the method's options that differ from its defaults, without paths of the local machine."""
    defaults = methods.values_of(methods.load(run.method))
    changed = {}
    for name, value in all_options(run).items():
        if name not in defaults or defaults[name] != value:
            changed[name] = value

    return changed


def all_options(run: Run) -> Document:
    """Return the method's options without paths of the local machine."""
    values: Document = _without_paths(run.options)
    return values


# metadata.json


def bundle_metadata(
    folder: Path,
    trained: RunNetworks,
    model: Model,
    recorder: ShapeRecorder,
    agreements: Mapping[str, Agreement],
    kind: str,
) -> Document:
    """Return the content of metadata.json, based on that of the run's bundle, if any.

    `kind` is how the configuration defines the network: "configuration", "medfl" or "torchscript";
    `folder` already contains its files.
    """
    run = trained.run
    meta = {"schema": SCHEMA, **_DEFAULTS, **deepcopy(dict(trained.bundle.metadata))}
    version = _next(str(meta.get("version", "0.0.0")))
    meta["version"] = version
    meta["changelog"] = {version: title(trained, model), **dict(meta.get("changelog") or {})}
    meta |= {f"{short}_version": _version(name) for short, name in _PACKAGES.items()}
    meta["required_packages_version"] = _packages(
        folder,
        {
            **dict(meta.pop("optional_packages_version", {})),
            **dict(meta.get("required_packages_version") or {}),
        },
    )
    meta["name"] = f"{meta.get('name') or run.bundle}, federated ({run.method})"

    if run.data.source == PHANTOM:
        data = PHANTOM_NOTE
    else:
        data = f"real test images: {meta['data_source']}"

    meta["eval_metrics"] = {
        "data": data,
        "items": counts(run, model)["test"],
        **scores(trained, model),
    }
    if by_structure := structures(trained, model):
        meta["eval_metrics"]["structures"] = by_structure

    meta["network_data_format"] = _data_format(meta.get("network_data_format") or {}, recorder)
    meta["medfl"] = {
        "method": run.method,
        "options": options(run),
        "round": model.round,
        "which": trained.which,
        "site": model.site,
        "sites": len(run.partition.sites),
        "partition": _without_paths(run.partition.spec),
        "data_source": run.data.source,
        "finished": trained.finished,
        "run_hash": trained.run_hash,
        "network": kind,
        "agreement": map_values(asdict, agreements),
    }
    # as the files of MONAI's model zoo begin
    return {**pick(meta, ("schema", "version", "changelog")), **meta}


_NAMED = {
    "SupervisedEvaluator": "pytorch-ignite",
    "PILReader": "pillow",
    "ndimage": "scipy",
    ".nii": "nibabel",
    "KeepLargest": "scikit-image",
    "medfl": DISTRIBUTION,
}
"""What an inference configuration names -> the package that it needs."""
_PACKAGES = {"monai": "monai", "pytorch": "torch", "numpy": "numpy"}


def _packages(folder: Path, former: Mapping[str, object]) -> dict[str, str]:
    """Return the installed versions of the packages that the source bundle lists; its own version for missing ones."""
    versions = {}
    for listed, version in former.items():
        if listed not in ("medfl", DISTRIBUTION):
            versions[listed] = _version(listed) or str(version)

    inference = config_file(folder, "inference", medfl=False)
    text = "medfl"
    if inference:
        text = inference.read_text("utf-8")

    for word, name in _NAMED.items():
        if word in text and (version := _version(name)):
            versions[name] = version

    return versions


def _version(package: str) -> str:
    try:
        return version_of(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def _next(version: str) -> str:
    """Return the next minor version."""
    numbers = re.match(r"(\d+)\.(\d+)\.\d+", version)
    if numbers:
        return f"{numbers[1]}.{int(numbers[2]) + 1}.0"

    return "0.1.0"


def title(trained: RunNetworks, model: Model) -> str:
    """Describe in one line what is exported."""
    run = trained.run

    owner = "the global model"
    if model.site:
        owner = f"the model of site {model.site}"

    text = f"weights of {owner} after round {model.round}"
    if trained.which == "best":
        text += " (best by validation)"

    if not trained.finished:
        text += " of a run that was interrupted"

    text += f": {run.method}, {len(run.partition.sites)} sites"
    if run.data.source == PHANTOM:
        text += " of a PHANTOM (drawn images)"

    return text


def _data_format(source: Config, recorder: ShapeRecorder) -> Document:
    """Return network_data_format with the recorded shapes, and defaults for what the source bundle omits."""
    inputs, outputs = (deepcopy(dict(source.get(part) or {})) for part in ("inputs", "outputs"))
    for part, name, which in ((inputs, "image", 0), (outputs, "pred", 1)):
        count = recorder.shapes[0][which][1]
        tensor = {**_TENSOR, **dict(part.get(name) or {})}
        tensor |= {"num_channels": count, "spatial_shape": recorder.spatial(which)}
        if len(values := tensor["value_range"]) > 2:  # all values individually, as in some bundles
            tensor["value_range"] = [min(values), max(values)]

        # names of another number of channels are of other channels
        if len(channels := tensor.get("channel_def") or {}) != count:
            channels = {str(index): f"channel {index}" for index in range(count)}

        part[name] = {**tensor, "channel_def": channels}

    return {**source, "inputs": inputs, "outputs": outputs}


# Files


def weight_files(folder: Path) -> dict[str, Document]:
    """Return bytes and sha256 of each file of weights, by its path."""
    files = {}
    for path in sorted((folder / "models").iterdir()):
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}

    return files


def readme(
    meta: Config,
    trained: RunNetworks,
    model: Model,
    inference: Path | None,
    notes: Sequence[str],
    any_folder: bool,
) -> str:
    """Return docs/README.md in the model zoo's template.

    `inference` is the written configuration, None if there is none; `any_folder`: it predicts any folder of images.
    """
    run = trained.run
    by_structure = structures(trained, model)
    pooled = scores(trained, model)
    for name, kind in product(
        by_structure, (*KINDS, "cases")
    ):  # these are in the table of structures
        pooled.pop(f"{kind}_{slug(name)}", None)
        pooled.pop(f"{kind}_{slug(name)}_cases", None)

    environment = templates(
        lambda value: value if isinstance(value, Markup) else markdown_text(value)
    )
    environment.filters |= {"sized": _sized, "tiny": format_difference}
    content = {}
    if inference:
        content = read(inference)

    steps = (content.get("preprocessing") or {}).get("transforms")
    transforms = []
    if isinstance(steps, list):  # otherwise an expression, which is not evaluated here
        transforms = [target_name(step) for step in steps if isinstance(step, Mapping)]

    text = environment.get_template("export_readme.md.j2").render(
        meta=meta,
        run=run,
        site=model.site,
        round=model.round,
        which=trained.which,
        finished=trained.finished,
        install=pip_install(),
        packages=[
            f"{name}=={version}" for name, version in meta["required_packages_version"].items()
        ],
        volumes=len(meta["network_data_format"]["inputs"]["image"]["spatial_shape"]) == 3,
        scripted=content.get("network_def") == TORCHSCRIPT,
        paper=methods.load(run.method).paper,
        options=options(run),
        phantom=run.data.source == PHANTOM,
        phantom_note=PHANTOM_NOTE,
        counts=counts(run, model),
        scores=pooled,
        structures=by_structure,
        steps=transforms,
        partition=_without_paths(run.partition.spec),
        command=Markup(" ".join(_command(str(trained.document.get("command", ""))).splitlines())),  # noqa: S704 (in a block of code)
        tags=tags(meta, run),
        notes=notes,
        inference=inference.name if inference else "",
        any_folder=any_folder,
        segments=trained.task.kind == "segmentation",
        data_notes=_without_paths(run.data.notes),
        channels=list(meta["network_data_format"]["outputs"]["pred"]["channel_def"].values()),
    )

    return visible(re.sub(r"\n{3,}", "\n\n", text).rstrip()) + "\n"


def tags(meta: Config, run: Run) -> list[str]:
    """Return the tags of the bundle."""
    image = meta["network_data_format"]["inputs"]["image"]
    words = ["federated learning", run.method]
    if image["modality"] not in ("n/a", ""):
        words.append(str(image["modality"]))

    if "data_type" in meta:
        words.append(str(meta["data_type"]))

    return words


_LARGE_HEAD = """\
# The files are here; whoever publishes the bundle without them says where they lie in `url`.
large_files:
"""


def large_files(folder: Path, limit: int) -> str:
    """Return large_files.yml for the files above the zoo's limit, "" if there are none."""
    entries = ""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size > limit:
            entries += f'- path: {path.relative_to(folder).as_posix()}\n  url: ""\n'
            entries += f"  hash_val: {file_sha256(path)}\n  hash_type: sha256\n"

    return _LARGE_HEAD + entries if entries else ""


def _sized(count: int) -> str:
    if count >= 1e6:
        return f"{count / 1e6:.1f} MB"

    return f"{max(1, round(count / 1e3))} kB"


def as_json(document: Config) -> str:
    """Return a JSON file's content."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
