"""PBC: eight kinds of normal peripheral blood cell, as BloodMNIST or as the folders that it was made from."""

from medfl.datasets.base import DataSet, Download
from medfl.datasets.phantoms.phantom import draw_medmnist
from medfl.datasets.readers.splitting import by_group, published
from medfl.datasets.readers.tables import class_folders, medmnist

CLASSES = (
    "basophil",
    "eosinophil",
    "erythroblast",
    "ig",
    "lymphocyte",
    "monocyte",
    "neutrophil",
    "platelet",
)

DATASET = DataSet(
    name="pbc",
    title="PBC: eight kinds of peripheral blood cell",
    classes=CLASSES,
    concepts=(
        "basophil",
        "eosinophil",
        "erythroblast",
        "immature granulocyte",
        "lymphocyte",
        "monocyte",
        "neutrophil",
        "platelet",
    ),
    centres=("barcelona",),
    channels=3,
    folders=("pbc", "bloodmnist", "medmnist"),
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
    licence="CC BY 4.0",
    source="https://doi.org/10.5281/zenodo.10519652 (MedMNIST); https://doi.org/10.17632/snkd93bnjr.1 (images)",
    citation="Acevedo et al.: A dataset of microscopic peripheral blood cell images. Data in Brief 30, 105474 (2020); "
    "Yang et al.: MedMNIST v2. Scientific Data 10, 41 (2023)",
    draw=draw_medmnist("bloodmnist", len(CLASSES), 3),
    per_class=76,
    notes=(
        "11,959 / 1,712 / 3,421 images in MedMNIST's split; the folders have 17,092 and no published split",
    ),
    downloads=(
        Download(
            "https://zenodo.org/records/10519652/files/bloodmnist_64.npz?download=1",
            "bloodmnist_64.npz",
            "md5:2b94928a2ae4916078ca51e05b6b800b",
        ),
    ),
)
