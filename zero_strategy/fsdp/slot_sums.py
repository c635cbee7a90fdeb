"""Gradients of one bucket on their way to the sum over all slots of a step (`reproducible.slots`).

    a slot's gradients      whole, this rank's own (`LocalSums`)
      |  reduced once per step: they wait for those of further slots (`own`), and travel as the nodes they make up
      v
    nodes of this rank's slice (`arrived`, of one backward; then `owned`)
      |  with all slots of the row: nodes of other replicas, too
      v
    the sum over all slots, times 1 / slots (`ReducedSums`)

What arrives is kept apart until ranks have agreed that a backward is over: gradients that come late, of other
parameters, are then added to the node that they belong to, and not to one that it has become a part of.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zero_strategy.comm.collectives import PendingWork
from zero_strategy.comm.mesh import Mesh
from zero_strategy.config import ZeroConfig
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.reproducible.slot_tree import Node, NodeSums, SumOrder
from zero_strategy.reproducible.slots import SlotCount, SlotPlaces


def slots_of_rank(config: ZeroConfig, mesh: Mesh) -> SlotCount | None:
    """The count of slots of this rank; None: a step is no number of slots."""
    slots = config.reproducible.slots
    if not slots:
        return None
    per_step = config.gradient_reduction == "per_step"
    places = SlotPlaces(slots, mesh.replicate.size, mesh.shard_size, per_step)
    return SlotCount(places, mesh.replicate.rank, mesh.shard_rank)


class SlotSums:
    """Partial sums of a bucket's gradients.

    Args:
        bucket: The parameters.
        count: The slot at hand.
        dtype: Of gradients, in which they travel and are summed.

    Attributes:
        count: As above.
        waiting: Indices of parameters with gradients that have not travelled.
    """

    def __init__(self, bucket: ParameterBucket, count: SlotCount, dtype: torch.dtype) -> None:
        self._bucket, self.count, self._dtype = bucket, count, dtype
        slots = count.places.slots
        self._own, self._owned = NodeSums(slots), NodeSums(slots)
        self._arrived: dict[Node, Tensor] = {}
        self.waiting: set[int] = set()

    @property
    def factor(self) -> float:
        """Factor of the sum over slots that makes it their mean."""
        return 1.0 / self.count.places.slots

    @property
    def empty(self) -> bool:
        """True if no slot of this step has left anything here."""
        return not (self._own or self._owned or self._arrived)

    @property
    def goes_straight(self) -> bool:
        """True if one exchange gives the sum over all slots, on this rank's slice."""
        return self.count.places.count == 1 and self._bucket.ranks.replicate.size == 1

    # ---- this rank's own slots ----

    def keep(self, whole: Tensor, indices: set[int]) -> bool:
        """Let a slot's gradients of the whole bucket wait; some parameters have some.

        Returns:
            Whether the memory is the caller's again: they are in a sum.
        """
        self.waiting |= indices
        return self._own.put(self.count.node, whole)

    def take_waiting(self) -> list[Tensor]:
        """Buffers that this rank sends, one in each exchange of the step."""
        self.waiting.clear()
        rows = [self._own.take(node) for node in self.count.block]
        numel, device = self._bucket.layout.numel, self._bucket.device
        sent = [torch.zeros(numel, dtype=self._dtype, device=device) if row is None else row for row in rows]
        # A rank with fewer nodes than others sends something in vain.
        return sent + sent[:1] * (len(self.count.exchanges()) - len(sent))

    # ---- nodes of this rank's slice ----

    def room(self, order: SumOrder) -> Tensor:
        """Memory for the results of an exchange, one after the other."""
        numel = len(order.results) * self._bucket.layout.slice_numel
        return torch.empty(numel, dtype=self._dtype, device=self._bucket.device)

    def arrive(self, order: SumOrder, values: Tensor) -> None:
        """Take the results of an exchange."""
        for node, row in zip(order.results, values.chunk(len(order.results)), strict=True):
            known = self._arrived.get(node)
            if known is not None:
                known.add_(row)  # of other parameters
            else:
                # Of several a copy: a node that stays would keep the memory of those that have become parts of sums.
                self._arrived[node] = row if len(order.results) == 1 else row.clone()

    def end_backward(self) -> None:
        """A backward is over, on all ranks."""
        arrived, self._arrived = self._arrived, {}
        for node, values in arrived.items():
            self._owned.put(node, values)

    def total(self) -> Tensor | None:
        """The sum over all slots of this rank's slice, taken out; None: no rank has had any. A collective of replicas.

        Zeros come out without a sign, as where zeros were added.
        """
        replicas = self._bucket.ranks.replicate
        if replicas.size == 1:
            root = self._owned.take((0, self.count.places.slots))
            return None if root is None else root.add_(0.0)
        return self._across_replicas(replicas.rank)

    def _across_replicas(self, rank: int) -> Tensor | None:
        replicas, names = self._bucket.ranks.replicate, self._bucket.names
        rows = [self._owned.take(node) for node in self.count.row_nodes]
        like = next((row for row in rows if row is not None), None)
        if like is None:
            like = torch.zeros(self._bucket.layout.slice_numel, dtype=self._dtype, device=self._bucket.device)
        sums = NodeSums(self.count.places.slots)
        for turn, order in enumerate(self.count.places.across()):
            row = rows[turn] if turn < len(rows) else like
            sent = torch.zeros_like(like) if row is None else row
            parts = torch.empty(
                len(order.results) * (sent.numel() // replicas.size), dtype=sent.dtype, device=sent.device
            )
            replicas.reduce_scatter(sent, names, 1.0, parts, order).wait()
            for node, values in zip(order.results, parts.chunk(len(order.results)), strict=True):
                sums.put(node, values)
        part = sums.take((0, self.count.places.slots))
        assert part is not None
        whole = torch.empty_like(like)
        whole.chunk(replicas.size)[rank].copy_(part)
        replicas.all_gather(whole, of=names).wait()
        return whole

    # ---- what the user does meanwhile ----

    def zero(self, index: int) -> None:
        """A parameter's gradients become zeros, in all slots so far."""
        segment, piece = self._bucket.layout.segments[index], self._bucket.slice_piece_of.get(index)
        self.waiting.discard(index)
        self._own.fill(segment.offset, segment.stop, 0.0)
        if piece is not None:
            self._owned.fill(piece.offset, piece.offset + piece.numel, 0.0)

    def clear(self) -> None:
        """Forget all."""
        self._own.clear()
        self._owned.clear()
        self._arrived.clear()
        self.waiting.clear()

    def held(self) -> Iterator[Tensor]:
        """Every tensor with memory of its own."""
        yield from self._own
        yield from self._owned
        yield from self._arrived.values()


class SlotExchange:
    """Exchanges under way that end a backward for one bucket.

    Args:
        works: One for each.
        orders: Likewise.
        results: Their results, likewise.
        sent: What is read until they are over.
    """

    def __init__(
        self, works: list[PendingWork], orders: list[SumOrder], results: list[Tensor], sent: list[Tensor]
    ) -> None:
        self._works, self._orders, self._results, self._sent = works, orders, results, sent

    @property
    def reads(self) -> list[Tensor]:
        """Memory that is in use until it is over."""
        return self._sent + self._results

    def wait(self) -> None:
        """Wait for results that lie where they belong."""
        for work in self._works:
            work.wait()

    def arrive(self, sums: SlotSums) -> None:
        """Wait, and hand the results over."""
        for work, order, values in zip(self._works, self._orders, self._results, strict=True):
            work.wait()
            sums.arrive(order, values)
