"""The shipped bundles, described as JSON-able documents, terminal text and a Markdown table.

Everything is read from their data sets and configurations.
"""

from __future__ import annotations

import re

from medfl import datasets
from medfl.bundle.files import find, read, read_protocol, shipped
from medfl.cli.arguments import as_flag_text
from medfl.core import tables, terminal
from medfl.core.documents import Document
from medfl.core.errors import InputError, did_you_mean
from medfl.core.mappings import pick_known, present

_COUNTED = {"segmentation": "masks", "multilabel": "findings", "regression": "number"}


def bundles(name: str | None = None) -> Document:
    """Return {"bundles": [...]}, or the description of one shipped bundle; InputError if there is no such bundle."""
    if name is None:
        return {"bundles": list(map(_bundle, shipped()))}
    if name not in shipped():
        raise InputError(
            f"bundle {name!r}",
            f"shipped bundles are {', '.join(shipped())}",
            did_you_mean(name, shipped(), "pick one (medfl run takes any folder)"),
        )

    data = datasets.get(name)
    return {
        **_bundle(name),
        "class_names": list(data.classes),
        "concepts": list(data.concepts),
        "centre_names": list(data.centres),
        "splits": list(data.splits),
        "layouts": list(data.layout_texts),
        "can_fetch": bool(data.downloads),
        "source": data.source,
        "citation": data.citation,
        "notes": list(data.notes),
    }


def _bundle(name: str) -> Document:
    protocol = read_protocol(name)
    data = datasets.get(name)
    training = read(find(name) / "configs" / "train.yaml")
    settings = (
        "sites",
        "partition",
        "cohort",
        "rounds",
        "local_epochs",
        "batch_size",
        "lr",
        "lr_decay",
        "split",
    )

    return {
        "name": name,
        "title": data.title,
        "task": data.task,
        "classes": len(data.classes),
        "centres": len(data.centres),
        "channels": data.channels,
        "image_size": training["image_size"],
        "patch_size": training.get("patch_size"),
        "network": training["network_name"],
        "protocol": protocol.get("protocol", ""),
        "defaults": present(pick_known(protocol, settings)),
        "presets": {
            name: preset.get("about", "")
            for name, preset in (protocol.get("presets") or {}).items()
        },
        "data": _status(name),
        "licence": data.licence,
    }


def _status(name: str) -> dict[str, str | None]:
    """Tell whether $MEDFL_DATA holds the images."""
    try:
        folder = datasets.locate(name)
    except InputError:
        return {"status": "phantom only", "folder": None}
    return {"status": "phantom" if datasets.is_phantom(folder) else "real", "folder": str(folder)}


def _short(text: str) -> str:
    """Cut a licence or protocol after its first part; "FedBM (Medical Image Analysis 2025)" becomes "FedBM 2025"."""
    return re.sub(r" \([^()]*(\d{4})\)", r" \1", re.split(r"[,;:] | as ", text)[0])


def classes_text(entry: Document) -> str:
    """Return the number of classes and their kind: masks with the background, findings or numbers."""
    subject = _COUNTED.get(entry["task"])
    return f"{entry['classes']} ({subject})" if subject else str(entry["classes"])


def _sides(entry: Document) -> str:
    """Return the size of the network's input: that of images, or of patches for volumes with patches."""
    size = entry["patch_size"] or entry["image_size"]
    if isinstance(size, list):
        return "x".join(map(str, size))

    return str(size)


def bundles_text(document: Document) -> str:
    """Return the table of bundles, or the page of one, as wide as the screen at most."""
    if "bundles" not in document:
        return _bundle_page(document)

    head = [
        "bundle",
        "images",
        "classes",
        "centres",
        "pixels",
        "network",
        "protocol",
        "data",
        "licence",
    ]
    rows = [
        [
            e["name"],
            e["title"].rpartition(": ")[2],
            classes_text(e),
            str(e["centres"]),
            _sides(e),
            e["network"],
            _short(e["protocol"]),
            e["data"]["status"].replace("phantom only", "none"),
            _short(e["licence"]),
        ]
        for e in document["bundles"]
    ]
    legend = (
        "data: what $MEDFL_DATA holds: real images, a phantom cohort (drawn images) or none; then runs draw a phantom",
        "one bundle with its classes, defaults and data layouts: medfl bundles NAME",
    )
    lines = [*tables.text_table(head, rows, ("licence", "pixels", "network")), ""]

    return "\n".join([*lines, *(line for text in legend for line in tables.wrap(text))])


def _bundle_page(entry: Document) -> str:
    name = entry["name"]
    status = {
        "real": f"real images in {entry['data']['folder']}",
        "phantom": f"a PHANTOM cohort in {entry['data']['folder']}",
        "phantom only": "no images below $MEDFL_DATA: runs use a PHANTOM cohort unless --data names a folder",
    }[entry["data"]["status"]]
    concepts = entry["concepts"] or entry["class_names"]  # mask values have only names
    words_by_class = zip(entry["class_names"], concepts, strict=True)
    classes = [
        key if concepts == entry["class_names"] else f"{key} ({words})"
        for key, words in words_by_class
    ]
    facts = {
        "task": f"{entry['task']}, {entry['channels']} channel{'s' * (entry['channels'] > 1)}, "
        f"{_sides(entry)} {'voxels' if 'x' in _sides(entry) else 'pixels a side'}",
        "classes": ", ".join(classes),
        "centres": ", ".join(entry["centre_names"]),
        "network": entry["network"],
        "protocol": entry["protocol"],
        "defaults": ", ".join(
            f"{key} {as_flag_text(value)}" for key, value in entry["defaults"].items()
        ),
        "presets": "; ".join(f"{name}: {about}" for name, about in entry["presets"].items())
        or "none",
        "splits": ", ".join(entry["splits"]),
        "data": status,
        "layouts": " | ".join(entry["layouts"]),
        "fetch": f"medfl data fetch {name} --out DIR"
        if entry["can_fetch"]
        else "by hand, from the source",
        "licence": entry["licence"],
        "source": entry["source"],
        "cite": entry["citation"],
    }
    notes = [line for note in entry["notes"] for line in terminal.hanging_indent("note: ", note)]
    lines = [
        *tables.wrap(f"{name}: {entry['title']}"),
        "",
        *terminal.definitions(facts),
        *notes,
    ]

    return "\n".join(lines)
