"""The headers that CPU and CUDA kernels share, compiled by themselves: errors against float64, and Philox's vectors."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from zero_strategy.ops.build import SOURCES, recipe
from zero_strategy.ops.fused_layers import philox

PROGRAM = """
#include <cstdint>
#include <cstring>
#include "functions.h"
#include "philox.h"
extern "C" void evaluate(int which, const float* x, float* y, long n) {
  for (long i = 0; i < n; ++i) {
    switch (which) {
      case 0: y[i] = exp_negative(x[i], 0); break;
      case 1: y[i] = normal_distribution(x[i]).below; break;
      case 2: y[i] = normal_distribution(x[i]).density; break;
      case 3: y[i] = x[i] * gelu_exact(x[i]).gate; break;
      case 4: y[i] = gelu_exact(x[i]).gate + gelu_exact(x[i]).slope; break;
      case 5: y[i] = x[i] * gelu_tanh(x[i]).gate; break;
      default: y[i] = gelu_tanh(x[i]).gate + gelu_tanh(x[i]).slope;
    }
  }
}
extern "C" void random_block(uint32_t* counter, uint64_t seed) {
  philox(counter[0], counter[1], counter[2], counter[3], seed);
}
"""
EXP, BELOW, DENSITY, GELU, GELU_SLOPE, TANH, TANH_SLOPE = range(7)
Floats = np.ndarray


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = recipe("cpu").compiler
    if compiler is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("functions")
    source, target = folder / "functions.cpp", folder / "functions.so"
    source.write_text(PROGRAM)
    flags = ["-O2", "-shared", "-fPIC", "-ffp-contract=off", f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(Path(target)))


def evaluate(library: ctypes.CDLL, which: int, x: Floats) -> Floats:
    y = np.empty_like(x)
    library.evaluate(which, x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(len(x)))
    return y.astype(np.float64)


def between(low: float, high: float) -> Floats:
    """Float32 numbers, as dense around 0 as the format is; `low` and `high` have one sign."""
    bits = [int(np.float32(abs(end)).view(np.int32)) for end in (low, high)]
    numbers = np.linspace(*bits, 300_000).astype(np.int32).view(np.float32)
    return numbers if high > 0 else -numbers


def in_ulps(found: Floats, exact: Floats) -> float:
    step = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return float((np.abs(found - exact) / step).max())


def below(x: Floats) -> Floats:
    found: Floats = torch.special.erfc(torch.from_numpy(x.astype(np.float64)) / -math.sqrt(2)).numpy() / 2
    return found


def density(x: Floats) -> Floats:
    return np.exp(-(x.astype(np.float64) ** 2) / 2) / math.sqrt(2 * math.pi)


def test_exp(library: ctypes.CDLL) -> None:
    x = between(-1e-9, -86.9)
    assert in_ulps(evaluate(library, EXP, x), np.exp(x.astype(np.float64))) < 1
    special = np.array([0, -87.1, -1e30, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(evaluate(library, EXP, special), [1, 0, 0, 0, np.nan])


@pytest.mark.parametrize(
    ("low", "high", "ulps"), [(1e-9, 13.0, 2), (-1e-9, -1.0, 4), (-1.0, -4.0, 6.5), (-4.0, -13.0, 6)]
)
def test_normal_distribution_and_gelu(library: ctypes.CDLL, low: float, high: float, ulps: float) -> None:
    x = between(low, high)
    wide = x.astype(np.float64)
    assert in_ulps(evaluate(library, BELOW, x), below(x)) < ulps
    assert in_ulps(evaluate(library, DENSITY, x), density(x)) < 3
    assert in_ulps(evaluate(library, GELU, x), wide * below(x)) < ulps + 0.5
    assert np.abs(evaluate(library, GELU_SLOPE, x) - below(x) - wide * density(x)).max() < 2e-7


@pytest.mark.parametrize(("low", "high", "relative"), [(1e-9, 50.0, 3e-7), (-1e-9, -1.0, 4e-7), (-1.0, -9.7, 2e-5)])
def test_gelu_by_tanh(library: ctypes.CDLL, low: float, high: float, relative: float) -> None:
    x = between(low, high)
    wide = torch.from_numpy(x.astype(np.float64))
    # float64 tanh rounds the tail off: x / (1 + exp(-2u)) is the same and does not
    gate = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    exact = (wide * gate).numpy()
    assert (np.abs(evaluate(library, TANH, x) - exact) / np.abs(exact)).max() < relative
    steep = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * wide**2)
    slope = gate + wide * gate * (1 - gate) * steep
    assert np.abs(evaluate(library, TANH_SLOPE, x) - slope.numpy()).max() < 3e-7


def test_gelu_far_out(library: ctypes.CDLL) -> None:
    x = np.array([np.inf, np.nan, 0, 1e30, 30, -30, -1e30], np.float32)
    for which in (GELU, TANH):
        np.testing.assert_array_equal(evaluate(library, which, x), [np.inf, np.nan, 0, x[3], 30, 0, 0])
    for which in (GELU_SLOPE, TANH_SLOPE):
        np.testing.assert_array_equal(evaluate(library, which, x), [1, np.nan, 0.5, 1, 1, 0, 0])


VECTORS = [  # Random123's kat_vectors: counter, key, result
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("vector", VECTORS)
def test_philox_gives_the_published_words(library: ctypes.CDLL, vector: tuple[str, str, str]) -> None:
    counter, key, expected = ([int(word, 16) for word in words.split()] for words in vector)
    seed = key[0] | key[1] << 32
    block = (ctypes.c_uint32 * 4)(*counter)
    library.random_block(block, ctypes.c_uint64(seed))
    assert list(block) == expected
    assert [int(word) for word in philox(*map(torch.tensor, counter), seed=seed)] == expected
