"""MONAI's parser under guard: components are the listed objects themselves, expressions are evaluated by `policy`.

MONAI's own parser calls what a name leads to and evaluates expressions with `eval`. Here the same items of a
configuration are made of what was checked: a `_target_` becomes the object that `policy.components` found, and each `$`
expression goes through `policy.evaluate`. A bundle that the user trusts (`--trust`) is parsed by MONAI alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Any

from monai.bundle import (
    ConfigComponent,
    ConfigExpression,
    ConfigItem,
    ConfigParser,
    ReferenceResolver,
)

from medfl.bundle.guarded_readers import guard_readers
from medfl.core.untrusted import Refused
from medfl.datasets.readers.reading import files_of
from medfl.policy.components import check_arguments, component, is_never_made
from medfl.policy.evaluate import ExpressionEvaluator, values_inside
from medfl.policy.imports import DEFAULT_NAMES, Uses, imported
from medfl.policy.policy import Policy
from medfl.problem.described import Config


def guarded_parser(
    content: Config, policy: Policy, own_modules: frozenset[str], roots: Collection[Path]
) -> ConfigParser:
    """Return a parser of a configuration that makes and evaluates only what is listed.

    Args:
        content: the configuration, which the parser takes over.
        policy: its words widen what is listed; a trusted bundle is parsed by MONAI alone.
        own_modules: top-level modules of the bundle's own Python.
        roots: files and folders that may be looked into; what is added to them later counts.

    Raises:
        Refused: an import that is not listed.
    """
    parser = ConfigParser(content)
    if not policy.trusted:
        names = dict(DEFAULT_NAMES)
        for text in filter(None, content.get("imports", [])):
            names |= imported(str(text)[1:], Uses())
        parser.ref_resolver = _Resolver(
            ExpressionEvaluator(names, policy.allow, own_modules, roots)
        )

    return parser


class _Resolver(ReferenceResolver):
    """Takes guarded items in the place of MONAI's own."""

    def __init__(self, evaluator: ExpressionEvaluator) -> None:
        super().__init__()
        self._evaluator = evaluator

    def add_item(self, item: ConfigItem) -> None:
        if isinstance(item, ConfigExpression):
            item = _Expression(item.config, item.id, self._evaluator)
        elif isinstance(item, ConfigComponent):
            item = _Component(item.config, item.id, self._evaluator)
        super().add_item(item)


class _Expression(ConfigExpression):
    def __init__(self, config: Any, id_: str, evaluator: ExpressionEvaluator) -> None:
        super().__init__(config, id_)
        self._text = str(config)[len(self.prefix) :]
        self._evaluator = evaluator

    def evaluate(
        self, globals: dict[str, Any] | None = None, locals: dict[str, Any] | None = None
    ) -> Any:
        if globals is None:  # an import: the parser has read its name
            return self._text
        return self._evaluator.evaluate(self._text, globals[ReferenceResolver._vars])


class _Component(ConfigComponent):
    def __init__(self, config: Any, id_: str, evaluator: ExpressionEvaluator) -> None:
        super().__init__(config, id_)
        self._target = config["_target_"]
        self._evaluator = evaluator

    def instantiate(self, **extra: Any) -> object:
        if self.is_disabled():
            return None

        target = str(self._target)
        config = self.config
        is_own = target.partition(".")[0] in self._evaluator.own_modules
        factory = self._evaluator.member(target) if is_own else component(target)
        name = factory.__name__

        if not is_own and is_never_made(factory):
            raise Refused(
                f"{name} writes files or handles a trainer's events, and is never made here"
            )
        if config.get("_mode_", "default") != "default":
            raise Refused(f"_mode_ of {name}, where only 'default' is")

        arguments = {key: value for key, value in config.items() if key not in self.non_arg_keys}
        arguments |= extra
        if name.endswith("DataLoader"):
            arguments |= {"num_workers": 0, "multiprocessing_context": None, "worker_init_fn": None}
            arguments.pop("persistent_workers", None)
            arguments.pop("prefetch_factor", None)

        if not is_own:
            # of an engine: they would start a compiler
            arguments.pop("compile", None)
            arguments.pop("compile_kwargs", None)
            self._evaluator.check_handed([arguments.get("func")], objects=False)
            self._evaluator.check_handed(arguments.values(), objects=True)

        self._evaluator.check_paths(check_arguments(factory, (), arguments), factory)
        if not is_own and (name.endswith("Dataset") or name == "Subset"):
            self._check_items(arguments)

        try:
            instance = factory(**arguments)
        except Exception as error:
            words = ", ".join(arguments) or "nothing"
            raise RuntimeError(f"{name} cannot be made with {words}") from error

        if not is_own:
            guard_readers(instance, self._evaluator.check_path)

        return instance

    def _check_items(self, arguments: Config) -> None:
        """Refuse items of a data set that name files elsewhere: they are hashed, or opened while it is made."""
        for value in values_inside(list(arguments.values())):
            if isinstance(value, PurePath) or (isinstance(value, str) and _is_place(value)):
                for path in files_of([str(value)]):
                    self._evaluator.check_path(path)


def _is_place(text: str) -> bool:
    return text.startswith(os.sep) or os.path.isfile(text)
