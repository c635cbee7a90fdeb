"""Rotary position embedding: element i of a head's first half and element i of its second half turn together.

    angle(t, i) = t / base^(2 i / size),    (a, b) -> (a cos - b sin, b cos + a sin)
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(length: int, size: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of places 0 to length - 1.

    Args:
        length: Number of places.
        size: Width of a head, even.
        base: Of the frequencies.
        device: Of the results.

    Returns:
        Two float32 tensors of shape (1, length, size), whose halves are equal.
    """
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    places = torch.arange(length, dtype=torch.float32, device=device)
    angles = places[:, None] * (1.0 / base**steps)
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads by their places.

    Args:
        heads: (batch, length, heads, size).
        cos: (batch or 1, length, size).
        sin: Likewise.

    Returns:
        A tensor like `heads`. For the backward only the tables are kept.
    """
    first, second = heads.chunk(2, -1)
    turned = heads * cos.unsqueeze(2) + torch.cat((-second, first), -1) * sin.unsqueeze(2)
    return turned.to(heads.dtype)
