"""The distribution: an sdist, a pure wheel whose ops are built where installed, and a binary one without compilers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.warm import run_warm_script
from zero_strategy.ops.build import LIBRARIES, build, carried_path, carried_recipe, recipe
from zero_strategy.ops.fatbin import code_of

pytestmark = pytest.mark.timeout(1800)  # once for a machine and a state of the sources, CUDA kernels are compiled
ROOT = Path(__file__).parent.parent
MAKE = "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"
HURRIED = """#!/bin/sh
exec "$COMPILER" "$@" -O1
"""
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
TRAIN = """
import sys
import torch, torch.distributed as dist, zero_strategy
from torch import nn
from zero_strategy import ZeroEngine, ops
from zero_strategy.config import load_config
from zero_strategy.offload.file_queues import load_library
assert zero_strategy.__file__.startswith(sys.argv[1]), zero_strategy.__file__
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
engine = ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine.attach(optimizer)
x, losses = torch.randn(16, 8), []
for _ in range(5):
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
assert sys.argv[1] in str(ops.ensure("cpu").path), ops.ensure("cpu")
load_library()
dist.destroy_process_group()
"""


def run(arguments: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        arguments, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled() -> None:
    """Put all that a binary wheel carries into the cache: the CUDA kernels for six architectures take minutes."""
    for name in LIBRARIES:
        recipe = carried_recipe(name)
        if recipe.compiler is not None:
            build(recipe)


@pytest.fixture(scope="module")
def made(compiled: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    run([sys.executable, "-c", MAKE, "wheel", str(folder)], unpacked, ZERO_STRATEGY_WHEEL="binary")
    return folder


def test_making_a_wheel_takes_the_environment_of_releases_alone(tmp_path: Path) -> None:
    if not (ROOT / "Makefile").is_file() or shutil.which("make") is None:
        pytest.skip("not a checkout, or no make")
    said = run(["make", "--dry-run", "wheel", f"VENV={tmp_path / 'all'}", f"RELEASE_VENV={tmp_path / 'few'}"], ROOT)
    assert "auditwheel repair" in said and str(tmp_path / "few" / "bin") in said
    assert str(tmp_path / "all") not in said and "-e " not in said, "no environment for development is made"


def test_the_wheel_holds_modules_sources_of_ops_and_the_report_page(made: Path) -> None:
    (wheel,) = made.glob("*-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in ((ROOT / "zero_strategy", "zero_strategy"), (ROOT / "cpp", "zero_strategy/cpp")):
        wanted = {
            f"{inside}/{path.relative_to(folder)}"
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        assert wanted <= names, sorted(wanted - names)
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/", "cpp/"))]


def installed(wheel: Path, place: Path) -> Path:
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(place)]
    run([*install, str(wheel)], place.parent)
    return place


@pytest.fixture(scope="module")
def binary(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Place where the binary wheel is installed, for tests that only look and run."""
    (wheel,) = made.glob("*-linux_*.whl")
    return installed(wheel, tmp_path_factory.mktemp("binary") / "installed")


def test_ops_are_built_from_an_installed_wheel(made: Path, tmp_path: Path) -> None:
    """By a compiler in a hurry: whether all is there that it needs is the question, and GCC 12 fails at -O0."""
    (wheel,) = made.glob("*-any.whl")
    place = installed(wheel, tmp_path / "installed")
    cache, compiler = tmp_path / "cache", recipe("cpu").compiler
    assert compiler is not None
    hurried = tmp_path / "c++"
    hurried.write_text(HURRIED.replace("$COMPILER", compiler))
    hurried.chmod(0o755)
    variables = {"PYTHONPATH": str(place), "ZERO_STRATEGY_CACHE": str(cache), "CXX": str(hurried)}
    run([sys.executable, "-c", USE, str(place)], tmp_path, **variables)
    assert list(cache.rglob("*.so"))


def test_a_binary_wheel_carries_cuda_kernels_for_every_architecture(made: Path, binary: Path) -> None:
    (wheel,) = made.glob("*-linux_*.whl")
    assert wheel.stat().st_size <= 25_000_000
    carried = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/cuda.so")]
    if carried_recipe("cuda").compiler is None:
        assert not carried
        pytest.skip("no nvcc here")
    place = binary / "zero_strategy"
    library = carried_path(carried_recipe("cuda"), place)
    assert carried == [str(library.relative_to(place.parent))]
    code = code_of(library)
    assert code.architectures == ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_100")
    assert f"release {code.runtime // 1000}.{code.runtime % 1000 // 10}" in carried_recipe("cuda").identity
    needed = run(["readelf", "-d", str(library)], binary)
    assert not re.search(r"NEEDED.*(cuda|cudart|python)", needed), needed


def test_a_binary_wheel_trains_without_a_compiler(made: Path, binary: Path, tmp_path: Path) -> None:
    (wheel,) = made.glob("*-linux_*.whl")
    assert "-py3-none-" in wheel.name  # of any Python: nothing of it is used
    place, script = binary, tmp_path / "train.py"
    script.write_text(TRAIN)
    (tmp_path / "empty").mkdir()
    # The launcher has its libraries loaded; the ranks that it starts have nothing.
    two_ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(place)]
    cache = tmp_path / "cache"
    bare = {"PATH": str(tmp_path / "empty"), "CXX": "none", "ZERO_STRATEGY_CACHE": str(cache)}
    done = run_warm_script(*two_ranks, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(place), **bare}, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(cache.rglob("*.so")), "something was built"
