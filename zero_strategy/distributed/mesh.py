"""The mesh of data-parallel ranks: a replicate axis times a shard axis.

Rank r sits at (r // shard, r % shard): neighbours, which usually share a node, shard among themselves, and the copies
on other nodes replicate (hybrid sharding). Parameter gathers, gradient reductions and control messages each have a
group of their own, so that an early gather never waits behind a reduction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from zero_strategy.distributed.collectives import Communicator
from zero_strategy.distributed.counters import CommunicationCounters
from zero_strategy.distributed.groups import own_group
from zero_strategy.distributed.rendezvous import StoreRendezvous


@dataclass
class Mesh:
    """Groups of the data-parallel mesh, from this rank's point of view.

    Attributes:
        gather: Ranks of the shard axis, for parameters.
        reduce: The same ranks, for gradients.
        replicate: Ranks that hold the same slice.
        control: All data-parallel ranks, on the host, for flags, norms and objects.
        shard_control: The ranks of the shard axis, on the host, for norms.
        rendezvous: Bounded meeting of all data-parallel ranks.
        counters: What this rank sent.
    """

    gather: Communicator
    reduce: Communicator
    replicate: Communicator
    control: Communicator
    shard_control: Communicator
    rendezvous: StoreRendezvous
    counters: CommunicationCounters = field(default_factory=CommunicationCounters)

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.control.size

    @property
    def rank(self) -> int:
        """This rank among all data-parallel ranks."""
        return self.control.rank

    @property
    def shard_rank(self) -> int:
        """Index of the slice that this rank owns."""
        return self.gather.rank

    @property
    def shard_size(self) -> int:
        """Number of slices."""
        return self.gather.size

    @classmethod
    def build(cls, *, replicate: int, shard: int, timeout: float, rendezvous_seconds: float, name: str) -> Mesh:
        """Make the groups; a collective over the default process group.

        Args:
            replicate: Size of the replicate axis.
            shard: Size of the shard axis.
            timeout: Seconds after which a collective of these groups fails.
            rendezvous_seconds: Bound of our own waits.
            name: Tells engines of one process apart; equal on all ranks.

        Raises:
            ValueError: If replicate x shard is not the world size.
        """
        counters = CommunicationCounters()
        world = dist.get_world_size() if dist.is_initialized() else 1
        if replicate * shard != world:
            raise ValueError(f"mesh.replicate {replicate} x mesh.shard {shard} is not the world size {world}")
        if world == 1:
            alone = Communicator(None, counters)
            return cls(alone, alone, alone, alone, alone, StoreRendezvous(0, 1, 0.0, name), counters)
        limit = timedelta(seconds=timeout)

        def group_of(lists: list[list[int]], backend: str | None = None) -> Communicator:
            return Communicator(own_group(lists, timeout=limit, backend=backend), counters)

        rows = [[row * shard + column for column in range(shard)] for row in range(replicate)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        control = group_of([list(range(world))], backend="gloo")
        if shard == 1 or replicate == 1:
            shard_control = control if replicate == 1 else Communicator(None, counters)
        else:
            shard_control = group_of(rows, backend="gloo")
        return cls(
            gather=group_of(rows) if shard > 1 else Communicator(None, counters),
            reduce=group_of(rows) if shard > 1 else Communicator(None, counters),
            replicate=group_of(columns) if replicate > 1 else Communicator(None, counters),
            control=control,
            shard_control=shard_control,
            rendezvous=StoreRendezvous(dist.get_rank(), world, rendezvous_seconds, name),
            counters=counters,
        )
