"""Inspection: reads what a bundle would run as text; nothing of it is imported, evaluated or instantiated.

A filter and a report for people. Every file is hashed. Every configuration file (JSON and YAML in `configs/` and in the
bundle's folder) is read as plain values and walked: each `_target_` must be a component (`components`), each `$`
expression is checked for names with side effects (`expressions`), each string that could be a path must stay inside
the bundle or data folder. Permissions in the site's policy widen this one by one. The sandbox (`medfl.safety`) limits
what a bundle can do; without it (`--trust`, `--no-sandbox`, Python) this is the only protection.

One place is checked less strictly: top-level lists of expressions (`initialize`, `run` and others) that nothing refers
to and medfl does not use contain statements, which medfl never evaluates. metadata.json is descriptive: it may contain
no expression.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from medfl.core import (
    InputError,
    Plain,
    Refused,
    check_visible,
    decode_text,
    folders_below,
    not_among,
    printable,
    read_plain,
    words_of,
)
from medfl.policy.components import (
    check_arguments,
    check_path,
    component,
    name_set,
    replace_removed,
)
from medfl.policy.expressions import DEFAULT_NAMES, ExpressionFilter, Uses, imported
from medfl.policy.policy import PERMISSIONS, Policy
from medfl.storage import config_file

# Result of an inspection: the bundle's files, what it would use, what is refused

NOT_LISTED = (
    "a bundle names components of MONAI and PyTorch, and what computes",
    "have it changed; if its author may run code here with your rights, give --trust; a site's policy can allow single "
    "words (docs/security.md)",
)
"""The last two parts of an error about something that a bundle may not do."""
READ = ("train", "evaluate", "inference", "metadata", "federated")
"""The configurations that medfl reads, by their names in configs/; others are pinned but never evaluated."""
TWICE = ("train", "evaluate", "inference")
"""Those that an export also has in a form for MONAI alone."""
TRAINING = ("train", "evaluate", "metadata", "federated")
"""Those read for training."""
INFERENCE = ("inference", "metadata")
"""Those read for a prediction with a bundle's own weights."""
UNREADABLE = "where a configuration is keys and values"
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
"""What leaves a site, as far as it is known without running anything."""


@dataclass(frozen=True)
class File:
    """A file of a bundle."""

    path: str
    kind: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Refusal:
    """A refused item, its location and the reason."""

    file: str
    id: str
    why: str

    def __str__(self) -> str:
        where = f"{self.file}: {self.id}" if self.id else self.file
        return f"{printable(where)}: {self.why}"


@dataclass
class Inspection:
    """The result of an inspection."""

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
    """(permission of the policy, what it allowed)"""
    data: dict[str, str] = field(default_factory=dict)
    """file -> its value of `dataset_dir`"""
    refusals: list[Refusal] = field(default_factory=list)
    pin_refusals: list[Refusal] = field(default_factory=list)
    """those about a file's pin"""

    @property
    def accepted(self) -> bool:
        """Whether nothing is refused."""
        return not self.refusals

    def refused(self, reads: Collection[str]) -> list[Refusal]:
        """Return the refusals that concern a reader of these configurations, given by their names in configs/.

        Refusals in others do not count, except for a file that differs from its pin.
        """
        unread = {f"configs/{name}" for name in set(READ).difference(reads)}
        refusals = []
        for refusal in self.refusals:
            name = refusal.file.replace("configs/medfl/", "configs/").rpartition(".")[0]
            if name not in unread or refusal in self.pin_refusals:
                refusals.append(refusal)

        return refusals

    def require(self, reads: Collection[str] = READ) -> None:
        """Raise an error if something is refused for a reader of these configurations.

        Raises:
            InputError: names the first refusal, and how many there are.
        """
        refusals = self.refused(reads)
        if not refusals:
            return

        # An unreadable file is damaged rather than hostile: the message says so.
        first = refusals[0]
        count = len(refusals)
        if first.why.endswith(UNREADABLE) or first.why.startswith("not valid"):
            problem = f"{self.folder / first.file} cannot be read: {first.why}"
            raise InputError(
                problem.replace(";", ","),
                "it is JSON or YAML with keys and values",
                "repair the file",
            )

        more = "" if count == 1 else f" (and {count - 1} more)"
        if not self.refused(TRAINING):
            more += ", in what medfl predict and teachers read, and medfl run does not"
        problem = f"bundle {printable(self.bundle)!r} is refused: {first}{more}".replace(";", ",")
        if len(self.pin_refusals) == count:  # nothing else is wrong with it
            command = f"medfl site inspect {self.folder} --policy FILE --write-policy NEWFILE"
            raise InputError(
                problem,
                "the files that the site's policy has pinned",
                f"{command} shows them and pins them anew",
            )

        raise InputError(problem, *NOT_LISTED)

    def refuse(self, file: str, id_: str, why: object) -> None:
        """Record that something is refused, and where."""
        self.refusals.append(Refusal(file, id_, str(why)))

    def unpin(self) -> list[str]:
        """Judge the bundle without the policy's pins; return the files that differ from their pins, and why."""
        pin_refusals = self.pin_refusals
        self.pin_refusals = []
        self.refusals = not_among(self.refusals, pin_refusals)
        return list(map(str, pin_refusals))

    def policy(self, policy: Policy) -> Policy:
        """Return a policy that pins the files of this bundle, with all else from another policy."""
        files = {file.path: file.sha256 for file in self.files}
        return replace(policy, bundle=self.bundle, files=files)

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        allowed = []
        for (word, use), times in sorted(self.allowed.items()):
            entry = {"word": word, "meaning": PERMISSIONS[word], "what": use, "times": times}
            allowed.append(entry)

        return {
            "bundle": self.bundle,
            "folder": str(self.folder),
            "accepted": self.accepted,
            "pinned": self.pinned,
            "files": list(map(vars, self.files)),
            "targets": dict(sorted(self.targets.items())),
            "expressions": self.expressions,
            "uses": dict(sorted(self.uses.items())),
            "statements": self.statements,
            "allowed_by_policy": allowed,
            "data": self.data,
            "leaves": list(LEAVES),
            "refused": list(map(vars, self.refusals)),
        }


# The inspection

_MACRO = re.compile(r"%\w+((#|::)\w+)*", re.ASCII)
_ENTRIES = ("initialize", "run", "finalize", "training", "evaluating", "testing", "inferring")
"""Statements that the zoo's bundles give to `monai.bundle run`, single or in lists."""
_ASKED = name_set(
    "train validate val trainer evaluator validator val_dataset network network_def network_name inferer preprocessing "
    "dataset_dir bundle_root device in_channels image_size patch_size surface_tolerance images masks labels classes "
    "group_by split batch_size"
)
"""Ids that medfl itself uses, whether or not anything refers to them; a list under one is not a list of statements."""
_UPWARDS = re.compile(r"^(\.\./)+(?=\w)", re.ASCII)
"""Start of a placeholder beside the bundle, which is opened only if the user names it."""
_BUNDLES = ("public", "teachers", "plm", "bundle")
"""Settings that name other bundles, models and runs."""
_REFUSALS = 1000
"""After this many, the rest of a configuration is not inspected."""
_NAMES = re.compile(r"(\w[\w.-]*(,\w[\w.-]*)*)?", re.ASCII)

_Keys = tuple[str, ...]


def inspect(folder: Path, policy: Policy | None = None) -> Inspection:
    """Inspect the bundle in a folder.

    Args:
        folder: of the bundle; links in its own path are followed, links inside it are refused.
        policy: of the site; None: the default, which allows nothing extra and pins nothing.

    Raises:
        InputError: there is no such folder.
    """
    policy = policy or Policy()
    root = folder.expanduser().resolve()
    if not root.is_dir():
        raise InputError(
            f"bundle {printable(folder)}", "the folder of a MONAI bundle", "check the path"
        )

    inspection = Inspection(root.name, root, policy.files is not None)
    if policy.bundle and policy.bundle != root.name:
        inspection.refuse(".", "", f"the policy is for the bundle {printable(policy.bundle)!r}")

    files = BundleFiles(inspection, policy)
    if not files.contents:
        inspection.refuse("configs", "", "no configuration could be read")

    uses = Uses(inspection.uses, inspection.allowed)
    names = dict(DEFAULT_NAMES)
    referred: set[str] = set()
    for file, content in files.contents.items():
        names |= _imports(inspection, file, content, uses)
        for _, node in _walk(content, policy.limits.depth):
            if isinstance(node, str) and node[:1] in ("$", "@", "%"):
                # relative references begin with any of their parts
                referred |= set(re.findall(r"\w+", " ".join(re.findall(r"[@%][\w#:]+", node))))

    filter_ = ExpressionFilter(names, policy.allow, files.own_modules, policy.limits.expression)
    for file, content in files.contents.items():
        if isinstance(content, dict):
            _Configuration(inspection, policy, file, content, filter_, uses, referred).inspect()
        else:
            inspection.refuse(file, "", f"a {type(content).__name__}, {UNREADABLE}")

    return inspection


def _imports(inspection: Inspection, file: str, content: Plain, uses: Uses) -> dict[str, str]:
    """Return the names bound by a configuration's imports, and the paths they refer to."""
    names: dict[str, str] = {}
    for key in ("imports", "+imports"):
        statements = content.get(key, []) if isinstance(content, dict) else []
        if not isinstance(statements, list):
            inspection.refuse(file, key, "not a list of import statements")
            continue

        for index, text in enumerate(statements):
            try:
                if isinstance(text, str) and text.startswith("$"):
                    names |= imported(text[1:], uses)
                elif text is not None:
                    raise Refused("not an import statement")
            except Refused as error:
                inspection.refuse(file, f"{key}#{index}", error)

    return names


@dataclass
class _Configuration:
    """A configuration file: `content` as plain values; `referred`: words in the references of any file."""

    inspection: Inspection
    policy: Policy
    file: str
    content: dict[Any, Plain]
    filter: ExpressionFilter
    uses: Uses
    referred: set[str]

    @cached_property
    def stem(self) -> str:
        """Its name without extension."""
        return PurePosixPath(self.file).stem

    @cached_property
    def statements(self) -> set[str]:
        """The top-level ids that medfl never evaluates: statements, or lists of them, that nothing uses."""
        ids = set()
        for key, entry in self.content.items():
            name = str(key).removeprefix("+")
            if name in self.referred or name in _ASKED:
                continue

            is_list = isinstance(entry, list) and all(
                isinstance(text, str) and text.startswith("$") for text in entry
            )
            is_named = name in _ENTRIES and isinstance(entry, str | list)
            if is_named or (is_list and self.stem != "federated" and not name.startswith("_")):
                ids.add(name)

        return ids

    def inspect(self) -> None:
        """Walk through it, and record what it uses and what is refused."""
        if self.stem in ("train", "inference", "evaluate") and "dataset_dir" in self.content:
            self.inspection.data[self.file] = printable(self.content["dataset_dir"])

        for keys, node in _walk(self.content, self.policy.limits.depth):
            if len(self.inspection.refusals) > _REFUSALS:
                self.inspection.refuse(self.file, _id(keys), "there is more that is refused")
                return

            try:
                if isinstance(node, dict):
                    self._check_keys(node)
                if self.stem == "metadata":
                    self._describe(node)
                # Imports have been read before.
                elif keys[:1] != ("imports",):
                    self._node(keys, node)
            except Refused as error:
                self.inspection.refuse(self.file, _id(keys), error)

    def _check_keys(self, node: dict[Any, Plain]) -> None:
        for key in node:
            if not isinstance(key, str | int):
                raise Refused(f"a key of type {type(key).__name__}")
            check_visible(str(key))
            if self.stem == "metadata" and str(key).endswith("_target_"):
                raise Refused("a component in a description")

    def _describe(self, node: Plain) -> None:
        if isinstance(node, str):
            check_visible(node)
            if node[:1] in ("$", "@", "%"):
                raise Refused(
                    f"the text {printable(node, 40)!r} in a description, which would be evaluated"
                )

    def _node(self, keys: _Keys, node: Plain) -> None:
        name = keys[-1] if keys else ""
        if len(keys) > self.policy.limits.depth:
            raise Refused(f"an id of more than {self.policy.limits.depth} parts")
        if name == "_mode_" and node != "default":
            raise Refused(f"_mode_ {printable(node, 40)!r}, where only 'default' is")
        if self.stem == "federated":
            self._setting(keys, node)

        if name == "_target_":
            self._target(node)
        elif isinstance(node, dict):
            self._component(node)
        elif isinstance(node, str):
            check_visible(node)
            self._text(keys, node)
        elif not isinstance(node, list | bool | int | float | date | None):
            raise Refused(f"a value of type {type(node).__name__}")

    def _setting(self, keys: _Keys, node: Plain) -> None:
        """Check a setting of federated.yaml, which names bundles and tables, and is merged as if given by the user."""
        if not isinstance(node, str):
            return
        if {*_BUNDLES} & {*keys} and not _NAMES.fullmatch(node):
            raise Refused(
                f"{printable(node, 40)!r}, where a bundle names others by their names only"
            )
        if keys[-1] == "partition" and node.startswith("file:"):
            raise Refused(f"{printable(node, 40)!r}, a table that only a user names")

    def _target(self, node: Plain) -> None:
        if not isinstance(node, str):
            raise Refused(f"a _target_ of type {type(node).__name__}")
        if node.partition(".")[0] in self.filter.own_modules:
            self.uses.permit("scripts", printable(node), self.policy.allow)
        else:
            component(replace_removed({"_target_": node})["_target_"])
        self.inspection.targets[node] += 1

    def _component(self, node: dict[Any, Any]) -> None:
        """Check the arguments of a component."""
        arguments = dict(replace_removed(node))
        # An inference has its own weights: fetching others is disabled when it is read.
        if self.stem == "inference" and arguments.get("pretrained") is True:
            arguments["pretrained"] = False
        try:
            factory = component(str(arguments.pop("_target_", "")))
        except Refused:
            return  # which is reported at the target
        check_arguments(factory, arguments)

    def _text(self, keys: _Keys, text: str) -> None:
        if text.startswith("$"):
            self._expression(keys, text)
        elif text.startswith("%") and not _MACRO.fullmatch(text):
            raise Refused(
                f"the macro {printable(text, 40)!r}, which is not one of an id of this configuration"
            )
        elif text[:1] not in ("@", "%") and keys[-1:] != ("_desc_",):
            self._path(keys, text)

    def _path(self, keys: _Keys, text: str) -> None:
        if keys == ("bundle_root",):
            return  # medfl sets it
        is_data = keys == ("dataset_dir",)
        try:
            below = _UPWARDS.sub("", text, 1) if is_data else text
            check_path(below, absolute=is_data)
            # In federated.yaml it would count as named by the user.
            if self.stem == "federated" and text.startswith("/"):
                raise Refused("an absolute path")
        except Refused as error:
            problem = f"{error} ({printable(text, 40)})"
            if "absolute" not in str(error):
                raise Refused(problem) from error
            self.uses.permit("paths", problem, self.policy.allow)

    def _expression(self, keys: _Keys, text: str) -> None:
        if keys[0] in self.statements and len(keys) <= 2:
            self.inspection.statements.append(f"{self.file}: {_id(keys)}: {printable(text)}")
            return

        self.inspection.expressions += 1
        # A handler is never created, so it may print.
        prints = any(part.endswith("handlers") for part in keys)
        try:
            self.filter.check(text[1:], self.uses, prints=prints)
        except Refused as error:
            raise Refused(f"{error}, in {printable(text)}") from error


def _walk(content: Plain, depth: int) -> Iterator[tuple[_Keys, Plain]]:
    """Yield every value with its keys; top-level keys such as `+train#dataset` are split as MONAI does.

    Values deeper than `depth` keys are skipped.
    """
    todo: list[tuple[_Keys, Plain]] = [((), content)]
    while todo:
        keys, node = todo.pop()
        yield keys, node
        if len(keys) > depth:
            continue

        if isinstance(node, dict):
            for key, value in reversed(node.items()):
                name = str(key) if keys else str(key).removeprefix("+")
                todo.append(((*keys, *re.split("#|::", name)), value))
        elif isinstance(node, list):
            todo += [((*keys, str(index)), node[index]) for index in range(len(node) - 1, -1, -1)]


def _id(keys: _Keys) -> str:
    return printable("#".join(keys))


# The files of a bundle: hashed, classified, compared with the policy's pins; configurations as plain values.


_CONFIGURATION = (".json", ".yaml", ".yml")
_WEIGHTS = words_of(".safetensors .onnx .pt .pth .ts .ckpt .pkl .pickle .bin .joblib")
_READ_AS = (*_CONFIGURATION, ".py", ".safetensors")
_COMPILED = words_of(".pyc .pyo .pyd .so .dll .dylib .egg .whl")
"""What Python would import instead of other modules."""
_CHUNK = 1 << 20
# Maximum bytes of a file per disk block: beyond that it is sparse.
_UNPACKED = 1 << 31
_BLOCK = 100 * 512


class BundleFiles:
    """Reads all files below a bundle's folder into an inspection.

    Attributes:
        contents: configuration file -> its plain values.
        own_modules: top-level modules of the bundle's own Python.
    """

    def __init__(self, inspection: Inspection, policy: Policy) -> None:
        """Read, pin and record the files; forbidden ones are refused in the inspection."""
        self.inspection = inspection
        self.policy = policy
        self.root = inspection.folder
        self.contents: dict[str, Plain] = {}
        self.own_modules: set[str] = set()
        self._read()
        self._compare_pins()

    def _read(self) -> None:
        for count, path in enumerate(sorted(self._paths())):
            name = path.relative_to(self.root).as_posix()
            if count >= self.policy.limits.files:
                self.inspection.refuse(name, "", f"more than {self.policy.limits.files} files")
                return

            try:
                status = path.lstat()
                if stat.S_ISLNK(status.st_mode):
                    raise Refused("a link: a bundle consists of plain files and folders")
                if stat.S_ISDIR(status.st_mode):
                    raise Refused("a folder with the name of a file")
                if not stat.S_ISREG(status.st_mode):
                    raise Refused("neither a file nor a folder")
                # Windows does not report blocks.
                blocks = getattr(status, "st_blocks", status.st_size)
                if status.st_size > max(_UNPACKED, _BLOCK * blocks):
                    raise Refused(
                        f"{status.st_size} bytes that are not there: it would be read for hours"
                    )

                self._file(path, name, self._kind_or_refusal(name))
            except (Refused, OSError) as error:
                self.inspection.refuse(name, "", error)

    def _paths(self) -> list[Path]:
        paths = []

        def unreadable(error: OSError) -> None:
            self.inspection.refuse(
                str(error.filename), "", f"a folder that cannot be read ({error.strerror})"
            )

        for folder, folders, files in folders_below(self.root, unreadable):
            paths += [Path(folder) / name for name in files]
            # Only folders that could be mistaken for files, or lead out of the bundle.
            for path in map(Path(folder).joinpath, folders):
                if path.is_symlink() or path.suffix in _READ_AS:
                    paths.append(path)

            if len(paths) > self.policy.limits.files:
                break

        return paths

    def _kind_or_refusal(self, name: str) -> str:
        try:
            check_visible(name)
            return self._kind(name)
        except Refused as error:
            self.inspection.refuse(name, "", error)
            return "refused"

    def _kind(self, name: str) -> str:
        path = PurePosixPath(name)
        suffix = path.suffix.lower()
        if suffix in _COMPILED:
            raise Refused(f"compiled or packed code ({printable(suffix)})")
        if suffix == ".py":
            if "scripts" in self.policy.allow:
                return "Python of the bundle"
            return "Python of the bundle, never run"

        is_read = path.parts[0] == "configs" and path.stem in READ
        if is_read and len(path.parts) == 2 and path.stem in TWICE:
            # if medfl's form exists, the one for MONAI alone is not read
            is_read = (
                getattr(config_file(self.root, path.stem), "parent", None)
                != self.root / "configs/medfl"
            )

        if suffix in _CONFIGURATION and is_read:
            if path.suffix != suffix:
                raise Refused(f"an ending {printable(path.suffix)} in capitals")
            return "configuration"

        if suffix in _CONFIGURATION and (path.parts[0] == "configs" or len(path.parts) == 1):
            return "configuration, never read"
        if suffix in _WEIGHTS:
            return "weights, never unpickled"

        return "another file, never run"

    def _file(self, path: Path, name: str, kind: str) -> None:
        digest = hashlib.sha256()
        size = 0
        content = b""
        limits = self.policy.limits

        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                if kind == "configuration" and len(content) <= limits.config_bytes:
                    content += chunk

        if name.endswith(".py"):
            self.own_modules.add(PurePosixPath(name).parts[0].removesuffix(".py"))
        # Recorded before it may be refused: a pin covers every file.
        self.inspection.files.append(File(name, kind, size, digest.hexdigest()))
        # Read from the hashed bytes: the file may change meanwhile.
        if kind == "configuration":
            if size > limits.config_bytes:
                raise Refused(f"{size} bytes; a configuration has at most {limits.config_bytes}")

            is_json = name.endswith(".json")
            text = decode_text(content)
            self.contents[name] = (
                read_plain(text, is_json=is_json, nodes=limits.nodes, depth=limits.depth) or {}
            )

    def _compare_pins(self) -> None:
        pins = self.policy.files
        if pins is None:
            return

        here = {file.path: file.sha256 for file in self.inspection.files}
        # From here on, refusals concern pins only, which `Inspection.unpin` removes.
        refusals = self.inspection.refusals
        before = len(refusals)
        for name, digest in here.items():
            if name not in pins:
                self.inspection.refuse(name, "", "a file that the policy does not have")
            elif digest != pins[name]:
                self.inspection.refuse(
                    name, "", f"its sha256 is {digest[:16]}..., in the policy {pins[name][:16]}..."
                )

        for name in sorted(pins.keys() - here.keys()):
            self.inspection.refuse(name, "", "it is in the policy but not here")

        self.inspection.pin_refusals += refusals[before:]
