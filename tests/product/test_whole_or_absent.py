"""Whatever ends a verb, and whenever: its new folder is whole or absent, and the same command can be repeated."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from medfl import datasets
from medfl.cli.verbs import main

_CHANGES = ("os.mkdir", "os.rename", "os.rmdir", "os.remove")
_WRITING = os.O_WRONLY | os.O_RDWR


class Ending:
    """Raises an error at the n-th change of a file or folder below a place."""

    def __init__(self) -> None:
        self.place = ""
        self.left = 0
        self.error: BaseException = KeyboardInterrupt()
        sys.addaudithook(self.see)  # for the whole process: there is no way to remove one

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.left == 0 or event not in ("open", *_CHANGES):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
            return
        if str(arguments[0]).startswith(self.place):
            self.left -= 1
            if self.left == 0:
                raise self.error


ENDING = Ending()


@pytest.fixture
def ending(tmp_path: Path) -> Iterator[Ending]:
    ENDING.place = str(tmp_path / "place")
    (tmp_path / "place").mkdir()
    yield ENDING
    ENDING.left = 0


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images and masks, a site's fingerprint, a run, and its pictures with their classes."""
    root = tmp_path_factory.mktemp("given")
    lungs = datasets.write_phantom("lung_cxr", root / "lungs", per_class=10, size=16)
    pairs = ["--images", str(lungs / "images"), "--masks", str(lungs / "masks")]
    assert main(["site", "fingerprint", *pairs, "--out", str(root / "site.json")]) == 0
    data = datasets.write_phantom("mednist", root / "mednist", per_class=10, size=16)
    run = ["run", "mednist", "--data", str(data), "--config=network=small_cnn", "--sites=2"]
    small = ["--config=image_size=16", "--rounds=1", "--jobs=1", "--quiet"]
    assert main([*run, *small, "--out", str(root / "run")]) == 0
    (root / "pictures").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "pictures" / "a.png")
    (root / "classes.csv").write_text("id,label\na.png,Hand\n")
    return root


VERBS = {
    "data make": "data make lung_cxr --per-class 10 --size 65",  # too large to be copied from another test's
    "plan": "plan site.json",
    "new": "new --images lungs/images --masks lungs/masks",
    "predict": "predict run pictures --reference classes.csv",
    "calibrate": "calibrate run --coverage 0.5",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=["interrupt", "full"]
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_new_folder_is_whole_or_absent(
    verb: str,
    error: BaseException,
    given: Path,
    ending: Ending,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(given)
    place = Path(ending.place)
    out = place / "above" / "out"
    words = VERBS[verb].split()
    if verb == "new":
        words.append(str(out))
    else:
        words += ["--out", str(out)]

    ending.error = error
    moment = 1
    while True:
        ending.left = moment
        code = main(words)
        said = capsys.readouterr().err
        if ending.left:
            break
        if not out.exists():
            assert [*place.rglob("*")] == [], (moment, said)
            assert code in (1, 130), moment
        told = [line for line in said.splitlines() if line.startswith(("error:", "interrupted:"))]
        assert len(told) == (code != 0), said
        if out.exists():  # the last change
            break
        moment += 1 + moment // 3

    ending.left = 0
    whole = sorted(path.relative_to(out) for path in out.rglob("*"))
    assert whole
    assert moment > 3
    assert code in (0, 1, 130)


@pytest.mark.slow
def test_an_examination_goes_on_whenever_it_was_ended(
    given: Path,
    ending: Ending,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(given)
    out = Path(ending.place) / "out"
    sites = "--data mednist --sites 2 --partition iid --jobs 1 --quiet"
    words = f"evaluate run {sites} --out {out}".split()
    assert main([*words[:-1], "whole"]) == 0

    ending.error = KeyboardInterrupt()
    moment = 1
    ended = 0
    while True:
        ending.left = moment
        code = main(words)
        if ending.left:
            break
        if code == 130:
            assert "; the same command goes on" in capsys.readouterr().err
            ended += 1
            assert main(words) == 0, (moment, capsys.readouterr().err)

        for name in ("predictions.csv", "sites.csv", "weights.safetensors"):
            assert (out / name).read_bytes() == Path("whole", name).read_bytes(), moment

        assert (out / "report.html").is_file()
        shutil.rmtree(out)
        moment += 1 + moment // 2

    assert ended > 5
