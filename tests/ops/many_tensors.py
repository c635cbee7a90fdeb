"""Calls with more tensors than a kernel's table holds, at every alignment, as neighbours in one buffer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.ops.native import same_bits, spread
from tests.ops.test_optimizer_ops import CASES
from zero_strategy.ops import multi_tensor as mt
from zero_strategy.ops import quantization as q

SIZES = [(37 * i) % 211 for i in range(120)] + [8192, 8193, 16390, 0, 1]


class PipelinePeers:
    """Tensors of `SIZES` side by side; what is written beyond one of them shows in the next."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str, *, positive: bool = False) -> None:
        values = spread(torch.Generator().manual_seed(seed), sum(SIZES) + 8, dtype)
        self.whole = (values.abs() if positive else values).to(device)

    def parts(self, shift: int) -> tuple[Tensor, list[Tensor]]:
        """A copy of the buffer, and its tensors, of which the first begins at `shift`."""
        whole = self.whole.clone()
        return whole, list(whole[shift : shift + sum(SIZES)].split(SIZES))


def check_optimizer(device: str) -> None:
    """AdamW on all of them at once, with gradients and copies of other types, at equal and at unequal alignments."""
    case = CASES["adamw"]
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float16)
    buffers = [PipelinePeers(seed, dtype, device, positive=seed == 3) for seed, dtype in enumerate(dtypes)]
    hyper = torch.tensor([case.row(s % 5) for s in range(len(SIZES))], dtype=torch.float64)
    for shifts in ((0, 0, 0, 0, 0), (4, 4, 4, 4, 4), (3, 3, 5, 2, 1), (3, 3, 3, 3, 3)):
        found = []
        for call in (case.native, case.reference):
            made = [buffer.parts(shift) for buffer, shift in zip(buffers, shifts, strict=True)]
            call(*(parts for _, parts in made), hyper, *case.flags)
            found.append([whole for whole, _ in made])
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True)), shifts


def check_moves(device: str) -> None:
    """Copies into a flat buffer and from tensors to tensors."""
    source = PipelinePeers(0, torch.float32, device)
    found = []
    for flatten, unflatten, scale in (
        (mt._flatten, mt._unflatten, mt._scale),
        (mt._flatten_reference, mt._unflatten_reference, mt._scale_reference),
    ):
        flat, (half, halves) = torch.ones(sum(SIZES) + 9, device=device).bfloat16(), source.parts(5)
        offsets = [1 + sum(SIZES[:i]) for i in range(len(SIZES))]
        flatten(source.parts(2)[1], flat, offsets, 0.3, True)
        low = half.half()
        count = scale(halves, list(low[3 : 3 + sum(SIZES)].split(SIZES)), 3e38)
        unflatten(flat, halves, offsets)
        found.append([flat, half, low, count])
    assert int(found[0][-1]) > 0
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def check_statistics(device: str) -> None:
    """More tensors than one launch adds up, and sums that do not depend on where a tensor lies."""
    values = spread(torch.Generator().manual_seed(0), 1020, torch.float32).to(device)
    tensors = [*values.split(1), torch.ones(100_000, device=device)]
    tensors[7].fill_(math.nan)
    sums, counts = mt._grad_stats(tensors, 2.0)
    expected, expected_counts = mt._grad_stats_reference(tensors, 2.0)
    torch.testing.assert_close(sums, expected, rtol=1e-13, atol=0, equal_nan=True)
    assert torch.equal(counts, expected_counts)
    buffer = PipelinePeers(1, torch.bfloat16, device)
    for order in (1.0, 2.0, math.inf):
        aligned = [part.clone() for part in buffer.parts(0)[1][-5:]]
        shifted = [torch.zeros(len(part) + 3, dtype=part.dtype, device=device)[3:].copy_(part) for part in aligned]
        assert torch.equal(mt._grad_stats(aligned, order)[0], mt._grad_stats(shifted, order)[0])


def check_quantized(device: str) -> None:
    """A sum of more quantised tensors than one launch adds up, of two formats of scales."""
    for bits in (4, 8):
        sources = []
        for seed in range(300):
            values = spread(torch.Generator().manual_seed(seed), 1001, torch.float32).to(device)
            sources.append(q._quantize_reference(values, bits, 64, (torch.float32, torch.bfloat16)[seed % 2]))
        codes, scales = (list(part) for part in zip(*sources, strict=True))
        found = [call(codes, scales, 1001, 64) for call in (q._reduce, q._reduce_reference)]
        assert same_bits(*found)
