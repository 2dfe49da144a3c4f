"""Inspection: what a bundle would run, read as text; nothing of it is imported, evaluated or instantiated.

Every file is hashed. Every configuration file (JSON and YAML in `configs/` and in the bundle's folder) is read as plain
values and walked: each `_target_` and each `$` expression has to be on the lists of `allowed`, each reference and
macro has to stay inside the configuration, each text that could be a path inside bundle or data folder. What is unknown
is refused. Words of the site's policy widen this, one by one.

One place is read with more patience: the top-level lists `initialize`, `run` and their like, where nothing refers to
them, hold statements, which medfl never evaluates. metadata.json describes: no expression is accepted there.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Any

from medfl.core.errors import InputError
from medfl.core.untrusted import Plain, Refused, check_visible, decode_text, printable, read_plain
from medfl.policy.allowed import MODULES, WEIGHTS_OF_THEIR_OWN, argument_refused, target_allowed
from medfl.policy.expressions import DEFAULT_NAMES, Found, check_expression, check_id, check_path, imported
from medfl.policy.policy import WORDS, Policy

_CONFIGURATION = (".json", ".yaml", ".yml")
_INERT = (
    "", ".md", ".rst", ".txt", ".csv", ".tsv", ".safetensors", ".onnx", ".png", ".jpg", ".jpeg", ".tif", ".tiff",
    ".bmp", ".svg", ".gif", ".pdf", ".gz", ".nii", ".nrrd", ".mha", ".mhd", ".raw", ".npy", ".npz", ".dcm", ".h5",
    *_CONFIGURATION,
)  # fmt: skip
_PICKLED = (".pt", ".pth", ".ckpt", ".ts", ".pkl", ".pickle", ".bin", ".joblib")
_COMPILED = (".pyc", ".pyo", ".pyd", ".so", ".dll", ".dylib", ".exe", ".egg", ".whl", ".zip", ".sh", ".bat", ".ps1")
_KEY = re.compile(r"\+?\w+((#|::)\w+)*", re.ASCII)
_REFERENCE = re.compile(r"@((#|::)*\w+)((#|::)\w+)*", re.ASCII)
_MACRO = re.compile(r"%\w+((#|::)\w+)*", re.ASCII)
_SPECIAL = ("_target_", "_disabled_", "_requires_", "_desc_", "_mode_")
_ENTRIES = ("initialize", "run", "finalize", "training", "evaluating", "testing", "inferring")
"""Lists that the zoo's bundles give to `monai.bundle run`."""
_ZOO_DATA = "/workspace/"
_CHUNK = 1 << 20
_ADVICE = "have it changed, or allow it by a word of the policy where the line names one (docs/deploy.md)"

_Place = tuple[str, ...]


@dataclass(frozen=True)
class File:
    """A file of a bundle."""

    path: str
    kind: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Refusal:
    """Something that may not be, and where."""

    file: str
    id: str
    why: str

    def __str__(self) -> str:
        """Return it as a line."""
        where = f"{self.file}: {self.id}" if self.id else self.file
        return f"{printable(where)}: {self.why}"


@dataclass
class Inspection:
    """What was found; accepted where nothing is refused."""

    bundle: str
    folder: Path
    pinned: bool
    files: list[File] = field(default_factory=list)
    targets: Counter[str] = field(default_factory=Counter)
    uses: Counter[str] = field(default_factory=Counter)
    """parts of expressions"""
    expressions: int = 0
    statements: list[str] = field(default_factory=list)
    """those that medfl never evaluates, with file and id"""
    allowed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(word of the policy, what it allowed)"""
    data: dict[str, str] = field(default_factory=dict)
    """file -> what it says of `dataset_dir`"""
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        """Tell whether nothing is refused."""
        return not self.refusals

    def require(self) -> None:
        """Raise where something is refused.

        Raises:
            InputError: names the first refusal, and how many there are.
        """
        if self.refusals:
            count = len(self.refusals)
            more = "" if count == 1 else f" (and {count - 1} more)"
            given = f"bundle {printable(self.bundle)!r} is refused: {self.refusals[0]}{more}"
            raise InputError(given.replace(";", ","), "nothing unknown runs at a site", _ADVICE)

    def policy(self, given: Policy) -> Policy:
        """Return the policy that pins the files of this bundle, with the words and limits of the one given."""
        return Policy(self.bundle, given.allow, given.limits, {file.path: file.sha256 for file in self.files})

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "bundle": self.bundle,
            "folder": str(self.folder),
            "accepted": self.accepted,
            "pinned": self.pinned,
            "files": [vars(file) for file in self.files],
            "targets": dict(sorted(self.targets.items())),
            "expressions": self.expressions,
            "uses": dict(sorted(self.uses.items())),
            "statements": self.statements,
            "allowed_by_policy": [
                {"word": word, "meaning": WORDS[word], "what": what, "times": times}
                for (word, what), times in sorted(self.allowed.items())
            ],
            "data": self.data,
            "leaves": list(LEAVES),
            "refused": [vars(refusal) for refusal in self.refusals],
        }


LEAVES = (
    "tensors and numbers that the method sends: the network's weights and, with some methods, class counts, class "
    "means or answers to public images (medfl methods NAME)",
    "their names and sizes are known once the network is built; a run prints how many leave and how many stay",
    "with each reply the numbers of training images and of steps, whether a State was kept, and the mean training "
    "loss, which the policy may keep back (told/train_loss)",
    "where the server asks for scores, metrics of a section's items and how many these are "
    "(metrics/validate/accuracy, metrics/validate/cases)",
    "no image, file name, path, text or expression",
)
"""What leaves a site, as far as it can be said without running anything."""


def inspect(folder: Path, policy: Policy | None = None) -> Inspection:
    """Inspect the bundle in a folder.

    Args:
        folder: the bundle's; links in its own path are followed, links inside it are refused.
        policy: of the site; None: the default, which allows nothing extra and pins nothing.

    Raises:
        InputError: there is no such folder.
    """
    policy = policy or Policy()
    root = folder.expanduser().resolve()
    if not root.is_dir():
        raise InputError(f"bundle {printable(folder)}", "the folder of a MONAI bundle", "check the path")
    found = Inspection(root.name, root, policy.files is not None)
    _Inspector(found, policy).run()
    return found


class _Inspector:
    def __init__(self, found: Inspection, policy: Policy) -> None:
        self.found, self.policy, self.root = found, policy, found.folder
        self.contents: dict[str, Plain] = {}
        self.names: dict[str, str] = dict(DEFAULT_NAMES)
        self.own: frozenset[str] = frozenset()
        self.referred: set[str] = set()

    def refuse(self, file: str, id_: str, why: object) -> None:
        self.found.refusals.append(Refusal(file, id_, str(why)))

    def run(self) -> None:
        if self.policy.bundle and self.policy.bundle != self.found.bundle:
            self.refuse(".", "", f"the policy is for the bundle {printable(self.policy.bundle)!r}")
        self._files()
        self._pins()
        self._own_python()
        if not any(name.startswith("configs/") for name in self.contents):
            self.refuse("configs", "", "no configuration could be read")
        for file, content in self.contents.items():
            self._imports(file, content)
        places = {file: list(_walk(content)) for file, content in self.contents.items()}
        self._referred(places)
        self._macros(places)
        for file, content in self.contents.items():
            self._configuration(file, content, places[file])

    # Files

    def _files(self) -> None:
        paths = self._paths()
        for count, path in enumerate(sorted(paths)):
            name = path.relative_to(self.root).as_posix()
            if count >= self.policy.limits.files:
                self.refuse(name, "", f"more than {self.policy.limits.files} files")
                return
            try:
                if stat.S_ISLNK(path.lstat().st_mode):
                    raise Refused("a link: a bundle consists of plain files and folders")
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise Refused("neither a file nor a folder")
                self._file(path, name, self._kind_or_refusal(name))
            except (Refused, OSError) as error:
                self.refuse(name, "", error)

    def _paths(self) -> list[Path]:
        paths: list[Path] = []

        def unreadable(error: OSError) -> None:
            self.refuse(str(error.filename), "", f"a folder that cannot be read ({error.strerror})")

        for folder, folders, files in os.walk(self.root, onerror=unreadable):
            paths += [Path(folder) / name for name in files]
            paths += [Path(folder) / name for name in folders if (Path(folder) / name).is_symlink()]
            if len(paths) > self.policy.limits.files:
                break
        return paths

    def _kind_or_refusal(self, name: str) -> str:
        try:
            check_visible(name)
            return self._kind(name)
        except Refused as error:
            self.refuse(name, "", error)
            return "refused"

    def _kind(self, name: str) -> str:
        path = PurePosixPath(name)
        suffix, allow = path.suffix.lower(), self.policy.allow
        if suffix in _COMPILED:
            raise Refused(f"compiled or packed code ({printable(suffix)})")
        if suffix == ".py":
            return self._worded("scripts", "Python of the bundle")
        if suffix in _PICKLED:
            return self._worded("pickle", f"pickled weights ({suffix})")
        if path.name == "logging.conf":
            return self._worded("logging", "a logging configuration")
        if suffix in _CONFIGURATION and (path.parts[0] == "configs" or len(path.parts) == 1):
            if path.suffix != suffix:
                raise Refused(f"an ending {printable(path.suffix)} in capitals")
            return "large files, never fetched" if path.stem == "large_files" else "configuration"
        if suffix not in _INERT or (path.parts[0] == "configs" and suffix not in (".txt", ".md")):
            if "files" not in allow:
                raise Refused(
                    f"a file of unknown kind ({printable(path.name)}), for which the policy has to allow 'files'"
                )
            return self._worded("files", f"a file of unknown kind ({printable(suffix)})")
        return "weights" if suffix in (".safetensors", ".onnx") else "data or text"

    def _worded(self, word: str, what: str) -> str:
        if word not in self.policy.allow:
            raise Refused(f"{what}, for which the policy has to allow {word!r}")
        self.found.allowed[word, what] += 1
        return what

    def _file(self, path: Path, name: str, kind: str) -> None:
        digest, size, content = hashlib.sha256(), 0, b""
        limits = self.policy.limits
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                if kind == "configuration" and len(content) <= limits.config_bytes:
                    content += chunk
        self.found.files.append(File(name, kind, size, digest.hexdigest()))
        if kind == "configuration":  # read from the bytes that were hashed
            if size > limits.config_bytes:
                raise Refused(f"{size} bytes; a configuration has at most {limits.config_bytes}")
            is_json = name.endswith(".json")
            text = decode_text(content)
            self.contents[name] = read_plain(text, is_json=is_json, nodes=limits.nodes, depth=limits.depth) or {}

    def _pins(self) -> None:
        pins = self.policy.files
        if pins is None:
            return
        here = {file.path: file.sha256 for file in self.found.files}
        for name, digest in here.items():
            if name not in pins:
                self.refuse(name, "", "a file that the policy does not have")
            elif digest != pins[name]:
                self.refuse(name, "", f"its sha256 is {digest[:16]}..., in the policy {pins[name][:16]}...")
        for name in sorted(pins.keys() - here.keys()):
            self.refuse(name, "", "it is in the policy but not here")

    def _own_python(self) -> None:
        scripts = [PurePosixPath(file.path) for file in self.found.files if file.path.endswith(".py")]
        self.own = frozenset(path.stem if len(path.parts) == 1 else path.parts[0] for path in scripts)
        taken = {module.partition(".")[0] for module in MODULES} | set(sys.stdlib_module_names)
        for name in sorted(self.own & taken):
            self.refuse(name, "", "Python of the bundle with the name of another module")
        self.own -= taken

    # What every place of every file has to know

    def _imports(self, file: str, content: Plain) -> None:
        if not isinstance(content, dict):
            return
        for key in ("imports", "+imports"):
            statements = content.get(key, [])
            if not isinstance(statements, list):
                self.refuse(file, key, "not a list of import statements")
                continue
            for index, text in enumerate(statements):
                found = Found()
                try:
                    if not isinstance(text, str) or not text.startswith("$"):
                        raise Refused("not an import statement")
                    bound = imported(text[1:], self.policy.allow, self.own, found)
                    for name, path in bound.items():
                        if self.names.get(name, path) != path:
                            raise Refused(f"an import that takes the name {printable(name)} of another")
                    self.names |= bound
                except Refused as error:
                    self.refuse(file, f"{key}#{index}", error)
                self._took(found)

    def _took(self, found: Found) -> None:
        self.found.uses += found.uses
        self.found.allowed += found.words

    def _referred(self, places: Mapping[str, list[tuple[_Place, Plain]]]) -> None:
        """Gather every word that a reference or macro could begin with, relative ones by any of their parts."""
        for nodes in places.values():
            for _, node in nodes:
                if isinstance(node, str) and node[:1] in ("$", "@", "%"):
                    self.referred |= set(re.findall(r"\w+", " ".join(re.findall(r"[@%][\w#:]+", node))))

    def _macros(self, places: Mapping[str, list[tuple[_Place, Plain]]]) -> None:
        """Refuse macros of macros: they could grow without end."""
        macros = [
            (file, place, tuple(re.split("#|::", node[1:])))
            for file, nodes in places.items()
            for place, node in nodes
            if isinstance(node, str) and _MACRO.fullmatch(node)
        ]
        for file, place, target in macros:
            for _, other, _ in macros:
                length = min(len(other), len(target))
                if other[:length] == target[:length]:
                    self.refuse(file, _id(place), "a macro of a macro")
                    break

    # One file

    def _configuration(self, file: str, content: Plain, places: list[tuple[_Place, Plain]]) -> None:
        if not isinstance(content, dict):
            self.refuse(file, "", f"a {type(content).__name__}, where a configuration is keys and values")
            return
        stem = PurePosixPath(file).stem
        if stem in ("train", "inference", "evaluate") and "dataset_dir" in content:
            self.found.data[file] = printable(content["dataset_dir"])
        for place, node in places:
            try:
                if isinstance(node, dict):
                    for key in node:
                        self._key(key, place, stem)
                if stem == "metadata":
                    self._description(node)
                elif place[:1] == ("imports",):
                    continue  # read before, or refused by its key
                else:
                    self._node(file, place, node, content, stem)
            except Refused as error:
                self.refuse(file, _id(place), error)

    def _key(self, key: object, place: _Place, stem: str) -> None:
        if isinstance(key, int) and not isinstance(key, bool):
            return
        if not isinstance(key, str):
            raise Refused(f"a key of type {type(key).__name__}")
        check_visible(key)
        last = re.split("#|::", key)[-1]
        if last.startswith("_") and last.endswith("_") and last not in _SPECIAL:
            raise Refused(f"the key {printable(key)!r}")
        if key.lstrip("+") != "imports" and re.split("#|::", key.lstrip("+"))[0] == "imports" and not place:
            raise Refused("an import outside of the list of imports")
        if last in _SPECIAL and stem == "metadata":
            raise Refused(f"the key {printable(key)!r} in a description")
        if not _is_free(place, stem) and not _KEY.fullmatch(key):
            raise Refused(f"the key {printable(key)!r}, which is no plain name")

    def _description(self, node: Plain) -> None:
        if isinstance(node, str):
            check_visible(node)
            if node[:1] in ("$", "@", "%"):
                raise Refused(f"the text {printable(node, 40)!r} in a description, which would be evaluated")

    def _node(self, file: str, place: _Place, node: Plain, content: Plain, stem: str) -> None:
        name = place[-1] if place else ""
        if name == "_target_":
            self._target(node)
        elif name == "_mode_" and node != "default":
            raise Refused(f"_mode_ {printable(node, 40)!r}, where only 'default' is")
        for part in () if _is_free(place, stem) else place:  # also of `x#reader#0`
            if why := argument_refused(part, node):
                raise Refused(why)
        if isinstance(node, dict):
            self._component(node)
        elif isinstance(node, str):
            check_visible(node)
            self._text(file, place, node, content, stem)
        elif not isinstance(node, list | bool | int | float | date | None):
            raise Refused(f"a value of type {type(node).__name__}")

    def _target(self, node: Plain) -> None:
        if not isinstance(node, str):
            raise Refused(f"a _target_ of type {type(node).__name__}")
        if node.split(".")[0] in self.own and re.fullmatch(r"\w+(\.\w+)+", node, re.ASCII) and "__" not in node:
            self._worded("scripts", node)
        elif not target_allowed(node):
            raise Refused(f"_target_ {printable(node)!r}, which is not on the list")
        self.found.targets[node] += 1

    def _component(self, node: dict[Any, Any]) -> None:
        target = node.get("_target_")
        fetches = isinstance(target, str) and target.rpartition(".")[2] in WEIGHTS_OF_THEIR_OWN
        if fetches and node.get("pretrained", True) not in (False, None):
            raise Refused(f"{printable(target)} without 'pretrained: false', which would fetch weights")
        for key, value in node.items():
            apart = isinstance(key, str) and key != "_target_" and re.split("#|::", key)[-1] == "_target_"
            if apart and isinstance(value, str) and value.rpartition(".")[2] in WEIGHTS_OF_THEIR_OWN:
                raise Refused(f"{printable(value)} apart from its 'pretrained: false', which would fetch weights")

    def _text(self, file: str, place: _Place, text: str, content: Plain, stem: str) -> None:
        if text.startswith("$"):
            self._expression(file, place, text, content, stem)
        elif text.startswith("@"):
            if not _REFERENCE.fullmatch(text):
                raise Refused(f"{printable(text, 40)!r}, which begins as a reference and is none")
            _not_relative(text, stem)
            check_id(text[1:])
        elif text.startswith("%"):
            if not _MACRO.fullmatch(text) or stem == "federated":
                raise Refused(f"the macro {printable(text, 40)!r}, which is not one of an id of this configuration")
            check_id(text[1:])
        elif place[-1:] != ("_desc_",):
            zoo = text.startswith(_ZOO_DATA) or place == ("dataset_dir",)
            try:
                check_path(text, absolute=zoo)
            except Refused as error:
                if "absolute" not in str(error) or "paths" not in self.policy.allow:
                    hint = ", for which the policy has to allow 'paths'" if "absolute" in str(error) else ""
                    raise Refused(f"{error} ({printable(text, 40)}){hint}") from error
                self.found.allowed["paths", printable(text)] += 1

    def _expression(self, file: str, place: _Place, text: str, content: Plain, stem: str) -> None:
        _not_relative(text, stem)
        statement = self._is_statement(place, content)
        found = Found()
        self.found.expressions += 1
        try:
            check_expression(
                text[1:],
                self.names,
                self.policy.allow,
                self.own,
                found,
                statement=statement,
                length=self.policy.limits.expression,
            )
        except Refused as error:
            raise Refused(f"{error}, in {printable(text)}") from error
        self._took(found)
        if statement:
            self.found.statements.append(f"{file}: {_id(place)}: {printable(text)}")

    def _is_statement(self, place: _Place, content: Plain) -> bool:
        """Tell whether medfl never evaluates this: it stands in a list of statements that nothing refers to."""
        if not place or place[0] not in _ENTRIES or place[0] in self.referred or len(place) > 2:
            return False
        return len(place) == 1 or isinstance(content.get(place[0], content.get(f"+{place[0]}")), list)


def _walk(content: Plain) -> Iterator[tuple[_Place, Plain]]:
    """Yield every value with its place; top-level keys such as `+train#dataset` are taken apart as MONAI does."""
    todo: list[tuple[_Place, Plain]] = [((), content)]
    while todo:
        place, node = todo.pop()
        yield place, node
        if isinstance(node, dict):
            for key, value in reversed(node.items()):
                name = str(key) if place else str(key).removeprefix("+")
                todo.append(((*place, *re.split("#|::", name)), value))
        elif isinstance(node, list):
            todo += [((*place, str(index)), node[index]) for index in range(len(node) - 1, -1, -1)]


def _id(place: _Place) -> str:
    return printable("#".join(place))


def _is_free(place: _Place, stem: str) -> bool:
    """Tell whether a place never becomes part of the configuration: a preset's `config` of federated.yaml does."""
    return stem == "metadata" or (stem == "federated" and "config" not in place)


def _not_relative(text: str, stem: str) -> None:
    if stem == "federated" and re.search("@(#|::)", text):
        raise Refused("a relative reference in settings that are merged elsewhere")
