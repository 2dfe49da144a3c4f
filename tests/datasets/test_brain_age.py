"""Age from T1 MRI: OASIS-1 and IXI with their tables, alone and together; the real scans; the phantom is learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.ensemble import RandomForestRegressor
from sklearn.metrics import r2_score

import medfl.datasets as datasets
from medfl.core.errors import InputError
from medfl.datasets.phantoms.phantom import save_volume

NAME = "brain_age"
SECTIONS = ("train", "validate", "test")
OASIS = (
    "ID,M/F,Hand,Age,Educ,SES,MMSE,CDR,eTIV,nWBV,ASF,Delay\n"
    "OAS1_0001_MR1,F,R,74,2,3,29,0,1344,0.743,1.306,N/A\n"
    "OAS1_0002_MR1,M,R,55,4,1,29,0,1147,0.81,1.531,N/A\n"
    "OAS1_0061_MR1,F,R,20,,,,,1390,0.848,1.263,N/A\n"
    "OAS1_0061_MR2,F,R,20,,,,,1377,0.848,1.263,26\n"
)
IXI = (
    'IXI_ID,"SEX_ID (1=m, 2=f)",HEIGHT,WEIGHT,ETHNIC_ID,STUDY_DATE,AGE\n'
    "2,2,164,58,1,2005-11-18,35.8001368925\n"
    "12,1,175,70,1,2005-06-01,38.7816563997\n"
    "14,2,163,65,4,,\n"
    "16,2,172,64,1,2005-06-01,55.1676933607\n"
)
VOLUMES = (
    "disc1/OAS1_0001_MR1/OAS1_0001_MR1_mpr_n4_anon_111_t88_masked_gfc.nii.gz",
    "disc1/OAS1_0002_MR1/OAS1_0002_MR1_mpr_n4_anon_111_t88_masked_gfc.nii",
    "disc1/OAS1_0002_MR1/FSL_SEG/OAS1_0002_MR1_mpr_n4_anon_111_t88_masked_gfc_fseg.nii",
    "disc2/OAS1_0061_MR1_mpr_n4_anon_111_t88_masked_gfc.nii.gz",
    "disc2/OAS1_0061_MR2_mpr_n4_anon_111_t88_masked_gfc.nii.gz",
    "IXI-T1/IXI002-Guys-0828-T1.nii.gz",
    "IXI-T1/IXI012-HH-1211-T1.nii.gz",
    "IXI-T1/IXI014-HH-1236-T1.nii.gz",
    "IXI_sample/IXI016-Guys-0697/T1/IXI016-Guys-0697_image.nii.gz",
    "IXI_sample/IXI016-Guys-0697/label/IXI016-Guys-0697_label.nii.gz",
)


def written(folder: Path) -> Path:
    voxels = np.random.default_rng(0).integers(0, 1000, (6, 7, 8)).astype(np.int16)
    for name in VOLUMES:
        save_volume(folder / name, voxels, 2.0)
    (folder / "oasis_cross-sectional.csv").write_text(OASIS)
    (folder / "IXI.csv").write_text(IXI)
    return folder


def told(folder: Path) -> dict[str, tuple[float, str, str, str]]:
    found = {}
    for section in SECTIONS:
        for item in datasets.datalist(NAME, folder, section):
            (years,) = item["label"]
            found[item["id"]] = (round(years, 2), item["centre"], item["group"], item["sex"])
    return found


OF_OASIS = {
    "OAS1_0001_MR1": (74.0, "oasis", "OAS1_0001", "female"),
    "OAS1_0002_MR1": (55.0, "oasis", "OAS1_0002", "male"),
    "OAS1_0061_MR1": (20.0, "oasis", "OAS1_0061", "female"),
    "OAS1_0061_MR2": (20.0, "oasis", "OAS1_0061", "female"),
}
OF_IXI = {
    "IXI002-Guys-0828": (35.8, "Guys", "IXI002", "female"),
    "IXI012-HH-1211": (38.78, "HH", "IXI012", "male"),
    "IXI016-Guys-0697": (55.17, "Guys", "IXI016", "female"),
}


def test_both_sources_are_read_as_published(tmp_path: Path) -> None:
    """No segmentation or mask is taken for a scan; a subject without an age is left out, which is said."""
    folder = written(tmp_path / NAME)
    assert told(folder) == OF_OASIS | OF_IXI
    assert any(
        "1 volumes have no age in the tables and are left out: IXI014-HH-1236" in note
        for note in datasets.notes(NAME, folder)
    )
    assert datasets.check(NAME, folder).ok


@pytest.mark.parametrize(
    ("table", "expected"), [("IXI.csv", OF_OASIS), ("oasis_cross-sectional.csv", OF_IXI)]
)
def test_a_source_is_read_alone(
    tmp_path: Path, table: str, expected: dict[str, tuple[float, str, str, str]]
) -> None:
    folder = written(tmp_path / NAME)
    (folder / table).unlink()
    assert told(folder) == expected


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / NAME)
    (folder / "IXI.csv").write_text(IXI.replace("35.8001368925", "unknown"))
    with pytest.raises(InputError, match="IXI002-Guys-0828 has age 'unknown', which is no number"):
        datasets.datalist(NAME, folder, "train")
    save_volume(folder / "IXI-T1" / "IXI012-HH-1211-T1.nii", np.zeros((4, 4, 4), np.uint8), 1.0)
    (folder / "IXI.csv").write_text(IXI)
    with pytest.raises(InputError, match="image IXI012-HH-1211 is listed 2 times"):
        datasets.datalist(NAME, folder, "train")


def test_a_broken_volume_is_found_by_the_check(tmp_path: Path) -> None:
    folder = written(tmp_path / NAME)
    path = folder / VOLUMES[0]
    path.write_bytes(path.read_bytes()[:60])
    problems = datasets.check(NAME, folder).problems
    assert len(problems) == 1
    assert path.name in problems[0]


def test_ages_can_be_learned(tmp_path: Path) -> None:
    """A forest on volumes of 8 voxels a side."""
    folder = datasets.write_phantom(NAME, tmp_path / NAME, per_class=14, size=16)
    assert {item["centre"] for item in datasets.datalist(NAME, folder, "train")} == set(
        datasets.get(NAME).centres
    )
    reader = datasets.ReadVolumed("image")

    def arrays(section: str) -> tuple[np.ndarray, np.ndarray]:
        items = datasets.datalist(NAME, folder, section)
        volumes = [reader(item)["image"].numpy()[0, ::2, ::2, ::2].ravel() for item in items]
        scaled = [volume / volume.max() for volume in volumes]
        return np.stack(scaled), np.array([item["label"][0] for item in items])

    images, years = arrays("train")
    tested, expected = arrays("test")
    forest = RandomForestRegressor(100, random_state=0)
    assert r2_score(expected, forest.fit(images, years).predict(tested)) > 0.5


def test_real_scans(real_data: Path) -> None:
    """Those of `brain_tissue`: the ages of its table, test and retest of a subject in one section."""
    folder = real_data / "oasis_tissue"
    found = told(folder)
    assert len(found) == 23
    assert (min(found.values())[0], max(found.values())[0]) == (18.0, 90.0)
    assert {len(part) for part in datasets.sections(NAME, folder).values()} == {16, 3, 4}
    groups = [{item["group"] for item in part} for part in datasets.sections(NAME, folder).values()]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 20
