"""Rows that the experts of a layer get, counted for reports; a warning where one rank has many more than others."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_CALLS, _MOST = 100, 1.5
"""Forwards after which a rank's rows are compared with the mean over ranks, and how many times it they may be."""


class ExpertLoad:
    """Counts of one layer, the same on all ranks of a group.

    Args:
        name: Of the layer.
        experts: Number of experts.
        rank: This rank in its group.
        ranks: Ranks that divide the experts.
    """

    def __init__(self, name: str, experts: int, rank: int, ranks: int) -> None:
        self._name, self._rank, self._ranks = name, rank, ranks
        self._rows, self._seen = (torch.zeros(experts, dtype=torch.int64) for _ in range(2))
        self._calls = 0

    def add(self, counts: Tensor) -> None:
        """Count the rows of a forward.

        Args:
            counts: Of all ranks of the group for each expert, (experts,) int64, on the host.
        """
        self._rows += counts
        if self._calls < _CALLS:
            self._calls, self._seen = self._calls + 1, self._seen + counts
            if self._calls == _CALLS and self._rank == 0:
                self._compare()

    def take(self) -> list[int]:
        """Rows for each expert since the last call."""
        found: list[int] = self._rows.tolist()
        self._rows.zero_()
        return found

    def _compare(self) -> None:
        by_rank = self._seen.view(self._ranks, -1).sum(dim=1).double()
        times = float(by_rank.max() / by_rank.mean().clamp(min=1))
        if times > _MOST:
            warnings.warn(
                f"experts of {self._name}: rank {int(by_rank.argmax())} of {self._ranks} had {times:.2f} times the "
                f"mean number of rows in {_CALLS} forwards, and the others wait for it. A larger weight of the "
                "router's balance loss, or a smaller mesh.expert, evens that out",
                stacklevel=2,
            )
