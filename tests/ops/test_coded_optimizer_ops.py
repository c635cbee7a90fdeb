"""States of 8 bits: the map against its definition, kernels against their references (same bits), round trips."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from tests.ops.native import FLOATS, need_native, same_bits, spread
from tests.warm import run_warm
from zero_strategy import ops
from zero_strategy.ops import coded_optimizers as coded
from zero_strategy.ops.dynamic_codes import BLOCK, blocks_of, decode, dynamic_map, encode

MAPS = {"signed": True, "unsigned": False}
ROW = {
    "adam": (1e-2, 0.9, 0.999, 1e-8, 0.1, 3.0, 0.25),
    "lion": (1e-3, 0.9, 0.99, 0.1, -0.5),
    "sgd": (0.1, 0.9, 0.1, 0.1, 0.0, 0.5),
}
KINDS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], tuple[bool, ...], int]] = {
    "adam": ("adam", coded._adam8, coded._adam8_reference, (False,), 2),
    "adamw": ("adam", coded._adam8, coded._adam8_reference, (True,), 2),
    "lion": ("lion", coded._lion8, coded._lion8_reference, (), 1),
    "sgd": ("sgd", coded._sgd8, coded._sgd8_reference, (False,), 1),
    "nesterov": ("sgd", coded._sgd8, coded._sgd8_reference, (True,), 1),
}
SIZES = [0, 1, 15, 255, 256, 257, 1000, 4096, 33_000]


def by_definition(signed: bool) -> set[float]:
    """The values of the paper: a sign, zeros, a one, and a part of [0.1, 1]; 0 and 1 beside them."""
    extra = 0 if signed else 1
    found = {0.0, 1.0}
    for bits in range(1, 1 << (7 + extra)):
        width = bits.bit_length() - 1  # behind the leading one
        if width < extra:
            continue  # without its sign the tree has a bit more for the part, and no zero more
        value = 10.0 ** (width - 6 - extra) * (0.1 + 0.9 * (bits - (1 << width) + 0.5) / (1 << width))
        found |= {value, -value} if signed else {value}
    return found


@pytest.mark.parametrize("name", MAPS)
def test_the_map_is_that_of_the_paper(name: str) -> None:
    signed = MAPS[name]
    values = dynamic_map(signed).values
    expected = torch.tensor(sorted(by_definition(signed)), dtype=torch.float64)
    assert len(expected) == 256
    found = values.double().sort().values
    assert bool(((found - expected).abs() <= 1e-6 * expected.abs()).all())
    assert values[0] == 0 and values[128 if signed else 255] == 1
    codes, scales = encode(values, signed=signed)
    assert torch.equal(codes.long(), torch.arange(256)) and scales.tolist() == [1.0]


@pytest.mark.parametrize("name", MAPS)
def test_codes_are_those_of_the_nearest_values(name: str) -> None:
    signed = MAPS[name]
    values = spread(torch.Generator().manual_seed(0), 300 * BLOCK, torch.float32)
    values = values if signed else values.abs()
    codes, scales = encode(values, signed=signed)
    known, parts = dynamic_map(signed).values.double(), values.double().view(-1, BLOCK) / scales.double().unsqueeze(1)
    apart = (parts.view(-1) - known[codes.long()]).abs()
    nearest = (parts.view(-1, 1) - known).abs().min(1).values
    if signed:
        assert float((apart - nearest).max()) <= 1e-7
    else:  # but for what would be zero
        small = nearest == parts.view(-1)
        assert float((apart - nearest)[~small].max()) <= 1e-7
        assert bool((codes[values != 0] != 0).all())


def test_special_blocks() -> None:
    values = torch.zeros(7 * BLOCK + 3)
    values[BLOCK + 7] = float("nan")
    values[2 * BLOCK] = float("-inf")
    values[3 * BLOCK : 4 * BLOCK] = 1e-42
    values[4 * BLOCK], values[4 * BLOCK + 1] = 2.0**-126, 2.0**-127
    values[5 * BLOCK], values[5 * BLOCK + 1] = 3.4e38, -3.4e38
    values[-1] = 5.0
    for signed in (True, False):
        given = values if signed else values.abs()
        codes, scales = encode(given, signed=signed)
        back = decode(codes, scales, signed=signed)
        assert not back[:BLOCK].any() and not back[3 * BLOCK : 4 * BLOCK].any()
        assert bool(back[BLOCK : 3 * BLOCK].isnan().all()), "a block with a NaN or an infinity is NaN"
        assert back[4 * BLOCK] == 2.0**-126 and abs(float(back[4 * BLOCK + 1]) / 2.0**-127 - 1) < 0.02
        assert back[5 * BLOCK] == given[5 * BLOCK] and back[-1] == 5 and scales.shape == (8,)


def case_of(name: str, sizes: list[int], grad: torch.dtype, copy: Any, wild: bool, seed: int) -> list[Any]:
    row, _, _, flags, states = KINDS[name]
    generator = torch.Generator().manual_seed(seed)
    params = [spread(generator, n, torch.float32) for n in sizes]
    grads = [spread(generator, n, grad, wild=wild) for n in sizes]
    lists: list[Any] = [params, grads]
    for number in range(states):
        values = [spread(generator, n, torch.float32, wild=wild) for n in sizes]
        pairs = [encode(v.abs() if number else v, signed=not number) for v in values]
        lists += [[codes for codes, _ in pairs], [scales for _, scales in pairs]]
    copies = [] if copy is None else [p.to(copy) for p in params]
    return [*lists, copies, torch.tensor([ROW[row]] * len(sizes), dtype=torch.float64), *flags]


def run(call: Callable[..., Any], given: list[Any]) -> list[Tensor]:
    """All that a call leaves behind; the given tensors stay as they are."""
    own = [[t.clone() for t in each] if isinstance(each, list) else each for each in given]
    call(*own)
    return [tensor for each in own if isinstance(each, list) for tensor in each]


@pytest.mark.parametrize("name", KINDS)
@hypothesis.settings(max_examples=25)
@hypothesis.given(
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
    grad=st.sampled_from(FLOATS),
    copy=st.sampled_from((None, *FLOATS)),
    wild=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_kernel_and_reference_give_the_same_bits(
    name: str, sizes: list[int], grad: torch.dtype, copy: Any, wild: bool, seed: int
) -> None:
    need_native()
    _, native, reference, *_ = KINDS[name]
    given = case_of(name, sizes, grad, copy, wild, seed)
    for found, expected in zip(run(native, given), run(reference, given), strict=True):
        assert same_bits(found, expected)


def test_pieces_that_begin_at_blocks_give_the_bits_of_the_whole() -> None:
    given = case_of("adamw", [5 * BLOCK + 77], torch.float32, torch.bfloat16, False, 3)
    whole = run(coded._adam8, given)
    cut = 2 * BLOCK
    lists = [[[t[: -(-cut // (BLOCK if t.numel() < BLOCK else 1))], t[-(-cut // (BLOCK if t.numel() < BLOCK else 1)) :]]
              for t in each] if isinstance(each, list) else each for each in given]  # fmt: skip
    pieces = [each[0] if isinstance(each, list) else each for each in lists]
    pieces[7] = given[7].expand(2, -1).contiguous()
    found = run(coded._adam8, pieces)
    for index, expected in enumerate(whole):
        assert same_bits(torch.cat(found[2 * index : 2 * index + 2]), expected)


START = """
import hashlib
from tests.ops.test_coded_optimizer_ops import KINDS, SIZES, case_of, need_native, run, torch
need_native()
digest = hashlib.sha256()
for name, kind in KINDS.items():
    for tensor in run(kind[1], case_of(name, SIZES, torch.float16, torch.bfloat16, True, 1)):
        clean = tensor.nan_to_num(7.0, 8.0, 9.0) if tensor.is_floating_point() else tensor
        digest.update(clean.reshape(-1).view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def test_every_processor_has_the_same_bits() -> None:
    need_native()
    found = set()
    for target in ("avx512", "avx2", "portable"):
        root = Path(__file__).resolve().parents[2]
        done = run_warm(START, cwd=root, env={**os.environ, "ZERO_STRATEGY_CPU": target, "PYTHONPATH": str(root)})
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_results_do_not_depend_on_threads() -> None:
    need_native()
    before, digests = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found = run(coded._adam8, case_of("adamw", [200_001], torch.float32, None, False, 0))
            digests.add(hashlib.sha256(b"".join(t.view(torch.uint8).numpy().tobytes() for t in found)).hexdigest())
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_bad_arguments_of_coded_states_are_named() -> None:
    p, g, hyper = torch.ones(300), torch.ones(300), torch.tensor([ROW["lion"]], dtype=torch.float64)
    codes, scales = torch.zeros(300, dtype=torch.uint8), torch.zeros(blocks_of(300))
    ops.lion8_([p], [g], ([codes], [scales]), hyper)
    with pytest.raises(TypeError, match=r"exp_avgs\[0\]\[0\] must be torch.uint8"):
        ops.lion8_([p], [g], ([p.clone()], [scales]), hyper)
    with pytest.raises(ValueError, match=r"exp_avgs\[1\]\[0\] must have shape \(2,\), not \(1,\)"):
        ops.lion8_([p], [g], ([codes], [scales[:1]]), hyper)
    with pytest.raises(ValueError, match=r"exp_avgs\[1\] has 0 tensors, but params has 1"):
        ops.lion8_([p], [g], ([codes], []), hyper)
    with pytest.raises(ValueError, match="hyper must be contiguous"):
        ops.lion8_([p], [g], ([codes], [scales]), hyper[:, :2])
    with pytest.raises(TypeError, match=r"values must be torch\.float32"):
        encode(torch.ones(3).half(), signed=True)
    with pytest.raises(ValueError, match="must be contiguous"):
        encode(torch.ones(4, 4).t()[1:], signed=True)
    with pytest.raises(ValueError, match=r"scales must have shape \(2,\)"):
        decode(codes, scales[:1], signed=True)
