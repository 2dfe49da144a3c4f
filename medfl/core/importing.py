"""Packages that export their public names without importing them: torch and MONAI take seconds to import."""

from __future__ import annotations

import ast
import gc
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def lazy_names(package: str) -> tuple[list[str], Callable[[str], object]]:
    """Return the `__all__` and `__getattr__` of a package, which imports a public name on first use.

    The names are those that `if TYPE_CHECKING` in the package's `__init__.py` imports.
    """
    source = pkgutil.get_data(package, "__init__.py") or b""
    modules: dict[str, str] = {}
    for block in ast.parse(source).body:
        for node in block.body if isinstance(block, ast.If) else ():
            if isinstance(node, ast.ImportFrom):
                modules |= {alias.asname or alias.name: str(node.module) for alias in node.names}

    def load(name: str) -> object:
        if name not in modules:
            public_names = ", ".join(sorted(modules))
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; its public names are {public_names}"
            )

        with without_gc():
            return getattr(importlib.import_module(modules[name]), name)

    return sorted(modules), load


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector inside the block: it takes a third of the time of importing torch and MONAI."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
