"""Packages of the distribution; all else is in pyproject.toml.

`cpp/` stands at the top of the repository, and is installed as `zero_strategy/cpp`, from which the ops are built.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["zero_strategy*"]), "zero_strategy.cpp"],
    package_dir={"zero_strategy.cpp": "cpp"},
    package_data={
        "zero_strategy": ["py.typed", "cli/page/*"],
        "zero_strategy.cpp": ["*.h", "cpu/*", "cuda/*", "io/*"],
    },
)
