"""The layer ops give the same bits on every processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ops.native import need_native

DIGEST = """
import hashlib, itertools, torch
from tests.ops.native import FLOATS, need_native, spread
from zero_strategy import ops
from zero_strategy.ops import dropout, fused_activation, normalization, softmax
need_native()
digest = hashlib.sha256()
generator = torch.Generator().manual_seed(0)

def note(*tensors):
    for tensor in tensors:
        # which NaN it is may differ
        clean = tensor.nan_to_num(7.0, 8.0, 9.0) if tensor.is_floating_point() else tensor
        digest.update(clean.contiguous().view(torch.uint8).numpy().tobytes())

def made(rows, columns, dtype, wild=False):
    return spread(generator, rows * columns, dtype, wild=wild).view(rows, columns)

state = ops.random_state(1, 2)
for dtype, columns in itertools.product(FLOATS, (1, 37, 1024, 2051)):
    x, gradient = made(9, columns, dtype, True), made(9, columns, dtype)
    weight, bias = (made(1, columns, torch.float32).view(-1) for _ in range(2))
    for centered in (True, False):
        output, mean, rstd = normalization._forward(x, weight, bias, columns, 1e-5, centered, False)
        note(output, mean, rstd)
        for inverted in (True, False):
            saved = (output if inverted else x, mean, rstd)
            note(*normalization._backward(gradient, *saved, weight, bias, columns, centered, inverted))
    for tanh in (True, False):
        note(fused_activation._forward(x, bias, tanh), *fused_activation._backward(gradient, x, bias, tanh))
    note(dropout._forward(x, bias, gradient, state, 0.3), *dropout._backward(gradient, bias, state, 0.3, dtype))
    output, shares = softmax._forward(x, bias, state, True, 0.3)
    note(output, shares, softmax._backward(gradient, shares, state, 0.3))
    for bits in (4, 8):
        codes, scales = ops.quantize_blocks(x, bits=bits, block_size=64)
        note(codes, scales, ops.dequantize_reduce([codes, codes], [scales, scales], x.shape, block_size=64))
print(digest.hexdigest())
"""


def test_every_processor_variant_gives_the_same_bits() -> None:
    need_native()
    root = Path(__file__).resolve().parents[2]
    found = {}
    for variant in ("portable", "avx2", ""):
        environment = {**os.environ, "ZERO_STRATEGY_CPU": variant, "PYTHONPATH": str(root)}
        done = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found[variant] = done.stdout
    assert len(set(found.values())) == 1, found
