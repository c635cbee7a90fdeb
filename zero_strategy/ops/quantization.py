"""Symmetric quantisation in blocks, to int8 or to int4 (two in a byte), with one scale per block.

    scale = largest |x| of the block / 127 (int4: 7), rounded up to the scales' dtype
    code  = round(x / scale), ties to even
    x'    = code * scale

So |x - x'| <= scale / 2 for every element, but for the rounding of x / scale and of x' to its dtype. A float16 scale
lies between 6e-8 and 65504: elements up to 8.3e6 (int4: 4.6e5) are represented, and a block whose largest element is
below 7.6e-6 is coded ever more coarsely; take `scale_dtype=torch.float32` or bfloat16 where numbers are not scaled to a
middling size first. A block with an infinite, NaN or too large element has an infinite or NaN scale and comes back as
NaN, every element of it, so that an overflow is not lost in the codes.

In int4, element 2k is the low half of byte k, and element 2k + 1 the high one, in two's complement; the last half byte
of an odd number of elements is 0. Results have the same bits on every processor, and those of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_strategy.ops.library import FLOATS, check_tensor, define

BLOCK_SIZE = 256


def quantize_blocks(
    input: Tensor, *, bits: int = 8, block_size: int = BLOCK_SIZE, scale_dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor's elements in memory order; the last block may be shorter.

    Args:
        input: float32, bfloat16 or float16, of any shape.
        bits: 8 or 4.
        block_size: Elements per scale; even if `bits` is 4.
        scale_dtype: float16, bfloat16 or float32.

    Returns:
        Codes: (numel,) int8, or (ceil(numel / 2),) uint8 with two int4 each; scales: (ceil(numel / block_size),).

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    check_tensor("input", input)
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    _check_block_size(block_size, packed=bits == 4)
    if scale_dtype not in FLOATS:
        raise TypeError(f"scale_dtype must be {' or '.join(map(str, FLOATS))}, not {scale_dtype}")
    codes, scales = _quantize(input.detach().contiguous(), bits, block_size, scale_dtype)
    return codes, scales


def dequantize_blocks(
    codes: Tensor,
    scales: Tensor,
    shape: Sequence[int],
    *,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Tensor of that shape and dtype from the result of `quantize_blocks`; the codes' dtype tells int8 from int4."""
    numel = _numel(shape)
    _check_quantized([codes], [scales], numel, block_size)
    if dtype not in FLOATS:
        raise TypeError(f"dtype must be {' or '.join(map(str, FLOATS))}, not {dtype}")
    result: Tensor = _dequantize(codes.contiguous(), scales.contiguous(), numel, block_size, dtype)
    return result.view(tuple(shape))


def dequantize_reduce(
    codes: Sequence[Tensor], scales: Sequence[Tensor], shape: Sequence[int], *, block_size: int = BLOCK_SIZE
) -> Tensor:
    """Sum of several quantised tensors of one shape, in float32 and in the order of the lists.

    Args:
        codes: Of each one, all of one dtype.
        scales: Of each one.
        shape: Their shape.
        block_size: Elements per scale.

    Returns:
        A float32 tensor.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    numel = _numel(shape)
    if not len(codes):
        raise ValueError("codes is empty: there is nothing to add up")
    if len(scales) != len(codes):
        raise ValueError(f"scales has {len(scales)} tensors, but codes has {len(codes)}")
    _check_quantized(codes, scales, numel, block_size)
    parts = ([tensor.contiguous() for tensor in tensors] for tensors in (codes, scales))
    result: Tensor = _reduce(*parts, numel, block_size)
    return result.view(tuple(shape))


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        if size < 0:
            raise ValueError(f"shape {tuple(shape)} has a negative size")
        numel *= size
    return numel


def _check_block_size(block_size: int, packed: bool) -> None:
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise TypeError(f"block_size must be an integer, not {type(block_size).__name__}")
    if block_size < 1 or (packed and block_size % 2):
        raise ValueError(f"block_size must be positive{', and even for 4 bits' if packed else ''}; it is {block_size}")


def _check_quantized(codes: Sequence[Tensor], scales: Sequence[Tensor], numel: int, block_size: int) -> None:
    check_tensor("codes[0]", codes[0], dtypes=(torch.int8, torch.uint8))
    first = codes[0]
    packed = first.dtype == torch.uint8
    _check_block_size(block_size, packed)
    for index, (code, scale) in enumerate(zip(codes, scales, strict=True)):
        length = (numel + 1) // 2 if packed else numel
        check_tensor(f"codes[{index}]", code, dtypes=(first.dtype,), shape=(length,), device=first.device)
        blocks = (numel + block_size - 1) // block_size
        check_tensor(f"scales[{index}]", scale, shape=(blocks,), device=first.device)


# ------------------------------------------------------------------------------------------------ references


def _blocks(values: Tensor, block_size: int) -> Tensor:
    """(blocks, block_size), the last one filled up with zeros."""
    missing = -values.numel() % block_size
    return torch.nn.functional.pad(values.reshape(-1), (0, missing)).view(-1, block_size)


def _round_up(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The least numbers of a dtype that are not below these positive ones."""
    kept = values.to(dtype)
    if dtype == torch.float32:
        return kept
    return (kept.view(torch.int16) + (kept.float() < values).to(torch.int16)).view(dtype)


@torch.no_grad()
def _quantize_reference(input: Tensor, bits: int, block_size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    most = 127.0 if bits == 8 else 7.0
    values = _blocks(input.to(torch.float32), block_size)
    scales = _round_up(values.abs().amax(1) / most, scale_dtype)
    wide = scales.float().unsqueeze(1)
    ratios = (values / wide).clamp(-most, most).round()
    codes = torch.where(wide.isfinite() & (wide > 0), ratios, 0.0).to(torch.int8).view(-1)[: input.numel()]
    if bits == 8:
        return codes.clone(), scales
    pairs = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(torch.uint8).view(-1, 2)
    return (pairs[:, 0] & 15) | (pairs[:, 1] << 4), scales


def _values(codes: Tensor, scales: Tensor, numel: int, block_size: int) -> Tensor:
    if codes.dtype == torch.uint8:
        wide = codes.to(torch.int16)
        codes = torch.stack(((wide & 15 ^ 8) - 8, (wide >> 4 ^ 8) - 8), 1).view(-1)[:numel]
    return (_blocks(codes.float(), block_size) * scales.float().unsqueeze(1)).view(-1)[:numel]


@torch.no_grad()
def _dequantize_reference(codes: Tensor, scales: Tensor, numel: int, block_size: int, dtype: torch.dtype) -> Tensor:
    return _values(codes, scales, numel, block_size).to(dtype)


@torch.no_grad()
def _reduce_reference(codes: Sequence[Tensor], scales: Sequence[Tensor], numel: int, block_size: int) -> Tensor:
    total = codes[0].new_zeros(numel, dtype=torch.float32)
    for code, scale in zip(codes, scales, strict=True):
        total += _values(code, scale, numel, block_size)
    return total


def _quantize_fake(input: Tensor, bits: int, block_size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numel = input.numel()
    codes = (
        input.new_empty(numel, dtype=torch.int8) if bits == 8 else input.new_empty((numel + 1) // 2, dtype=torch.uint8)
    )
    return codes, input.new_empty((numel + block_size - 1) // block_size, dtype=scale_dtype)


def _dequantize_fake(codes: Tensor, scales: Tensor, numel: int, block_size: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(numel, dtype=dtype)


def _reduce_fake(codes: Sequence[Tensor], scales: Sequence[Tensor], numel: int, block_size: int) -> Tensor:
    return codes[0].new_empty(numel, dtype=torch.float32)


_quantize = define(
    "quantize_blocks(Tensor input, int bits, int block_size, ScalarType scale_dtype) -> (Tensor, Tensor)",
    _quantize_reference,
    _quantize_fake,
)
_dequantize = define(
    "dequantize_blocks(Tensor codes, Tensor scales, SymInt numel, int block_size, ScalarType dtype) -> Tensor",
    _dequantize_reference,
    _dequantize_fake,
)
_reduce = define(
    "dequantize_reduce(Tensor[] codes, Tensor[] scales, SymInt numel, int block_size) -> Tensor",
    _reduce_reference,
    _reduce_fake,
)
