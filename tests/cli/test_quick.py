"""What can be said without torch or MONAI is said without importing them."""

from __future__ import annotations

import json
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
from PIL import Image

from medfl.bundle.files import find
from medfl.core.errors import InputError
from tests.support.run_folders import build

QUICK = (
    (["--help"], 0), (["--version"], 0), (["run", "--help"], 0), (["methods"], 0), (["methods", "fedprox"], 0),
    (["methods", "--json"], 0), (["bundles"], 0), (["bundles", "mednist"], 0), (["bundles", "mednist", "--json"], 0),
    (["methods", "fedporx"], 2), (["bundles", "mednits"], 2), (["run", "mednits"], 2),
    (["run", "mednist", "--rounds", "0"], 2), (["run", "mednist", "--method", "fedporx"], 2),
    (["run", "mednist", "--sites", "0"], 2), (["run", "mednist", "--lr", "nan"], 2), (["rnu"], 2),
    (["predict", "no", "image.png", "--out", "x"], 2), (["run", "{own}", "--data", "nosuch"], 2),
    (["run", "ham10000", "--data", "phantom", "--leave-out", "rosendal"], 2),
    *[(["run", "mednist", *words.split()], 2) for words in (
        "--set mu=1", "--method fedprox --set mu=-1", "--method fedprox --set nu=1", "--method fedsm --set lam=2",
        "--device gpuu", "--partition dirichlett:1", "--partition shots:1", "--runtime sim", "--metrics dicee",
        "--messages int7", "--aggregation krumm", "--aggregation trimmed:0.7", "--resume", "--resume --out gone",
        "--init gone.pt", "--init .", "--init run:gone", "--init run:.", "--init bundle:.",
        "--from gone.json", "--out /proc/version/x", "--data x --from gone.json", "--data nosuch", "--preset foo",
        "--data nosuch --folds 3",
    )],
    *[(words.split(), 2) for words in (
        "run", "compare mednits --methods fedavg --out g", "compare mednist --methods fedavg,fedporx --out g",
        "tune mednist --method fedprox --out g", "tune mednist --method fedprox --grid nu=1,2 --out g",
        "tune mednist --method fedprox --grid lr=0,1 --out g", "tune mednist --method fedprox --grid mu=1,1 --out g",
        "tune mednist --method fedprox --grid mu=1,2 --trials 3 --out g", "compare mednist --tuned gone --out g",
        "compare mednist --out g", "compare mednist --method fedprox,mu=1 --out g", "compare --paper fedbm/x --out g",
        "compare mednist --methods fedavg --partition ii --out g",
        "compare mednist --methods fedavg --init gone --out g", "compare mednist --methods fedavg --folds 3 --out g",
        "flare export mednist --sites a,b --init gone --out q", "report gone", "export gone --out x",
        "subgroups gone --by sex", "new x --images /gone", "new x --images . --masks /gone", "site inspect gone",
        "site check gone", "site stats gone", "site audit gone", "site inspect mednist --policy gone",
        "flare export mednits --sites a,b --out q", "flare export mednist --sites a,b --method fedporx --out q",
        "flare export mednist --sites a,b --set mu=1 --out q", "data check gone", "concepts gone --plm minilm",
        "new {there} --images .", "new x --images . --size 5", "new x --images . --size 0",
        "predict {there} {there}/run.json --out {there}", "predict {there} gone.png --out x",
        "predict {there} {there}/run.json --out x --which foo", "export {there} --out {there}",
        "export {there} --out x --which foo", "run mednist --data .", "run mednist --data . --folds 3",
        "compare mednist --methods fedavg --data gone --out g", "compare mednist --methods fedavg --data . --out g",
        "tune mednist --method fedprox --grid mu=1,2 --data gone --out g", "new x --images .",
        "new x --images {table} --labels {table}/t.csv --patient-column who",
        "new x --images {table} --labels gone.csv",
        "run --resume --out {run} --lr 3", "run --resume --out {run} --seed 7 --rounds 99",
        *(["run mednist --device cuda", "compare mednist --methods fedavg --device cuda:1 --out g",
           "tune mednist --method fedprox --grid mu=1,2 --device cuda --out g",
           "run --resume --out {run} --device cuda"]
          * (find_library("cuda") is None)),
        "compare ham10000 --methods fedavg --data phantom --partition centre:x=0/all --out g",
        "calibrate gone", "calibrate {there} --coverage 1",
        "calibrate {there} --share all", "calibrate {there} --which foo", "calibrate {there} --strength -1",
    )],
)  # fmt: skip
PROGRAM = """
import contextlib, io, json, sys
from medfl.cli.verbs import main
assert "numpy" not in sys.modules
for words, code in json.load(sys.stdin):
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        try:
            found = main(words)
        except SystemExit as error:
            found = error.code or 0
    heavy = sorted({"torch", "monai", "scipy", "nibabel", "pydicom", "pandas"} & set(sys.modules))
    assert (found, heavy, told.getvalue().startswith("error: ")) == (code, [], code == 2), (words, told.getvalue())
    assert told.getvalue().count("\\n") == (code == 2), words
"""


def test_listings_and_plain_refusals_import_neither_torch_nor_monai(tmp_path: Path) -> None:
    """Words with {there} name a folder that is taken for a run's, {run} a run, {table} a table beside a picture."""
    there, empty = tmp_path / "there", tmp_path / "empty"
    empty.mkdir()
    there.mkdir()
    (there / "run.json").touch()
    (tmp_path / "table").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "table/1.png")
    (tmp_path / "table/t.csv").write_text("file,label\n1.png,a\n")
    (tmp_path / "own/configs").mkdir(parents=True)
    (tmp_path / "own/configs/train.yaml").write_text("trainer: {}\n")
    places = {
        "own": tmp_path / "own",
        "there": there,
        "table": tmp_path / "table",
        "run": build(tmp_path),
    }
    calls = [([word.format(**places) for word in words], code) for words, code in QUICK]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(calls), capture_output=True, text=True, timeout=600,
        cwd=empty,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not any(empty.iterdir())


def test_a_mistyped_folder_is_told_the_one_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine/cells/configs").mkdir(parents=True)
    (tmp_path / "mine/cells/configs/train.yaml").write_text("trainer: {}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="did you mean mine/cells"):
        find("mine/cels")
