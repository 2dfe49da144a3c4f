"""MONAI's parser behind the filter of `policy`: what is made and evaluated was checked where it stands.

Components are the objects that `policy.components` finds, and each `$` expression passes `policy.expressions` before
MONAI evaluates it, also where a setting changed it after an inspection. A bundle that the user trusts (`--trust`) is
parsed by MONAI alone.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from monai.bundle import (
    ConfigComponent,
    ConfigExpression,
    ConfigItem,
    ConfigParser,
    ReferenceResolver,
)

from medfl.bundle.guarded_readers import Check, guard_readers
from medfl.core.untrusted import Refused
from medfl.policy.components import check_arguments, component, is_never_made
from medfl.policy.expressions import DEFAULT_NAMES, ExpressionFilter, Uses, imported
from medfl.policy.paths import check_place
from medfl.policy.policy import Policy
from medfl.problem.described import Config


def guarded_parser(
    content: Config, policy: Policy, own_modules: frozenset[str], roots: Collection[Path]
) -> ConfigParser:
    """Return a parser of a configuration that makes and evaluates only what is let through.

    Args:
        content: the configuration, which the parser takes over.
        policy: its words widen what is let through; a trusted bundle is parsed by MONAI alone.
        own_modules: top-level modules of the bundle's own Python.
        roots: files and folders whose images may be read; what is added to them later counts.

    Raises:
        Refused: an import that is none.
    """
    parser = ConfigParser(content)
    if not policy.trusted:
        names = dict(DEFAULT_NAMES)
        for text in filter(None, content.get("imports", [])):
            names |= imported(str(text)[1:], Uses())

        def check(path: Any) -> None:
            if "paths" not in policy.allow:
                check_place(path, roots)

        expressions = ExpressionFilter(names, policy.allow, own_modules, policy.limits.expression)
        parser.ref_resolver = _Resolver(expressions, check)

    return parser


class _Resolver(ReferenceResolver):
    """Takes guarded items in the place of MONAI's own."""

    def __init__(self, expressions: ExpressionFilter, check_path: Check) -> None:
        super().__init__()
        self._expressions = expressions
        self._check_path = check_path

    def add_item(self, item: ConfigItem) -> None:
        if isinstance(item, ConfigExpression):
            item = _Expression(item.config, item.id, self._expressions)
        elif isinstance(item, ConfigComponent):
            item = _Component(item.config, item.id, self._expressions, self._check_path)
        super().add_item(item)

    def _resolve_one_item(self, id: str, *args: Any, **kwargs: Any) -> Any:
        # A placeholder would find no image, and say nothing.

        if id == "dataset_dir" and id in self.items:
            folder = self.items[id].config
        else:
            folder = None

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

        # of an engine: they would start a compiler
        arguments.pop("compile", None)
        arguments.pop("compile_kwargs", None)
        check_arguments(factory, arguments)
        try:
            instance = factory(**arguments)
        except Exception as error:
            words = ", ".join(arguments) or "nothing"
            raise RuntimeError(f"{name} cannot be made with {words}") from error

        guard_readers(instance, self._check_path)

        return instance
