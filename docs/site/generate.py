"""The parts of the documentation that are made from the code, so that they cannot go stale.

`python docs/site/generate.py` refreshes what stands between `<!-- NAME -->` and `<!-- /NAME -->` on the pages of
`PARTS`; all other lines are written by hand. `--check` changes nothing, names what is stale and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import html
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import yaml

from medfl import methods
from medfl.bundle.bundle import Bundle, shipped
from medfl.cli import bundle_pages, method_pages, verbs as cli
from medfl.core import tables
from medfl.core.declared import Declared
from medfl.storage.files import write_atomic

sys.path.insert(0, str(Path(__file__).parent))
from method_messages import catalogue  # noqa: E402 (it lies beside this program)

DOCS = Path(__file__).resolve().parents[1]

Parts = Mapping[str, Callable[[], str]]
Row = tuple[str, str]
Groups = dict[str, list[Row]]


# Methods


def method_table() -> str:
    """Return the table of methods with links to their pages and without their options."""
    head = ["Method", "Tasks", "Judged", "What travels", "Plain averaging host", "Paper"]
    rows = [
        [f"[`{e['name']}`](methods/{e['name']}.md)", method_pages.tasks_text(e), e["judged"],
         method_pages.travels_text(e), "yes" if e["plain_host"] else "no", e["paper"]]
        for e in method_pages.methods()["methods"]
    ]  # fmt: skip
    return tables.markdown_table(head, rows, is_markup=True)


def method_parts(name: str) -> Parts:
    """Return what a method's page takes from its class and its module."""
    return {
        "facts": lambda: _facts(name),
        "options": lambda: _options(name),
        "as built": lambda: _as_built(name),
    }


@cache
def _method(name: str) -> method_pages.Document:
    """Return what the catalogue knows of a method; finding out what travels takes a moment."""
    return method_pages.methods(name)


def _facts(name: str) -> str:
    entry = _method(name)
    with mock.patch.object(tables, "screen_width", return_value=10_000):
        page = method_pages.methods_text(entry).split("\n\n")[1]

    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in page.splitlines())
    rows = [[fact[0].upper() + fact[1:], _escaped(text)] for fact, text in facts.items()]
    return f"{_escaped(entry['summary'])}\n\n" + tables.markdown_table(
        ["", ""], rows, is_markup=True
    )


def _options(name: str) -> str:
    entry = _method(name)
    tables = (
        [_option_table(entry["options"])] if entry["options"] else ["This method has no options."]
    )
    if entry["prototype_options"]:
        tables += [
            "Class prototypes can be shared beside the weights, as in [FedMR](fedmr.md):",
            _option_table(entry["prototype_options"]),
        ]
    return "\n\n".join(tables)


def _option_table(options: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"`{o['name']}`",
            _kind(o),
            f"`{_plain(o['default'])}`" if o["default"] != "" else "",
            _escaped(o["help"]),
        ]
        for o in options
    ]
    return tables.markdown_table(
        ["Option", "Value", "Default", "What it does"], rows, is_markup=True
    )


def _kind(option: Mapping[str, Any]) -> str:
    if option["choices"]:
        return ", ".join(
            f"`{_plain(choice)}`" if choice != "" else "nothing" for choice in option["choices"]
        )
    return str(option["type"]).replace("|", "or") + Declared(**option).bounds("≥", "≤")


def _as_built(name: str) -> str:
    """Return the module's docstring but for its title: aligned lines as they are, the rest as paragraphs."""
    paragraphs = _method(name)["docs"].strip().split("\n\n")
    lines = paragraphs[0].split("\n")
    paragraphs[0] = "\n".join(lines[1:]).strip("\n")
    made = [_paragraph(text) for text in paragraphs if text]
    return '<div class="as-built" markdown>\n\n' + "\n\n".join(made) + "\n\n</div>"


def _paragraph(text: str) -> str:
    if re.search(r"\S {2,}\S|^ +\S", text, re.MULTILINE):
        return f"```text\n{text}\n```"
    return re.sub(r"(?:^|\n)(Departures?\b)", r"\n\n**\1**", _escaped(text)).strip()


# Bundles


def bundle_table() -> str:
    """Return the table of bundles with links to their pages."""
    head = ["Bundle", "Images", "Classes", "Centres", "Network", "Licence of the images"]
    rows = [
        [f"[`{e['name']}`](bundles/{e['name']}.md)", e["title"], bundle_pages.classes_text(e), str(e["centres"]),
         f"`{e['network']}`", e["licence"]]
        for e in bundle_pages.bundles()["bundles"]
    ]  # fmt: skip
    return tables.markdown_table(head, rows, is_markup=True)


def bundle_page(name: str) -> str:
    """Return all of a bundle's page but its title: what it is, how it is used, its protocol, counts and figures."""
    entry, bundle = bundle_pages.bundles(name), Bundle(name)
    metadata = json.loads((bundle.root / "configs" / "metadata.json").read_text(encoding="utf-8"))
    parts = [
        _escaped(metadata["description"]),
        _facts_table(_about(entry, metadata)),
        "## Use",
        _bundle_commands(entry),
        "## Protocol",
        "What a run takes where nothing else is asked for.",
        _facts_table(_protocol(entry)),
    ]
    if counts := _counts(bundle.root / "docs" / "README.md"):
        parts += ["## Images", counts]
    if entry["notes"]:
        parts += ["## Notes", "\n".join(f"- {_escaped(note)}" for note in entry["notes"])]
    if figures := _figures().get(name):
        parts += [
            "## Figures reached",
            "On real images, in small settings of our own; the links say which.",
            tables.markdown_table(["Setting", "Figure", "By method"], figures, is_markup=True),
        ]
    return "\n\n".join(parts)


def _about(entry: bundle_pages.Document, metadata: Mapping[str, Any]) -> dict[str, str]:
    fetched = f"`medfl data fetch {entry['name']} --out DIR`"
    return {
        "Task": metadata["task"],
        "Classes": ", ".join(entry["class_names"]),
        "Centres": ", ".join(entry["centre_names"]) or "not known",
        "Network": f"`{entry['network']}`",
        "Layouts on disk": "<br>".join(map(_code, entry["layouts"])),
        "Real images": fetched if entry["can_fetch"] else "by hand, from the source",
        "Licence": entry["licence"],
        "Source": entry["source"],
        "Cite": entry["citation"],
    }


def _protocol(entry: bundle_pages.Document) -> dict[str, str]:
    defaults = (f"{key} `{_plain(value)}`" for key, value in entry["defaults"].items())
    presets = (f"`{name}`: {about}" for name, about in entry["presets"].items())
    return {
        "Protocol": entry["protocol"],
        "Defaults": ", ".join(defaults),
        "Presets (`--preset NAME`)": "; ".join(presets) or "none",
        "Splits": ", ".join(f"`{split}`" for split in entry["splits"]),
    }


def _facts_table(facts: Mapping[str, str]) -> str:
    rows = [
        [fact, text if re.search("`|<code>", text) else _escaped(text)]
        for fact, text in facts.items()
    ]
    return tables.markdown_table(["", ""], rows, is_markup=True)


def _bundle_commands(entry: bundle_pages.Document) -> str:
    """Return the commands that draw, check, train on and report a bundle's images."""
    name = entry["name"]
    partition = " --partition centre" if entry["centres"] > 1 else ""
    commands = [
        f"medfl data make {name} --out data/{name}",
        f"medfl data check {name} --data data/{name}",
        f"medfl run {name} --data data/{name}{partition} --rounds 2 --out runs/{name}",
        f"medfl report runs/{name}",
    ]
    text = "The first line draws a phantom; leave it out where `data/{}` has the real images."
    return "\n".join(["```sh", *commands, "```"]) + "\n\n" + text.format(name)


def _counts(readme: Path) -> str:
    """Return the table of counts of a bundle's README and what is said of it."""
    found = re.search(
        r"^## Counts\n+(.*?)(?=^## |\Z)",
        readme.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    return found[1].strip() if found else ""


@cache
def _results() -> ModuleType:
    """Return docs/results/make.py, which knows the recorded runs."""
    spec = importlib.util.spec_from_file_location("medfl_results", DOCS / "results" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["medfl_results"] = module  # dataclasses look there for their module
    spec.loader.exec_module(module)
    return module


@cache
def _figures() -> dict[str, list[list[str]]]:
    """Return bundle -> a row for each recorded table of its runs alone: where it stands, and one column of it."""
    make = _results()
    results = make.Results.read()
    rows: dict[str, list[list[str]]] = {}
    for page in make.PAGES:
        heading = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("#"):
                heading = line.lstrip("# ")
            found = re.fullmatch(r"<!-- table: (\S+) -->", line)
            if found and found[1] != "claims":
                table = results.asked["tables"][found[1]]
                runs = [make._named(entry) for entry in table["rows"].values()]
                bundles = {results.run(run).record["bundle"] for row in runs for run in row}
                if len(bundles) == 1:
                    titles = list(table["columns"])
                    title = "mean" if "mean" in titles else titles[0]
                    link = f"[{heading}](../results/{page.name}#{_anchor(heading)})"
                    figures = _column(results.table(found[1]), 1 + titles.index(title))
                    said = "mean of the sites" if title == "mean" else title
                    rows.setdefault(bundles.pop(), []).append([link, said, figures])
    return rows


def _column(table: str, index: int) -> str:
    """Return the label and one cell of each row of a Markdown table as text."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return "; ".join(f"{cells[0]}: {cells[index]}" for cells in rows)


def _anchor(heading: str) -> str:
    """Return a heading's anchor as the site makes it."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


# Command line


def border_table() -> str:
    """Return the table of what comes from outside."""
    border = yaml.safe_load((Path(__file__).parent / "border.yaml").read_text())
    rows = [
        [one["what"], one["sender"], f"`{one['validator']}`", one["checks"], one["remains"]]
        for one in border
    ]
    return tables.markdown_table(
        ["what", "from", "checked by", "what is checked", "what remains"], rows, is_markup=True
    )


def command_line() -> str:
    """Return the help of every command, from the parser itself; options that several commands share come first."""
    commands = {parser.prog: parser for parser in _parsers(cli.parser())}
    options = {name: _option_groups(parser) for name, parser in commands.items()}
    shared = _shared(options.values())

    parts = [
        "## Shared options",
        "Commands name the groups that they take; a group is meant with all its options unless said otherwise.",
    ]
    for title, rows in shared.items():
        parts += [
            f"### {title}",
            tables.markdown_table(["Option", ""], list(map(list, rows)), is_markup=True),
        ]
    parts += [_verb(parser, options[name], shared) for name, parser in commands.items()]
    return "\n\n".join(parts)


def _option_groups(parser: argparse.ArgumentParser) -> Groups:
    """Return the rows of a command's arguments and options by the title of their group."""
    groups: Groups = {}
    for group in parser._action_groups:
        title = {"options": "general", "positional arguments": "arguments"}.get(
            str(group.title), str(group.title)
        )
        # The page's first paragraphs tell what --help, --json and --debug do.
        actions = [
            action
            for action in group._group_actions
            if action.dest not in ("help", "json", "debug")
        ]
        rows = [_argument(action) for action in actions if action.help != argparse.SUPPRESS]
        if rows:
            groups[title[0].upper() + title[1:]] = rows
    return groups


def _shared(tables: Iterable[Groups]) -> Groups:
    """Return the options that two or more commands have in the same group, with the same words.

    Of an option that has other words in some commands, the first are shared, and the other commands tell their own.
    """
    counts = Counter(
        (title, row) for groups in tables for title, rows in groups.items() for row in rows
    )
    shared: Groups = {}
    for (title, row), count in counts.items():
        if count < 2 or title in ("Arguments", "General"):
            continue
        rows = shared.setdefault(title, [])
        if _flag(row) not in map(_flag, rows):
            rows.append(row)
    return shared


def _named(title: str, rows: list[Row], shared: list[Row]) -> str:
    """Name those rows of a shared group that a command has."""
    link = f"[{title}](#{title.lower().replace(' ', '-')})"
    present = [_flag(row) for row in shared if row in rows]
    missing = [_flag(row) for row in shared if row not in rows]
    if not missing:
        return link
    if len(missing) < len(present):
        return f"{link} except {', '.join(missing)}"
    return f"{link}: only {', '.join(present)}"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield parser
    for action in inner:
        for verb in action.choices.values():
            yield from _parsers(verb)


def _flag(row: Row) -> str:
    return "`" + row[0].replace("<code>", "").strip("`").partition(" ")[0] + "`"


def _verb(parser: argparse.ArgumentParser, groups: Groups, shared: Groups) -> str:
    positional = " ".join(
        str(action.metavar) for action in parser._actions if not action.option_strings
    )
    parts = [
        f"## {parser.prog}",
        parser.description or "",
        f"```text\n{' '.join(f'{parser.prog} {positional} [options]'.split())}\n```",
    ]

    names = []
    for title, rows in groups.items():
        common = [row for row in rows if row in shared.get(title, [])]
        own = [list(row) for row in rows if row not in common]
        if own:
            parts.append(tables.markdown_table([title, ""], own, is_markup=True))
        if common:
            names.append(_named(title, common, shared[title]))
    if names:
        parts.append(f"Shared options: {'; '.join(names)}.")

    about, _, examples = (parser.epilog or "").partition("examples\n")
    parts += [_escaped(" ".join(about.split()))] if about.strip() else []
    parts += [f"```text\n{examples}\n```"] if examples else []
    return "\n\n".join(parts)


def _argument(action: argparse.Action) -> Row:
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    if not action.option_strings:
        name = str(action.metavar) + ("..." if action.nargs == "+" else "")
        return _code(name), _escaped(action.help or "")
    must = " (required)" if action.required else ""
    return _code(", ".join(action.option_strings) + value), _escaped((action.help or "") + must)


# Pages


PARTS: Mapping[str, Parts] = {
    "methods.md": {"methods": method_table},
    "bundles.md": {"bundles": bundle_table},
    "cli.md": {"verbs": command_line},
    "security.md": {"border": border_table},
    **{f"methods/{name}.md": method_parts(name) for name in methods.names()},
    **{f"bundles/{name}.md": {"page": partial(bundle_page, name)} for name in shipped()},
}


def fresh(text: str, parts: Parts) -> str:
    """Return a page with its marked parts made anew.

    Raises:
        ValueError: a part's two marks are not there, in this order, exactly once.
    """
    for name, make in parts.items():
        opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
        if (
            text.count(opening) != 1
            or text.count(closing) != 1
            or text.index(opening) > text.index(closing)
        ):
            raise ValueError(f"the page needs {opening} and {closing} once, in this order")
        before, _, rest = text.partition(opening)
        text = f"{before}{opening}\n\n{make()}\n\n{closing}{rest.partition(closing)[2]}"
    return text


def stale() -> Iterator[tuple[Path, str]]:
    """Yield the pages that are not as the code has them, with what they should say."""
    known = json.dumps(catalogue(), indent=1, ensure_ascii=False) + "\n"
    if method_pages.CATALOGUE.read_text(encoding="utf-8") != known:
        yield method_pages.CATALOGUE, known
    for page, parts in PARTS.items():
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        if (wanted := fresh(text, parts)) != text:
            yield path, wanted


def _escaped(text: str) -> str:
    """Keep plain text plain in Markdown: marks of emphasis, links, mathematics and HTML mean themselves."""
    pieces = re.split(r"(`[^`\n]*`)", text)
    return "".join(
        piece if i % 2 else re.sub(r"([\\*_\[\]$~])", r"\\\1", html.escape(piece, quote=False))
        for i, piece in enumerate(pieces)
    )


def _code(text: str) -> str:
    """Mark as code; a bar ends a cell even there, or shows its backslash, as the reader of Markdown likes."""
    return (
        f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"
        if "|" in text
        else f"`{text}`"
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def main(arguments: list[str]) -> int:
    """Refresh the pages, or with --check only name the stale ones."""
    found = list(stale())
    for path, wanted in found:
        if "--check" not in arguments:
            write_atomic(path, wanted.encode())
        sys.stdout.write(
            f"{path.relative_to(DOCS.parent)}: {'stale' if '--check' in arguments else 'refreshed'}\n"
        )
    return int(bool(found) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
