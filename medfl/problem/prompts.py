"""Prompts: classes in words and the text around them, from `text` in a bundle's federated configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeGuard

from medfl.core import InputError, not_among


@dataclass(frozen=True)
class Text:
    """The classes in words and the prompts around them.

    Attributes:
        concepts: one phrase per class, in label order.
        prompts: texts with `{concept}` where the phrase goes.
    """

    concepts: tuple[str, ...]
    prompts: tuple[str, ...]

    def filled(self) -> list[list[str]]:
        """Return the K x M prompts."""
        return [
            [prompt.replace("{concept}", concept) for prompt in self.prompts]
            for concept in self.concepts
        ]

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that depend on concepts and prompts."""
        return hashlib.sha256(json.dumps([self.concepts, self.prompts]).encode()).hexdigest()[:12]


def read_text(node: object, classes: Sequence[str], where: str) -> Text:
    """Read `{concepts: {class: phrase}, prompts: [{frames: [...], nouns: [...]}]}`.

    Every frame of a group is combined with each of its nouns: `{noun}` becomes the noun, `{a noun}` the noun with its
    article ("an image").

    Raises:
        InputError: another form, a class without words, prompts that do not differ; or other classes, or another number
            or order of them: names both lists.
    """
    node = node if isinstance(node, Mapping) else {}
    concepts = node.get("concepts")
    if not isinstance(concepts, Mapping):
        form = "a list of" if isinstance(concepts, list) else "no"
        raise InputError(
            f"{where}: the key 'text' has {form} concepts",
            f"it has concepts: {{class: phrase}} for {', '.join(classes)}",
            "write them as {class: phrase}, or use a method that needs no text (medfl methods)",
        )

    described = list(map(str, concepts))
    if described != list(classes):
        advice = []
        if missing := not_among(classes, described):
            advice.append(f"add {', '.join(missing)}")

        if extra := not_among(described, classes):
            advice.append(f"drop {', '.join(extra)}")

        raise InputError(
            f"{where}: text concepts are given for {', '.join(described) or 'no class'}",
            f"the bundle's classes are, in label order, {', '.join(classes)}",
            " and ".join(advice) or "bring them into this order",
        )

    for name, phrase in concepts.items():
        if not isinstance(phrase, str) or not phrase.strip():
            raise InputError(
                f"{where}: the text concept of class {str(name)!r} is {phrase!r}",
                "every class is put in words",
                "write them, in quotation marks if YAML would read something else",
            )

    class_of: dict[str, str] = {}
    for name, phrase in zip(described, concepts.values(), strict=True):
        if (first := class_of.setdefault(phrase, name)) != name:
            raise InputError(
                f"{where}: classes {first!r} and {name!r} have the same text concept {phrase!r}",
                "concepts differ from each other",
                "put one of the two classes in other words",
            )

    return Text(tuple(class_of), tuple(_prompts(node.get("prompts"), where)))


def _prompts(groups: object, where: str) -> list[str]:
    """Return the prompts of all groups, each with `{concept}`."""
    prompts = []
    for group in groups if isinstance(groups, list) and groups else [groups]:
        table = group if isinstance(group, Mapping) else {}
        frames = table.get("frames")
        nouns = table.get("nouns")
        if not _are_texts(frames) or not _are_texts(nouns):
            raise InputError(
                f"{where}: the key 'text' has among its prompts {_short(group)}",
                "prompts are a list of groups, each with frames: [...] and nouns: [...]",
                "write it as frames: ['a photo of {a noun}: {concept}'] and nouns: ['an image']",
            )

        for noun in nouns:
            if not noun.partition(" ")[2]:
                raise InputError(
                    f"{where}: noun {noun!r}", "a noun has its article, as in 'an image'", "add it"
                )

        # frames outermost: stored embeddings are in this order
        for frame, noun in product(frames, nouns):
            prompt = frame.replace("{a noun}", noun)
            prompts.append(prompt.replace("{noun}", noun.partition(" ")[2]))

    for prompt in prompts:
        if prompt.count("{concept}") != 1 or set(prompt.replace("{concept}", "")) & set("{}"):
            raise InputError(
                f"{where}: prompt {prompt!r}",
                "a prompt names {concept} once, a frame {noun} or {a noun} besides",
                "write {concept} once, and no other braces than {noun} and {a noun}",
            )
        if prompts.count(prompt) > 1:
            raise InputError(
                f"{where}: prompt {prompt!r} comes {prompts.count(prompt)} times",
                "prompts differ from each other",
                "drop one, or put a frame without a noun into a group with one noun",
            )

    return prompts


def _are_texts(values: object) -> TypeGuard[list[str]]:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(value, str) for value in values)
    )


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
