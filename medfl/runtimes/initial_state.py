"""The weights that all networks of a run begin with where they are given and not drawn: `--init`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Tensors, Weights
from medfl.core.names import listed
from medfl.core.run import Run
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.methods.base import Method
from medfl.problem.problem import Problem
from medfl.training.site import snapshot

_NAMED = 3  # tensors that an error names


def initial_state_dict(bundle: Problem, method: Method, task: Task, run: Run) -> Tensors:
    """Return the state dict that a run's network begins with.

    The given weights are those of the bundle's network, or of what the method makes of it; in the first case what the
    method adds is drawn from the run's seed.

    Raises:
        InputError: they are of another network, or not at hand.
    """
    if bundle.start is None:
        raise InputError(
            f"a run that begins with the weights {run.init[:19]}, which are not at hand",
            "init.safetensors in its folder",
            "restore the file, or start a new run with --init",
        )

    # on the stream of a drawn network, so that what the method adds is what it would be without --init
    with stream(run.seed, "network"):
        plain = bundle.network()
        is_plain = not _differences(plain, bundle.start)
        # before the method adapts it: a method may copy or freeze layers
        if is_plain:
            plain.load_state_dict(bundle.start)

        adapted = method.adapt(plain, task)

    if not is_plain:
        if _differences(adapted, bundle.start):
            # compared with the network that the weights resemble, so that the error lists few tensors
            network = adapted if len(adapted.state_dict()) == len(bundle.start) else plain
            raise InputError(
                f"--init of another network than that of bundle {bundle.name!r}: {_differences(network, bundle.start)}",
                f"all {len(network.state_dict())} tensors of the network, by name and shape",
                "give weights of this network, or choose it with --config network=NAME",
            )

        adapted.load_state_dict(bundle.start)

    return snapshot(adapted)


def _differences(network: nn.Module, weights: Weights) -> str:
    """Say in which tensors weights are not a network's, "" if in none: of other forms, missing, and odd ones."""
    state = network.state_dict()
    forms = []
    for name, tensor in state.items():
        if name in weights and _form(weights[name]) != _form(tensor):
            forms.append(f"{name!r} is {_form(weights[name])}, the network's {_form(tensor)}")

    kinds = {
        "tensors have another shape": forms,
        "tensors are missing": [repr(name) for name in state if name not in weights],
        "tensors are not of the network": [repr(name) for name in weights if name not in state],
    }
    return "; ".join(f"{len(kinds[k])} {k}: {listed(kinds[k], _NAMED)}" for k in kinds if kinds[k])


def _form(tensor: Tensor) -> str:
    if tensor.dtype == torch.float32:
        kind = ""
    else:
        kind = f" {str(tensor.dtype).removeprefix('torch.')}"
    return f"({', '.join(map(str, tensor.shape))}){kind}"


def refuse_init_of_mixed_networks(run: Run) -> None:
    """Raise an InputError if sites with networks of their own were to begin with the weights of one."""
    if run.init:
        raise InputError(
            f"--init with method {run.method!r}, whose sites have networks of several kinds",
            "weights are of one network",
            "leave it out, or take another method",
        )
