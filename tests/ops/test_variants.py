"""Every op gives the same bits on every processor."""

from __future__ import annotations

import os
from pathlib import Path

from tests.ops.native import need_native
from tests.warm import run_warm

START = """
import hashlib, itertools, torch
from tests.ops import test_optimizer_ops as optimizers
from tests.ops.native import FLOATS, need_native, spread
from zero_strategy import ops
from zero_strategy.ops import fused_layers
need_native()
digest = hashlib.sha256()
generator = torch.Generator().manual_seed(0)

def note(*tensors):
    for tensor in tensors:
        # which NaN it is may differ
        clean = tensor.nan_to_num(7.0, 8.0, 9.0) if tensor.is_floating_point() else tensor
        digest.update(clean.reshape(-1).view(torch.uint8).numpy().tobytes())

def made(rows, columns, dtype, wild=False):
    return spread(generator, rows * columns, dtype, wild=wild).view(rows, columns)

"""
LAYERS = """
state = ops.random_state(1, 2)
for dtype, columns in itertools.product(FLOATS, (1, 37, 1024, 2051)):
    x, gradient = made(9, columns, dtype, True), made(9, columns, dtype)
    weight, bias = (made(1, columns, torch.float32).view(-1) for _ in range(2))
    for centered in (True, False):
        output, mean, rstd = fused_layers._forward(x, weight, bias, columns, 1e-5, centered, False)
        note(output, mean, rstd)
        for inverted in (True, False):
            saved = (output if inverted else x, mean, rstd)
            note(*fused_layers._backward(gradient, *saved, weight, bias, columns, centered, inverted))
    for tanh in (True, False):
        note(fused_layers._gelu_forward(x, bias, tanh))
        note(*fused_layers._gelu_backward(gradient, x, bias, tanh))
    note(fused_layers._dropout_forward(x, bias, gradient, state, 0.3))
    note(*fused_layers._dropout_backward(gradient, bias, state, 0.3, dtype))
    output, shares = fused_layers._softmax_forward(x, bias, state, True, 0.3)
    note(output, shares, fused_layers._softmax_backward(gradient, shares, state, 0.3))
    for bits in (4, 8):
        codes, scales = ops.quantize_blocks(x, bits=bits, block_size=64)
        note(codes, scales, ops.dequantize_reduce([codes, codes], [scales, scales], x.shape, block_size=64))
"""
OPTIMIZERS = """
for (name, case), dtype in itertools.product(optimizers.CASES.items(), FLOATS):
    sizes = [1, 37, 4099, 70_001]
    lists = [[spread(generator, n, torch.float32) for n in sizes], [spread(generator, n, dtype) for n in sizes]]
    lists += [[spread(generator, n, torch.float32).abs() for n in sizes] for _ in range(case.states)]
    note(*optimizers.run(case.native, case, lists, [torch.zeros(n, dtype=torch.bfloat16) for n in sizes]))
# so large that copies are written past the caches
lists = [[torch.rand((1 << 22) + 5, generator=generator)] for _ in range(4)]
note(*optimizers.run(optimizers.CASES["adamw"].native, optimizers.CASES["adamw"], lists, [lists[0][0].bfloat16()]))
(params, grads, m, v), hyper = optimizers.lamb_case(0)
note(ops.lamb_direction_(params, grads, m, v, hyper))
ops.lamb_apply_(params, m, v, hyper, torch.ones(3, 1, dtype=torch.float64))
note(*params, *m, *v)
"""
MOVES = """
for threads, order in itertools.product((1, 2), (1.0, 2.0, 3.0, 0.5, float("inf"))):
    torch.set_num_threads(threads)
    tensors = [spread(generator, n, dtype) for dtype in FLOATS for n in (5, 100_003)]
    note(*ops.grad_stats(tensors, order))
    if order < float("inf"):
        note(*ops.exact_sums(tensors, order, [1.0, 0.25, 3.0] * 2))
for dtype in FLOATS:
    x, y, out = ([spread(generator, n, kind, wild=True) for n in (5, 5000)] for kind in (dtype, torch.float32, dtype))
    note(ops.scale_(x, out, 0.3), *out, ops.axpby_(x, y, out, 0.3, 0.7), *out)
    ops.accumulate_(y, x, 0.3)
    flat = torch.zeros(5010, dtype=dtype)
    ops.flatten_(y, flat, [0, 9])
    note(*y, flat)
"""


PARTS = {"layers": LAYERS, "optimizers": OPTIMIZERS, "moves": MOVES}


def test_every_processor_variant_gives_the_same_bits() -> None:
    need_native()
    code = "".join(START + part + f"print({name!r}, digest.hexdigest())\n" for name, part in PARTS.items())
    root = Path(__file__).resolve().parents[2]
    found = {}
    for variant in ("portable", "avx2", ""):
        done = run_warm(code, cwd=root, env={**os.environ, "ZERO_STRATEGY_CPU": variant})
        assert done.returncode == 0, done.stderr
        found[variant] = done.stdout
    assert len(set(found.values())) == 1 and all(name in found[""] for name in PARTS), found
