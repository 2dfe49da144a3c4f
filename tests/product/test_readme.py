"""The README stays true: its Python runs, and its method from a file of one's own. Commands: test_docs_commands.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import medfl
from medfl import datasets

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("target", re.findall(r"make ([a-z-]+)", README))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "medfl.run(" in block
    )
    monkeypatch.chdir(tmp_path)
    code = code.replace("rounds=2,", 'rounds=1, local_epochs=1, config={"network": "small_cnn"},')
    assert "small_cnn" in code
    exec(compile(code, "README.md", "exec"), {})
    value, digest = capsys.readouterr().out.splitlines()[-1].split()
    assert 0 <= float(value) <= 1
    assert (
        json.loads((tmp_path / "runs/python/summary.json").read_text())["weights_sha256"] == digest
    )


def test_the_method_example_is_fedprox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.S)
        if "METHOD = FedProx" in block
    )
    (tmp_path / "readme_pkg").mkdir()
    (tmp_path / "readme_pkg" / "method.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    data = datasets.write_phantom("pneumonia", tmp_path / "data", per_class=20, size=28)
    requested = {"data": str(data), "sites": 2, "partition": "iid", "rounds": 1, "local_epochs": 1}
    results = [
        medfl.federate(
            "pneumonia",
            options={"mu": "0.5"},
            config={"network": "small_cnn"},
            requested={**requested, "method": method},
            out=tmp_path / method,
            jobs=1,
        )
        for method in ("fedprox", "readme_pkg.method")
    ]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    sys.modules.pop("readme_pkg.method", None)


def test_public_names_exist_and_are_documented() -> None:
    for name in medfl.__all__:
        assert getattr(medfl, name) is not None
    with pytest.raises(AttributeError, match="public names are"):
        _ = medfl.nothing
