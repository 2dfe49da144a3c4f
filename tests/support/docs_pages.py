"""The pages of the docs as tests read them: fenced blocks, commands, and how a command is made to take seconds."""

from __future__ import annotations

import glob
import re
import runpy
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from medfl.cli import verbs as cli
from tests.support.programs import python_path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = "../README.md"
FOLDERS = (DOCS, DOCS / "methods", DOCS / "bundles", DOCS / "results")
PAGES = sorted(
    path.relative_to(DOCS).as_posix() for folder in FOLDERS for path in folder.glob("*.md")
)

# What is not executed, with the reason; everything else runs as it stands, but for what is appended below.
NOT_RUN = {
    "make demo": "an installation, then the run of docs/methods/fedbm.md; CI makes it",
    "make test": "an installation, then the tests that are running",
    "pip install": "an installation, which every fresh environment of the tests is",
    "--device cuda": "needs a GPU; test_gpu.py has runs on one",
    "--plm biomedclip": "downloads a language model; test_prompts.py has a small one",
}
FLARE = ("--runtime flare", "medfl flare ", "nvflare ", "medfl site serve")
"""Words of commands that need NVIDIA FLARE: theirs is a test of its own."""

# Appended to a command, so that it takes seconds: of a flag given twice the last one counts.
SHORTER = {
    "run": "--rounds 1 --config image_size=32 --jobs 1 --quiet",
    "compare": "--rounds 1 --config image_size=32 --seeds 0 --quiet",
    "tune": "--rounds 1 --config image_size=32 --quiet",
    "subgroups": "--by centre",  # of phantoms nothing else is known
    "calibrate": "--by centre",
}
OTHERWISE = {
    "--resume": "--rounds 2 --quiet",
    "--from": "--quiet",
    "bundles/mine": "--rounds 1 --config network=small_cnn --quiet",
    "mybundle": "--rounds 1 --quiet",
    "any_bundle": "--rounds 1 --quiet",
    "hippocampus": "--rounds 1 --quiet",
    "femnist": "--rounds 1 --cohort 0.03 --eval-every 0 --config network=small_cnn --quiet",
    "--paper fedbm/table6": "--config image_size=16 --config network=small_cnn --seeds 0 --local-epochs 1 "
    "--partition dirichlet:0.1 --scale 0.005 --set g_iterations=2 --set g_batch=4 --set synthetic_batch=2 --quiet",
    "--paper": "--config image_size=16 --config network=small_cnn --partition dirichlet:0.1 --local-epochs 1 "
    "--scale 0.005 --seeds 0 --methods fedavg,fedetf --quiet",
}
"""The same for commands with one of these words, the first of which counts, instead."""
BESIDES = {
    "--method fedbm": "--set g_iterations=2 --set g_batch=4 --set synthetic_batch=2",
    "--method fedhelp": "--set public_items=16",
    "large_network=resnet110": "--set large_network=small_cnn",
    "--preset paper --method fedhelp": "--set large_network=small_cnn --set public=mednist "
    "--set teachers=run:runs/teacher",
    "run ham10000": "--local-epochs 1 --config network=small_cnn",
    "run brain_tissue": "--local-epochs 1 --config image_size=[16,16,16]",
    "run mednist": "--local-epochs 1",
    "run pneumonia": "--local-epochs 1 --config network=small_cnn",
    "run isic19": "--local-epochs 1 --config network=two_conv --batch-size 32",
    "run fmnist": "--rounds 1 --local-epochs 1 --config network=small_cnn",
    "tune pneumonia": "--local-epochs 1 --config network=small_cnn",
    "fedavg,fedcb": "--config network=small_cnn",
    "fedavg,feddgga": "--local-epochs 1 --config network=small_cnn",
    "compare mednist": "--local-epochs 1",
    "compare bundles/mine": "--seeds 0",
    "compare pneumonia": "--local-epochs 1 --config network=small_cnn",
}
"""And besides, for commands with these words."""


def blocks(page: str, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in some languages."""
    found, inside, language = [], None, ""
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("```"):
            if inside is not None:
                inside.append(line)
        elif inside is None:
            inside, language = [], line[3:].strip()
        else:
            found += ["\n".join(inside) + "\n"] if language in languages else []
            inside = None
    assert inside is None, f"{page}: a block does not end"
    return found


def commands(page: str) -> list[str]:
    """Return the commands of a page, one a line."""
    lines = "".join(blocks(page, "sh", "")).replace("\\\n", " ").splitlines()
    return [" ".join(line.partition(" #")[0].split()) for line in lines if line.strip()]


def inline(page: str, first: str) -> list[list[str]]:
    """Return the words of the commands in the text of a page that begin with a word; those in blocks are left out."""
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    return [shlex.split(found) for found in re.findall(rf"(?<!`)`({first} [^`]+)`", text)]


def is_run(command: str) -> bool:
    return not any(word in command for word in (*NOT_RUN, *FLARE))


def shortened(command: str) -> list[str]:
    """Return the words of a command of a page with what makes it short, and paths for patterns."""
    words = shlex.split(command)
    extra = next(
        (more for word, more in OTHERWISE.items() if word in command), SHORTER.get(words[1], "")
    )
    extra = extra if words[1] in SHORTER else ""
    besides = [more for word, more in BESIDES.items() if word in command and words[1] in SHORTER]
    found = [
        path for word in words for path in (sorted(glob.glob(word)) if "*" in word else [word])
    ]
    return [*found, *shlex.split(" ".join([extra, *besides]))]


def execute(command: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Run a command of a page, shortened, with more words; return what it printed."""
    if command.startswith("export ") or command == "medfl --version":
        return ""
    capsys.readouterr()
    code = cli.main([*shortened(command)[1:], *more])
    printed = capsys.readouterr()
    assert code == 0, f"{command}\n{printed.err}"
    return printed.out


def script(words: Iterable[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run `python SCRIPT ...` of the repository in this process, as its own main program; return what it printed."""
    path, *given = words
    file = ROOT / path
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(file), *given])
        patch.syspath_prepend(file.parent)
        code: object = None
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as end:
            code = end.code
    assert not code, f"{path} {given}\n{capsys.readouterr().err}"
    return capsys.readouterr().out


def write_files(page: str, folder: Path) -> None:
    """Write the blocks that begin with a path in a comment to that path."""
    for text in blocks(page, "python", "yaml"):
        if found := re.match(r"# (\S+/\S+\.(?:py|yaml))\n", text):
            path = folder / found[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def run_python(page: str) -> None:
    """Run the blocks of Python that are no file."""
    for text in blocks(page, "python"):
        if not re.match(r"# \S+/\S+\.py\n", text):
            exec(compile(text, page, "exec"), {"__name__": "__main__"})


def draw_pictures(folder: Path) -> None:
    """Put there what a reader of the pages has: pictures of two classes."""
    for index in range(60):
        path = folder / "pictures" / ("ill" if index % 2 else "well") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (40, 40), 120 * (index % 2) + index).save(path)


def alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give an empty folder without real data, with small phantoms, where a page's modules can be imported."""
    before = set(sys.modules)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MEDFL_DATA", raising=False)
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "mypackage":
            del sys.modules[name]
