"""The distribution: a wheel and an sdist with the same content, from which the native ops are built where installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAKE = "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"
USE = """
import sys
import torch, zero_strategy
from zero_strategy import ops
assert zero_strategy.__file__.startswith(sys.argv[1]), zero_strategy.__file__
ops.ensure("cpu")
x, bias = torch.randn(3, 5), torch.randn(5)
torch.testing.assert_close(ops.bias_gelu(x, bias), torch.nn.functional.gelu(x + bias))
assert dict(ops.ops_report("cpu"))["bias_gelu"] == "native", ops.ops_report("cpu")
"""


def run(arguments: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        arguments, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this tree, and the wheel that is built of the sdist alone."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("not a checkout")
    folder = tmp_path_factory.mktemp("distribution")
    tree = folder / "tree"
    kept = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "outputs", "multirun", "docs")
    shutil.copytree(ROOT, tree, ignore=kept)
    run([sys.executable, "-c", MAKE, "sdist", str(folder)], tree)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run([sys.executable, "-c", MAKE, "wheel", str(folder)], unpacked)
    return folder


def test_the_wheel_holds_modules_sources_of_ops_and_the_report_page(made: Path) -> None:
    (wheel,) = made.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in ((ROOT / "zero_strategy", "zero_strategy"), (ROOT / "cpp", "zero_strategy/cpp")):
        wanted = {
            f"{inside}/{path.relative_to(folder)}"
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        assert wanted <= names, sorted(wanted - names)
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/", "cpp/"))]


def test_ops_are_built_from_an_installed_wheel(made: Path, tmp_path: Path) -> None:
    (wheel,) = made.glob("*.whl")
    place = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(place)]
    run([*install, str(wheel)], tmp_path)
    cache = tmp_path / "cache"
    run([sys.executable, "-c", USE, str(place)], tmp_path, PYTHONPATH=str(place), ZERO_STRATEGY_CACHE=str(cache))
    assert list(cache.rglob("*.so"))
