"""The packages, bundles/ among them: it is installed as medfl/shipped; all else is in setup.cfg."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

repository = os.environ.get("GITHUB_REPOSITORY", "")
"""Set where the project's workflows build: the addresses in the package are then those of that repository."""
readme = Path("README.md").read_text(encoding="utf-8")
if repository:
    home = f"https://github.com/{repository}"
    readme = re.sub(
        r"(!\[[^\]]*\])\((?!http)([^)]+)\)", rf"\1(https://raw.githubusercontent.com/{repository}/main/\2)", readme
    )
    readme = re.sub(r"\]\((?!http)([^)]+)\)", rf"]({home}/blob/main/\1)", readme)
else:  # pictures and pages of a checkout are nowhere else
    readme = re.sub(r"!\[[^\]]*\]\((?!http)[^)]+\)", "", readme)
    readme = re.sub(r"\[([^\]]*)\]\((?!http)[^)]+\)", r"\1", readme)
pages = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}

setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls={name: home + page for name, page in pages.items()} if repository else {},
    packages=[*find_packages(include=["medfl", "medfl.*"]), "medfl.shipped"],
    package_dir={"medfl.shipped": "bundles"},
)
