"""The slots of a step: who computes them, and which of them this rank is at.

    slots 8, 2 replicas of 2 ranks that shard:      reduced once per step      reduced per micro-batch
        replica 0   rank 0, rank 1                  0 1     2 3                0 2     1 3
        replica 1   rank 2, rank 3                  4 5     6 7                4 6     5 7

Where a rank sums up its own micro-batches before they travel, its slots lie side by side, so that they make up few
nodes of the tree; where each micro-batch travels, those that ranks compute at the same time do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from zero_strategy.reproducible.slot_tree import Node, SumOrder, cover


@dataclass(frozen=True)
class SlotPlaces:
    """Slots of all data-parallel ranks.

    Args:
        slots: Of a step; a multiple of `replicas` x `shards`.
        replicas: Rows of ranks that hold the whole state.
        shards: Ranks of a row, among which it is divided.
        per_step: Ranks sum up their own micro-batches before they travel.
    """

    slots: int
    replicas: int
    shards: int
    per_step: bool

    @property
    def count(self) -> int:
        """Micro-batches of each rank in a step."""
        return self.slots // (self.replicas * self.shards)

    def row(self, replica: int) -> Node:
        """First slot of a replica, and one past its last."""
        size = self.slots // self.replicas
        return replica * size, (replica + 1) * size

    def slot(self, replica: int, shard: int, micro: int) -> int:
        """The slot that a rank computes as its micro-batch number `micro`."""
        first, _ = self.row(replica)
        return first + (shard * self.count + micro if self.per_step else micro * self.shards + shard)

    def own(self, replica: int, shard: int) -> list[int]:
        """The slots of a rank, in the order in which it computes them."""
        return [self.slot(replica, shard, micro) for micro in range(self.count)]

    def block(self, replica: int, shard: int) -> list[Node]:
        """Nodes that a rank's own slots make up, where they lie side by side."""
        first = self.slot(replica, shard, 0)
        return cover(self.slots, first, first + self.count)

    def exchanges(self, replica: int, micro: int) -> list[SumOrder]:
        """The exchanges of a row of ranks that end a micro-batch (or with it the step), one after the other.

        Of each rank the own nodes: in exchange i its i-th, or nothing where it has fewer.
        """
        if not self.per_step:
            slots = [self.slot(replica, shard, micro) for shard in range(self.shards)]
            return [SumOrder(self.slots, tuple((slot, slot + 1) for slot in slots))]
        blocks = [self.block(replica, shard) for shard in range(self.shards)]
        return _in_turn(self.slots, blocks)

    def across(self) -> list[SumOrder]:
        """The exchanges of replicas that end a step."""
        return _in_turn(self.slots, [cover(self.slots, *self.row(replica)) for replica in range(self.replicas)])

    def row_nodes(self, replica: int) -> list[Node]:
        """Nodes that the slots of a row make up."""
        return cover(self.slots, *self.row(replica))


def _in_turn(slots: int, nodes: list[list[Node]]) -> list[SumOrder]:
    most = max(map(len, nodes))
    return [SumOrder(slots, tuple(own[turn] if turn < len(own) else None for own in nodes)) for turn in range(most)]


class SlotCount:
    """The micro-batch of a step that this rank is at, and the slot that it is.

    Backwards are counted one by one (`begin`, `end`), or a pipeline, which mixes micro-batches, says at each
    computation which one it belongs to (`at`).

    Args:
        places: Of all ranks.
        replica, shard: This rank's place.

    Attributes:
        places: As above.
        micro: Number of the micro-batch whose backward is under way or comes next; the number of them: all are done.
    """

    def __init__(self, places: SlotPlaces, replica: int, shard: int) -> None:
        self.places, self._replica, self._shard = places, replica, shard
        self.micro = 0
        self._ends: bool | None = None
        """Whether what is computed ends the step; None: that follows from the count."""
        self._exchanges: dict[int, list[SumOrder]] = {}

    @property
    def own(self) -> list[int]:
        """This rank's slots, in its order."""
        return self.places.own(self._replica, self._shard)

    @property
    def slot(self) -> int:
        """The slot of the micro-batch at hand; after the last one, the first of the next step."""
        return self.own[self.micro % self.places.count]

    @property
    def is_last(self) -> bool:
        """True if the backward at hand ends the step."""
        return self.micro == self.places.count - 1 if self._ends is None else self._ends

    @property
    def mixed(self) -> bool:
        """True inside of `at`: this micro-batch need not follow the one before."""
        return self._ends is not None

    @property
    def complete(self) -> bool:
        """True if all micro-batches of the step are done."""
        return self.micro == self.places.count

    @property
    def node(self) -> Node:
        """The leaf of the micro-batch at hand."""
        return self.slot, self.slot + 1

    @property
    def block(self) -> list[Node]:
        """Nodes that this rank's slots make up, where they lie side by side."""
        return self.places.block(self._replica, self._shard)

    @property
    def row_nodes(self) -> list[Node]:
        """Nodes that the slots of this rank's row make up."""
        return self.places.row_nodes(self._replica)

    def exchanges(self) -> list[SumOrder]:
        """See `SlotPlaces.exchanges`; of this rank's row, for the micro-batch at hand."""
        if self.micro not in self._exchanges:  # each bucket asks
            self._exchanges[self.micro] = self.places.exchanges(self._replica, self.micro)
        return self._exchanges[self.micro]

    def begin(self, *, dropped: bool) -> None:
        """A backward begins; inside of `at` it is known already which one.

        Args:
            dropped: No gradient of earlier micro-batches of the step is left.

        Raises:
            RuntimeError: If the step has all of its micro-batches already.
        """
        if self.mixed:
            return
        if dropped:
            self.micro = 0
        if self.complete:
            ranks = self.places.replicas * self.places.shards
            raise RuntimeError(
                f"reproducible.slots is {self.places.slots}: on {ranks} rank(s) a step is {self.places.count} "
                f"micro-batch(es) each, and this is backward number {self.places.count + 1} since the last step. Call "
                f"optimizer.step() after {self.places.count}; several backwards of one micro-batch belong inside of "
                "one `with engine.micro_batch(backwards=n):`"
            )

    def end(self) -> None:
        """A backward is over."""
        if not self.mixed:
            self.micro += 1

    @contextmanager
    def at(self, micro: int, *, ends: bool) -> Iterator[None]:
        """Be at a micro-batch in the block, whichever was there before.

        Args:
            micro: Its number.
            ends: Gradients from the block are the last of the step, which is complete afterwards.
        """
        assert not self.mixed, "one computation at a time"
        before, self.micro, self._ends = self.micro, micro, ends
        try:
            yield
            if ends:
                before = self.places.count
        finally:
            self.micro, self._ends = before, None

    def check_complete(self, what: str) -> None:
        """Raise if gradients of some micro-batches of a step are wanted before all are done.

        Raises:
            RuntimeError: Naming both numbers.
        """
        if self.micro < self.places.count:
            raise RuntimeError(
                f"{what} after {self.micro} of {self.places.count} micro-batches: reproducible.slots is "
                f"{self.places.slots}, so that on {self.places.replicas * self.places.shards} rank(s) a step is "
                f"{self.places.count} backwards of each; accumulate as many"
            )
