"""A schedule as data: what every rank computes, in order."""

from __future__ import annotations

from dataclasses import dataclass

from zero_strategy.pipeline.actions import Action, Kind
from zero_strategy.pipeline.placement import Placement

Row = tuple[Action, ...]

_BITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 4, Kind.BACKWARD_WEIGHT: 8}
_WHOLE = (1 | 2, 1 | 4 | 8)


@dataclass(frozen=True)
class Table:
    """A row of actions for each rank. Times and messages are in no table: they follow from the order.

    Every rank carries out a forward of every micro-batch in every chunk, and a backward, or both halves of one; in a
    table for inference, forwards only.

    Raises:
        ValueError: If the rows are not those; the message names the rank and the action.
    """

    name: str
    micro_batches: int
    placement: Placement
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"schedule {self.name}: needs at least one micro-batch, not {self.micro_batches}")
        if len(self.rows) != self.ranks:
            raise ValueError(f"schedule {self.name}: {len(self.rows)} rows for {self.ranks} ranks")
        whole = (1,) if self.forward_only else _WHOLE
        first = set(self.rows[0])
        for rank, row in enumerate(self.rows):
            if rank and len(row) == len(first) and set(row) == first:
                continue  # the same as rank 0 does, in another order
            seen = self._seen(rank, row)
            for place, bits in enumerate(seen):
                if bits not in whole:
                    chunk, micro_batch = divmod(place, self.micro_batches)
                    there = "".join(kind.value for kind, bit in _BITS.items() if bits & bit) or "nothing"
                    raise ValueError(
                        f"schedule {self.name}, rank {rank}: of micro-batch {micro_batch} in chunk {chunk} there is "
                        f"{there}; a forward (F) with a backward (B), or with both halves of one (I and W), is needed"
                    )

    @property
    def ranks(self) -> int:
        """How many pipeline ranks, which is how many rows."""
        return self.placement.ranks

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        return self.placement.chunks

    @property
    def forward_only(self) -> bool:
        """Whether this is a table for inference."""
        return all(action.kind is Kind.FORWARD for row in self.rows for action in row)

    def _seen(self, rank: int, row: Row) -> list[int]:
        """For each chunk and micro-batch, the bits of what the row does with it."""
        micro_batches, chunks = self.micro_batches, self.chunks
        seen = [0] * (micro_batches * chunks)
        for kind, micro_batch, chunk in row:
            if not (0 <= micro_batch < micro_batches and 0 <= chunk < chunks):
                there = f"there are {micro_batches} micro-batches and {chunks} chunks"
                raise ValueError(f"{self._where(rank, Action(kind, micro_batch, chunk))}, but {there}")
            place, bit = chunk * micro_batches + micro_batch, _BITS[kind]
            if seen[place] & bit:
                raise ValueError(f"{self._where(rank, Action(kind, micro_batch, chunk))} twice")
            seen[place] |= bit
        return seen

    def _where(self, rank: int, action: Action) -> str:
        what = f"{action.kind.value} of micro-batch {action.micro_batch} in chunk {action.chunk}"
        return f"schedule {self.name}, rank {rank}: {what}"
