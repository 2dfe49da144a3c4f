"""The docs stay true: generated parts are those of the code, commands and Python run, links lead somewhere."""

from __future__ import annotations

import argparse
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

import medfl
from medfl import methods
from medfl.bundle.bundle import shipped
from medfl.cli import verbs as cli
from tests.support.docs_pages import DOCS, FLARE, NOT_RUN, PAGES, README, blocks, commands, inline

METHOD_PAGES = [page for page in PAGES if page.startswith("methods/")]
BUNDLE_PAGES = [page for page in PAGES if page.startswith("bundles/")]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "medfl_docs_generate", DOCS / "site" / "generate.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Public names


def test_pages_and_notebooks_import_public_names_only() -> None:
    """They name `medfl.NAME` or `medfl.ROOM.NAME`. Only docs/examples, which extend FLARE's parts, go deeper."""
    pages = [
        DOCS.parent / "README.md",
        *DOCS.rglob("*.md"),
        *(DOCS.parent / "notebooks").glob("*.ipynb"),
    ]
    imports = {
        f"{path.name}: {line}"
        for path in pages
        for line in re.findall(
            r"\b(?:from medfl[\w.]* import [\w, ]+|import medfl\.[\w.]+)", path.read_text()
        )
    }
    assert any("medfl.runs import" in line for line in imports), "the pattern finds them"
    deep = [
        line for line in imports if re.search(r"medfl\.\w+\.\w|\b_\w+", line.partition(": ")[2])
    ]
    assert not deep, "let the room's __init__.py hand the name out"


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
    assert [f"bundles/{name}.md" for name in sorted(shipped())] == BUNDLE_PAGES
    verbs = re.findall(r"^## medfl (\w+)", (DOCS / "cli.md").read_text(), re.M)
    assert list(dict.fromkeys(verbs)) == list(cli.parser()._subparsers._group_actions[0].choices)


def test_the_evidence_of_each_claim_is_there() -> None:
    """A row of docs/claims.md names tests, programs or pages; links are the site's to check."""
    page = (DOCS / "claims.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][
        1:
    ]
    assert len(rows) > 10
    for claim, evidence, *_ in rows:
        named = re.findall(r"`((?:tests|benchmarks)/[^`]+)`", evidence)
        assert named or "](" in evidence, claim
        assert all((DOCS.parent / name).exists() for name in named), claim


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


# Commands: that they are understood (test_docs_commands.py runs them)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Return the command line's parser, which takes any names of bundles and folders: they are the reader's."""
    with pytest.MonkeyPatch.context() as patch:
        for checked in ("bundle_name", "bundle_folder", "existing", "run_folder"):
            for module in ("arguments", "new", "site"):
                patch.setattr(f"medfl.cli.{module}.{checked}", str, raising=False)

        return cli.parser()


@pytest.mark.parametrize("page", [README, *PAGES])
def test_every_command_is_understood(page: str, parser: argparse.ArgumentParser) -> None:
    for command in commands(page):
        words = shlex.split(command)
        assert words[0] in (
            "medfl",
            "pip",
            "export",
            "make",
            "nvflare",
            "python",
            "python3",
            "medfl/bin/pip",
        ), command
        if words[0] == "medfl" and words[1] != "--version":
            options = parser.parse_args(words[1:])
            assert (
                getattr(options, "method", None) in (None, *methods.names())
                or "." in options.method
            )
            if (
                words[1] == "run"
                and options.bundle
                and "/" not in options.bundle
                and page != "extend.md"
            ):
                assert options.bundle in shipped()


def test_every_flag_that_the_text_names_with_its_verb_exists(
    parser: argparse.ArgumentParser,
) -> None:
    """Commands in the middle of a sentence may have names for values, and words left out; verbs and flags are real."""
    known = 0
    for page in [README, *PAGES]:
        for words in inline(page, "medfl"):
            verb = parser
            while verb._subparsers is not None:
                actions = verb._subparsers._group_actions[0].choices
                if len(words) < 2 or words[1].startswith("-"):
                    break
                assert words[1] in actions, (page, words)
                verb, words = actions[words[1]], words[1:]
            for flag in (
                word.partition("=")[0] for word in words if word.startswith("--") and word != "--"
            ):
                assert flag in verb._option_string_actions, (page, words)
                known += 1
    assert known > 20


def test_what_is_not_run_is_in_the_docs() -> None:
    given = [command for page in [README, *PAGES] for command in commands(page)]
    for word in (*NOT_RUN, *FLARE):
        assert any(word in command for command in given), f"drop {word!r}"


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
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_the_site_is_built_and_asks_nothing_of_the_net(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=\"(?:https?:)?//|<link[^>]+href=\"(?:https?:)?//"
    )
    for page in pages:
        assert not loaded.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.search(
            r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")
        ), sheet


@pytest.mark.slow
@pytest.mark.xdist_group("site")
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
@pytest.mark.xdist_group("site")
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_phone_shows_a_page_without_scrolling_sideways(site: Path, tmp_path: Path) -> None:
    for page in (
        "index.html",
        "methods/fedbm.html",
        "bundles.html",
        "bundles/mednist.html",
        "cli.html",
    ):
        probe = "<script>document.title='w'+document.documentElement.scrollWidth</script></body>"
        copy = site / page.replace(".html", ".probe.html")
        copy.write_text((site / page).read_text().replace("</body>", probe))
        command = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            f"--user-data-dir={tmp_path}", "--window-size=500,900", "--dump-dom", copy.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert int(re.search(r"<title>w(\d+)</title>", done.stdout)[1]) <= 500, page
