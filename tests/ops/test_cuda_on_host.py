"""The CUDA kernels' arithmetic, indices and tables, run on the host: what can be known of them without a device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.cuda_on_host import build_on_host, cuda_headers
from zero_strategy.ops import cache
from zero_strategy.ops.build import recipe

ROOT = Path(__file__).resolve().parents[2]

# Tables hold some 40 segments, 90 moves and 1000 statistics: these are more, of sizes that end anywhere.
MANY = """
import torch
from tests.ops.native import need_native, same_bits, spread
from tests.ops.test_optimizer_ops import CASES, run
from zero_strategy.ops import multi_tensor as mt
need_native()
generator = torch.Generator().manual_seed(0)
sizes = [(37 * i) % 211 for i in range(120)] + [8192, 8193, 16390, 0]
def parts(dtype, shift):  # neighbours in one buffer: every alignment there is
    whole = spread(generator, sum(sizes) + shift, dtype)
    return list(whole[shift:].split(sizes))
case = CASES["adamw"]
states = [parts(torch.bfloat16, 5), [v.abs() for v in parts(torch.float32, 2)]]
lists = [parts(torch.float32, 3), parts(torch.bfloat16, 3), *states]
copies = parts(torch.float16, 1)
ours, theirs = (run(call, case, lists, copies) for call in (case.native, case.reference))
assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
flats = []
for flatten, scale in ((mt._flatten, mt._scale), (mt._flatten_reference, mt._scale_reference)):
    flat, out = torch.ones(sum(sizes) + 1).bfloat16(), [torch.empty(n).half() for n in sizes]
    offsets = [1 + sum(sizes[:i]) for i in range(len(sizes))]
    flatten(lists[0], flat, offsets, 0.3, True)
    flats.append([flat, scale(lists[0], out, 3e4), *out])
assert all(same_bits(a, b) for a, b in zip(*flats, strict=True))
short = list(spread(generator, 3000, torch.float32).split(2)) + [torch.ones(100_000)]
short[7][0] = float("nan")
for order in (2.0, float("inf")):
    (sums, counts), (expected, expected_counts) = mt._grad_stats(short, order), mt._grad_stats_reference(short, order)
    torch.testing.assert_close(sums, expected, rtol=1e-13, atol=0, equal_nan=True)
    assert torch.equal(counts, expected_counts)
shifted = torch.empty(100_003)[3:].copy_(spread(generator, 100_000, torch.float32))
assert torch.equal(mt._grad_stats([shifted], 2.0)[0], mt._grad_stats([shifted.clone()], 2.0)[0])  # wherever it lies
print("all equal")
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of processes in which the CPU's library is the CUDA one."""
    made, headers = recipe("cpu"), cuda_headers()
    if made.compiler is None or made.compiler_key is None or headers is None:
        pytest.skip("no CUDA toolkit, or no C++ compiler")
    folder = tmp_path_factory.mktemp("cuda_on_host")
    place = folder / "cache" / made.source_key / f"{made.compiler_key}.so"
    place.parent.mkdir(parents=True)
    shutil.copy(build_on_host(folder, made.compiler, headers), place)
    chosen = {cache.CACHE_VARIABLE: str(folder / "cache"), "ZERO_STRATEGY_NATIVE": "cached", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **chosen, "OMP_NUM_THREADS": "1"}


def test_more_tensors_than_a_table_holds(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", MANY], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "all equal\n", done.stdout + done.stderr


def test_the_tests_of_the_cpu_kernels_pass(environment: dict[str, str]) -> None:
    files = [str(ROOT / "tests" / "ops" / name) for name in ("test_optimizer_ops.py", "test_multi_tensor_ops.py")]
    wanted = "same_bits or lamb or grad_stats or nonfinite or scaled or results_may or every_number or flat_buffers"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files, "-k", wanted]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    summary = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0 and "skipped" not in summary, done.stdout
