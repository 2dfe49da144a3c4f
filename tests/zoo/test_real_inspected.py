"""The public zoo's bundles as published: accepted with no words but those for own Python and pickled weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from medfl.policy.inspection import inspect
from medfl.policy.policy import Policy
from tests.support.paths import SHARED
from tests.zoo.table import page_rows, trainer, verdict

FOLDER = SHARED / "zoo"
REAL = sorted(path.name for path in FOLDER.glob("*") if (path / "configs").is_dir())
OWN = Policy(allow=frozenset({"scripts", "pickle"}))
pytestmark = pytest.mark.skipif(not REAL, reason=f"the public zoo's bundles are not in {FOLDER}")


@pytest.mark.parametrize("name", REAL)
def test_a_bundle_of_the_zoo_is_accepted_as_published(name: str) -> None:
    found = inspect(FOLDER / name, OWN)
    assert found.accepted, "\n".join(map(str, found.refusals))
    needed = {word for word, _ in found.allowed}
    assert inspect(FOLDER / name).accepted == (not needed)
    assert inspect(FOLDER / name, Policy(allow=frozenset(needed))).accepted
    on_disk = {
        str(path.relative_to(FOLDER / name))
        for path in (FOLDER / name).rglob("*")
        if path.is_file()
    }
    assert {file.path for file in found.files} == on_disk


@pytest.mark.parametrize("name", sorted({*REAL} & page_rows().keys()))
def test_the_page_says_what_inspection_does(name: str) -> None:
    assert page_rows()[name][:3] == [f"`{name}`", f"`{trainer(name)}`", verdict(name)]


def test_most_of_the_zoo_needs_no_word() -> None:
    assert sum(inspect(FOLDER / name).accepted for name in REAL) >= len(REAL) / 2


@pytest.mark.parametrize("name", REAL)
def test_a_danger_in_what_is_read_of_it_is_refused(name: str, tmp_path: Path) -> None:
    """In an id, an argument of a component and an expression that a bundle of the zoo has."""
    root = tmp_path / name
    shutil.copytree(FOLDER / name, root)
    (root / "configs" / "evaluate.yaml").unlink(missing_ok=True)
    file = root / "configs" / "evaluate.json"
    danger = "__import__('os').system('id')"
    for change in ({"x": f"${danger}"}, {"x": {"_target_": "os.system", "command": "id"}}):
        file.write_text(json.dumps(change))
        assert not inspect(root, OWN).accepted
