"""Which global stage a rank's chunk is.

loop, 2 ranks x 2 chunks: rank 0 has stages 0 and 2, rank 1 has 1 and 3.
v, the same: rank 0 has stages 0 and 3, rank 1 has 1 and 2; the way goes down the ranks and back up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shape = Literal["loop", "v"]


@dataclass(frozen=True)
class Placement:
    """The stages of `ranks` pipeline ranks with `chunks` stages each.

    Raises:
        ValueError: If ranks or chunks are fewer than one, the shape is unknown, or a "v" has more than two chunks.
    """

    ranks: int
    chunks: int = 1
    shape: Shape = "loop"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunks < 1:
            raise ValueError(f"a pipeline needs at least one rank and one chunk, not {self.ranks} and {self.chunks}")
        if self.shape not in ("loop", "v"):
            raise ValueError(f"placement {self.shape!r} is unknown; there are 'loop' and 'v'")
        if self.shape == "v" and self.chunks != 2:
            raise ValueError(f"the 'v' placement has two chunks per rank, not {self.chunks}")

    @property
    def stages(self) -> int:
        """All global stages: ranks x chunks."""
        return self.ranks * self.chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        """The global stage of a rank's chunk."""
        if self.shape == "v" and chunk == 1:
            return self.stages - 1 - rank
        return chunk * self.ranks + rank

    def rank_of(self, stage: int) -> int:
        """The rank that has a global stage."""
        if self.shape == "v" and stage >= self.ranks:
            return self.stages - 1 - stage
        return stage % self.ranks

    def chunk_of(self, stage: int) -> int:
        """The number of a global stage among its rank's chunks."""
        return stage // self.ranks
