"""Batches that come several times in a row."""

from __future__ import annotations

from medfl.methods._parts.repeated_batches import repeating
from tests.support.toy import Toy, blobs, classifier, cross_entropy


def test_repeated_batches_are_of_the_same_items() -> None:
    site = Toy(blobs({"a": 6}), classifier(), cross_entropy).site("a")
    repeated = repeating(site, 3).train
    assert repeated.ids == site.train.ids
    assert len(repeated.prepared.items) == len(site.train.prepared.items)
