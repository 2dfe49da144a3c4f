"""Retinal OCT-C8: eight kinds of retinal disease in OCT scans."""

from medfl.datasets.base import DataSet
from medfl.datasets.phantoms.phantom import draw_files, even
from medfl.datasets.phantoms.scene import class_scenes
from medfl.datasets.readers.splitting import published
from medfl.datasets.readers.tables import class_folders

CLASSES = ("AMD", "CNV", "CSR", "DME", "DR", "DRUSEN", "MH", "NORMAL")
ROOT = "RetinalOCT_Dataset"

DATASET = DataSet(
    name="oct_c8",
    title="Retinal OCT-C8: eight classes of OCT scan",
    classes=CLASSES,
    concepts=(
        "Age-related macular degeneration",
        "Choroidal neovascularization",
        "Central serous retinopathy",
        "Diabetic macular edema",
        "Diabetic retinopathy",
        "Choroidal drusen",
        "Macular hole",
        "Normal retina",
    ),
    channels=1,
    mixed_channels=True,
    folders=("oct_c8", "OCT-C8", "retinal-oct-c8"),
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
    licence="stated on its Kaggle page; collected from open sources with terms of their own",
    source="https://www.kaggle.com/datasets/obulisainaren/retinal-oct-c8",
    citation="Subramanian et al.: Classification of retinal OCT images using deep learning. ICCCI 2022",
    draw=draw_files(
        class_scenes(len(CLASSES), 1),
        even(len(CLASSES)),
        lambda case: (
            f"{ROOT}/{case.part}/{CLASSES[case.label]}/{CLASSES[case.label].lower()}_{1001 + case.number}.jpg"
        ),
    ),
    per_class=76,
    notes=("18,400 / 2,800 / 2,800 images; patients and centres are not named",),
    download_note="download needs a Kaggle account: kaggle datasets download obulisainaren/retinal-oct-c8",
)
