"""MedNIST: six kinds of radiological picture, an easy first task."""

from medfl.datasets.base import DataSet
from medfl.datasets.phantoms.phantom import draw_medmnist
from medfl.datasets.readers.splitting import by_group, published
from medfl.datasets.readers.tables import class_folders, medmnist

CLASSES = ("AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT")

DATASET = DataSet(
    name="mednist",
    title="MedNIST: six kinds of radiological picture",
    classes=CLASSES,
    concepts=(
        "abdominal CT",
        "breast MRI",
        "chest radiograph",
        "chest CT",
        "hand radiograph",
        "head CT",
    ),
    channels=1,
    folders=("mednist", "MedNIST"),
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
    licence="CC BY-SA 4.0 as MONAI states it for MedNIST",
    source="https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/MedNIST.tar.gz",
    citation="MedNIST, assembled by B. J. Erickson (Mayo Clinic) from TCIA, the RSNA Bone Age Challenge "
    "and the NIH Chest X-ray data",
    draw=draw_medmnist("mednist", len(CLASSES), 1, CLASSES),
    per_class=100,
    notes=(
        "the split is by image at random; pictures of one patient may be in several sections, and the task is easy",
    ),
    download_note="fetch MedNIST.tar.gz from the source address and unpack it; the folder MedNIST/ is recognised",
)
