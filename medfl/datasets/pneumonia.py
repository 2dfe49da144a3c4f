"""Paediatric chest radiographs with and without pneumonia: PneumoniaMNIST or the folders that it was made from."""

from __future__ import annotations

import re

from medfl.datasets.base import DataSet, Download
from medfl.datasets.phantoms.phantom import draw_medmnist
from medfl.datasets.readers.splitting import by_group, published
from medfl.datasets.readers.tables import class_folders, medmnist

FOLDERS = ("NORMAL", "PNEUMONIA")


def patient(kind: str, stem: str) -> str:
    """Return the patient in a file name: person<n>_…, IM-<n>-…, NORMAL2-IM-<n>-…; otherwise the image itself."""
    match = re.match(r"(person\d+)_|((?:NORMAL2-)?IM-\d+)-", stem)
    return f"{kind}/{match[1] or match[2] if match else stem}"


DATASET = DataSet(
    name="pneumonia",
    title="Paediatric chest radiographs: normal or pneumonia",
    classes=("normal", "pneumonia"),
    concepts=("normal chest", "pneumonia"),
    centres=("guangzhou",),
    channels=1,
    mixed_channels=True,
    folders=("pneumonia", "pneumoniamnist", "chest_xray", "chest-xray-pneumonia", "medmnist"),
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
    licence="CC BY 4.0",
    source="https://doi.org/10.5281/zenodo.10519652 (MedMNIST); https://doi.org/10.17632/rscbjbr9sj (images)",
    citation="Kermany et al.: Identifying medical diagnoses and treatable diseases by image-based deep learning. "
    "Cell 172 (2018); "
    "Yang et al.: MedMNIST v2. Scientific Data 10, 41 (2023)",
    draw=draw_medmnist("pneumoniamnist", 2, 1),
    per_class=300,
    notes=(
        "split fedhelp: all images cut anew within each class, 620 of 5856 to test, a tenth of the others to validate",
        "a person number in a file name counts as one patient, for bacterial and viral pneumonia alike",
        "patients are known from the file names of the folders only; MedMNIST's arrays do not name them",
        "MedMNIST's arrays repeat some images, 8 of them in both train and val",
    ),
    downloads=(
        Download(
            "https://zenodo.org/records/10519652/files/pneumoniamnist.npz?download=1",
            "pneumoniamnist.npz",
            "md5:28209eda62fecd6e6a2d98b1501bb15f",
        ),
    ),
)
