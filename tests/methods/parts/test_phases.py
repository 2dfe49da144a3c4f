"""Training in parts."""

from __future__ import annotations

import torch

from medfl.methods._parts.phases import fit_part
from tests.support.toy import Toy, blobs, classifier, cross_entropy, sgd


def test_a_part_with_a_rate_of_its_own_has_it_in_all_rounds() -> None:
    federation = Toy(
        blobs({"a": 6}), classifier(), cross_entropy, sgd(0.1, momentum=0.9), lr_decay=0.5
    )
    site = federation.site("a", round_=3)
    model, by_hand = (federation.networks.fresh() for _ in range(2))
    fit_part(model, site, ["4.bias"], "head", epochs=1, rate=0.2)
    x, y = federation.data["a"]
    (slope,) = torch.autograd.grad(cross_entropy(by_hand(x), y), [by_hand[4].bias])
    torch.testing.assert_close(model[4].bias, by_hand[4].bias - 0.2 * slope)
