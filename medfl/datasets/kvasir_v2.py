"""Kvasir v2: eight kinds of finding in gastrointestinal endoscopy."""

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import draw_files, even
from medfl.datasets.phantoms.scene import class_scenes
from medfl.datasets.readers.splitting import by_group
from medfl.datasets.readers.tables import class_folders

SHEET = sheet("kvasir_v2")
CLASSES = SHEET["classes"]
ROOT = "kvasir-dataset-v2"

DATASET = DataSet(
    **SHEET,
    layouts=(
        class_folders(
            f"{ROOT}/<class>/*.jpg with the eight published class folders, as folders or in kvasir*.zip",
            ("seeded",),
            ROOT,
            ("kvasir*.zip",),
            CLASSES,
            centre="vestre_viken",
        ),
    ),
    rules={"seeded": by_group("kvasir_v2")},
    draw=draw_files(
        class_scenes(len(CLASSES), 3),
        even(len(CLASSES)),
        lambda case: f"{ROOT}/{CLASSES[case.label]}/{CLASSES[case.label]}-{case.number:04d}.jpg",
    ),
)
