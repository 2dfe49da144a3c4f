"""The files of a bundle: hashed, told by kind, compared with what the policy pins; configurations as plain values."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path, PurePosixPath

from medfl.core.untrusted import (
    Plain,
    Refused,
    check_visible,
    decode_text,
    folders_below,
    printable,
    read_plain,
)
from medfl.policy.findings import READ, File, Inspection
from medfl.policy.policy import Policy

_CONFIGURATION = (".json", ".yaml", ".yml")
_WEIGHTS = (
    ".safetensors", ".onnx", ".pt", ".pth", ".ts", ".ckpt", ".pkl", ".pickle", ".bin", ".joblib",
)  # fmt: skip
_READ_AS = (*_CONFIGURATION, ".py", ".safetensors")
_COMPILED = (".pyc", ".pyo", ".pyd", ".so", ".dll", ".dylib", ".egg", ".whl")
"""What Python would import in the place of other modules."""
_CHUNK = 1 << 20
# Bytes of a file, or of each of its blocks on the disk: more are holes.
_UNPACKED = 1 << 31
_BLOCK = 100 * 512


class BundleFiles:
    """Reads all files below a bundle's folder into an inspection.

    Attributes:
        contents: configuration file -> its plain values.
        own_modules: top-level modules of the bundle's own Python.
    """

    def __init__(self, inspection: Inspection, policy: Policy) -> None:
        """Read, pin and note the files; what may not be is refused in the inspection."""
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
                # Windows tells no blocks.
                blocks = getattr(status, "st_blocks", status.st_size)
                if status.st_size > max(_UNPACKED, _BLOCK * blocks):
                    raise Refused(
                        f"{status.st_size} bytes that are not there: it would be read for hours"
                    )

                self._file(path, name, self._kind_or_refusal(name))
            except (Refused, OSError) as error:
                self.inspection.refuse(name, "", error)

    def _paths(self) -> list[Path]:
        paths: list[Path] = []

        def unreadable(error: OSError) -> None:
            self.inspection.refuse(
                str(error.filename), "", f"a folder that cannot be read ({error.strerror})"
            )

        for folder, folders, files in folders_below(self.root, unreadable):
            paths += [Path(folder) / name for name in files]
            # Of folders those that could be taken for files, or lead out of the bundle.
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

        if suffix in _CONFIGURATION and path.parts[0] == "configs" and path.stem in READ:
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
        # Noted before it may be refused: a pin covers every file.
        self.inspection.files.append(File(name, kind, size, digest.hexdigest()))
        # Read from the bytes that were hashed: the file may change meanwhile.
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
        # What follows is refused for its pin alone, which `Inspection.unpin` takes back.
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
