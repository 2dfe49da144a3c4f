"""The docs stay true: generated parts are those of the code, commands and Python run, links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from PIL import Image

import medfl
from medfl import cli, methods
from medfl.bundle import shipped

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in [*DOCS.glob("*.md"), *(DOCS / "methods").glob("*.md")])
METHOD_PAGES = [page for page in PAGES if page.startswith("methods/")]

# What is not executed here, with the reason; everything else runs as it stands, but for `SHORTER`.
NOT_RUN = {
    "pip install": "an installation, which every fresh environment of the tests is",
    "--device cuda": "needs a GPU; test_gpu.py has runs on one",
}
ELSEWHERE = {
    "deploy.md": "commands of a site and of a server; run by tests of these verbs",
    "papers.md": "grids of hours; test_paper_runs.py expands and runs them small",
    "performance.md": "benchmarks, whose figures are those of the machine that it names",
    "results.md": "runs of minutes to days on real images; each row names its run hash",
}
# Appended to a command, so that it takes seconds: of a flag given twice the last one counts.
SHORTER = {
    "run": "--rounds 2 --eval-every 2 --config image_size=32 --jobs 1 --quiet",
    "compare": "--rounds 1 --config image_size=32 --quiet",
}
OTHERWISE = {"--resume": "--quiet", "--from": "--quiet", "bundles/mine": "--rounds 1 --quiet", "mybundle": "--quiet"}
"""The same for commands with one of these words, which have a configuration of their own."""


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


def is_run(command: str) -> bool:
    return not any(word in command for word in NOT_RUN)


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("medfl_docs_generate", DOCS / "site" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What is generated


def test_the_generated_parts_are_those_of_the_code(generate: ModuleType) -> None:
    stale = [path.name for path, _ in generate.stale()]
    assert not stale, "run: python docs/site/generate.py"


def test_a_page_without_its_marks_is_refused(generate: ModuleType) -> None:
    assert generate.fresh("a\n<!-- x -->\nold\n<!-- /x -->\nb", {"x": lambda: "new"}) == (
        "a\n<!-- x -->\n\nnew\n\n<!-- /x -->\nb"
    )
    for text in ("", "<!-- /x --><!-- x -->", "<!-- x --><!-- /x --><!-- x -->"):
        with pytest.raises(ValueError, match="once, in this order"):
            generate.fresh(text, {"x": lambda: "new"})


def test_plain_text_stays_plain_in_markdown(generate: ModuleType) -> None:
    assert generate._escaped("w_k < 2 * $a$ `w_k < 2`") == r"w\_k &lt; 2 \* \$a\$ `w_k < 2`"


def test_every_method_and_bundle_and_verb_has_its_place() -> None:
    assert sorted(f"methods/{name}.md" for name in methods.names()) == METHOD_PAGES
    sections = re.findall(r"^### (\w+)$", (DOCS / "bundles.md").read_text(), re.M)
    assert sections == list(shipped())
    verbs = re.findall(r"^## medfl (\w+)", (DOCS / "cli.md").read_text(), re.M)
    assert list(dict.fromkeys(verbs)) == list(cli._parser()._subparsers._group_actions[0].choices)


def test_the_number_of_methods_is_right() -> None:
    told = re.findall(r"(\d+) (?:\[methods\]|of them)", (DOCS / "index.md").read_text())
    assert {int(number) for number in told} == {len(methods.names())}


def test_every_public_name_is_documented() -> None:
    page = (DOCS / "api.md").read_text()
    for name in medfl.__all__:
        assert re.search(rf"(::: medfl\S*\.{name}$|`medfl\.{name}`)", page, re.M), name
    for path in re.findall(r"^::: (\S+)$", page, re.M):
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name).__doc__


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_options_that_a_methods_page_names_exist(page: str) -> None:
    cls = methods.method_class(Path(page).stem)
    known = {entry["name"] for entry in [*methods.options_of(cls), *methods.prototype_options(cls)]}
    by_hand = (DOCS / page).read_text().partition("## Options")[0]
    named = re.findall(r"--set ([\w.]+)=", by_hand) + re.findall(r"`([a-z_]+)=[^`]*`", by_hand)
    assert set(named) <= known
    assert "$$" in by_hand
    assert blocks(page, "sh")


# Commands and Python


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_every_command_is_understood(page: str) -> None:
    for command in commands(page):
        words = shlex.split(command)
        assert words[0] in ("medfl", "pip", "export"), command
        if words[0] == "medfl" and words[1] != "--version":
            options = cli._parser().parse_args(words[1:])
            assert getattr(options, "method", None) in (None, *methods.names()) or "." in options.method


def test_what_is_not_run_is_in_the_docs() -> None:
    given = [command for page in PAGES for command in commands(page)]
    for word in NOT_RUN:
        assert any(word in command for command in given), f"drop {word!r} from NOT_RUN"
    assert set(ELSEWHERE) <= set(PAGES)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder without real data, where a page's modules can be imported."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEDFL_DATA", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "mypackage":
            del sys.modules[name]


def execute(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command of a page, shortened; return what it printed."""
    words = shlex.split(command)
    if words[0] == "export" or command == "medfl --version":
        return ""
    own = [extra for word, extra in OTHERWISE.items() if word in words[2:]]
    extra = shlex.split((own or [SHORTER[words[1]]])[0]) if words[1] in SHORTER else []
    capsys.readouterr()
    assert cli.main([*words[1:], *extra]) == 0, f"{command}\n{capsys.readouterr().err}"
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


@pytest.mark.slow
@pytest.mark.parametrize("page", METHOD_PAGES)
def test_a_methods_command_runs(page: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = commands(page)
    for command in given:
        assert is_run(command)
        out = execute(command, capsys)
        assert out.splitlines()[-1].startswith("PHANTOM data")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in ELSEWHERE and page not in METHOD_PAGES and blocks(page, "sh")]
)
def test_a_pages_commands_and_python_run_in_their_order(
    page: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(page, elsewhere)
    draw_pictures(elsewhere)
    for command in filter(is_run, commands(page)):
        execute(command, capsys)
    run_python(page)


def draw_pictures(folder: Path) -> None:
    """Put there what a reader of the pages has: pictures of two classes."""
    for index in range(60):
        path = folder / "pictures" / ("ill" if index % 2 else "well") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (40, 40), 120 * (index % 2) + index).save(path)


@pytest.mark.slow
def test_the_runtime_of_the_docs_gives_the_bits_of_medfl_run(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = next(block for block in blocks("extend.md", "python") if "site_step(" in block)
    exec(compile(text, "extend.md", "exec"), {})
    printed = capsys.readouterr().out.split()[-1]
    config = {"network": "small_cnn", "image_size": 28}
    requested = {"method": "scaffold", "data": "phantom", "sites": 2, "partition": "iid", "rounds": 2}
    summary = medfl.federate("mednist", config=config, requested=requested, out="runs/same", jobs=1)
    assert summary["weights_sha256"] == printed


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; --strict refuses links and anchors that lead nowhere and pages that are not in the menu."""
    pytest.importorskip("mkdocs", reason="the site's tools are the extra docs")
    pytest.importorskip("mkdocstrings", reason="the site's tools are the extra docs")
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "-f",
        DOCS / "site/mkdocs.yml",
        "-d",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_site_is_built_and_asks_nothing_of_the_net(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    loaded = re.compile(r"<(?:script|img|iframe|source)[^>]+src=\"(?:https?:)?//|<link[^>]+href=\"(?:https?:)?//")
    for page in pages:
        assert not loaded.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_equations_are_mathml_without_leftovers(site: Path) -> None:
    for name in methods.names():
        text = (site / "methods" / f"{name}.html").read_text(encoding="utf-8")
        assert "<math" in text
        assert "arithmatex" not in text
        assert not re.search(r"<m[a-z]+[^>]*>\\", text), f"{name}: LaTeX that was not understood"


def test_every_page_is_in_the_menu_once() -> None:
    config = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text())

    def listed(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            yield from (page for value in entry.values() for page in listed(value))
        else:
            yield from (page for value in entry for page in listed(value))

    assert sorted(listed(config["nav"])) == PAGES


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_phone_shows_a_page_without_scrolling_sideways(site: Path, tmp_path: Path) -> None:
    for page in ("index.html", "methods/fedbm.html", "bundles.html", "cli.html"):
        probe = "<script>document.title='w'+document.documentElement.scrollWidth</script></body>"
        copy = site / page.replace(".html", ".probe.html")
        copy.write_text((site / page).read_text().replace("</body>", probe))
        command = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            f"--user-data-dir={tmp_path}", "--window-size=500,900", "--dump-dom", copy.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert int(re.search(r"<title>w(\d+)</title>", done.stdout)[1]) <= 500, page
