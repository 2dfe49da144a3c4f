"""Decides by their text which `$` expressions and imports of a configuration are permitted; nothing is run here.

A filter, and a report of what is used: it reads names, and refuses a name with side effects (it writes, starts,
fetches, unpickles or leads to the interpreter). No list of names is complete, so what an expression can do is limited
by the sandbox (`medfl.safety`), not here. MONAI evaluates permitted expressions.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from medfl.core import Refused, printable
from medfl.policy.components import check_argument, check_path, name_set

DEFAULT_NAMES = {"monai": "monai", "torch": "torch", "np": "numpy", "numpy": "numpy"}
"""The modules that MONAI makes available in every expression without an import."""
_BUILTINS = name_set(
    "abs all any bool bytes complex dict divmod enumerate filter float frozenset int isinstance iter len list map max "
    "min next ord pow range repr reversed round set slice sorted str sum tuple zip"
)
"""Built-in functions that compute values from values."""
_CALLED = ("open", "print", "setattr")
_SCOPE = (*_BUILTINS, *_CALLED, "__import__")
"""Other names available where an expression is evaluated; the check of the text is stricter."""
_MODULES = name_set(
    "collections copy csv datetime datetime.datetime functools glob itertools json logging math operator os.path "
    "pathlib random re statistics string numpy numpy.fft numpy.linalg numpy.random pandas scipy.fft "
    "scipy.interpolate scipy.ndimage scipy.signal scipy.spatial scipy.special scipy.stats skimage.color "
    "skimage.exposure skimage.feature skimage.filters skimage.measure skimage.morphology skimage.segmentation "
    "skimage.transform skimage.util torch torch.amp torch.cuda torch.cuda.amp torch.distributed torch.fft "
    "torch.linalg torch.nn torch.nn.functional torch.nn.init torch.nn.utils torch.optim torch.optim.lr_scheduler "
    "torch.random torch.special torch.utils.data torchvision.models torchvision.transforms ignite.engine "
    "ignite.metrics monai.apps.deepedit monai.apps.deepgrow monai.apps.detection monai.apps.generation "
    "monai.apps.nuclick monai.apps.pathology monai.apps.vista3d monai.auto3dseg.utils monai.data monai.engines "
    "monai.handlers monai.inferers monai.losses monai.metrics monai.networks monai.optimizers monai.transforms "
    "monai.utils"
)
"""Modules whose members compute, look at files or are components, unless their name acts; with MONAI's submodules."""
_MEMBERS = name_set(
    "json.load json.loads os.getcwd os.listdir os.sep monai.data.load_decathlon_datalist "
    "medfl.datasets.datalist medfl.datasets.locate medfl.datasets.unlabelled "
    "medfl.datasets.own.above medfl.datasets.own.labelled medfl.datasets.own.listed "
    "medfl.datasets.own.paired"
)
"""Further permitted members, whatever their name."""
_ATTRIBUTES = {"eval", "load_state_dict", "load_old_state_dict", "removeprefix", "removesuffix"}
_ACTS = re.compile(
    r"_|(.*_)?(attrgetter|chmod|compile|connect|delattr|download|dump|eval|exec|fetch|fork|getattr|hub|import|"
    r"instantiate|kill|link|load|locate|memmap|methodcaller|mkdir|open(?!ing)|pickle|popen|register|"
    r"remove(?!_small)|rename|replace$|rmdir|run(?!ning)|save|send|setattr|socket|spawn|symlink|system|touch|unlink|url|write)"
    r"|(os|sys|io|builtins|ctypes|importlib|multiprocessing|shutil|subprocess)$"
    r"|from_?file|tofile|to_(csv|excel|hdf|json|parquet|pickle|sql)|read_(?!csv|text)|(f|gi|cr|tb)_|func_",
    re.IGNORECASE,
)
"""A name with side effects, or leading to a module that has them or to the interpreter; also `LoadImage` and others."""
_PERMISSIONS = {
    "torch.load": "pickle",
    "torch.jit.load": "pickle",
    "sys.path.append": "sys.path",
    "sys.path.insert": "sys.path",
    "torch.cuda.set_device": "distributed",
    "os.path.expanduser": "paths",
}
"""Members that need a permission of the site's policy, and which."""
_READING = ("r", "rb", "rt")
_REFERENCE = re.compile(r"@(?:\w*)(?:::\w*)*")  # as MONAI recognises them
_PLACEHOLDER = "_reference_"


@dataclass
class Uses:
    """What expressions and imports use, with counts, and the policy permissions this needs."""

    counts: Counter[str] = field(default_factory=Counter)
    permissions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(permission, what needs it)"""

    def permit(self, permission: str, what: str, granted: Collection[str]) -> None:
        """Count a use that a permission of the policy allows.

        Raises:
            Refused: the policy does not grant it.
        """
        if permission not in granted:
            raise Refused(f"{what}, for which the policy has to allow {permission!r}")
        self.permissions[permission, what] += 1


def imported(text: str, uses: Uses) -> dict[str, str]:
    """Return the names that an import statement (without its `$`) binds, and the paths they refer to.

    Nothing is imported. Whether the target of a path may be used is checked when an expression uses the name.

    Raises:
        Refused: it is not an import, or a relative one.
    """
    node = _only_statement(text)
    if not isinstance(node, ast.Import | ast.ImportFrom):
        raise Refused("something else than an import")

    bound = {}
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            if node.level or not node.module or alias.name == "*":
                raise Refused("a relative import or one of everything")
            path = f"{node.module}.{alias.name}"
            bound[alias.asname or alias.name] = path
        else:
            path = alias.name
            name = alias.asname or path.partition(".")[0]
            bound[name] = path if alias.asname else name
        uses.counts[f"import {path}"] += 1

    return bound


@dataclass(frozen=True)
class ExpressionFilter:
    """What the expressions of one bundle may name.

    Attributes:
        names: names bound by its imports, and the paths they refer to.
        permissions: of the policy.
        own_modules: top-level modules of the bundle's own Python.
        length: maximum length of an expression.
    """

    names: Mapping[str, str]
    permissions: Collection[str] = ()
    own_modules: Collection[str] = ()
    length: int = 1000

    def modules(self, text: str) -> dict[str, object]:
        """Check an expression, given without its `$`, and return what the names of imports in it stand for.

        Raises:
            Refused: it names something that is not permitted.
        """
        # What C imports looks for __import__ here, which no expression can spell.
        values: dict[str, object] = {
            "__builtins__": {name: getattr(builtins, name) for name in _SCOPE}
        }
        for name, path in self.check(text, Uses()):
            with suppress(AttributeError):  # which is reported if it is evaluated
                if isinstance(_located(path), ModuleType):
                    raise Refused(f"{path}, a module as a value")
            values[name] = _located(self.names[name])
        return values

    def check(self, text: str, uses: Uses, *, prints: bool = False) -> list[tuple[str, str]]:
        """Check an expression, and return the imported names in it, with the path of each.

        Args:
            text: the expression without its `$`.
            uses: records what is used.
            prints: it belongs to a handler, which medfl never creates, so it may print.

        Raises:
            Refused: it names something that is not permitted.
        """
        if len(text) > self.length:
            raise Refused(f"an expression of more than {self.length} characters")
        # `lambda batch, *_, **__:` ignores the arguments it does not use.
        if "__" in re.sub(r"(?<=\*\*)__(?=\s*:)", "_", text):
            raise Refused("a name with two underscores")

        text = text.replace("#", "::")
        if "%::" in text or _PLACEHOLDER in text:
            raise Refused("a macro inside an expression")

        statement = _only_statement(_REFERENCE.sub(f"{_PLACEHOLDER}0", text))
        if not isinstance(statement, ast.Expr):
            raise Refused("a statement where an expression is expected")

        bound = set(_bound(statement))
        if not bound.isdisjoint(_CALLED):
            raise Refused("an argument that takes the name of a function")

        nameable = {*_BUILTINS, f"{_PLACEHOLDER}0", *bound}
        if prints:
            nameable.add("print")

        paths = []
        passed: set[ast.AST] = set()
        for node in ast.walk(statement):  # a chain of attributes before its parts
            name, path = _module_path(node, self.names)
            if node in passed:
                continue
            if path:
                passed.update(ast.walk(node))
                self.member(path, uses)
                paths.append((name, path))
            elif isinstance(node, ast.Attribute):
                self._attribute(node, uses)
            elif isinstance(node, ast.Call):
                passed.update(self._call(node, uses))
            elif isinstance(node, ast.Name) and node.id not in nameable:
                raise Refused(
                    f"the name {printable(node.id)}, which is not imported, or may not be called here"
                )
            elif isinstance(node, ast.Name) and node.id in _BUILTINS:
                uses.counts[node.id] += 1
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                raise Refused("an assignment")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if _PLACEHOLDER in node.value:
                    raise Refused("a reference inside a text")
                # for os.path.expanduser
                home = "~" if "paths" in self.permissions else ""
                check_path(node.value.removeprefix(home), absolute=True)

        return paths

    def member(self, path: str, uses: Uses) -> None:
        """Check the target of a module's name and attributes.

        Raises:
            Refused: it is not permitted.
        """
        module = path.rpartition(".")[0]
        while module and module not in _MODULES:
            module = module.rpartition(".")[0]

        permission = _PERMISSIONS.get(path)
        if path.startswith("torch.distributed.") and not re.search(r"\.(get|is)_\w+$", path):
            permission = "distributed"
        if path.partition(".")[0] in self.own_modules:
            permission = "scripts"

        if permission:
            uses.permit(permission, path, self.permissions)
        elif path not in _MEMBERS:
            *classes, name = path.removeprefix(f"{module}.").split(".")
            is_below = "".join(classes)[:1].islower() and not path.startswith("monai.")
            if not module or is_below:
                raise Refused(f"{printable(path)}, of no module that a bundle uses here")
            for part in (*classes, name):
                _check_name(part, path)

        uses.counts[path] += 1

    def _attribute(self, node: ast.Attribute, uses: Uses) -> None:
        if not isinstance(node.ctx, ast.Load):
            raise Refused("an assignment")
        # Objects of the bundle's own Python have attributes of any name.
        of_scripts = self.own_modules and "scripts" in self.permissions
        if node.attr not in _ATTRIBUTES and not (of_scripts and node.attr[:1] != "_"):
            _check_name(node.attr, f"the attribute .{node.attr}")
        uses.counts[f".{node.attr}"] += 1

    def _call(self, node: ast.Call, uses: Uses) -> Iterator[ast.AST]:
        """Check a call; yield the called name if it is one that may only be called."""
        called = node.func
        keywords = {}
        for keyword in node.keywords:
            name = keyword.arg or ""
            keywords[name] = _literal(keyword.value)
            if name != "weights_only" or "pickle" not in self.permissions:
                check_argument(name, keywords[name])

        if isinstance(called, ast.Name) and called.id == "open":
            if len(node.args) > 1:
                mode = _literal(node.args[1])
            else:
                mode = keywords.get("mode", "r")

            plain = len(node.args) <= 2 and keywords.keys() <= {"mode", "encoding", "newline"}
            if not plain or mode not in _READING:
                uses.permit("open", "open() for writing", self.permissions)
            uses.counts["open, to read" if mode in _READING else "open"] += 1
            yield called
        elif isinstance(called, ast.Name) and called.id == "setattr":
            uses.permit("setattr", "setattr()", self.permissions)
            uses.counts["setattr"] += 1
            yield called
        # A string's has two arguments; a path's, with one, moves a file.
        elif isinstance(called, ast.Attribute) and called.attr == "replace" and len(node.args) > 1:
            yield from [called] * (not _module_path(called, self.names)[0])


def _check_name(name: str, whole: str) -> None:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    if _ACTS.match(words):
        raise Refused(
            f"{printable(whole)}, a name of what writes, starts, fetches or leads elsewhere"
        )


def _only_statement(text: str) -> ast.stmt:
    """Return the single statement of a text.

    Raises:
        Refused: this Python does not parse it, or it is not ASCII, or not one statement.
    """
    if not text.isascii():
        raise Refused("characters outside of ASCII in an expression")

    try:
        # The parser raises MemoryError for deep nesting.
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise Refused(f"an expression that Python {version} does not parse") from error

    if len(statements) != 1:
        raise Refused("not exactly one expression")

    return statements[0]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that lambdas and comprehensions bind."""
    for node in ast.walk(statement):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _module_path(node: ast.AST, names: Mapping[str, str]) -> tuple[str, str]:
    """Return the imported name that starts a name or attribute chain, and the path that it spells."""
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value

    if not isinstance(node, ast.Name) or node.id not in names:
        return "", ""

    return node.id, ".".join([names[node.id], *reversed(attributes)])


def _literal(node: ast.AST) -> object:
    """Return a node's literal value, or a string that begins with `$` if it is computed."""
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return "$"


def _located(path: str) -> Any:
    """Return the target of a path, importing its module if needed."""
    # The longest module first: the rest are attributes.
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        try:
            target = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # also a package that the module itself needs
            if end == 1 or not name.startswith(str(error.name)):
                raise
            continue

        for part in parts[end:]:
            target = getattr(target, part)
        return target

    raise AssertionError("a path has parts")
