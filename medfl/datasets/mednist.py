"""MedNIST: six kinds of radiological picture, an easy first task."""

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import draw_medmnist
from medfl.datasets.readers.splitting import by_group, published
from medfl.datasets.readers.tables import class_folders, medmnist

SHEET = sheet("mednist")
CLASSES = SHEET["classes"]

DATASET = DataSet(
    **SHEET,
    layouts=(
        medmnist(
            "mednist_64.npz: {train,val,test}_{images,labels}",
            "mednist",
            len(CLASSES),
            "file",
            more_splits=("seeded",),
        ),
        class_folders(
            "MedNIST/{AbdomenCT,BreastMRI,CXR,ChestCT,Hand,HeadCT}/*.jpeg, as folders or in MedNIST.zip",
            ("seeded",),
            "MedNIST",
            ("MedNIST*.zip", "mednist*.zip", "archive.zip"),
            CLASSES,
        ),
    ),
    rules={"file": published("file"), "seeded": by_group("mednist")},
    draw=draw_medmnist("mednist", len(CLASSES), 1, CLASSES),
)
