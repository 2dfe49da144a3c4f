"""A site that misbehaves, for `tests.flare.test_faults`: FLARE makes it in the place of `MedflExecutor`."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt import tensor_downloader

from medfl.flare.parts import MedflExecutor

KEY = "message/weights/fc.bias"


class StandIn(MedflExecutor):
    """Does in some rounds at one site what a test says.

    Args:
        folder, start: of the run.
        site: where.
        does: round -> what.
    """

    def __init__(self, folder: str, start: str, site: str, does: Mapping[str, str]) -> None:
        super().__init__(folder, start)
        self.site, self.does = site, dict(does)

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        question = FLModelUtils.from_shareable(shareable)
        round_ = str(int(question.meta.get("round", 0)))
        what = self.does.get(round_, "") if task_name == "train" else ""
        if fl_ctx.get_identity_name() != self.site or not what:
            return super().execute(task_name, shareable, fl_ctx, abort_signal)
        (Path(self.folder) / "flare" / f"{self.site}-{round_}.json").write_text(json.dumps(what))
        if what == "disk full":
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (150_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            )
        if what == "silent":
            while not abort_signal.triggered:
                time.sleep(0.2)
        if what == "slow":
            time.sleep(8)
        answer = super().execute(task_name, shareable, fl_ctx, abort_signal)
        return self._spoilt(what, answer)

    def _spoilt(self, what: str, answer: Shareable) -> Shareable:
        model: Any = FLModelUtils.from_shareable(answer)
        params = model.params
        if what == "nan":
            params[KEY] = torch.full_like(params[KEY], float("nan"))
        elif what == "shape":
            params[KEY] = torch.ones(3)
        elif what == "extra":
            params["message/weights/backdoor"] = torch.ones(3)
        elif what == "pickle":
            params[KEY] = "cos\nsystem\n(S'true'\ntR."
        elif what in ("truncated", "claim"):
            tensor_downloader.save_tensors = _broken(
                what
            )  # for all that this process sends from now on
        return FLModelUtils.to_shareable(model)


def _broken(what: str) -> Any:
    def encoded(tensors: Mapping[str, torch.Tensor]) -> bytes:
        form = {"dtype": "F32", "shape": [2**29], "data_offsets": [0, 2**31]}
        header = json.dumps(dict.fromkeys(tensors, form)).encode()
        whole = len(header).to_bytes(8, "little") + header + bytes(64)
        return whole if what == "claim" else whole[:20]

    return encoded
