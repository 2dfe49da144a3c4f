"""Retinal OCT-C8: eight kinds of retinal disease in OCT scans."""

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import draw_files, even
from medfl.datasets.phantoms.scene import class_scenes
from medfl.datasets.readers.splitting import published
from medfl.datasets.readers.tables import class_folders

SHEET = sheet("oct_c8")
CLASSES = SHEET["classes"]
ROOT = "RetinalOCT_Dataset"

DATASET = DataSet(
    **SHEET,
    layouts=(
        class_folders(
            f"{ROOT}/{{train,val,test}}/{{{','.join(CLASSES)}}}/*.jpg, as folders or in a zip "
            "(Retinal*.zip, retinal*.zip, archive.zip)",
            ("official",),
            ROOT,
            ("Retinal*.zip", "retinal*.zip", "archive.zip"),
            CLASSES,
            sections=True,
        ),
    ),
    rules={"official": published("official")},
    draw=draw_files(
        class_scenes(len(CLASSES), 1),
        even(len(CLASSES)),
        lambda case: (
            f"{ROOT}/{case.part}/{CLASSES[case.label]}/{CLASSES[case.label].lower()}_{1001 + case.number}.jpg"
        ),
    ),
)
