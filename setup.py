"""The packages of the distribution for setuptools: the top-level folders, installed as `baton.actors`, `baton.api`, ….

Everything else about the distribution is in pyproject.toml, which cannot add the prefix `baton.` to found packages.
"""

from setuptools import find_packages, setup

FOLDERS = ("actors", "api", "kernels", "models")

setup(
    packages=[f"baton.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])],
    package_dir={f"baton.{folder}": folder for folder in FOLDERS},
)
