"""The packages, bundles/ among them: it is installed as medfl/shipped; all else is in setup.cfg."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["medfl", "medfl.*"]), "medfl.shipped"],
    package_dir={"medfl.shipped": "bundles"},
)
