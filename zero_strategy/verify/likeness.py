"""Likeness of two tensors: the same, a multiple, a rounded one, and where they are not alike."""

from __future__ import annotations

import torch
from torch import Tensor

CLOSE = 1e-3
"""Relative distance up to which a tensor is taken for another one's multiple."""


def same(mine: Tensor, wanted: Tensor, bound: float) -> bool:
    """Say that tensors of one shape differ by no more than a bound, or a millionth of the largest element."""
    gap = (mine.double() - wanted.double()).abs()
    return not gap.numel() or bool(gap.max() <= max(bound, 1e-6 * float(wanted.double().abs().max())))


def elements_off(value: Tensor, wanted: Tensor, bound: float) -> Tensor:
    """Elements that differ by more than a bound, as a mask; what is not a number does."""
    return ~((value.double() - wanted.double()).abs() <= bound)


def block_of(off: Tensor) -> str:
    """The block along one dimension in which all wrong elements are, "" if they are everywhere."""
    for dim in range(off.dim()):
        rows = off.movedim(dim, 0).reshape(off.shape[dim], -1).any(dim=1)
        inside = rows.nonzero().reshape(-1)
        begin, end = int(inside[0]), int(inside[-1]) + 1
        if end - begin < off.shape[dim] and bool(rows[begin:end].all()):
            return f"in [{begin}:{end}] of dimension {dim}"
    return ""


def rounded(value: Tensor, wanted: Tensor) -> str:
    """A lower precision whose values these are, and those of one process are not."""
    for dtype in (torch.bfloat16, torch.float16):
        close = same(value, wanted, 2 * torch.finfo(dtype).eps * float(wanted.double().abs().max()))
        kept = [torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) for tensor in (value, wanted)]
        if close and kept == [True, False]:
            return f"its values are rounded to {str(dtype).removeprefix('torch.')}: it was sent or kept in that"
    return ""


def multiple(value: Tensor, wanted: Tensor, *, equal: bool = False) -> float | None:
    """The number by which one tensor is the other one's multiple.

    Args:
        value: The one.
        wanted: The other.
        equal: Whether 1 counts.

    Returns:
        None if it is no multiple.
    """
    a, b = value.double().reshape(-1), wanted.double().reshape(-1)
    if a.shape != b.shape or not bool(b.count_nonzero()):
        return None
    factor = float(a @ b / (b @ b))
    if float((a - factor * b).norm()) > CLOSE * float(a.norm()) or (not equal and abs(factor - 1.0) < CLOSE / 10):
        return None
    return factor


def near(value: float, wanted: float, relative: float = 5e-3) -> bool:
    """Say that a number is another one but for a small part of that."""
    return abs(value - wanted) <= relative * abs(wanted)
