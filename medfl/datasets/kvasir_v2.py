"""Kvasir v2: eight kinds of finding in gastrointestinal endoscopy."""

from medfl.datasets.base import DataSet, Download
from medfl.datasets.phantoms.phantom import draw_files, even
from medfl.datasets.phantoms.scene import class_scenes
from medfl.datasets.readers.splitting import by_group
from medfl.datasets.readers.tables import class_folders

CLASSES = (
    "dyed-lifted-polyps",
    "dyed-resection-margins",
    "esophagitis",
    "normal-cecum",
    "normal-pylorus",
    "normal-z-line",
    "polyps",
    "ulcerative-colitis",
)
ROOT = "kvasir-dataset-v2"

DATASET = DataSet(
    name="kvasir_v2",
    title="Kvasir v2: eight findings in gastrointestinal endoscopy",
    classes=CLASSES,
    concepts=(
        "dyed lifted polyp",
        "dyed resection margin",
        "esophagitis",
        "cecum",
        "pylorus",
        "Z-line",
        "polyps",
        "ulcerative colitis",
    ),
    centres=("vestre_viken",),
    channels=3,
    folders=("kvasir_v2", "kvasir-v2", "kvasir"),
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
    licence="free for research and education, as its page states",
    source="https://datasets.simula.no/kvasir/",
    citation="Pogorelov et al.: KVASIR: a multi-class image dataset for computer aided "
    "gastrointestinal disease detection. MMSys 2017",
    draw=draw_files(
        class_scenes(len(CLASSES), 3),
        even(len(CLASSES)),
        lambda case: f"{ROOT}/{CLASSES[case.label]}/{CLASSES[case.label]}-{case.number:04d}.jpg",
    ),
    per_class=76,
    notes=(
        "7:1:2 within each class by image in the order of a hash of the file name; patients are not named",
    ),
    downloads=(
        Download(
            "https://datasets.simula.no/downloads/kvasir/kvasir-dataset-v2.zip",
            "kvasir-dataset-v2.zip",
        ),
    ),
)
