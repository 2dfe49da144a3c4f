"""Prompts: the grammar, and what is no text for a bundle's classes."""

from __future__ import annotations

import pytest

from medfl.core.errors import InputError
from medfl.problem.prompts import Text, read_text

NODE = {
    "concepts": {"A": "apple", "b": "blue pear"},
    "prompts": [
        {"frames": ["{a noun} of {concept}."], "nouns": ["an image"]},
        {
            "frames": ["{concept} in {noun}.", "the {noun} shows {concept}."],
            "nouns": ["an image", "a colour photo"],
        },
    ],
}
GROUP = NODE["prompts"][0]


def concepts(**given: object) -> dict[str, object]:
    return {**NODE, "concepts": given}


def prompts(*groups: object) -> dict[str, object]:
    return {**NODE, "prompts": [*groups]}


def test_frames_times_nouns() -> None:
    text = read_text(NODE, ("A", "b"), "federated.yaml")
    assert text.prompts == (
        "an image of {concept}.",
        "{concept} in image.",
        "{concept} in colour photo.",
        "the image shows {concept}.",
        "the colour photo shows {concept}.",
    )
    assert text.filled()[1][2] == "blue pear in colour photo."
    assert len(text.filled()) == 2


def test_the_digest_follows_concepts_and_prompts() -> None:
    text = read_text(NODE, ("A", "b"), "federated.yaml")
    assert text.digest == read_text(NODE, ("A", "b"), "elsewhere.yaml").digest
    others = [Text(text.concepts[::-1], text.prompts), Text(text.concepts, text.prompts[:-1])]
    assert len({text.digest, *(other.digest for other in others)}) == 3


BOTH = r"; the bundle's classes are, in label order, A, b; "


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (
            concepts(b="blue pear", A="apple"),
            f"text concepts are given for b, A{BOTH}bring them into this order",
        ),
        (concepts(A="apple"), f"text concepts are given for A{BOTH}add b"),
        (
            concepts(A="apple", b="blue pear", c="cherry"),
            f"text concepts are given for A, b, c{BOTH}drop c",
        ),
        (
            concepts(A="apple", B="blue pear"),
            f"text concepts are given for A, B{BOTH}add b and drop B",
        ),
        (concepts(), f"text concepts are given for no class{BOTH}add A, b"),
        (
            concepts(A="apple", b=None),
            "the text concept of class 'b' is None; every class is put in words; write them",
        ),
        (
            concepts(A=" ", b="blue pear"),
            "the text concept of class 'A' is ' '; every class is put in words",
        ),
        (
            concepts(A=True, b="blue pear"),
            "the text concept of class 'A' is True; .*quotation marks",
        ),
        (
            concepts(A="apple", b="apple"),
            "classes 'A' and 'b' have the same text concept 'apple'; concepts differ",
        ),
        (
            {**NODE, "concepts": ["apple", "pear"]},
            "'text' has a list of concepts; it has concepts: {class: .* for A, b",
        ),
        (
            {"prompts": NODE["prompts"]},
            "the key 'text' has no concepts; it has concepts: {class: phrase} for A, b",
        ),
        (None, "the key 'text' has no concepts"),
        (
            {"concepts": NODE["concepts"]},
            "the key 'text' has among its prompts null; prompts are a list of groups",
        ),
        (prompts(), r"the key 'text' has among its prompts \[\]; prompts are a list of groups"),
        (
            prompts("an image of {concept}."),
            'has among its prompts "an image of {concept}."; .* frames: .* nouns: ',
        ),
        (
            prompts(GROUP, {"frames": ["{concept}."]}),
            r"has among its prompts {\"frames\": \[\"{concept}.\"\]}",
        ),
        (
            prompts({**GROUP, "nouns": "an image"}),
            'has among its prompts .*"nouns": "an image"}; prompts are a list',
        ),
        (prompts({**GROUP, "frames": []}), r"has among its prompts {\"frames\": \[\],"),
        (prompts({**GROUP, "nouns": ["an image", 3]}), "has among its prompts "),
        (
            prompts({**GROUP, "nouns": ["image"]}),
            "noun 'image'; a noun has its article, as in 'an image'; add it",
        ),
        (
            prompts({**GROUP, "frames": ["a {noun}."]}),
            "prompt 'a image.'; a prompt names {concept} once",
        ),
        (
            prompts({**GROUP, "frames": ["{concept}, {concept}."]}),
            "prompt '{concept}, {concept}.'; a prompt names",
        ),
        (
            prompts({**GROUP, "frames": ["{concept} in {place}."]}),
            "prompt '{concept} in {place}.'; a prompt names",
        ),
        (
            prompts(GROUP, GROUP),
            "prompt 'an image of {concept}.' comes 2 times; prompts differ from each other; drop",
        ),
        (
            prompts({"frames": ["{concept}."], "nouns": ["an image", "a photo"]}),
            "prompt '{concept}.' comes 2 times",
        ),
    ],
)
def test_bad_text(node: object, text: str) -> None:
    with pytest.raises(InputError, match=text) as caught:
        read_text(node, ("A", "b"), "federated.yaml")
    assert str(caught.value).startswith("federated.yaml: ")
    assert str(caught.value).count("; ") == 2
