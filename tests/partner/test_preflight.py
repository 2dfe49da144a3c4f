"""Preflight: what is fine is told, what is not is named with what to do, and nothing runs before inspection."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.bundle.open import open_problem, with_data
from medfl.cli import verbs as cli
from medfl.partner import preflight
from medfl.partner.case_findings import Findings
from medfl.partner.preflight import Preflight, PreflightOptions, check
from medfl.partner.scanning import ScannedItem, scan
from medfl.policy.inspection import inspect
from medfl.policy.policy import Outbound, Policy
from medfl.starter import starter
from tests.hostile.base import write
from tests.zoo.build import ZOO

SMALL = {"network": "small_cnn", "image_size": 16}


@pytest.fixture(scope="module")
def moles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "ham10000", tmp_path_factory.mktemp("moles") / "data", per_class=10, size=16
    )


@pytest.fixture(autouse=True)
def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured step takes seconds: one test is enough."""
    monkeypatch.setattr(preflight, "step_bytes", lambda federation: 1 << 20)


def said(found: Preflight, topic: str, level: str | None = None) -> str:
    return "\n".join(
        line.text for line in found.lines if line.topic == topic and level in (None, line.level)
    )


def test_a_bundle_and_its_data_that_are_fine_are_ready(moles: Path, tmp_path: Path) -> None:
    folder = inspect(Path("bundles/ham10000")).folder
    policy = inspect(folder).policy(Policy(outbound=Outbound(clip=1.0)))
    found = check(
        PreflightOptions("ham10000", str(moles), Policy(policy.bundle, files=policy.files, outbound=Outbound(clip=1.0)),
              config=SMALL, folder=tmp_path)
    )  # fmt: skip
    assert found.ok, found.text(200)
    found.require()
    assert "files are those that the policy pins" in said(found, "inspection", "ok")
    assert "no formal privacy: no noise is added" in said(found, "policy")
    assert "layout:" in said(found, "data", "warning")  # of a phantom, which is said
    assert "items can be read" in said(found, "files", "ok")
    assert "within the 7 classes" in said(found, "labels", "ok")
    assert "12 x 16 pixels" in said(found, "size") or "16 x 16 pixels" in said(found, "size")
    assert "one step with" in said(found, "memory", "ok")
    assert "State: " in said(found, "disk", "ok")
    assert found.text()[-1].startswith("READY")
    json.dumps(found.as_dict())


def test_a_step_is_measured_in_memory(moles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from medfl.runtimes.local.memory import step_bytes

    measured: list[int] = []

    def measure(federation: object) -> int:
        measured.append(step_bytes(federation))  # type: ignore[arg-type]
        return measured[-1]

    monkeypatch.setattr(preflight, "step_bytes", measure)
    found = check(PreflightOptions("ham10000", str(moles), config=SMALL, batch_size=4))
    assert measured[0] > 0
    assert "one step with 4 images takes" in said(found, "memory", "ok")


@pytest.mark.parametrize(
    ("free", "level"), [(2 << 20, "ok"), ((1 << 20) + 1, "warning"), (1000, "FAILED")]
)
def test_memory_and_disk_are_compared_with_what_is_free(
    free: int, level: str, moles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "free_ram", lambda: free)
    monkeypatch.setattr(preflight, "budget", lambda: 0)  # of images in memory
    monkeypatch.setattr(
        preflight.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free)
    )
    found = check(PreflightOptions("ham10000", str(moles), config=SMALL))
    assert said(found, "memory", level)
    assert ("cache of prepared images" in said(found, "disk", "FAILED")) == (level == "FAILED")


def test_nothing_of_a_refused_bundle_runs(tmp_path: Path) -> None:
    """Its expression would write a file."""
    trace = tmp_path / "ran"
    root = write(tmp_path / "b")
    config = json.loads((root / "configs" / "train.json").read_text())
    config["trap"] = f"$open({str(trace)!r}, 'w').write('x')"
    config["dataset_dir"] = "@trap"
    (root / "configs" / "train.json").write_text(json.dumps(config))
    found = check(PreflightOptions(str(root), str(tmp_path)))
    assert not found.ok
    assert "nothing of it was run" in said(found, "inspection", "FAILED")
    assert not said(found, "data")
    assert not trace.exists()


def test_a_folder_of_another_layout_is_told(tmp_path: Path) -> None:
    found = check(PreflightOptions("pbc", str(tmp_path)))
    assert "holds no pbc data" in said(found, "data", "FAILED")
    assert [line.advice for line in found.lines if line.level == "FAILED"]


def test_unreadable_files_are_named_up_to_twenty_and_counted(moles: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(moles, tmp_path / "data"))
    broken = sorted(data.glob("images_*/*.jpg"))[:23]
    for path in broken:
        path.write_bytes(path.read_bytes()[:200])
    found = check(PreflightOptions("ham10000", str(data), config=SMALL))
    lines = [line.text for line in found.lines if line.topic == "files"]
    assert len(lines) == 21
    assert sum(any(path.name in line for path in broken) for line in lines) == 20
    assert lines[-1].startswith("23 of ")
    assert not said(found, "memory")  # nothing is measured on data that cannot be read
    missing = broken[0]
    missing.unlink()
    gone = check(PreflightOptions("ham10000", str(data), config=SMALL))
    assert missing.stem in said(gone, "data", "FAILED")


def test_the_same_image_in_several_sections_is_found_by_its_content(
    moles: Path, tmp_path: Path
) -> None:
    data = Path(shutil.copytree(moles, tmp_path / "data"))
    bundle = with_data(open_problem("ham10000", SMALL), str(data), SMALL).bundle
    first, again = bundle.data("train")[0]["image"], bundle.data("test")[0]["image"]
    shutil.copyfile(first, again)
    found = check(PreflightOptions("ham10000", str(data), config=SMALL))
    text = said(found, "duplicates", "warning")
    assert "1 images are in several sections" in text
    assert Path(first).stem in text
    assert Path(again).stem in text


def test_images_unlike_the_others_are_named(moles: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(moles, tmp_path / "data"))
    large, black = sorted(data.glob("images_*/*.jpg"))[:2]
    with Image.open(large) as image:
        image.resize((400, 400)).save(large)
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(black)
    found = check(PreflightOptions("ham10000", str(data), config=SMALL))
    assert large.stem in said(found, "size", "warning")
    assert black.stem in said(found, "intensity", "warning")
    assert found.ok


@pytest.mark.parametrize(
    "name", ["seg3d_decathlon_json", "cls2d_glob_yaml", "seg2d_opaque_dataset"]
)
def test_bundles_of_the_zoo_s_kinds_are_looked_at_alike(name: str, tmp_path: Path) -> None:
    bundle = ZOO[name](tmp_path)
    found = check(PreflightOptions(str(bundle.path), None, config=bundle.overrides))
    assert found.ok, found.text(200)
    assert "items can be read" in said(found, "files", "ok")
    if name.startswith("seg3d"):
        assert "mm" in said(found, "spacing", "ok")
        assert "0 in " in said(found, "masks", "ok")


def test_a_volume_that_cannot_be_read_is_named_for_any_bundle(tmp_path: Path) -> None:
    bundle = ZOO["seg3d_decathlon_json"](tmp_path)
    victim = sorted(bundle.path.rglob("imagesTr/*.nii.gz"))[1]
    victim.write_bytes(b"no volume")
    found = check(PreflightOptions(str(bundle.path), None, config=bundle.overrides))
    assert victim.name in said(found, "files", "FAILED")


def test_labels_outside_the_declared_classes_fail(tmp_path: Path) -> None:
    bundle = ZOO["seg3d_decathlon_json"](tmp_path)
    opened = with_data(
        open_problem(str(bundle.path), bundle.overrides), None, bundle.overrides
    ).bundle
    findings = Findings(opened)
    for seen in scan(opened, "train"):
        if seen.image is not None:
            seen.label[0, 0, 0, 0] = 7
        findings.add(seen)
    levels = {(topic, level): text for topic, level, text, _ in findings.lines()}
    assert "7 in 4" in "".join(text for (topic, _), text in levels.items() if topic == "masks")


def test_structures_that_no_mask_shows_are_named() -> None:
    """They may be absent, or not annotated: nobody but the site knows."""
    findings = Findings(
        SimpleNamespace(task="segmentation", structures=("background", "liver", "spleen", "kidney"))
    )
    for number, value in enumerate((0, 1, 3)):
        mask = torch.zeros(1, 4, 4, dtype=torch.uint8)
        mask[..., 0] = value
        findings.add(ScannedItem("train", f"{number}", torch.rand(1, 4, 4), mask, (4, 4), ()))
    (found,) = [finding for finding in findings._structures() if finding.topic == "labels"]
    assert (
        found.text == "masks show liver, kidney; none shows spleen: absent, or not annotated here"
    )
    assert found.level == "warning"
    assert found.advice.endswith("--site-labels SITE=liver,kidney")


def test_a_server_that_is_not_there_fails_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        server = closed.getsockname()
    found = check(PreflightOptions(str(write(tmp_path / "b")), str(tmp_path), server=server))
    assert "cannot be reached" in said(found, "server", "FAILED")
    assert "firewall" in next(line.advice for line in found.lines if line.topic == "server")


def test_the_command_exits_with_2_if_anything_failed(
    moles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = [f"--config={key}={value}" for key, value in SMALL.items()]
    command = ["site", "check", "ham10000", "--data", str(moles), *config, "--batch-size", "4"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("READY")
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert cli.main([*command, "--server", f"127.0.0.1:{port}"]) == 2
    captured = capsys.readouterr()
    assert "NOT READY: 1 FAILED" in captured.out
    assert captured.err.startswith("error: server: the server 127.0.0.1")
    assert captured.err.count("\n") == 1
    assert cli.main([*command, "--server", "nowhere"]) == 2
    assert cli.main([*command, "--config", "x"]) == 2


@pytest.mark.parametrize(
    ("free", "level", "text"),
    [
        (2**40, "ok", "one step with 4 images takes "),
        (1, "FAILED", "; 0 MiB are free"),
        (0, "FAILED", "does not fit"),
    ],
)
def test_what_a_step_takes_of_a_gpu_is_held_against_what_is_free(
    moles: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str, text: str
) -> None:
    """With the counters of a GPU that is not there: a peak of 1 MiB beside four copies of the weights."""
    asked = PreflightOptions("ham10000", str(moles), config=SMALL, batch_size=4)
    made = preflight._one_batch(asked, Bundle("ham10000", {**SMALL, "dataset_dir": str(moles)}))
    made.run = replace(made.run, device="cuda")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**20)
    monkeypatch.setattr(preflight.on_device, "free_gpu_memory", lambda device: free)
    if not free:
        monkeypatch.setattr(preflight, "fit", out_of_memory)
    found = Preflight("ham10000", str(moles))
    with found.errors_as("memory"):
        preflight._memory(found, made)
    assert text in said(found, "memory", level)
    assert ("on the GPU" in said(found, "memory")) == bool(free)


def out_of_memory(*_: object) -> None:
    raise torch.cuda.OutOfMemoryError


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_is_measured_on_a_gpu(moles: Path) -> None:
    found = check(
        PreflightOptions("ham10000", str(moles), config=SMALL, batch_size=4, device="cuda")
    )
    assert "on the GPU" in said(found, "memory", "ok")


def test_channels_with_nothing_in_any_image_are_named(moles: Path) -> None:
    findings = Findings(with_data(open_problem("ham10000", SMALL), str(moles), SMALL).bundle)
    for number in range(3):
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(number))
        image[1] = number
        findings.add(ScannedItem("train", str(number), image, 0, (8, 8), ()))
    lines = [line for line in findings.lines() if line.topic == "channels"]
    assert [line.level for line in lines] == ["ok", "warning"]
    assert lines[0].text == "3 in each image: red, green, blue"
    assert lines[1].text == "nothing in any image of: green"
    assert lines[1].advice.endswith("--site-channels SITE=red,blue")


def test_what_a_run_says_of_a_table_a_check_says_too(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 16, 16), np.uint8)
    lines = ["file,label"]
    for number, shades in enumerate(pixels):
        Image.fromarray(shades).save(tmp_path / f"{number:04}.png")
        lines.append(f"{number},{'ab'[number % 2]}")

    (tmp_path / "labels.csv").write_text("\n".join(lines))
    starter.write(tmp_path / "bundle", starter.survey(tmp_path, labels=tmp_path / "labels.csv"))
    found = check(PreflightOptions(str(tmp_path / "bundle"), str(tmp_path), folder=tmp_path))
    assert "24 names of images differ from the table's in zeros" in said(found, "data")
    assert "patients are not known" in said(found, "data")


def test_pictures_that_are_turned_by_exif_are_told_beside_their_masks(tmp_path: Path) -> None:
    """`medfl new` and `data check` said so, a partner's own check did not."""
    for case in range(12):
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir(exist_ok=True)
            pixels = np.zeros((16, 16), np.uint8)
            pixels[: 2 + case % 4, :8] = 1 if folder == "masks" else 9 + case
            picture = Image.fromarray(pixels)
            exif = picture.getexif()
            if folder == "images" and case < 5:
                exif[274] = 6
            picture.save(tmp_path / folder / f"c{case:02d}.png", exif=exif)

    starter.write(
        tmp_path / "bundle", starter.survey(tmp_path / "images", tmp_path / "masks"), size=16
    )
    found = check(PreflightOptions(str(tmp_path / "bundle"), str(tmp_path), folder=tmp_path))
    told = "the image is turned upright by its EXIF, the mask is as stored, in 5 files"
    assert told in "\n".join(line.text for line in found.lines)
