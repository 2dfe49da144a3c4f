"""What setup.py and pyproject.toml say of the package, as setuptools reads them; nothing is built."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from setuptools import Distribution

from tests.support.programs import ROOT


def distribution(monkeypatch: pytest.MonkeyPatch) -> Distribution:
    """Return the distribution that a build in the checkout would make."""
    options: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", options.update)
    runpy.run_path("setup.py")
    described = Distribution(options)
    described.parse_config_files()
    return described


def packaged_files(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Return the paths, in the place where packages are installed, of all files that are not Python's."""
    build: Any = distribution(monkeypatch).get_command_obj("build_py")
    build.ensure_finalized()
    return {
        Path(*package.split("."), name)
        for package, _, _, names in build.data_files
        for name in names
    }
