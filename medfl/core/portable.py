"""Portable runs: kernels that every x86 processor since about 2015 supports, so that all compute the same bits.

Libraries choose their kernels at import by the processor and by these variables. The remaining choices are made in
`medfl.training.accelerate.arithmetic`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from medfl.core.documents import Config
from medfl.core.errors import InputError

ENVIRONMENT: Mapping[str, str] = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",  # MKL uses different kernels on AMD and Intel under AVX2
    # All names used by some version of NumPy: it ignores unknown ones.
    "NPY_DISABLE_CPU_FEATURES": (
        "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
    ),
    "OPENBLAS_CORETYPE": "Haswell",
}
"""Variables of a portable process; "AVX2" and "Haswell" are the level of processors of about 2015."""
_NEEDED = {"avx2", "fma"}
_begun = False


def active(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether environment variables, by default this process's, are those of a portable process."""
    variables = os.environ if environment is None else environment
    return all(variables.get(name) == value for name, value in ENVIRONMENT.items())


def enable() -> None:
    """Make this process portable, before NumPy or PyTorch is imported, or check that it was started as one.

    Raises:
        InputError: they are already imported, or the processor lacks what portable kernels need.
    """
    global _begun
    _require_processor()
    if _begun or active(_at_the_start()):
        return

    if {"torch", "numpy"} & sys.modules.keys():
        settings = " ".join(f"{name}='{value}'" for name, value in ENVIRONMENT.items())
        raise InputError(
            "portable numbers in a process that was started without the variables for them",
            f"they are read when NumPy and PyTorch are imported: {settings}",
            "set them before Python is started, or use medfl run --portable",
        )

    os.environ.update(ENVIRONMENT)
    _begun = True


def check(values: Config) -> None:
    """Raise an InputError if a portable run has a setting whose results depend on the machine; None is ignored."""
    if not values.get("portable"):
        return
    excluded = {
        f"--device {values.get('device')}": values.get("device") not in (None, "cpu"),
        f"--threads {values.get('threads')}": values.get("threads") not in (None, 1),
        "--amp": values.get("amp"),
        "--compile": values.get("compile"),
    }

    for flag, is_given in excluded.items():
        if is_given:
            raise InputError(
                f"--portable with {flag}",
                "one thread on a CPU, in float32, not compiled",
                "leave one out",
            )


def enable_if_requested(run: Config) -> None:
    """Raise an InputError if a run, its settings by name, is portable and cannot be computed in this process."""
    check(run)
    if run.get("portable"):
        enable()


def _at_the_start() -> dict[str, str]:
    """Return the variables that this process was started with, regardless of later changes."""
    try:
        text = Path("/proc/self/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def _require_processor(file: Path = Path("/proc/cpuinfo")) -> None:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        lines = []

    # One line per core, all alike.
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    if missing := _NEEDED - flags:
        raise InputError(
            f"--portable on a processor without {' and '.join(sorted(missing)).upper()}",
            "Linux on a 64-bit x86 processor with AVX2 and FMA",
            "leave --portable out, or run it on such a machine",
        )
