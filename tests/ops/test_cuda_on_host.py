"""The CUDA kernels' arithmetic, indices and tables, run on the host: what can be known of them without a device."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.ops.cuda_on_host import build_on_host, cuda_headers
from tests.ops.native import need_native
from tests.warm import run_warm, run_warm_script
from zero_strategy.ops import build as cache
from zero_strategy.ops.build import recipe

ROOT = Path(__file__).resolve().parents[2]

MANY = """
from tests.ops import layer_checks, many_tensors
from tests.ops.native import need_native
from tests.warm import run_warm, run_warm_script
need_native()
for name in ("check_optimizer", "check_moves", "check_statistics", "check_quantized"):
    getattr(many_tensors, name)("cpu")
layer_checks.check_long_rows("cpu")
print("all equal")
"""
BITS = """
import hashlib, torch
from tests.ops.native import FLOATS, need_native, spread
from zero_strategy.ops import fused_layers as g
need_native()
generator, digest = torch.Generator().manual_seed(0), hashlib.sha256()
for dtype in FLOATS:
    x, gradient = (spread(generator, 40_000, dtype).view(8, 5000) for _ in range(2))
    bias = spread(generator, 5000, dtype)
    for tanh in (False, True):
        for result in (g._gelu_forward(x, bias, tanh), g._gelu_backward(gradient, x, bias, tanh)[0]):
            digest.update(result.view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""
OPTIMIZERS = (
    "not processor and not beyond and not opcheck and "
    "(same_bits or lamb or grad_stats or nonfinite or scaled or results_may or every_number or flat_buffers)"
)
LAYERS = ("normalization", "bias", "softmax", "quantization")
EXACT = "not compile and not opcheck"
CODED = "reference_give_the_same_bits or pieces"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of processes in which the CPU's library is the CUDA one."""
    made, headers = recipe("cpu"), cuda_headers()
    if made.compiler is None or made.compiler_key is None or headers is None:
        pytest.skip("no CUDA toolkit, or no C++ compiler")
    folder = tmp_path_factory.mktemp("cuda_on_host")
    place = folder / "cache" / made.source_key / f"{made.compiler_key}.so"
    place.parent.mkdir(parents=True)
    shutil.copy(build_on_host(folder, headers), place)
    chosen = {cache.CACHE_VARIABLE: str(folder / "cache"), "ZERO_STRATEGY_NATIVE": "cached", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **chosen, "OMP_NUM_THREADS": "1"}


def test_more_tensors_than_a_table_holds_and_rows_than_a_block_keeps(environment: dict[str, str]) -> None:
    done = run_warm(MANY, cwd=ROOT, env=environment)
    assert done.returncode == 0 and done.stdout == "all equal\n", done.stdout + done.stderr


def test_gelu_has_the_bits_of_the_cpu_kernels(environment: dict[str, str]) -> None:
    """Its reference is another formula, so that only the other kernels tell whether a bit is wrong."""
    need_native()
    found = set()
    for variables in (environment, {**os.environ, "PYTHONPATH": str(ROOT)}):
        done = run_warm(BITS, cwd=ROOT, env=variables)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_the_tests_of_the_cpu_kernels_pass(environment: dict[str, str]) -> None:
    names = {
        **dict.fromkeys(("optimizer", "multi_tensor"), OPTIMIZERS),
        **dict.fromkeys(LAYERS, EXACT),
        "coded_optimizer": CODED,
    }
    wanted = " or ".join(f"(test_{name}_ops and {which})" for name, which in names.items())
    files = [str(ROOT / "tests" / "ops" / f"test_{name}_ops.py") for name in names]
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-k", wanted]
    done = run_warm_script("-m", "pytest", *options, *files, cwd=ROOT, env=environment, timeout=240)
    summary = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0 and "skipped" not in summary, done.stdout
    assert all(f"test_{name}_ops.py" in done.stdout for name in names), done.stdout
