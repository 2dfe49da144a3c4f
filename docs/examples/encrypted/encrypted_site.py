"""A site whose updates leave encrypted: medfl's own site behind FLARE's filters for homomorphic encryption.

FLARE's filters stand between this executor and the wire: `HEModelDecryptor` on what comes, `HEModelEncryptor` on what
leaves. They are in the site's own rules and not in the job, so that no job can leave them out. Numbers are plain here
only. All of a reply are one vector: FLARE encrypts tensor by tensor, each at least one ciphertext with a part of the
keys beside it, and a network has many small tensors; so the server is not told their forms either.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.fl.utils.constants import ExtraItems, FlStatistics
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from torch import Tensor

from medfl.core.errors import RunError
from medfl.core.run import Run
from medfl.flare.files import participants, read_run
from medfl.flare.site_config import CONFIG_FILE, SiteConfig, accepted_run, open_site
from medfl.flare.wire import wire_names
from medfl.runs.plan import repeat
from medfl.runtimes.federation import Federation
from medfl.runtimes.monai_fl.client import ROUND, MedflClientAlgo, exchange_object
from medfl.storage.files import save_weights

RULES: Mapping[str, Any] = {
    "scopes": [
        {
            "name": "encrypted",
            "task_data_filters": [{"path": "nvflare.app_opt.he.model_decryptor.HEModelDecryptor"}],
            "task_result_filters": [
                {
                    "path": "nvflare.app_opt.he.model_encryptor.HEModelEncryptor",
                    "args": {"encrypt_layers": ".*"},
                }
            ],
        }
    ],
    "default_scope": "encrypted",
}
"""`local/privacy.json` of a site's kit: whatever a job says, weights leave encrypted."""
TRAIN, VALIDATE = AppConstants.TASK_TRAIN, AppConstants.TASK_VALIDATION
VECTOR = "weights"
"""Name of the one vector."""
SITES, MEAN = "sites", "{}.mean.safetensors"
"""In the run folder of one machine: the sites' own, and in it the last mean, decrypted at the site of this name."""
MOST = 2.0**18
"""Largest number that FLARE's default keys carry (60, 40, 40 bits, scale 2^40): beyond it the mean comes out wrong."""


def packed(weights: Mapping[str, Tensor]) -> np.ndarray:
    """Return all floating-point numbers as one vector (N,), in the order of their names.

    Integers, as BatchNorm's counters, stay at the site.

    Raises:
        RunError: a number is too large for the keys, or not finite.
    """
    parts = [
        tensor.double().reshape(-1)
        for _, tensor in sorted(weights.items())
        if tensor.is_floating_point()
    ]
    vector = torch.cat(parts).numpy()
    largest = float(np.abs(vector).max(initial=0.0))
    if not largest <= MOST:
        raise RunError(f"the largest weight is {largest:g}; encrypted ones go up to {MOST:g}")
    return vector


def unpacked(vector: Any, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `packed` was given, with the integers of `like`.

    Args:
        vector: N numbers.
        like: tensors with the names, forms and types.

    Raises:
        RunError: there are not N of them.
    """
    values = torch.as_tensor(np.asarray(vector, dtype=np.float64))
    floats = {name: tensor for name, tensor in sorted(like.items()) if tensor.is_floating_point()}
    sizes = [tensor.numel() for tensor in floats.values()]
    if values.shape != (sum(sizes),):
        raise RunError(f"a mean of {tuple(values.shape)} numbers arrived; expected ({sum(sizes)},)")
    pieces = zip(floats.items(), torch.split(values, sizes), strict=True)
    return {
        **like,
        **{name: piece.reshape(tensor.shape).to(tensor.dtype) for (name, tensor), piece in pieces},
    }


class _EncryptedSite(Executor):  # type: ignore[misc]
    """A site that averages with others through FLARE's aggregator."""

    def __init__(self) -> None:
        """Begin with nothing prepared."""
        super().__init__()
        self._algo: MedflClientAlgo | None = None
        self._held: Mapping[str, Tensor] = {}
        self._folder = Path()

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Train on the mean, or take it as the last one; the first broadcast has none, and all begin with the run's."""
        if task_name not in (TRAIN, VALIDATE):
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            algo = self._algo or self._prepared(fl_ctx)
            data = from_shareable(shareable).data
            weights = unpacked(data[VECTOR], self._held) if data else dict(self._held)
            if task_name == VALIDATE:
                return self._finished(algo, weights).to_shareable()
            round_ = (
                int(shareable.get_header(AppConstants.CURRENT_ROUND)) + 1
            )  # FLARE counts from 0
            return self._trained(algo, weights, round_).to_shareable()
        except Exception as error:  # the server is told that it failed, the site's log why
            self.log_exception(fl_ctx, f"{type(error).__name__}: {error}")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)

    def _prepared(self, fl_ctx: FLContext) -> MedflClientAlgo:
        workspace = fl_ctx.get_engine().get_workspace()
        run = read_run(workspace.get_app_dir(fl_ctx.get_job_id()))
        algo, self._folder = self._opened(run, str(fl_ctx.get_identity_name()), workspace)
        torch.set_num_threads(run.threads)
        algo.initialize({ExtraItems.CLIENT_NAME: algo.name})
        self._held = algo.get_weights().weights or {}
        self._algo = algo
        return algo

    def _trained(self, algo: MedflClientAlgo, weights: dict[str, Tensor], round_: int) -> DXO:
        algo.train(exchange_object(weights, {ROUND: round_}))
        told = algo.get_weights()
        self._held = told.weights or {}
        samples = told.statistics[FlStatistics.DATA_COUNT]
        # FLARE weighs a reply by this number, whatever it counts, and multiplies by it before it encrypts.
        return DXO(
            DataKind.WEIGHTS,
            {VECTOR: packed(self._held)},
            {MetaKey.NUM_STEPS_CURRENT_ROUND: samples},
        )

    def _finished(self, algo: MedflClientAlgo, weights: dict[str, Tensor]) -> DXO:
        self._folder.mkdir(parents=True, exist_ok=True)
        save_weights(self._folder / MEAN.format(algo.name), weights)
        return DXO(DataKind.METRICS, algo.evaluate(exchange_object(weights, {})).metrics)

    @abstractmethod
    def _opened(self, run: Run, called: str, workspace: Any) -> tuple[MedflClientAlgo, Path]:
        """Return the site that FLARE calls so, and the folder for the last mean."""


class EncryptedSite(_EncryptedSite):
    """A site of a run on one machine, whose processes all see the data.

    Args:
        folder: the run folder.
        start: folder that relative paths of the run are meant from.
    """

    def __init__(self, folder: str, start: str) -> None:
        """Keep the arguments under their names: FLARE writes them into the job from there."""
        super().__init__()
        self.folder, self.start = folder, start

    def _opened(self, run: Run, called: str, workspace: Any) -> tuple[MedflClientAlgo, Path]:
        os.chdir(self.start)
        name = {there: name for name, there in wire_names(participants(run)).items()}[called]
        made, folder = repeat(run), Path(self.folder) / SITES
        federation = Federation(made.bundle, made.method, made.run)
        return MedflClientAlgo(federation, name, folder=folder, host="averaging"), folder


class RemoteEncryptedSite(_EncryptedSite):
    """A site with images of its own; all but the run's numbers and names is in `local/medfl.yaml` of its kit."""

    def _opened(self, run: Run, called: str, workspace: Any) -> tuple[MedflClientAlgo, Path]:
        own = SiteConfig.read(Path(workspace.get_site_config_dir()) / CONFIG_FILE)
        policy = own.checked_policy()
        accepted_run(run, called, own)
        algo = MedflClientAlgo(
            lambda: open_site(run, called, own), called, folder=own.folder, host="averaging",
            outbound=policy.outbound, audit=own.audit or None,
        )  # fmt: skip
        return algo, Path(own.folder)
