"""What pyproject.toml cannot say: bundles/ is a package too, and links of the README depend on where it is built."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

repository = os.environ.get("GITHUB_REPOSITORY", "")
"""Set where the project's workflows build: links in the package then point to that repository."""
home = f"https://github.com/{repository}"
pages = {
    "Source": "",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}

PICTURE = r"!\[([^\]]*)\]\((?!http)([^)]+)\)"
LINK = r"\[([^\]]*)\]\((?!http)([^)]+)\)"
readme = Path("README.md").read_text(encoding="utf-8")
if repository:
    readme = re.sub(
        PICTURE, rf"![\1](https://raw.githubusercontent.com/{repository}/main/\2)", readme
    )
    readme = re.sub(LINK, rf"[\1]({home}/blob/main/\2)", readme)
else:  # a checkout's pictures and pages are nowhere else
    readme = re.sub(PICTURE, "", readme)
    readme = re.sub(LINK, r"\1", readme)

setup(
    packages=[*find_packages(include=["medfl", "medfl.*"]), "medfl.shipped"],
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls={name: home + page for name, page in pages.items()} if repository else {},
)
