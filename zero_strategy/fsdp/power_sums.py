"""Sums of powers of one bucket's reduced gradients, taken while they pass by on their way to a tier.

Reading them again for a norm would cost as much as the step. Chunks are cut between the blocks of exact sums
(`ops.exact_sums`): a piece begins at a block of its parameter and, as chunks do, at a multiple of `BLOCK` of the owned
elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero_strategy import ops
from zero_strategy.fsdp.layout import Piece
from zero_strategy.offload.chunks import Powers
from zero_strategy.ops.block_sums import BLOCK, WORDS


class PowerSums:
    """Sums over the parts of parameters in one bucket.

    Args:
        norm_type: p.
        exact: Take digits of exact sums; a maximum is exact anyway.
    """

    def __init__(self, norm_type: float, *, exact: bool = False) -> None:
        self._norm_type, self._exact = norm_type, exact and not math.isinf(norm_type)
        self._pieces: Sequence[Piece] = ()
        self._found: dict[int, Powers] = {}
        self._taken: list[tuple[list[Piece], Tensor, Tensor]] = []

    def serves(self, wanted: PowerSums) -> bool:
        """True if these are the sums that others are to be."""
        return (self._norm_type, self._exact) == (wanted._norm_type, wanted._exact)

    def anew(self) -> PowerSums:
        """Sums of the same kind of values to come."""
        return PowerSums(self._norm_type, exact=self._exact)

    def begin(self, pieces: Sequence[Piece]) -> Callable[[int, Tensor], None]:
        """A function that takes the chunks of a new pass."""
        nothing = torch.zeros(WORDS, dtype=torch.int64) if self._exact else 0.0
        self._pieces, self._found = pieces, {piece.index: Powers(self._norm_type, nothing, 0) for piece in pieces}
        self._taken.clear()
        return self._take

    def _take(self, start: int, values: Tensor) -> None:
        stop = start + values.numel()
        here = [piece for piece in self._pieces if piece.offset < stop and piece.offset + piece.numel > start]
        cut = [values[max(piece.offset - start, 0) : piece.offset + piece.numel - start] for piece in here]
        if not here:
            return
        if self._exact:
            assert all((piece.start + max(start - piece.offset, 0)) % BLOCK == 0 for piece in here)
            self._taken.append((here, *ops.exact_sums(cut, self._norm_type)))
        else:
            self._taken.append((here, *ops.grad_stats(cut, self._norm_type)))

    def add_up(self) -> None:
        """Read what was taken; on a device that has been computed by now, or the host would wait for it."""
        if not self._taken:
            return
        pieces = [piece for here, _, _ in self._taken for piece in here]
        sums = torch.cat([sums for _, sums, _ in self._taken])
        counts = torch.cat([counts for _, _, counts in self._taken])
        if self._exact:
            rows = torch.cat([sums, counts.unsqueeze(1)], dim=1).cpu()
            sums, counts = rows[:, :-1], rows[:, -1]
        else:
            sums, counts = ops.stats_to_host(sums, counts)
        values: Sequence[float | Tensor] = sums.unbind() if self._exact else sums.tolist()
        for piece, value, count in zip(pieces, values, counts.tolist(), strict=True):
            before = self._found[piece.index]
            if math.isinf(self._norm_type):
                # NaN counts as larger, and stays: Python's `max` would let go of it.
                together = value if not value <= before.total and before.total == before.total else before.total
            else:
                together = before.total + value
            self._found[piece.index] = Powers(self._norm_type, together, before.nonfinite + count)
        self._taken.clear()

    def of(self, index: int) -> Powers | None:
        """The sum by the last `add_up`; None if nothing is known."""
        return self._found.get(index)
