"""nvcc compiles the CUDA library wherever there is nvcc; a device is not needed to see what it links and registers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.cuda_on_host import BY_TORCH, OPS
from zero_strategy.ops.build import COMMON_ARCHITECTURES, Recipe, build, carried_recipe
from zero_strategy.ops.library import op_names

pytestmark = pytest.mark.timeout(1800)  # once for a machine and a state of the sources, CUDA kernels are compiled
TORCH_LIBRARIES = Path(torch.__file__).parent / "lib"
# What a torch without CUDA has not.
OF_CUDA = {"aoti_torch_get_current_cuda_stream", "torch_c10_cuda_check_msg", "torch_c10_cuda_free_error_msg"}
LOAD = """
import ctypes, sys, torch
from zero_strategy.ops import library
stand_in, path, *names = sys.argv[1:]
if stand_in:
    ctypes.CDLL(stand_in, ctypes.RTLD_GLOBAL)
torch.ops.load_library(path)
assert all(library.has_kernel(name, "CUDA") and not library.has_kernel(name, "CPU") for name in names)
"""


@pytest.fixture(scope="module")
def made() -> Recipe:
    # The one that a binary wheel carries: it is compiled once, without a warning, for these tests and for packaging's.
    found = carried_recipe("cuda")
    if found.compiler is None:
        pytest.skip("no nvcc here")
    return found


@pytest.fixture(scope="module")
def library(made: Recipe) -> Path:
    return build(made)


def symbols(kind: str, path: Path) -> set[str]:
    done = subprocess.run(["nm", "-D", kind, str(path)], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}


def test_it_needs_the_stable_abi_of_torch_and_shows_nothing_of_its_own(library: Path) -> None:
    wanted = {name for name in symbols("--undefined-only", library) if "torch" in name}
    assert wanted >= OF_CUDA
    assert all(name.startswith(("aoti_torch_", "torch_")) for name in wanted), wanted
    assert wanted - OF_CUDA <= symbols("--defined-only", TORCH_LIBRARIES / "libtorch_cpu.so")
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "[libtorch.so]" in needed  # through which the loader finds those symbols
    assert "libcudart" not in needed  # whose version would have to be torch's
    assert not [name for name in symbols("--defined-only", library) if "2zs" in name]


def test_it_registers_every_op(library: Path, tmp_path: Path) -> None:
    assert {*OPS, *BY_TORCH} == set(op_names()) and not {*OPS} & {*BY_TORCH}
    stand_in = ""
    if not (TORCH_LIBRARIES / "libtorch_cuda.so").exists():
        source, stand_in = tmp_path / "cuda.c", str(tmp_path / "cuda.so")
        source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in sorted(OF_CUDA)))
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", stand_in], check=True)
    done = subprocess.run([sys.executable, "-c", LOAD, stand_in, str(library), *OPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optimizers", {"div.rn.f32", "sqrt.rn.f32"}),
        ("coded_optimizers", {"div.rn.f32", "sqrt.rn.f32"}),
        ("normalization", {"div.rn.f32", "div.rn.f64", "sqrt.rn.f64"}),
        ("activation", {"rcp.rn.f32", "mul.rn.f32"}),
        ("softmax", {"rcp.rn.f64", "mul.rn.f32"}),
        ("quantization", {"div.rn.f32"}),
    ],
)
def test_arithmetic_is_ieee(made: Recipe, tmp_path: Path, name: str, expected: set[str]) -> None:
    """No contraction, no flush of small numbers to zero, no approximate division or root."""
    source = next(path for path in made.sources if path.name == f"{name}.cu")
    target = tmp_path / f"{name}.ptx"
    flags = [flag for flag in made.flags if not flag.startswith("-gencode")]
    flags += [f"-arch=sm_{COMMON_ARCHITECTURES[-2]}", "-ptx"]
    subprocess.run([str(made.compiler), *flags, str(source), "-o", str(target)], check=True)
    used = set(re.findall(r"\b(?:add|sub|mul|div|sqrt|fma|rsqrt|rcp|mad|ex2)\.[a-z.]*f(?:32|64)\b", target.read_text()))
    assert expected <= used
    # what rcp.rn gives is correctly rounded
    wrong = re.compile(r"fma|mad|rcp(?!\.rn\.)|rsqrt|ex2|.*ftz|.*approx")
    assert not [found for found in used if wrong.match(found)]
