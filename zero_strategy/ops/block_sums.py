"""Sums of powers that are the same bits however elements are divided among tensors, calls, threads and ranks.

Elements are taken in blocks of `BLOCK`, counted from the beginning of each tensor. Whoever cuts a tensor and wants the
sum of the whole cuts between blocks. Of a block:

    powers   |x * factor| ** p in float64: for p = 1, 2, 3 and 0.5, and all multiples of 0.5 up to `MOST_PRODUCTS`, by
             products from the highest bit of p on and a root at the end; for others by the library's `pow`
    sum      in float64, in halves: the first eight and the last eight, of these sums the first four and the last four,
             and so on; what a last block lacks is 0
    p = 1, 2 the factor ** p multiplies the sum, which cannot overflow, instead of float32, bfloat16 or float16 elements

A product with a power of two is exact but at the ends of the range, so a factor that waits has the bits of one that was
carried out. Sums of blocks are added without any rounding, as integers, and `optim.exact_sum` rounds the total once.

    digits   |----|----| ... |----| infinite | NaN |     `WORDS` int64
              0    1          66                          digit i weighs 2 ** (32 i - 1075)

A block's 53 bits begin in one digit, which takes those below the next one; the next one takes the rest, up to 52 bits.
Results have digits of at most 2 ** 32, so that 2 ** 21 of them can be added as float64, too, and more as integers.
Digits are not unique: two results of one sum may differ by carries.

Source: Neal, "Fast Exact Summation Using Small and Large Superaccumulators", 2015 (the small one, without signs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from zero_strategy.ops import foreach
from zero_strategy.ops.library import FLOATS, check_tensors, define, norm_order
from zero_strategy.runtime import torch_private as private

Tensors = Sequence[Tensor]
BLOCK = 16
"""Elements whose powers are added up with rounding; parameters are cut at multiples of it, see `layout.ALIGN_BYTES`."""
DIGITS = 67
INFINITE, NAN = DIGITS, DIGITS + 1
"""Words that count blocks whose sums are so."""
WORDS = DIGITS + 2
LEAST = -1075
"""Exponent of the first digit's weight: half of the smallest subnormal number, so that shifts have no special case."""
MOST_PRODUCTS = 32
_ROW = 64
"""Blocks that share digits at first: few enough to need no carry, many enough for a GPU to add them side by side."""
_ON_CPU = 1 << 16
"""Elements at a time there: they stay in the cache."""
_LOW = (1 << 32) - 1


def exact_sums(
    tensors: Tensors, norm_type: float | str = 2.0, factors: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of |x * factor| ** p of every tensor, in one pass, to be added up without rounding.

    Args:
        tensors: What to look at: float32, bfloat16, float16 or float64, contiguous and on one device.
        norm_type: Any p > 0 but inf, also as a string.
        factors: One for each tensor, finite; default: 1.

    Returns:
        (tensors, WORDS) int64: see the module; (tensors,) int64: how many elements are infinite or NaN.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    order, factors = _checked(tensors, norm_type, factors)
    if not len(tensors):
        return torch.zeros(0, WORDS, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    table = torch.tensor(factors, dtype=torch.float64).unsqueeze(1)
    if all(tensor.dtype in FLOATS for tensor in tensors):
        digits, counts = _exact_sums(tensors, order, table)
    else:  # of which there are no kernels
        digits, counts = _exact_sums_reference(tensors, order, table)
    return digits, counts


def exact_sums_and_flags(
    tensors: Tensors, norm_type: float | str = 2.0, factors: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """The digits of `exact_sums` on a device, without another pass and without waiting for it.

    Returns:
        (tensors, WORDS) int64; (tensors,) int64: 1 where a sum is not finite, which elements may be the reason of, or
        the size of their powers.
    """
    digits = _digits_of(tensors, *_checked(tensors, norm_type, factors))
    return digits, digits[:, INFINITE:].sum(dim=1).sign()


def exact_sums_on_host(
    tensors: Tensors, norm_type: float | str = 2.0, factors: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """The results of `exact_sums` in host memory, from a device in one wait where all is finite, and in one pass."""
    if not len(tensors) or tensors[0].is_cpu:
        return exact_sums(tensors, norm_type, factors)
    digits = exact_sums_and_flags(tensors, norm_type, factors)[0].cpu()
    counts = torch.zeros(len(tensors), dtype=torch.int64)
    unsure = digits[:, INFINITE:].any(dim=1).nonzero().flatten().tolist()
    if unsure:
        counts[unsure] = torch.stack([foreach.count_nonfinite(tensors[index]) for index in unsure]).cpu()
    return digits, counts


def carried(digits: Tensor) -> Tensor:
    """Carry digits that are not negative, so that they are at most 2 ** 32; the sums stay: (..., WORDS) int64.

    The last digit takes what there is: a sum of 2 ** 60 of the largest numbers leaves it below 2 ** 52.
    """
    for _ in range(2):  # the first leaves carries of 1
        low, high = digits & _LOW, digits >> 32
        low[..., DIGITS - 1 :] = digits[..., DIGITS - 1 :]
        low[..., 1:DIGITS] += high[..., : DIGITS - 1]
        digits = low
    return digits


def _checked(
    tensors: Tensors, norm_type: float | str, factors: Sequence[float] | None
) -> tuple[float, Sequence[float]]:
    check_tensors({"tensors": tensors}, {"tensors": (*FLOATS, torch.float64)})
    order = norm_order(norm_type)
    if math.isinf(order):
        raise ValueError("norm_type must be finite, not inf: a maximum is no sum, and needs none (grad_stats)")
    factors = [1.0] * len(tensors) if factors is None else factors
    if len(factors) != len(tensors):
        raise ValueError(f"factors has {len(factors)} entries, but there are {len(tensors)} tensors")
    for index, factor in enumerate(factors):
        if not math.isfinite(factor):
            raise ValueError(f"factors[{index}] must be finite, not {factor}: no number has a finite multiple of it")
    return order, factors


# ------------------------------------------------------------------------------------------------ references


@torch.no_grad()
def _exact_sums_reference(tensors: Tensors, norm_type: float, factors: Tensor) -> tuple[Tensor, Tensor]:
    digits = _digits_of(tensors, norm_type, factors.flatten().tolist())
    if digits.is_cpu and not digits[:, INFINITE:].any():  # of finite elements: no second pass
        return digits, digits.new_zeros(len(tensors))
    return digits, torch.stack([foreach.count_nonfinite(tensor) for tensor in tensors])


def _exact_sums_fake(tensors: Tensors, norm_type: float, factors: Tensor) -> tuple[Tensor, Tensor]:
    like = tensors[0]
    return like.new_empty(len(tensors), WORDS, dtype=torch.int64), like.new_empty(len(tensors), dtype=torch.int64)


@dataclass
class _Batch:
    """Parts of tensors that have temporaries at a time.

    Attributes:
        owners: Numbers of the tensors, one for each part.
        parts: Flat; all of them begin at blocks.
        sizes: Elements of each, with what its last row lacks.
    """

    owners: list[int] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def _batches(tensors: Tensors) -> Iterator[_Batch]:
    """All elements of the tensors, in order."""
    most = _ON_CPU if tensors[0].is_cpu else foreach.BATCH
    row, batch = _ROW * BLOCK, _Batch()
    for owner, tensor in enumerate(tensors):
        for part in tensor.detach().reshape(-1).split(most) if tensor.numel() else ():
            size = -(-part.numel() // row) * row
            if batch.parts and sum(batch.sizes) + size > most:
                yield batch
                batch = _Batch()
            batch.owners.append(owner)
            batch.parts.append(part)
            batch.sizes.append(size)
    if batch.parts:
        yield batch


@torch.no_grad()
def _digits_of(tensors: Tensors, order: float, factors: Sequence[float]) -> Tensor:
    """The digits of every tensor, on their device."""
    digits = torch.zeros(len(tensors), WORDS, dtype=torch.int64, device=tensors[0].device)
    for batch in _batches(tensors):
        of_sums = [order in (1.0, 2.0) and part.dtype in FLOATS for part in batch.parts]
        own = [abs(factors[owner]) for owner in batch.owners]
        values = torch.zeros(sum(batch.sizes), dtype=torch.float64, device=digits.device)
        views = [view[: len(part)] for view, part in zip(values.split(batch.sizes), batch.parts, strict=True)]
        private.foreach_copy_(views, batch.parts)
        values = values.abs_()
        _multiply(views, [1.0 if late else factor for factor, late in zip(own, of_sums, strict=True)])
        sums = _block_sums(_powers(values, order))
        blocks = [size // BLOCK for size in batch.sizes]
        # Not of what rows lack: 0 times a square that overflows is no number.
        full = [part[: -(-len(view) // BLOCK)] for part, view in zip(sums.split(blocks), views, strict=True)]
        late = [factor if late else 1.0 for factor, late in zip(own, of_sums, strict=True)]
        _multiply(full, [factor * factor if order == 2 else factor for factor in late])
        owners = torch.tensor(batch.owners).repeat_interleave(torch.tensor(blocks) // _ROW)
        rows = carried(_digits_of_blocks(sums.view(-1, _ROW)))
        there = torch.empty(owners.shape, dtype=torch.int64, device=digits.device).copy_(owners, non_blocking=True)
        digits.index_add_(0, there, rows)
        digits = carried(digits)
    return digits


def _multiply(views: list[Tensor], factors: list[float]) -> None:
    if any(factor != 1.0 for factor in factors):
        private.foreach_mul_(views, factors)


def _powers(values: Tensor, order: float) -> Tensor:
    """values ** order, of float64 numbers that are not negative; see the module."""
    if order > MOST_PRODUCTS or 2 * order != math.floor(2 * order):
        return values.pow(order)
    whole, result = int(order), None
    for bit in range(whole.bit_length() - 1, -1, -1):
        result = values if result is None else result * result
        if whole >> bit & 1 and bit + 1 < whole.bit_length():
            result = result * values
    if order == whole:
        assert result is not None
        return result
    root = _root(values)
    return root if result is None else result * root


def _root(values: Tensor) -> Tensor:
    # Torch's own is off by a bit on CPUs where a vector library of theirs takes it; a GPU's is rounded correctly.
    return torch.from_numpy(numpy.sqrt(values.numpy())) if values.is_cpu else values.sqrt()


def _block_sums(powers: Tensor) -> Tensor:
    """Sums of blocks: (blocks * BLOCK,) to (blocks,)."""
    found = powers.view(-1, BLOCK)
    while found.shape[1] > 1:
        first, second = found.split(found.shape[1] // 2, dim=1)
        found = first + second
    return found.view(-1)


def _digits_of_blocks(sums: Tensor) -> Tensor:
    """Digits of rows of up to 2048 float64 numbers: (rows, numbers) to (rows, WORDS) int64, without carries."""
    bits = sums.view(torch.int64)
    exponent, fraction = (bits >> 52) & 0x7FF, bits & ((1 << 52) - 1)
    # Numbers that are not finite count 1 in their word. By products: a choice would bring its constants to the device.
    finite = (exponent != 0x7FF).to(torch.int64)
    place, mantissa = exponent.clamp(min=1), fraction | ((exponent != 0).to(torch.int64) << 52)
    shift, digit = place & 31, place >> 5
    low, high = ((mantissa & _LOW) << shift) & _LOW, mantissa >> (32 - shift)
    beyond = (fraction != 0).to(torch.int64) + INFINITE
    digits = torch.zeros(len(sums), WORDS, dtype=torch.int64, device=sums.device)
    digits.scatter_add_(1, digit * finite + beyond * (1 - finite), low * finite + (1 - finite))
    digits.scatter_add_(1, digit + 1, high * finite)
    return digits


_exact_sums = define(
    "exact_sums(Tensor[] tensors, float norm_type, Tensor factors) -> (Tensor, Tensor)",
    _exact_sums_reference,
    _exact_sums_fake,
)
