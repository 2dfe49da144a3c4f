"""One step with the bundle's own network and loss, before a run writes anything: detects parts that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from medfl.core import InputError, MedflError, as_text, not_among, root_cause, site_names, stream
from medfl.data import Shard
from medfl.runtimes.federation import Federation
from medfl.training import Networks, fit

# for segmentation, and for classification: unlike most class counts, so that shapes cannot match by accident
_ITEMS = (2, 5)


def try_training_step(federation: Federation, overrides: Mapping[str, object]) -> None:
    """Train on a few items of a labelled site, as FedAvg would, and discard the result.

    Raises:
        InputError: network, loss and images do not fit together, or the network lacks an output for a class.
    """
    bundle = federation.bundle
    run = federation.run
    without_labels = site_names(run.unlabelled)
    for name in federation.participants:
        work = federation.participant_shard(name, "train")
        if len(work) and name not in without_labels:
            break
    else:
        return

    site = federation.site(name, 0)
    # enough for BatchNorm, few enough for the largest volumes
    few = Shard.of(work.prepared, work.indices.tolist()[: _ITEMS[bundle.task == "classification"]])
    # a pool of its own: the method adapts the run's networks, and its parts may hide the fault
    networks = Networks(bundle.network, run.seed, torch.device(run.device))
    site = replace(site, train=few, networks=networks, settings=replace(site.settings, epochs=1))
    values = ", ".join(f"{key}={value}" for key, value in overrides.items())

    try:
        with stream(0, "trial step"), networks.scope():
            model = networks.lease(networks.initial)
            outputs = []

            def note_outputs(module: object, arguments: object, output: object) -> None:
                outputs.append(_channels(output))

            with model.register_forward_hook(note_outputs):
                fit(model, site)
    except MedflError:
        return  # a loss that is not finite is not a mismatch: the run reports it
    except Exception as error:  # a network or a loss may raise anything
        raise InputError(
            f"--config {values}: a step of training fails with {as_text(root_cause(error))}",
            "network, loss and images of the bundle go together",
            "change these values, or leave them out",
        ) from error

    is_shipped_segmentation = bundle.dataset and bundle.task == "segmentation"
    classes = bundle.structures if is_shipped_segmentation else bundle.classes
    # two classes may share one binary output
    allowed = {len(classes), 1} if len(classes) == 2 else {len(classes)}
    wrong = not_among(outputs, allowed)
    if classes and wrong:
        raise InputError(
            f"--config {values}: the network has {wrong[0]} outputs",
            f"bundle {bundle.name!r} has {len(classes)} classes: {', '.join(classes)}",
            "leave the number of classes as it is",
        )


def _channels(output: object) -> int:
    if isinstance(output, torch.Tensor) and output.ndim > 1:
        return int(output.shape[1])

    return 0
