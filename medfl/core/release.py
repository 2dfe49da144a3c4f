"""The name of this release, and its version.

The distribution is not called like the package: `medfl` on the Python Package Index is MEDfl, another project.
"""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "medfl-monai"
VERSION = "0.7.0"
"""Also read by pyproject.toml. Part of every run's hash."""


def pip_install(*extras: str) -> str:
    """Return the command that installs medfl with these extras."""
    choice = f"[{','.join(extras)}]" if extras else ""
    return f"pip install '{DISTRIBUTION}{choice}'"


def version_of(package: str) -> str:
    """Return the version of an installed distribution; for `medfl` ours, even if MEDfl is installed too.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    if package in ("medfl", DISTRIBUTION):
        return VERSION

    return metadata.version(package)


def versions_of(*packages: str) -> dict[str, str]:
    """Return the `version_of` each package, by name."""
    return {package: version_of(package) for package in packages}
