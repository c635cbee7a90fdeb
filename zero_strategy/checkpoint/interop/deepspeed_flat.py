"""Tensors that lie in pieces in the flat buffers of several ranks, put together when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.portable import StoredTensor

Source = Callable[[], torch.Tensor]
"""Gives a rank's flat buffer: a mapped view, or what is read from a file of its own."""


class Flat:
    """One flat vector, divided among the ranks in this order.

    Args:
        parts: The ranks' buffers, 1-D, of one dtype.
        lengths: Their elements.
        dtype: Their dtype.
    """

    def __init__(self, parts: Sequence[Source], lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.parts = parts
        self.lengths = lengths
        self.dtype = dtype

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Flat:
        """One whose buffers are mapped tensors."""
        return cls([_giving(tensor) for tensor in tensors], [t.numel() for t in tensors], tensors[0].dtype)

    def __len__(self) -> int:
        return sum(self.lengths)

    def stored(self, name: str, shape: Sequence[int], start: int) -> StoredTensor:
        """A tensor that begins at an element of the whole vector, whichever ranks it lies on."""
        return self._stored(name, shape, lambda: self._run(start, start + prod(shape)))

    def stored_by_rank(self, name: str, shape: Sequence[int], start: int) -> StoredTensor:
        """A tensor of which every rank has an equal piece, beginning at the same element; the last are padded."""
        numel = prod(shape)
        piece = -(-numel // len(self.parts))
        return self._stored(name, shape, lambda: [part()[start : start + piece] for part in self.parts])

    def _stored(self, name: str, shape: Sequence[int], pieces: Callable[[], list[torch.Tensor]]) -> StoredTensor:
        numel = prod(shape)

        def load() -> torch.Tensor:
            return torch.cat(pieces())[:numel].view(tuple(shape)) if numel else torch.empty(shape, dtype=self.dtype)

        return StoredTensor(TensorSpec(name, self.dtype, tuple(shape)), load)

    def _run(self, start: int, stop: int) -> list[torch.Tensor]:
        pieces, begin = [], 0
        for part, length in zip(self.parts, self.lengths, strict=True):
            low, high = max(start, begin), min(stop, begin + length)
            if low < high:
                pieces.append(part()[low - begin : high - begin])
            begin += length
        return pieces


def _giving(tensor: torch.Tensor) -> Source:
    return lambda: tensor


def cast(stored: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """The same tensor, rounded to another dtype."""
    spec = TensorSpec(stored.spec.name, dtype, stored.spec.shape)
    return StoredTensor(spec, lambda: stored.load().to(dtype))


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    """A shape as the file has it.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, (tuple, list)) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{where}: {value!r} is no shape")
    return tuple(value)
