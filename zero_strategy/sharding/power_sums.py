"""What the norm of gradients in files needs, taken on their way there: reading them again costs as much as the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from zero_strategy import ops
from zero_strategy.sharding.layout import Piece


class PowerSums:
    """Sums over the parts of parameters in one bucket, taken while they pass by chunk by chunk."""

    def __init__(self, norm_type: float) -> None:
        self.norm_type = norm_type
        self._pieces: Sequence[Piece] = ()
        self._found: dict[int, tuple[float, int]] = {}

    def begin(self, pieces: Sequence[Piece]) -> Callable[[int, Tensor], None]:
        """What takes the chunks of a new pass."""
        self._pieces, self._found = pieces, {piece.index: (0.0, 0) for piece in pieces}
        return self._take

    def _take(self, start: int, values: Tensor) -> None:
        stop = start + values.numel()
        here = [piece for piece in self._pieces if piece.offset < stop and piece.offset + piece.numel > start]
        cut = [values[max(piece.offset - start, 0) : piece.offset + piece.numel - start] for piece in here]
        if not here:
            return
        sums, bad = ops.grad_stats(cut, self.norm_type)
        for piece, value, count in zip(here, sums.tolist(), bad.tolist(), strict=True):
            before, known = self._found[piece.index]
            total = max(before, value) if math.isinf(self.norm_type) else before + value
            self._found[piece.index] = total, known + int(count)

    def of(self, index: int) -> tuple[float, float, int] | None:
        """p, the sum, and how many values are not finite; None if nothing is known."""
        return None if index not in self._found else (self.norm_type, *self._found[index])
