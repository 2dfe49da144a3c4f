"""How many workers fit in memory: the peak of one local step is measured in a separate process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from medfl.core import MedflError, Print
from medfl.data import Shard, free_ram
from medfl.runtimes.federation import Federation
from medfl.training.site import fit, snapshot

_SHARE = 0.8  # of the free memory that workers may use together
_NETWORKS = 4  # copies of the weights that methods hold beside the network in training


def jobs_that_fit(federation: Federation, jobs: int, say: Print = str) -> int:
    """Return how many of `jobs` workers fit in the free memory, at least 1; report it if they are fewer.

    Small images are not measured: a batch of them takes a few megabytes.
    """
    # measuring takes a step: worth it only if images are so large that memory may run out
    if jobs <= 1 or federation.run.device != "cpu" or not _large(federation):
        return jobs

    needed = step_bytes(federation)
    if not needed:
        return jobs

    free = free_ram()
    fitting = max(1, min(jobs, int(free * _SHARE / needed)))
    if fitting < jobs:
        say(
            f"note: {fitting} of {jobs} workers: each takes about {needed / 2**30:.1f} GiB, "
            f"of {free / 2**30:.1f} free"
        )

    return fitting


def step_bytes(federation: Federation) -> int:
    """Return the bytes that one local step adds to a process, including copies kept by methods; 0 if it fails.

    A failing step is not reported here: the first round will do so, with its site's name.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(federation, there), daemon=True)
    process.start()
    there.close()  # otherwise a killed process would leave `recv_bytes` waiting
    size = 0

    with suppress(EOFError, OSError):
        size = int(here.recv_bytes())

    process.join()
    return size


def _measure(federation: Federation, link: Connection) -> None:
    torch.set_num_threads(federation.run.threads)
    added = 0
    # glibc keeps freed memory for later use: a step would use that without growing
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

    with suppress(MedflError, RuntimeError, MemoryError), federation.scope():
        start = _status("VmRSS")
        # the largest: small sites may not fill a batch
        name = max(
            federation.participants,
            key=lambda participant: len(federation.participant_shard(participant, "train")),
        )
        work = federation.participant_shard(name, "train")
        site = federation.site(name, 1)
        batch = Shard(work.prepared, work.indices[: site.settings.batch_size])
        network = site.model(site.initial_weights)
        fit(network, replace(site, train=batch, settings=replace(site.settings, epochs=1)))
        weights = sum(tensor.nbytes for tensor in snapshot(network).values())
        # the peak of the process, including memory that the step has freed again
        added = max(0, _status("VmHWM") - start) + _NETWORKS * weights

    link.send_bytes(str(added).encode())
    os._exit(0)


def _large(federation: Federation) -> bool:
    """Tell whether a batch of training images has more than a million values."""
    x, _ = next(federation.site(federation.participants[0], 1).train.batches(1), (None, None))
    return isinstance(x, torch.Tensor) and x.numel() * federation.run.batch_size > 1_000_000


def _status(field: str) -> int:
    """Return a memory figure of this process in bytes, 0 if the system does not provide it."""
    with suppress(OSError):
        match = re.search(
            rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
        )
        return int(match[1]) * 1024 if match else 0
    return 0
