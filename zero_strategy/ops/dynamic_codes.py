"""Numbers as 8-bit codes with one scale per block of 256: block-wise dynamic quantisation, for optimizer states.

    scale   largest |x| of the block, float32
    code    the number of the value of a fixed map that is nearest to x / scale
    x'      value of the code * scale

Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", 2021 (sections 1.3
and 2; the dynamic tree is of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2015). The bits of a
code of the dynamic tree are a sign, e zeros, a one, and the number i of one of 2^F equal parts of [0.1, 1], whose
middle, times 10^-e, is the value: fine near the block's largest number, and down to 5.5e-7 of it. It is
number * slope + start, rounded once, with two constants in float32 for each e.

    map        codes                   values
    signed     0                       0
               256 - 2^F - i           (0.1 + 0.9 * (i + 1/2) / 2^F) * 10^(F - 6), F = 0..6: 127 of them
               2^F + i                 the same, negative
               128                     1, so that the largest number is exact
    unsigned   0                       0
               2^F + i - 1             (0.1 + 0.9 * (i + 1/2) / 2^F) * 10^(F - 7), F = 1..7: the sign's bit is one of i
               255                     1

Codes are in the order of the magnitudes, which the paper leaves open. Two rules go beyond it. A number that is not zero
never gets the code 0 of the unsigned map, since Adam divides by the root of a second moment. A block whose largest
number is below 2^-126 is zero. A block with an infinite or NaN number has the scale NaN, and comes back as NaN.

Arithmetic is float32, one rounding for each operation below: kernels and this reference give the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from zero_strategy.ops.library import check_tensor

BLOCK = 256
"""Elements that share a scale."""
_DECADES = 9
_DOWN = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_UP = (1e6, 1e5, 1e4, 1e3, 1e2, 1e1, 1.0)
# Parts of a decade begin at its tenth: part * factor + width * 8/9 is the width there, and twice the width at its end.
_SHIFT = float(torch.tensor(8 / 9, dtype=torch.float32))
_INFINITE, _LEAST_NORMAL, _MAGNITUDE = 0x7F800000, 0x00800000, 0x7FFFFFFF


@dataclass(frozen=True)
class DynamicMap:
    """Constants of a map by decade, (9,) each: that of zero, seven of `width` parts, that of one.

    Attributes:
        values: (256,) by code.
        factors: Numbers of a decade per unit.
        widths: Its parts, which is its first number too.
        bounds: (8,); a number's decade is the count of the bounds below it.
    """

    values: Tensor
    factors: Tensor
    widths: Tensor
    bounds: tuple[float, ...]


@lru_cache(maxsize=16)
def dynamic_map(signed: bool, device: torch.device | None = None) -> DynamicMap:
    """The signed or the unsigned map, with its tensors on a device. Each constant is rounded to float32 once."""
    widths = [(0.5 if signed else 1.0) * 2**decade for decade in range(_DECADES)]
    inner = list(zip(_DOWN, _UP, widths[1:-1], strict=True))
    slopes = torch.tensor([0.0, *(down * (0.9 / width) for down, _, width in inner), 0.0])
    starts = torch.tensor([0.0, *(down * (0.45 / width - 0.8) for down, _, width in inner), 1.0])
    factors = torch.tensor([0.0, *(width * up / 0.9 for _, up, width in inner), 0.0])
    # Nothing is below the first bound of the unsigned map: what is not zero is not rounded to it.
    bounds = [_DOWN[0] * (0.1 + 0.45) / 2 if signed else -1.0]
    bounds += [down * (1 + 0.9 / width) for down, _, width in inner[:-1]] + [1 - 0.225 / widths[-2]]
    values = torch.zeros(256)
    for decade in range(1, _DECADES):
        first = int(widths[decade])
        numbers = torch.arange(first, first + 1 if decade == _DECADES - 1 else 2 * first)
        found = (numbers.double() * slopes[decade].double() + starts[decade].double()).float()  # once rounded
        values[256 - numbers if signed else numbers - 1] = found
        if signed and decade < _DECADES - 1:
            values[numbers] = -found
    rounded: list[float] = torch.tensor(bounds).tolist()
    return DynamicMap(values.to(device), factors.to(device), torch.tensor(widths, device=device), tuple(rounded))


def blocks_of(numel: int) -> int:
    """Scales of that many elements."""
    return -(-numel // BLOCK)


def encode(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor's elements, in the order of its memory.

    Args:
        values: float32, contiguous, of any shape.
        signed: Which map; the unsigned one takes magnitudes.

    Returns:
        uint8 codes of the tensor's shape, and (ceil(numel / 256),) float32 scales.

    Raises:
        TypeError: If it is no float32 tensor.
        ValueError: If it is not contiguous.
    """
    check_tensor("values", values, dtypes=(torch.float32,))
    if not values.is_contiguous():
        raise ValueError(f"values, shape {tuple(values.shape)}, strides {values.stride()}, must be contiguous")
    codes, scales = torch.empty_like(values, dtype=torch.uint8), values.new_empty(blocks_of(values.numel()))
    encode_into(values, codes, scales, signed=signed)
    return codes, scales


@torch.no_grad()
def encode_into(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    """`encode` into tensors that are there."""
    if not values.numel():
        return
    known = dynamic_map(signed, values.device)
    flat = torch.nn.functional.pad(values.detach().reshape(-1), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    bits = flat.view(torch.int32) & _MAGNITUDE  # magnitudes compare as integers, and a NaN is the largest
    largest = bits.amax(1, keepdim=True)
    finite = largest < _INFINITE
    coded = finite & (largest >= _LEAST_NORMAL)
    scale = torch.where(coded, largest.view(torch.float32), torch.where(finite, 0.0, math.nan))
    part = flat.abs() * (1 / scale)
    decade = torch.zeros_like(bits, dtype=torch.int64)
    for bound in known.bounds:
        decade += part > bound
    width = known.widths[decade]
    place = part * known.factors[decade] + width * _SHIFT
    place = torch.minimum(torch.maximum(place, width), width * 2 - 1)
    number = torch.where(coded, place, 0.0).to(torch.int32)
    if signed:
        number = torch.where(flat < 0, number.clamp(max=127), 256 - number) & 255
    else:
        number = torch.where(bits != 0, number - 1, 0)
    number = torch.where(coded, number, 0).to(torch.uint8)
    codes.copy_(number.view(-1)[: values.numel()].view_as(codes))
    scales.copy_(scale.view_as(scales))


@torch.no_grad()
def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 tensor, of the codes' shape, that codes and scales stand for.

    Raises:
        TypeError: If the codes are not uint8, or the scales not float32.
        ValueError: If there is not one scale for each block of 256 codes.
    """
    check_tensor("codes", codes, dtypes=(torch.uint8,))
    check_tensor("scales", scales, dtypes=(torch.float32,), shape=(blocks_of(codes.numel()),), device=codes.device)
    values = dynamic_map(signed, codes.device).values[codes.reshape(-1).long()]
    wide = scales.repeat_interleave(BLOCK)[: codes.numel()]
    return (values * wide).view(codes.shape)
