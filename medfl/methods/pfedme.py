"""pFedMe: "Personalized Federated Learning with Moreau Envelopes" (T. Dinh, Tran, Nguyen, NeurIPS 2020).

min_w (1/N) sum_i F_i(w) with F_i(w) = min_theta f_i(theta) + (lambda/2) ||theta - w||^2, whose gradient is
lambda (w - theta_i), theta_i the minimiser.

Site:    w_i = theta = w; for each of R batches
         (1) K times, on that batch: theta <- theta - eta_p (g(theta) + lambda (theta - w_i));
         (2) w_i <- w_i - eta lambda (w_i - theta).
Server:  w <- (1 - beta) w + beta times the participants' plain mean of w_i.
Result:  a site is judged by the theta_i of its last participation, which never leaves; before the first by w.

(1) is the run's optimiser, so that eta_p is its learning rate (public code: 0.09 to 0.1) and its momentum continues
from batch to batch; R is the number of batches in the local epochs (public code: 20). A decay over the rounds also
applies to eta. Keep eta lambda below 1; at 1 w_i is theta.
Buffers are theta's, at the server their mean: neither pulled nor mixed by beta.
In a public library (PFLlib) theta_i shares its tensors with the network, which holds w_i when a round ends, so that
w_i is judged there: `judge=w`. It follows theta_i slowly, and was several points worse in ten rounds here.
Departures from the public code: no separate weight decay (0.001), and sites that were not drawn do not train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medfl.core.message import Message, Messages
from medfl.methods._parts.repeated_batches import repeating
from medfl.methods.base import (
    MEANS,
    Method,
    option,
    step_towards,
    trained_names,
)
from medfl.storage.files import State
from medfl.training import Host, Site, fit, snapshot, trainable


@dataclass(frozen=True)
class PFedMe(Method):
    """A personal model at each site, held near a common one that follows all of them."""

    lam: float = option(
        15.0, "lambda, how strongly theta is held to w_i (public code: 15)", minimum=0.0
    )
    inner_steps: int = option(5, "K, steps on theta a batch (public code: 5)", minimum=1)
    eta: float = option(
        0.005, "learning rate of w_i; theta has the run's (public code: 0.005)", minimum=0.0
    )
    beta: float = option(
        1.0, "the server's step towards the sites' mean (public code: 1 or 2)", minimum=0.0
    )
    judge: str = option(
        "theta",
        "a site's model: theta_i (paper), or w_i, which follows it slowly (as public code has it)",
        choices=("theta", "w"),
    )
    weights: str = option(
        "uniform", "mean over participants: 1/S (paper), or by samples", choices=MEANS
    )

    paper = "Personalized Federated Learning with Moreau Envelopes (T. Dinh et al., 2020)"
    judged = "personal"

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train theta on each batch, and let w_i follow it; keep theta, reply with w_i."""
        model = site.model(down["weights"])  # theta
        theta: list[Tensor] = [*trainable(model).values()]
        local_parameters = [p.detach().clone() for p in theta]  # w_i
        # eta lambda of (2), decayed like the run's learning rate.
        part = self.eta * site.settings.lr_factor * self.lam
        taken = 0  # steps

        def follow() -> None:
            with torch.no_grad():
                torch._foreach_lerp_(local_parameters, theta, part)  # (2)

        def hold(parameters: Sequence[nn.Parameter]) -> None:
            nonlocal taken
            # theta has had K steps on the last batch.
            if taken and taken % self.inner_steps == 0:
                follow()

            taken += 1
            for parameter, anchor in zip(parameters, local_parameters, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - anchor, alpha=self.lam)  # (1)

        fit(model, repeating(site, self.inner_steps), gradient_hook=hold)
        if taken:
            follow()

        personal = snapshot(model)
        with torch.no_grad():
            # The reply is w_i with theta's buffers.
            torch._foreach_copy_(theta, local_parameters)

        reply = snapshot(model)
        judged = {"personal": personal if self.judge == "theta" else reply}
        return judged, site.reply(reply)

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Move w by beta towards the mean of the w_i."""
        old = server["weights"]
        mean = super().aggregate(host, server, replies, num_sites)["weights"]
        return {"weights": step_towards(old, mean, self.beta, trained_names(host.model(old)))}

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return theta_i or w_i; w for a site that never took part."""
        return site.model(state.get("personal", down["weights"]))


METHOD = PFedMe
