"""Every command of the README and the docs runs, in its page's order, in one folder without real data."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

import medfl
from medfl import datasets
from medfl.bundle.files import find, read
from medfl.cli import verbs as cli
from medfl.storage.files import load_weights, save_weights
from tests.support.docs_pages import (
    DOCS,
    FLARE,
    PAGES,
    README,
    ROOT,
    alone,
    blocks,
    commands,
    draw_pictures,
    execute,
    inline,
    is_run,
    run_python,
    script,
    write_files,
)
from tests.support.figures import leave_blank
from tests.support.planned import is_training, plan
from tests.zoo.build import ZOO

METHOD_PAGES = [page for page in PAGES if page.startswith("methods/")]
BUNDLE_PAGES = [page for page in PAGES if page.startswith("bundles/")]
ELSEWHERE = {
    "deploy.md": "test_deploy.py, with what a hospital has",
    "deploy-operator.md": "test_deploy.py, with a kit",
    "deploy-encryption.md": "flare/test_encrypted.py",
    "compatibility.md": "test_upgrade.py, with a run and a bundle of an older version",
    "plan.md": "starter/test_plan.py, from folders to a round",
}
RESULTS = [
    f"results/{name}.md"
    for name in ("fedcb-fedbm", "fedmr", "fedhelp", "pfedpm", "beyond", "tasks")
]
WHOLE_METHODS = {
    "fedavg": "weights alone",
    "fedbm": "a generator at the server, and prompts",
    "fedhelp": "teachers and public images",
    "fedlora": "the weights of another run",
    "fedsm": "masks",
}
"""Methods whose pages' commands run, and what they show."""
WHOLE_BUNDLES = {
    "ham10000": "pictures of classes",
    "lung_cxr": "masks",
    "hippocampus": "volumes with masks",
    "brain_age": "volumes with numbers",
}
"""Bundles whose pages' commands all run, and what they have."""
OWN = ["guide.md", "papers.md", "performance.md", "troubleshooting.md", *RESULTS]
"""Pages with a test of their own here."""

pytestmark = pytest.mark.slow


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from alone(tmp_path, monkeypatch)


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_a_methods_command_runs(
    page: str, elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few kinds; the others up to their first round: each method trains in methods/ and in test_devices.py."""
    leave_blank(monkeypatch)
    name = Path(page).stem
    for command in commands(page):
        assert is_run(command)
        if name in WHOLE_METHODS:
            out = execute(command, capsys)
            assert out.splitlines()[-1].startswith("PHANTOM data")
        else:
            planned = plan(command)
            assert planned.run.data.source == "phantom"
            assert planned.run.method == name or f",{name}" in command


@pytest.mark.parametrize("page", BUNDLE_PAGES)
def test_a_bundles_commands_run(
    page: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On few drawn images; pictures and volumes small and by a small network, masks by the bundle's own.

    The training of most only up to its first round: every shipped bundle trains in test_outside.py.
    """
    name = Path(page).stem
    training = read(find(name) / "configs" / "train.yaml")
    volumes = "patch_size" in training or isinstance(training["image_size"], list)
    drawn = [] if name == "femnist" else ["--per-class", "12", "--size", "24" if volumes else "32"]
    short = ["--rounds", "1", "--local-epochs", "1", "--jobs", "1"]
    if isinstance(training["image_size"], list) and "patch_size" not in training:
        short += ["--config", "network=small_cnn", "--config", "image_size=[16,24,16]"]
    elif datasets.get(name).task != "segmentation":
        short += ["--config", "network=small_cnn", "--config", "image_size=32"]
    if "patch_size" in training:
        short += ["--config", "image_size=[16,24,16]", "--config", "patch_size=null"]
    if name == "femnist":
        short += ["--cohort", "0.03", "--eval-every", "0"]
    for command in commands(page):
        verb = command.split()[1]
        if name in WHOLE_BUNDLES or verb == "data":
            more = drawn if " make " in command else short if verb == "run" else []
            execute(command, capsys, *more)
        elif verb == "run":
            assert plan(command, *short).bundle.name == name
        else:
            assert verb in ("report", "bundles"), command
    assert Path("runs", name, "report.html").is_file() == (name in WHOLE_BUNDLES)


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page not in (*ELSEWHERE, *OWN, *METHOD_PAGES, *BUNDLE_PAGES) and blocks(page, "sh", "")
    ],
)
def test_a_pages_commands_and_python_run_in_their_order(
    page: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of comparisons only the first page's runs: another one does up to its first round."""
    write_files(page, elsewhere)
    draw_pictures(elsewhere)
    for command in filter(is_run, commands(page)):
        if command.startswith("medfl compare ") and page != "index.md":
            plan(command)
        else:
            execute(command, capsys)
    run_python(page)
    assert page != "index.md" or Path("grids/mine/tables.md").is_file()


@pytest.mark.slow
def test_the_python_page_runs(elsewhere: Path) -> None:
    """Its blocks go on from each other."""
    exec(
        compile("\n".join(blocks("python.md", "python")), "python.md", "exec"),
        {"__name__": "__main__"},
    )
    assert (elsewhere / "best.pt").is_file()


def test_the_errors_of_the_troubleshooting_page_are_printed(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command ends as the page shows; an ellipsis stands for any text."""
    (elsewhere / "runs" / "first").mkdir(parents=True)
    (elsewhere / "runs" / "first" / "notes.txt").write_text("not a run")
    shown = blocks("troubleshooting.md", "console")
    assert len(shown) >= 8
    for block in shown:
        command, error = block.strip().split("\n", 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.cuda.device_count", lambda: 0)
            patch.setattr("torch.cuda.is_available", lambda: False)
            code = cli.main(shlex.split(command)[2:])
        assert code == 2, command
        pattern = ".*".join(re.escape(part) for part in " ".join(error.split()).split("…"))
        assert re.search(pattern, " ".join(capsys.readouterr().err.split())), command


def test_the_readmes_commands_are_the_first_page_s() -> None:
    """They run, in this order, with that page."""
    run = list(filter(is_run, commands(README)))
    assert len(run) > 3
    assert run == list(filter(is_run, commands("index.md")))


GUIDED = (
    "--data phantom --partition centre", "any_bundle", "--resume", "--from", "condistfl", "--out grids/a",
    "--method central", "--out runs/fedhelp", "--out runs/fedavg", "--out runs/local",
)  # fmt: skip
"""Words of the guide's commands that run: one of each kind, and what others read; the rest is only planned."""


def test_the_guides_commands_run_in_their_order(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that train in a few rounds, or up to the first one."""
    leave_blank(monkeypatch)
    foreign = ZOO["cls2d_glob_yaml"](elsewhere / "path" / "to")
    (elsewhere / "path" / "to" / "MiniNIST").rename(elsewhere / "path" / "to" / "images")
    foreign.path.rename(foreign.path.with_name("any_bundle"))
    datasets.write_phantom(
        "ham10000", elsewhere / "path" / "to" / "ham10000", per_class=20, size=16
    )
    for command in filter(is_run, commands("guide.md")):
        if is_training(command) and not any(word in command for word in GUIDED):
            plan(command)
        else:
            execute(command, capsys)
    for made in ("page.html", "curves.png", "gains.png", "exported/configs/metadata.json"):
        assert Path(made).is_file(), made
    assert len(list(Path("runs").glob("*/summary.json"))) == 8
    assert Path("grids", "a", "tables.md").is_file()


def need_flare(page: str) -> list[str]:
    """Return the commands of one machine; sites, servers and what is submitted to them are in flare/test_faults.py."""
    return [
        command
        for command in commands(page)
        if any(word in command for word in FLARE)
        and " serve " not in command
        and "nvflare " not in command
    ]


@pytest.mark.flare
@pytest.mark.parametrize("page", [page for page in [README, *PAGES] if need_flare(page)])
def test_commands_that_need_flare_run(
    page: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to their job: flare/test_parity.py has whole runs of both runtimes."""
    pytest.importorskip("nvflare")
    for command in need_flare(page):
        if is_training(command):
            assert plan(command).run.data.source == "phantom"
        else:
            execute(command, capsys)


def test_the_papers_commands_run(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first; the others, of which compare/test_paper_runs.py has one more, up to their first round."""
    leave_blank(monkeypatch)
    first, *others = commands("papers.md")
    out = execute(first, capsys)
    assert "| published" in out
    assert "PHANTOM data" in out
    assert len(list(Path("grids").glob("*/published.md"))) == 1
    assert len(others) == 2
    for command in others:
        assert plan(command).run.data.source == "phantom"


def draw_cells(folder: Path) -> None:
    """Draw pictures of three kinds, and the table of their classes."""
    (folder / "images").mkdir(parents=True)
    rows = ["file,class"]
    for index in range(90):
        Image.new("RGB", (20, 20), (80 * (index % 3) + index, index, 0)).save(
            folder / "images" / f"{index}.png"
        )
        rows.append(f"{index}.png,{('lymphocyte', 'monocyte', 'neutrophil')[index % 3]}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")


FINDINGS = (
    "Atelectasis,Cardiomegaly,Consolidation,Edema,Effusion,Emphysema,Fibrosis,Hernia,Infiltration,Mass,Nodule,"
    "Pleural_Thickening,Pneumonia,Pneumothorax"
)


def draw_numbered(folder: Path, head: str, rest: Callable[[int], str]) -> None:
    """Draw grey pictures of two to a patient, and their table: file, patient, and what `rest` says of each."""
    (folder / "images").mkdir(parents=True)
    rows = [f"file,patient,{head}"]
    for index in range(120):
        picture = Image.new("L", (20, 20), 2 * index)
        picture.save(folder / "images" / f"{index}.png")
        rows.append(f"{index}.png,{index // 2},{rest(index)}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")


def draw_chests(folder: Path) -> None:
    """Draw pictures with two of the fourteen findings each, of two views."""
    views = ("PA", "AP")

    def rest(index: int) -> str:
        found = {index % 14, index // 14 % 14}
        return ",".join([views[index // 2 % 2], *(str(int(k in found)) for k in range(14))])

    draw_numbered(folder, f"view,{FINDINGS}", rest)


FEWER = {"shots": "shots:2,2,0", "centre": "centre", "file": "iid --sites 3"}
"""Partitions with fewer images a site."""


WHOLE = {
    **dict.fromkeys(
        ("teacher", "lung-teacher", "skin-teacher", "base-brain", "base-ham10000"),
        "what it leaves is read",
    ),
    "tuned/fedmr/fedavg": "a search",
    "grids/fedmr": "a comparison of searches",
    "tuned/nih_cxr64": "findings",
    "grids/hc18": "numbers",
}
"""Commands of the results that run, by what they write, and why; the others are only planned."""


def is_whole(command: str) -> bool:
    words = command.split()
    written = words[words.index("--out") + 1] if "--out" in words else ""
    return written.removeprefix("runs/") in WHOLE


def test_the_results_commands_run_on_phantoms(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each kind in a round of one epoch and of one seed, the others up to there.

    As phantoms a data set's classes and centres have fewer images.
    """
    leave_blank(monkeypatch)
    datasets.write_phantom(
        "mednist", elsewhere / "data" / "mednist-cut" / "public", per_class=20, size=16
    )
    datasets.write_phantom(
        "ham10000", elsewhere / "data" / "ham-cut" / "public", per_class=20, size=16
    )
    datasets.write_phantom("pneumonia", elsewhere / "data" / "pneumonia", per_class=20, size=16)
    datasets.write_phantom(
        "hippocampus", elsewhere / "data" / "hippo-cut" / "public", per_class=12, size=16
    )
    draw_cells(elsewhere / "data" / "wbc")
    draw_chests(elsewhere / "data" / "nih_cxr64")
    heads = elsewhere / "data" / "hc18"
    draw_numbered(heads, "hc_mm,mask_hc_mm", lambda index: f"{index + 50.5},{index + 50.7}")
    ran = set()
    for given in (command for page in RESULTS for command in commands(page)):
        if given.startswith("medfl new "):
            if not Path(given.split()[2]).exists():  # two sections say how one of them is made
                execute(given, capsys)
            continue
        command = re.sub(
            r"--partition (shots|centre|file):\S+", lambda at: f"--partition {FEWER[at[1]]}", given
        )
        command = command.replace("g_iterations=60 g_batch=32", "g_iterations=2 g_batch=4")
        if "hippocampus" in command:
            command = re.sub(r"--partition counts:\S+", "--partition iid", command)
        command = command.replace(
            "csf=csf;grey=grey;white=white", "site-1=csf;site-2=grey;site-3=white"
        )
        if "base-brain.safetensors" in command:  # as the page says
            base = load_weights(Path("runs/base-brain/weights.safetensors"))
            cut = {name: w[:3] if name.startswith("final_conv.") else w for name, w in base.items()}
            save_weights(Path("base-brain.safetensors"), cut)
        command = command.replace("--leave-out each", "--leave-out rosendahl")
        drawn = " bundles/" in command
        more = ["--rounds", "1"] + (["--seeds", "0"] if "--seeds" in command else [])
        more += [] if drawn else ["--data", "phantom"]
        more += ["--local-epochs", "1"] if "--local-epochs" in command else []
        more += ["--trials", "1"] if " tune " in command else []
        more += (
            ["--config", "patch_size=null"]
            if "brain_tissue" in command and "patch_size" not in command
            else []
        )
        if is_whole(given):
            # of a comparison of many methods the first one
            few = ["--methods", "fedavg"] if "--methods" in command else []
            out = execute(command, capsys, *more, *few)
            ran.add(command.partition("--out ")[2])
            assert out.splitlines()[-1].startswith("real data" if drawn else "PHANTOM data"), (
                command
            )
        if not is_whole(given) or "--methods" in command:
            source = plan(command, *more).run.data.source
            assert source == ("real" if drawn else "phantom"), command
    assert {name.removeprefix("runs/") for name in ran} == {*WHOLE}


def test_the_results_are_made_again_by_their_command(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ((_, path),) = [words[:2] for words in inline("results.md", "python")]
    shutil.copytree(ROOT / "docs" / "results", elsewhere / "docs" / "results")
    shutil.copyfile(DOCS / "results.md", elsewhere / "docs" / "results.md")
    printed = script([str(elsewhere / path)], capsys)
    assert printed == "".join(
        f"{Path(page).name}: up to date\n" for page in ["results.md", *RESULTS]
    )


SMALLEST = {
    "peers": "--rounds 1 --repeats 1 --networks small_cnn --systems script,medfl",
    "overhead": "--rounds 1 --repeats 1 --networks small_cnn --sites 2 --images 40 --jobs 1",
    "method_cost": "--batch 2 --size 28 --network small_cnn --large resnet20 --steps 1 --repeats 1 --iterations 1",
    "scale": "--rounds 2 --sites 10 --methods fedavg",
    "startup": "--repeats 1",
    "local_step": "--networks small_cnn --steps 4 --repeats 1",
    "mask_metrics": "--classes 5 --volumes 1 --side 12 --repeats 1",
    "runtime_cost": "--rounds 2 --networks small_cnn --images 40 --runtimes simulator,monai-fl",
}


def test_the_benchmarks_commands_run_at_their_smallest(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        words[1:]
        for words in inline("performance.md", "python")
        # they need a GPU; walls, and ten minutes
        if "/gpu" not in words[1] and "/walls" not in words[1]
    ]
    assert {Path(path).stem for path, *_ in given} == set(SMALLEST)
    for path, *flags in given:
        first = ["--methods", "fedmr"] if "method_cost" in path else []
        rows = json.loads(
            script([path, *first, *flags, *SMALLEST[Path(path).stem].split(), "--json"], capsys)
        )
        assert rows, path
        assert all({"name", "ratio"} <= row.keys() for row in rows), path


def test_the_runtime_of_the_docs_gives_the_bits_of_medfl_run(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = next(block for block in blocks("extend.md", "python") if "site_step(" in block)
    exec(compile(text, "extend.md", "exec"), {})
    printed = capsys.readouterr().out.split()[-1]
    config = {"network": "small_cnn", "image_size": 28}
    requested = {
        "method": "scaffold",
        "data": "phantom",
        "sites": 2,
        "partition": "iid",
        "rounds": 2,
    }
    summary = medfl.federate("mednist", config=config, requested=requested, out="runs/same", jobs=1)
    assert summary["weights_sha256"] == printed
