"""How an exported file is compared with the network that it was made of."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from medfl.export.formats import Comparison, OnnxNetwork


def test_a_difference_that_is_no_number_is_not_lost_among_others() -> None:
    def spoilt(x: Tensor) -> Tensor:
        return x / 0 if x.shape[-1] == 2 else x + 0.25

    images = [torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 3, 3)]
    comparison = Comparison(images, lambda x, network: network(x), torch.sigmoid)
    agreement = comparison.agreement(nn.Identity(), spoilt, 1e-4, "spoilt")
    assert math.isnan(agreement.outputs)
    assert math.isnan(agreement.probabilities)
    assert agreement.images == 2
    near = comparison.agreement(nn.Identity(), lambda x: x + 0.25, 1e-4, "shifted")
    assert near.outputs == 0.25


def test_onnxruntime_is_imported_without_telemetry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since 1.32 it writes an identifier of the machine below ~/.cache/Microsoft and sends each use to its maker."""
    program = "import os\nassert os.environ['ORT_DISABLE_TELEMETRY'] == '1'\nraise ImportError('reached')\n"
    (tmp_path / "onnxruntime.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    with pytest.raises(ImportError, match="reached"):
        OnnxNetwork(tmp_path / "model.onnx")
