"""Losses with which one network learns from another's predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(softmax(teacher) || softmax(student)) over dimension 1, averaged over all others; teacher is constant.

    Args:
        student: logits (B, K) or maps of them (B, K, H, W[, D]); a single channel is the logit of a sigmoid.
        teacher: of the same shape.
    """
    log_q = log_probabilities(student)
    log_p = log_probabilities(teacher.detach())
    return kl_div(log_q, log_p, reduction="none", log_target=True).sum(1).mean()


def log_probabilities(z: Tensor) -> Tensor:
    """Return the logarithms (B, K, ...) of softmax(z), at least float32; a single channel z is treated as (0, z)."""
    exact = z.to(torch.promote_types(z.dtype, torch.float32))  # mixed precision would not be enough
    # the logit z of a sigmoid is the pair (0, z) of a softmax
    if exact.shape[1] == 1:
        exact = torch.cat([torch.zeros_like(exact), exact], 1)

    return log_softmax(exact, 1)


def ensemble(outputs: Sequence[Tensor]) -> Tensor:
    """Return logits of the mean probability (2) of several networks' outputs (B, K, ...), at least float32.

    For several channels they are log-probabilities; a single one is the logit of a sigmoid, as in the outputs.
    """
    # log of the mean of e^(log p): the probabilities themselves might underflow.
    total = torch.stack(list(map(log_probabilities, outputs))).logsumexp(0)
    mean = total - math.log(len(outputs))
    if outputs[0].shape[1] == 1:
        return mean[:, 1:] - mean[:, :1]

    return mean


def set_loss(z: Tensor, sets: Tensor) -> Tensor:
    """Return the mean over the batch of -sum_(r in S) log p[r], FedHelp's eq. 5 with a set S for each sample.

    Args:
        z: logits (B, K, ...) of the large model.
        sets: (B, K, ...) bool, constant.
    """
    return -(log_probabilities(z) * sets).sum(1).mean()
