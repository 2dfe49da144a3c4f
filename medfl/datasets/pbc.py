"""PBC: eight kinds of normal peripheral blood cell, as BloodMNIST or as the folders that it was made from."""

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import draw_medmnist
from medfl.datasets.readers.splitting import by_group, published
from medfl.datasets.readers.tables import class_folders, medmnist

SHEET = sheet("pbc")
CLASSES = SHEET["classes"]

DATASET = DataSet(
    **SHEET,
    layouts=(
        medmnist(
            "MedMNIST bloodmnist[_64|_128|_224].npz",
            "bloodmnist",
            len(CLASSES),
            "official",
            centre="barcelona",
        ),
        class_folders(
            f"PBC_dataset_normal_DIB/{{{','.join(CLASSES)}}}/*.jpg, as folders or in PBC_dataset_normal_DIB.zip",
            ("seeded",),
            "PBC_dataset_normal_DIB",
            ("PBC*.zip", "snkd93bnjr*.zip"),
            CLASSES,
            centre="barcelona",
        ),
    ),
    rules={"official": published("official"), "seeded": by_group("pbc")},
    draw=draw_medmnist("bloodmnist", len(CLASSES), 3),
)
