"""Which files setup.py and setup.cfg put into the package, as setuptools says; nothing is built."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from setuptools import Distribution

from tests.support.programs import ROOT


def packaged_files(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Return the paths, in the place where packages are installed, of all files that are not Python's."""
    options: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", options.update)
    runpy.run_path("setup.py")
    distribution = Distribution(options)
    distribution.parse_config_files()
    build: Any = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    return {Path(*package.split("."), name) for package, _, _, names in build.data_files for name in names}
