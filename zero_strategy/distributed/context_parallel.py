"""A sequence divided among context-parallel ranks, and put together again.

    2 x ranks chunks:    0  1  2  3  4  5  6  7          rank r has chunks r and 2 x ranks - 1 - r:
                         0  1  2  3  3  2  1  0  <- rank

In causal attention a late position has more to attend to than an early one; a rank with one chunk from either end has
as much work as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.distributed.group_ranks import get_pg_rank, get_pg_size

MASK = "attention_mask"
"""The entry of a batch whose sequence dimension is 2 (batch, 1, queries, keys): its rows of queries are divided."""


def get_batch_on_this_cp_rank(batch: Mapping[str, Any], cp_group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """This rank's part of a batch.

    Args:
        batch: Tensors with the sequence in dimension 1 (2 for "attention_mask"); other values are left as they are.
        cp_group: The ranks among which sequences are divided; None: this rank alone.

    Raises:
        ValueError: See `batch_on_rank`.
    """
    return batch_on_rank(batch, get_pg_rank(cp_group), get_pg_size(cp_group))


def batch_on_rank(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The part of a batch that rank `rank` of `size` has; with one rank, everything.

    Raises:
        ValueError: If a sequence is no multiple of 2 x size long; names the entry.
    """
    if size == 1:
        return dict(batch)
    return {
        name: _part(name, value, rank, size) if isinstance(value, Tensor) else value for name, value in batch.items()
    }


def batch_from_ranks(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The batch whose parts these are, in the order of ranks: the inverse of `batch_on_rank`.

    Raises:
        ValueError: If parts have different entries.
    """
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError(f"parts have different entries: {[sorted(part) for part in parts]}")
    return {
        name: _whole(name, [part[name] for part in parts]) if isinstance(value, Tensor) else value
        for name, value in parts[0].items()
    }


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The chunks of a rank, of 2 x size."""
    return rank, 2 * size - 1 - rank


def _dim(name: str) -> int:
    return 2 if name == MASK else 1


def _part(name: str, value: Tensor, rank: int, size: int) -> Tensor:
    dim = _dim(name)
    if value.dim() <= dim or value.shape[dim] % (2 * size):
        raise ValueError(
            f"{name!r} of shape {list(value.shape)} cannot be divided among {size} context-parallel ranks: dimension "
            f"{dim}, the sequence, must be a multiple of {2 * size}; pad it"
        )
    chunks = value.chunk(2 * size, dim)
    return torch.cat([chunks[index] for index in chunks_of(rank, size)], dim)


def _whole(name: str, parts: Sequence[Tensor]) -> Tensor:
    size, dim = len(parts), _dim(name)
    if size == 1:
        return parts[0]
    chunks: list[Tensor] = [parts[0]] * (2 * size)
    for rank, part in enumerate(parts):
        for index, chunk in zip(chunks_of(rank, size), part.chunk(2, dim), strict=True):
            chunks[index] = chunk
    return torch.cat(chunks, dim)
