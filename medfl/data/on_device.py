"""Prepared data on a GPU: kept there if they fit, otherwise copied batch by batch while the GPU computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch

from medfl.data.prepared import Prepared

Free = Callable[[torch.device], int]
"""Device -> bytes available for tensors."""

_GB = 1e9  # as GPU vendors count


def free_gpu_memory(device: torch.device) -> int:
    """Return the bytes that a CUDA device can still give this process, including those cached by torch."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def hold(
    sections: Mapping[str, Prepared], device: torch.device, free: Free = free_gpu_memory
) -> tuple[dict[str, Prepared], str]:
    """Move prepared data to a device, one section after another while they fit in half of its free memory.

    Batches of moved sections are gathered and randomly transformed on the device, with random numbers from the CPU.
    Batches of the others are pinned on a CUDA device, so that copying them is asynchronous.

    Args:
        sections: name -> items; an object under two names is moved once.
        device: the networks'; on the CPU nothing is done.
        free: returns the free memory of the device.

    Returns:
        name -> items, and a line for the user, "" on the CPU.
    """
    if device.type == "cpu":
        return dict(sections), ""

    memory = free(device)
    # The other half is for networks, their gradients and activations.
    left = memory // 2
    moved = {}
    held = []
    large = []
    single = []

    for name, prepared in sections.items():
        if id(prepared) not in moved:
            placed = prepared.to(device, left) if prepared.nbytes else prepared
            if placed is not prepared:
                left -= prepared.nbytes
            elif device.type == "cuda":
                # A copy, since others may use the items without pinned batches.
                placed = copy.copy(prepared)
                placed.pinned = True

            moved[id(prepared)] = placed

        text = f"{name} ({_size(prepared.nbytes)})"
        if not prepared.nbytes:
            single.append(name)
        elif moved[id(prepared)].device.type == "cpu":
            large.append(text)
        else:
            held.append(text)

    line = f"data held on {device}: {', '.join(held) or 'none'}"
    if large:
        line += f"; copied batch by batch, as they do not fit in half of its free {_size(memory)}: {', '.join(large)}"
    if single:
        line += f"; made item by item on the CPU: {', '.join(single)}"

    return {name: moved[id(prepared)] for name, prepared in sections.items()}, line


def _size(number: int) -> str:
    if number >= _GB / 10:
        return f"{number / _GB:.1f} GB"

    return f"{number / 1e6:.1f} MB"
