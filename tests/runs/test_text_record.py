"""The text embeddings of a run: other ones are another run, and the run's own are kept with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from medfl import datasets
from medfl.bundle import text_embeddings
from medfl.bundle.bundle import Bundle
from medfl.bundle.text_embeddings import Embeddings, unit
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.core.run import Run, TextRecord
from medfl.methods import load
from medfl.problem.prompts import Text
from medfl.runs import text_record
from tests.support.toy import run_record

SMALL = (
    "--config", "network=small_cnn", "--config", "image_size=32", "--rounds", "1", "--sites", "2", "--partition", "iid",
    "--cohort", "1", "--local-epochs", "1", "--batch-size", "16", "--jobs", "1", "--quiet",
)  # fmt: skip
E = unit(torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=32
    )


def written(path: Path, seed: int) -> Path:
    """Write embeddings for mednist that a made-up language model drew."""
    values = unit(torch.randn(6, 24, 16, generator=torch.Generator().manual_seed(seed)))
    Embeddings(values, "drawn", "0" * 64, Bundle("mednist").text).save(path)
    return path


def run(scans: Path, out: Path, plm: Path, code: int = 0) -> dict[str, Any]:
    command = [
        "run",
        "mednist",
        "--method",
        "fedcb",
        "--data",
        scans,
        "--set",
        f"plm={plm}",
        *SMALL,
        "--out",
        out,
    ]
    assert cli.main([*map(str, command)]) == code
    return json.loads((out / "summary.json").read_text()) if code == 0 else {}


@pytest.mark.slow
def test_a_run_has_its_embeddings_with_it(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same file elsewhere is the same run, another one under the same name is not; the file may then be gone."""
    file, out = written(tmp_path / "e.safetensors", 0), tmp_path / "run"
    first = run(scans, out, file)
    record = json.loads((out / "run.json").read_text())["text"]
    kept = safetensors.torch.load_file(out / text_record.FILE)["embeddings"]
    assert (record["plm"], record["shape"], record["sha256"]) == (
        "drawn",
        [6, 24, 16],
        text_record.fingerprint(kept),
    )
    moved = run(scans, tmp_path / "moved", file.rename(tmp_path / "f.safetensors"))
    assert (moved["run_hash"], moved["weights_sha256"]) == (
        first["run_hash"],
        first["weights_sha256"],
    )
    other = run(scans, tmp_path / "other", written(file, 1))
    assert other["run_hash"] != first["run_hash"]
    assert other["weights_sha256"] != first["weights_sha256"]

    file.unlink()
    assert (
        cli.main(
            ["run", "--from", str(out / "run.json"), "--out", str(tmp_path / "again"), "--quiet"]
        )
        == 0
    )
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert again["weights_sha256"] == first["weights_sha256"]
    assert (
        cli.main(["run", "--resume", "--out", str(out), "--rounds", "2", "--jobs", "1", "--quiet"])
        == 0
    )
    safetensors.torch.save_file({"embeddings": kept.flip(0).contiguous()}, out / text_record.FILE)
    capsys.readouterr()
    assert (
        cli.main(["run", "--resume", "--out", str(out), "--rounds", "3", "--jobs", "1", "--quiet"])
        == 2
    )
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: the text embeddings of {out / text_record.FILE} (checksum ")
    assert "the run used those of 'drawn' with checksum" in last
    (out / text_record.FILE).write_bytes(b"nonsense")
    assert (
        cli.main(["run", "--resume", "--out", str(out), "--rounds", "3", "--jobs", "1", "--quiet"])
        == 2
    )
    assert f"{out / text_record.FILE} is damaged" in capsys.readouterr().err.splitlines()[-1]


class Texts:
    """What `run_text` asks of a bundle."""

    task = "classification"

    def __init__(self, values: Tensor) -> None:
        self.values, self.name = values, "model"

    def embeddings(self, plm: str) -> Tensor:
        return self.values

    def plm_of(self, plm: str) -> str:
        return self.name

    def with_embeddings(self, plm: str, values: Tensor, name: str) -> Texts:
        assert name == self.name
        return Texts(values)


def recorded(method: str = "fedcb", **options: Any) -> tuple[Any, Run]:
    found = load(method, options)
    return found, run_record(method=method, text=text_record.make_record(Texts(E), found))  # type: ignore[arg-type]


def test_embeddings_are_kept_to_the_last_bit(tmp_path: Path) -> None:
    method, made = recorded()
    text_record.save(Texts(E), made, method, tmp_path)  # type: ignore[arg-type]
    found = Texts(-E)
    found = text_record.restored(found, made, method, tmp_path)  # type: ignore[arg-type]
    assert torch.equal(found.values, E)
    with pytest.raises(
        InputError, match=r"the text embeddings of plm=.*; the run used those of 'model'"
    ):
        text_record.restored(Texts(-E), made, method, None)  # type: ignore[arg-type]
    text_record.restored(Texts(E.clone()), made, method, None)  # type: ignore[arg-type]


def test_a_job_carries_them_as_json(tmp_path: Path) -> None:
    method, made = recorded()
    (path,) = text_record.write_for_job(Texts(E), made, method, tmp_path)  # type: ignore[arg-type]
    found = Texts(-E)
    found = text_record.restored(found, made, method, tmp_path)  # type: ignore[arg-type]
    assert torch.equal(found.values, E)
    for damaged in (
        "",
        "[]",
        "{}",
        '{"shape": [3, 4, 5], "float32": "?"}',
        '{"shape": [9], "float32": "AAAA"}',
    ):
        path.write_text(damaged)
        with pytest.raises(InputError, match="text.json is damaged"):
            text_record.restored(Texts(E), made, method, tmp_path)  # type: ignore[arg-type]
    assert text_record.write_for_job(Texts(E), run_record(), method, tmp_path) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "options", "uses"),
    [
        ("fedcb", {}, True),
        ("fedcb", {"classifier": "random_frozen"}, False),
        ("fedbm", {"classifier": "trainable"}, True),
        ("fedbm", {"classifier": "trainable", "generator": False}, False),
        ("fedavg", {}, False),
    ],
)
def test_only_what_is_used_is_recorded(method: str, options: dict[str, Any], uses: bool) -> None:
    assert (recorded(method, **options)[1].text is not None) is uses
    assert ("text" in recorded(method, **options)[1].to_dict()) is uses


def test_the_record() -> None:
    """What made the embeddings, and the option that says where they lie, are not hashed; the embeddings are."""
    text = TextRecord("a", "1" * 64, (3, 4, 5))
    one = run_record(text=text, options={"plm": "a", "tau": 1.0})
    assert Run.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    same = run_record(text=TextRecord("b", "1" * 64, (3, 4, 5)), options={"plm": "/b", "tau": 1.0})
    other = run_record(text=TextRecord("a", "2" * 64, (3, 4, 5)), options={"plm": "a", "tau": 1.0})
    assert one.run_hash == same.run_hash != other.run_hash
    assert one.difference(same) == []
    (line,) = one.difference(other)
    assert line.startswith("text.sha256: ")
    old = run_record(options={"plm": "a", "tau": 1.0})
    assert one.difference(old) == old.difference(one) == [], (
        "a record of before said nothing of text"
    )
    assert run_record(options={"plm": "c"}).difference(run_record(options={"plm": "a"})) != []
    with pytest.raises(InputError, match="run.json without 'text.sha256'"):
        Run.from_dict({**one.to_dict(), "text": {"plm": "a", "shape": [1]}})


def test_what_is_made_here_is_what_its_file_would_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision, whether or not `medfl concepts` was called before."""
    text = Text(("p", "q", "r"), ("a {concept}", "b {concept}", "c {concept}", "d {concept}"))
    made = Embeddings(E, "drawn", "0" * 64, text)
    monkeypatch.setattr(text_embeddings, "build", lambda plm, text: made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = text_embeddings.obtain("drawn", text)
    made.save(text_embeddings.cached("drawn", text))
    assert torch.equal(here.values, text_embeddings.obtain("drawn", text).values)
    assert not torch.equal(here.values, E)


def test_an_older_record_takes_what_is_found() -> None:
    text_record.restored(Texts(E), run_record(), load("fedcb"), None)  # type: ignore[arg-type]
