"""Division without a remainder, and joining what may be absent: `ensure_divisibility`, `divide`, `maybe_cat`."""

from __future__ import annotations

import torch
from torch import Tensor


class NotDivisibleError(ValueError, AssertionError):
    """There is a remainder. It is an AssertionError as well, which Megatron raises and scripts of its catch."""


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Check that `denominator` divides `numerator`.

    Raises:
        NotDivisibleError: If it does not, or is 0; a ValueError and an AssertionError.
    """
    if denominator == 0 or numerator % denominator:
        raise NotDivisibleError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """`numerator // denominator`, of which nothing is left over.

    Raises:
        NotDivisibleError: See `ensure_divisibility`.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def maybe_cat(a: Tensor | None, b: Tensor | None, dim: int = 0, *, required: bool = False) -> Tensor | None:
    """`a` and `b` joined along `dim`; the one that there is, if there is one; None for none.

    Args:
        a: Comes first.
        b: Comes second.
        dim: Along which.
        required: None for none is an error.

    Raises:
        ValueError: If both are None, and a result is required.
    """
    parts = [part for part in (a, b) if part is not None]
    if not parts:
        if required:
            raise ValueError("maybe_cat(None, None, required=True): at least one of the tensors must be there")
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
