"""Portable runs are begun before anything that computes is imported, or refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from medfl.core import portable
from medfl.core.errors import InputError
from medfl.core.settings import check_limits
from medfl.training.accelerate.arithmetic import portable_arithmetic
from tests.support.programs import ROOT

BEGUN = "from medfl.core import portable; portable.enable(); import os; print(portable.active())"


def test_begins_before_pytorch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGUN], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout == "True\n", done.stderr


def test_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is imported here; variables that are set now come too late."""
    for name, value in portable.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="ATEN_CPU_CAPABILITY='avx2'.*before Python is started"):
        portable.enable()


def test_a_processor_without_avx2_is_refused(tmp_path: Path) -> None:
    (tmp_path / "arm").write_text("Features\t: fp asimd\n")
    (tmp_path / "old").write_text("flags\t\t: fpu sse2 avx\n")
    for name in ("arm", "old", "none"):
        with pytest.raises(InputError, match="AVX2 and FMA"):
            portable._require_processor(tmp_path / name)


@pytest.mark.parametrize(
    "other", [{"device": "auto"}, {"threads": 2}, {"amp": True}, {"compile": True}]
)
def test_what_depends_on_the_machine_is_refused_beside_it(other: dict[str, object]) -> None:
    check_limits({"portable": True, "device": "cpu", "threads": 1, "amp": False, "compile": None})
    with pytest.raises(InputError, match="--portable with --"):
        check_limits({"portable": True, **other})


def test_arithmetic_is_exact_inside_only() -> None:
    x = torch.rand(4000, generator=torch.Generator().manual_seed(1)) + 0.1
    before, right = torch.sqrt(x), np.sqrt(x.numpy())
    with portable_arithmetic(True):
        assert not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled()
        for root in (torch.sqrt(x), x.clone().sqrt_(), torch._foreach_sqrt([x])[0]):
            assert np.array_equal(root.numpy(), right)
        y = x.clone().requires_grad_()
        torch.sqrt(y).sum().backward()
        assert np.array_equal(y.grad.numpy(), np.float32(1) / (np.float32(2) * right))
        assert torch.sqrt(torch.tensor(4)).dtype == torch.float32
        assert torch.sqrt(torch.rand(2, 3, 4, 5).bfloat16()).dtype == torch.bfloat16
        with portable_arithmetic(True):
            pass
        assert np.array_equal(torch.sqrt(x).numpy(), right)
    assert torch.equal(torch.sqrt(x), before)
    assert torch._C._get_mkldnn_enabled()
