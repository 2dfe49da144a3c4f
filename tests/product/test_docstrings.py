"""What docstrings list under `Args:` and `Attributes:` is there under that name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import medfl

ROOT = Path(medfl.__file__).parent
Documented = ast.ClassDef | ast.FunctionDef


def entries(docstring: str, head: str) -> list[str]:
    """The names of a section's entries; `a, b: what they are` are two."""
    section = re.search(rf"^{head}:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    lines = re.findall(r"^    ([\w*][\w, *]*): ", section[1], re.MULTILINE) if section else []
    return [name.strip().lstrip("*") for line in lines for name in line.split(",")]


def parameters(node: Documented) -> set[str]:
    """What a function, or a class when it is made, takes."""
    if isinstance(node, ast.ClassDef):
        made = [
            part
            for part in node.body
            if isinstance(part, ast.FunctionDef) and part.name == "__init__"
        ]
        if not made:
            fields = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
            return {target.id for target in fields if isinstance(target, ast.Name)}
        node = made[0]
    given = node.args
    named = [
        *given.posonlyargs,
        *given.args,
        *given.kwonlyargs,
        *filter(None, [given.vararg, given.kwarg]),
    ]
    return {part.arg for part in named}


def names_within(node: ast.AST) -> set[str]:
    """The fields, properties and attributes that a class has of its own."""
    kinds = ("id", "attr", "arg", "name")
    return {
        name
        for part in ast.walk(node)
        for kind in kinds
        if isinstance(name := getattr(part, kind, None), str)
    }


def documented(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each class and function of a module's text, with the names that its docstring has and it has not."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (
            docstring := ast.get_docstring(node)
        ):
            wrong = [name for name in entries(docstring, "Args") if name not in parameters(node)]
            yield (
                node.name,
                wrong
                + [n for n in entries(docstring, "Attributes") if n not in names_within(node)],
            )


def test_what_docstrings_list_is_there_under_that_name() -> None:
    """A name that was changed in the code alone misleads whoever reads the documentation."""
    found = {}
    for path in ROOT.rglob("*.py"):
        for name, wrong in documented(path.read_text(encoding="utf-8")):
            if wrong:
                found[f"{path.relative_to(ROOT)}: {name}"] = wrong
    assert not found


def test_a_name_that_is_not_there_is_found() -> None:
    """In a signature and in a class; entries of several names, and lines that go on, are read as such."""
    text = (
        "def f(a, b):\n    '''Do.\n\n    Args:\n        a, c: what\n            they: are\n        b: more\n    '''\n"
        "class K:\n    '''Be.\n\n    Attributes:\n        x: one\n        y: other\n    '''\n    x: int\n"
    )
    assert dict(documented(text)) == {"f": ["c"], "K": ["y"]}
