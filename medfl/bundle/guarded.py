"""MONAI's parser behind the filter of `policy`: created and evaluated objects are checked where they occur.

Components are the objects found by `policy.components`, and each `$` expression passes `policy.expressions` before
MONAI evaluates it, even if a setting changed it after an inspection. A bundle that the user trusts (`--trust`) is
parsed by MONAI alone.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from monai.bundle import (
    ConfigComponent,
    ConfigExpression,
    ConfigItem,
    ConfigParser,
    ReferenceResolver,
)
from monai.data import ImageReader
from monai.transforms import LoadImage
from monai.utils import ensure_tuple
from monai.utils.enums import MetaKeys

import medfl.data.samples  # noqa: F401 - a reader that warns is taken out of MONAI's there
from medfl.core import Refused, printable
from medfl.datasets.readers.reading import names_other_file
from medfl.policy.components import check_arguments, check_place, component, is_never_made
from medfl.policy.expressions import DEFAULT_NAMES, ExpressionFilter, Uses, imported
from medfl.policy.policy import Policy
from medfl.problem.described import Config


def guarded_parser(
    content: Config, policy: Policy, own_modules: frozenset[str], roots: Collection[Path]
) -> ConfigParser:
    """Return a parser of a configuration that creates and evaluates only what is permitted.

    Args:
        content: the configuration, which the parser takes over.
        policy: its permissions widen the default; a trusted bundle is parsed by MONAI alone.
        own_modules: top-level modules of the bundle's own Python.
        roots: files and folders whose images may be read; later additions to it count.

    Raises:
        Refused: an invalid import.
    """
    parser = ConfigParser(content)
    if not policy.trusted:
        names = dict(DEFAULT_NAMES)
        for text in filter(None, content.get("imports", [])):
            names |= imported(str(text)[1:], Uses())

        def check(path: Any) -> None:
            """Raise Refused for a path outside the roots, unless the policy allows any."""
            if "paths" not in policy.allow:
                check_place(path, roots)

        expressions = ExpressionFilter(names, policy.allow, own_modules, policy.limits.expression)
        parser.ref_resolver = _Resolver(expressions, check)

    return parser


class _Resolver(ReferenceResolver):
    """Uses guarded items in place of MONAI's own."""

    def __init__(self, expressions: ExpressionFilter, check_path: Check) -> None:
        super().__init__()
        self._expressions = expressions
        self._check_path = check_path

    def is_resolved(self) -> bool:
        """Tell whether the content is parsed: MONAI would parse it again for the first id that is evaluated."""
        return bool(self.items)

    def add_item(self, item: ConfigItem) -> None:
        """Take an item, an expression or a component as its guarded kind."""
        if isinstance(item, ConfigExpression):
            item = _Expression(item.config, item.id, self._expressions)
        elif isinstance(item, ConfigComponent):
            item = _Component(item.config, item.id, self._expressions, self._check_path)
        super().add_item(item)

    def _resolve_one_item(self, id: str, *args: Any, **kwargs: Any) -> Any:
        # A folder that may not be read would have no image, without any error.
        if id == "dataset_dir" and id in self.items:
            folder = self.items[id].config
            if isinstance(folder, str) and folder[:1] not in ("$", "@"):
                self._check_path(folder)

        return super()._resolve_one_item(id, *args, **kwargs)


class _Expression(ConfigExpression):
    def __init__(self, config: Any, id_: str, expressions: ExpressionFilter) -> None:
        super().__init__(config, id_)
        self._text = str(config)[len(self.prefix) :]
        self._expressions = expressions

    def evaluate(
        self, globals: dict[str, Any] | None = None, locals: dict[str, Any] | None = None
    ) -> Any:
        """Return the expression's value, or the text of an import; Refused for a name that is not allowed."""
        if globals is None:  # an import: the parser has read its name
            return self._text
        return super().evaluate({**self._expressions.modules(self._text), **globals}, locals)


class _Component(ConfigComponent):
    def __init__(
        self, config: Any, id_: str, expressions: ExpressionFilter, check_path: Check
    ) -> None:
        super().__init__(config, id_)
        self._target = str(config["_target_"])
        self._expressions = expressions
        self._check_path = check_path

    def instantiate(self, **extra: Any) -> object:
        """Return the component, None if it is disabled; Refused where it or a path that it opens is not allowed."""
        if self.is_disabled():
            return None

        if self._target.partition(".")[0] in self._expressions.own_modules:
            self._expressions.member(self._target, Uses())
            return super().instantiate(**extra)

        factory = component(self._target)
        name = factory.__name__
        arguments = {**self.resolve_args(), **extra}  # type: ignore[no-untyped-call]
        if is_never_made(factory):
            raise Refused(
                f"{name} writes files or handles a trainer's events, and is never made here"
            )
        if self.config.get("_mode_", "default") != "default":
            raise Refused(f"_mode_ of {name}, where only 'default' is")

        if name.endswith("DataLoader"):
            arguments |= {"num_workers": 0, "multiprocessing_context": None, "worker_init_fn": None}
            arguments.pop("persistent_workers", None)
            arguments.pop("prefetch_factor", None)

        # options of an engine: they would start a compiler
        arguments.pop("compile", None)
        arguments.pop("compile_kwargs", None)
        check_arguments(factory, arguments)
        try:
            instance = factory(**arguments)
        except Exception as error:
            raise RuntimeError(
                f"{name} cannot be made with {', '.join(arguments) or 'nothing'}"
            ) from error

        guard_readers(instance, self._check_path)

        return instance


# Guarded image readers: location and type of each file are checked when it is opened, whoever names it.
#
# A path may come from a data list, a transform or an expression; they all meet at the reader. Some formats store the
# pixels in another file, named in their header: such a header would make an image of any file on the machine.


Check = Callable[[Any], None]
"""Raises `Refused` for a path that may not be opened."""

_HEAD = 1 << 16
_GZIP = b"\x1f\x8b"
_UNIT = 0b111  # the bits of a NIfTI's xyzt_units for the unit of length
_MILLIMETRES = {1: 1e3, 3: 1e-3}  # of metres and micrometres; others are mm, or said to be nothing


class GuardedReader(ImageReader):
    """A MONAI reader that checks each path before opening it."""

    def __init__(self, reader: ImageReader, check: Check) -> None:
        self._reader = reader
        self._check = check

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a Python attribute, requested before the object is complete
            raise AttributeError(name)
        return getattr(self._reader, name)

    def verify_suffix(self, filename: Any) -> bool:
        """Tell whether the reader supports files of this name."""
        return self._reader.verify_suffix(filename)

    def read(self, data: Any, **kwargs: Any) -> Any:
        """Return the reader's result for one or several files.

        Raises:
            Refused: a file is elsewhere, or refers to another file.
        """
        for path in ensure_tuple(data):
            self._check(path)
        return self._reader.read(data, **kwargs)

    def get_data(self, *args: Any, **kwargs: Any) -> Any:
        """Return the pixels and their metadata, affines in mm; readers call their argument `img` or `wsi`."""
        pixels, meta = self._reader.get_data(*args, **kwargs)
        factor = _MILLIMETRES.get(int(meta.get("xyzt_units", 0)) & _UNIT, 1.0)
        for key in (MetaKeys.AFFINE, MetaKeys.ORIGINAL_AFFINE):
            if factor != 1 and key in meta:
                meta[key] = np.diag([factor] * 3 + [1]) @ meta[key]

        return pixels, meta


def guard_readers(component: Any, check_place: Check) -> None:
    """Check the files that a component opens: MONAI's loaders, single or in a data set, and medfl's readers."""

    def check(path: Any) -> None:
        """Raise Refused for a file that lies elsewhere, or names another as its pixels."""
        check_place(path)
        check_content(path)

    for part in _parts(component):
        if isinstance(part, LoadImage):
            part.readers = [_guarded(reader, check) for reader in part.readers]
        if isinstance(getattr(part, "wsi_reader", None), ImageReader):
            part.wsi_reader = _guarded(part.wsi_reader, check)
        if hasattr(type(part), "check_path"):  # of medfl's own readers
            part.check_path = check


def check_content(path: Any) -> None:
    """Check that a file contains its own pixels.

    Raises:
        Refused: its header refers to another file, or may: HDF5 has external links.
    """
    if not os.path.isfile(path):
        return

    with open(path, "rb") as file:
        head = file.read(_HEAD)

    if head.startswith(_GZIP):
        with gzip.open(path) as file:
            try:
                head = file.read(_HEAD)
            except (OSError, EOFError):
                return  # its reader reports what is wrong with it

    if names_other_file(head):
        raise Refused(f"the file {printable(path)}, which names another file as its pixels")


def _guarded(reader: ImageReader, check: Check) -> ImageReader:
    if isinstance(reader, GuardedReader):
        return reader

    return GuardedReader(reader, check)


def _parts(component: Any) -> Iterator[Any]:
    """Yield a component, and the parts with which it loads images."""
    yield component
    for name in ("_loader", "loader", "transform"):
        part = getattr(component, name, None)
        if part is not None and not isinstance(part, type):
            yield from _parts(part)
