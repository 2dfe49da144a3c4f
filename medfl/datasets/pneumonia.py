"""Paediatric chest radiographs with and without pneumonia: PneumoniaMNIST or the folders that it was made from."""

from __future__ import annotations

import re

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import draw_medmnist
from medfl.datasets.readers.splitting import by_group, published
from medfl.datasets.readers.tables import class_folders, medmnist

FOLDERS = ("NORMAL", "PNEUMONIA")


def patient(kind: str, stem: str) -> str:
    """Return the patient in a file name: person<n>_…, IM-<n>-…, NORMAL2-IM-<n>-…; otherwise the image itself."""
    match = re.match(r"(person\d+)_|((?:NORMAL2-)?IM-\d+)-", stem)
    return f"{kind}/{match[1] or match[2] if match else stem}"


DATASET = DataSet(
    **sheet("pneumonia"),
    layouts=(
        class_folders(
            "chest_xray/{train,val,test}/{NORMAL,PNEUMONIA}/*.jpeg, as folders or in a zip (chest*.zip, archive.zip)",
            ("official", "patient", "fedhelp"),
            "chest_xray",
            ("chest*.zip", "archive.zip"),
            FOLDERS,
            sections=True,
            centre="guangzhou",
            group=patient,
            notes=(
                "the published val folder has 16 images only; split patient cuts all images 70/10/20 by patient",
            ),
        ),
        medmnist(
            "MedMNIST pneumoniamnist[_64|_128|_224].npz",
            "pneumoniamnist",
            2,
            "official",
            more_splits=("fedhelp",),
            centre="guangzhou",
        ),
    ),
    rules={
        "official": published("official"),
        "patient": by_group("pneumonia"),
        "fedhelp": by_group("pneumonia", (4712 / 5856, 524 / 5856, 620 / 5856)),
    },
    draw=draw_medmnist("pneumoniamnist", 2, 1),
)
