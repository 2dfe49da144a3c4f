"""Applies a site's policy to a reply before it leaves: checks, clips, adds noise, and charges the account.

Clipping and noise act on the change d = w_k - v of all weights that leave together, with v as received by the site:

    d <- d min(1, C / |d|) + n,  n ~ N(0, sigma^2) in each number;  w_k = v + d is what leaves  (1)

With error feedback (`compression`, topk) d includes what earlier rounds left unsent. The result is computed in float64
and then rounded to the weights' type. Counters (integers) leave as received if there is noise, or if they and d
together exceed C; with noise, running variances are kept at 0 or above: neither needs access to the images. The noise
is generated from the operating system's entropy, not from a seed, so that nobody can compute it, least of all the
server, which has the run's seed.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

from medfl.core import Config, Document, Floats, Message, RunError, Tensors, Weights, without
from medfl.policy.policy import Outbound
from medfl.policy.privacy import Account, BudgetExceeded
from medfl.policy.suppression import Entropy, uniform

_CHUNK = 1 << 20
_SAMPLES = "samples"
_VARIANCE = "running_var"


class Gate:
    """Everything leaves a site with outbound rules through this gate; `account` is the site's privacy account."""

    def __init__(
        self, rules: Outbound, account: Account, site: str, entropy: Entropy = os.urandom
    ) -> None:
        """Store the rules.

        Raises:
            InputError: epsilon is to be reported, but its library is not installed.
        """
        self.rules = rules
        self.account = account
        self.site = site
        self._entropy = entropy
        if rules.has_formal_privacy:
            account.epsilon(rules.multiplier)

    def charge_noised_reply(self) -> None:
        """Charge one noised reply before training starts, since a round that fails also discloses something.

        Raises:
            RunError: it exceeds the budget.
        """
        self.account.refresh()
        if self.rules.has_formal_privacy:
            try:
                self.account.spend(self.rules.multiplier, budget=self.rules.epsilon)
            except BudgetExceeded as error:
                raise self._refusal(
                    f"the budget is epsilon {self.rules.epsilon:g} at delta {self.rules.delta:g}; "
                    f"another reply would make it {error.after:.3g} ({self.account.words()})"
                ) from error

    def reply(self, message: Message, received: Message, samples: int) -> Message:
        """Return the reply to a broadcast as it may leave, before compression.

        The exact number of the site's training images may leave, as `scalars/samples`.

        Raises:
            RunError: the policy forbids something in it; names it.
        """
        self._check_names(message.flat())
        rules = self.rules
        if rules.clip is not None or rules.noise is not None:
            weights = self._clipped_and_noised(
                message.tensors.get("weights", {}), received.tensors.get("weights", {})
            )
            if weights:
                message = Message({**message.tensors, "weights": weights}, message.scalars)
            elif message.tensors:
                raise self._refusal("a reply without weights, which are what clip and noise limit")

        if rules.has_formal_privacy:
            self._check_uncovered(_without_noise(message, samples))

        return message

    def charge_introduction(self, message: Message, *, from_images: bool) -> None:
        """Check a site's message before its first training, and charge it; `from_images` if it depends on its images.

        Raises:
            RunError: the policy forbids something in it; names it.
        """
        self._check_names(message.flat())
        if from_images and self.rules.has_formal_privacy:
            names = [f"{name} (introduction)" for name in message.flat()]
            self.account.add(self._check_uncovered(names))

    def check_size(self, message: Message) -> None:
        """Check the size of a message as it is encoded.

        Raises:
            RunError: it is too large.
        """
        limit = self.rules.max_bytes
        if limit is not None and message.num_bytes > limit:
            raise self._refusal(
                f"its message has {message.num_bytes:,} bytes, more than max_bytes {limit:,}"
            )

    def charge_numbers(self, group: str, names: Iterable[str], *, from_images: bool) -> None:
        """Check and charge numbers that are not a reply, such as metrics and statistics, named group/name.

        `from_images`: they depend on training images beyond what the replies have revealed; otherwise each answer is
        counted.

        Raises:
            RunError: the policy forbids one of them, or no answers are left; names it.
        """
        keys = [f"{group}/{name}" for name in names]
        self._check_names(keys)
        if self.rules.noise is None:
            return

        if from_images:
            self.account.add(self._check_uncovered(keys))
        elif not self.account.add_answer(self.rules.answers):
            raise self._refusal(
                f"it has answered {self.rules.answers} questions about images that are kept out of training, "
                "as many as it may"
            )

    def charge_fingerprint(self, names: Iterable[str], epsilon: float) -> None:
        """Check and charge a fingerprint with noise.

        Raises:
            RunError: the policy forbids a name in it, or has a budget, which covers all images rather than one case.
        """
        self._check_names(f"fingerprint/{name}" for name in names)
        if self.rules.epsilon is not None:
            raise self._refusal(
                "a fingerprint's epsilon is of one case, the budget's of all images"
            )
        self.account.add_fingerprint(epsilon)

    def charge_without_noise(self, message: Message, samples: int) -> None:
        """Charge what a reply reveals beside its noised change (`charge_noised_reply`); without noise all of it."""
        if not self.rules.has_formal_privacy:
            self.account.spend(None)
        elif uncovered := _without_noise(message, samples):
            self.account.add(Counter(uncovered))

    def allowed_numbers(self, numbers: Config, *optional: str) -> Document:
        """Drop optional numbers beside a message: all of them with noise, else those that no key names."""
        # The mean loss is computed from the images without noise, so no epsilon would cover it.
        noised = self.rules.noise is not None
        permits = self.rules.permits
        kept_back = [name for name in optional if noised or not permits(f"told/{name}")]
        return without(numbers, kept_back)

    def _check_names(self, names: Iterable[str]) -> None:
        if refused := self.rules.refused(names):
            more = f" ({len(refused)} such)" if len(refused) > 1 else ""
            raise self._refusal(f"'{refused[0]}' is not among its keys{more}")

    def _check_uncovered(self, names: Iterable[str]) -> Counter[str]:
        """Return how often each name leaves without noise; refuse any if epsilon is a budget."""
        uncovered = Counter(names)
        if uncovered and self.rules.epsilon is not None:
            raise self._refusal(
                f"'{min(uncovered)}' would leave without noise, and epsilon is a budget for all that leaves"
            )
        return uncovered

    def _clipped_and_noised(self, weights: Weights, base: Weights) -> Tensors:
        """Return weights whose change is clipped and noised (1)."""
        changes: Tensors = {}
        counters: Tensors = {}
        for name in sorted(weights):
            if name not in base or base[name].shape != weights[name].shape:
                raise self._refusal(
                    f"'weights/{name}' has no counterpart in what was received: its change cannot be limited"
                )

            part = changes if weights[name].is_floating_point() else counters
            part[name] = weights[name].double() - base[name].double()

        norm = _norm(changes)
        if not math.isfinite(norm):
            raise self._refusal("its change has NaN or infinite numbers, which cannot be limited")

        clip = self.rules.clip
        noise = self.rules.noise
        # Counters enter the norm, but cannot be scaled: if both are short, all leave unchanged.
        if noise is None and clip is not None and math.hypot(norm, _norm(counters)) <= clip:
            return dict(weights)

        scale = 1.0 if clip is None or norm <= clip else clip / norm
        limited_weights = dict(weights)
        for name, change in changes.items():
            # With neither clipping nor noise the weights leave unchanged, without another rounding.
            if noise is None and not scale < 1:
                continue

            limited = scale * change
            if noise is not None:
                drawn = torch.from_numpy(normal(change.numel(), self._entropy))
                limited += noise * drawn.reshape(change.shape).to(change)

            # Last: large numbers sent by a server would make the change be rounded before the noise
            limited += base[name].double()
            # A negative variance has no root; bounding it needs no access to the images.
            if noise is not None and name.endswith(_VARIANCE):
                limited = limited.clamp(min=0)

            limited_weights[name] = limited.to(weights[name].dtype)

        # Integers can be neither scaled nor noised: they leave as received.
        for name in counters:
            limited_weights[name] = base[name].clone()

        return limited_weights

    def _refusal(self, why: str) -> RunError:
        return RunError(f"site {self.site!r}: its outbound policy refuses: {why}")


def _norm(changes: Weights) -> float:
    return math.sqrt(sum(float(change.square().sum()) for change in changes.values()))


def normal(count: int, entropy: Entropy = os.urandom) -> Floats:
    """Return `count` standard normal numbers, by the inverse distribution function of 52 random bits each."""
    from scipy.special import ndtri

    # In pieces: the inverse needs several times their memory.
    values = np.empty(count)
    for start in range(0, count, _CHUNK):
        part = values[start : start + _CHUNK]
        part[:] = ndtri(uniform(len(part), entropy))

    return values


def _without_noise(message: Message, samples: int) -> list[str]:
    """Return what noise does not cover: names of groups other than the weights, and numbers."""
    names = [f"{group}/*" for group in message.tensors if group != "weights"]
    for name, number in message.scalars.items():
        # The exact number of images is sent, as the account says; any other number is not it.
        if name != _SAMPLES or number != samples:
            names.append(f"scalars/{name}")

    return names
