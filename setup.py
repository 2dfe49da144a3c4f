"""Install the files of all folders in bundles/ below share/medfl; all else is in setup.cfg."""

from collections import defaultdict
from pathlib import Path

from setuptools import setup

INSTALLED = ("LICENSE", "configs/*", "docs/*", "embeddings/*")
"""Of each bundle; models and predictions that a run left there stay where they are."""

folders = defaultdict[str, list[str]](list)
for pattern in INSTALLED:
    for path in sorted(Path("bundles").glob(f"**/{pattern}")):
        folders[f"share/medfl/{path.parent.as_posix()}"].append(path.as_posix())

setup(data_files=list(folders.items()))
