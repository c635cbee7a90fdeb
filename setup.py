"""Packages of the distribution, and binary wheels; all else is in pyproject.toml.

`cpp/` stands at the top of the repository, and is installed as `zero_strategy/cpp`, from which the ops are built. It is
copied there, not declared as a package of another directory: an editable install is then a line in a `.pth` file, which
editors and type checkers follow, where they do not follow the import hook that setuptools would make.
With ZERO_STRATEGY_WHEEL=binary a wheel carries the CPU ops, the CUDA ops and the file I/O built, for one platform and
for every Python and torch: they use torch's stable ABI and nothing of Python's. That needs torch, a compiler and nvcc
where the wheel is made (`make wheel`); without nvcc the CUDA ops are left out. A wheel without it all is pure Python,
and what is needed is built at its first use.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

BINARY = os.environ.get("ZERO_STRATEGY_WHEEL") == "binary"
ROOT = Path(__file__).resolve().parent


class Package(Distribution):
    """A distribution of one platform, where its wheel is binary."""

    def has_ext_modules(self) -> bool:
        return BINARY


class BuildPackage(build_py):
    """Copies the package, and builds the libraries that a binary wheel carries."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shutil.copytree(ROOT / "cpp", Path(self.build_lib) / "zero_strategy" / "cpp", dirs_exist_ok=True)
        if BINARY:
            sys.path.insert(0, str(ROOT))
            from zero_strategy.ops.build import LIBRARIES, build, carried_path, carried_recipe

            for name in LIBRARIES:
                made = carried_recipe(name)
                if name == "cuda" and made.compiler is None:
                    print("no nvcc: the wheel carries no CUDA kernels", file=sys.stderr)
                    continue
                target = carried_path(made, Path(self.build_lib) / "zero_strategy")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(build(made), target)


class BuildWheel(bdist_wheel):
    """Tags a binary wheel with its platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if BINARY else tag


setup(
    packages=find_packages(include=["zero_strategy*"]),
    package_dir={"": "."},
    package_data={"zero_strategy": ["py.typed", "cli/page/*"]},
    distclass=Package,
    cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel},
)
