"""FedAvg: "Communication-Efficient Learning of Deep Networks from Decentralized Data" (McMahan et al., AISTATS 2017).

w^{t+1} = sum_{k in S_t} p_k w_k^t, p_k = n_k / sum_{j in S_t} n_j. Floating BatchNorm buffers are averaged too.
"""

from dataclasses import dataclass

from medfl.methods.base import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Average the sites' weights by sample counts."""

    paper = "Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al., 2017)"


METHOD = FedAvg
