"""How an exported file is compared with the network that it was made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from medfl.export.formats import Comparison


def test_a_difference_that_is_no_number_is_not_lost_among_others() -> None:
    def spoilt(x: Tensor) -> Tensor:
        return x / 0 if x.shape[-1] == 2 else x + 0.25

    images = [torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 3, 3)]
    comparison = Comparison(images, lambda x, network: network(x), torch.sigmoid)
    agreement = comparison.agreement(nn.Identity(), spoilt, 1e-4, "spoilt")
    assert math.isnan(agreement.outputs)
    assert math.isnan(agreement.probabilities)
    assert agreement.images == 2
    near = comparison.agreement(nn.Identity(), lambda x: x + 0.25, 1e-4, "shifted")
    assert near.outputs == 0.25
