"""Costs of collectives, in closed form: latencies that add up, and bytes that pass the slowest link.

A message of n bytes takes a + n / b seconds: a is the latency of a link, b its bandwidth (Hockney, "The communication
challenge for MPP", 1994). Of N ranks on H hosts, each exchanging n bytes in all:

    ring all-gather        start + L(N - 1) + (N - 1)/N n / b
    ring reduce-scatter    the same, + (N - 1)/N n g
    ring all-reduce        start + 2 L(N - 1) + 2 (N - 1)/N n / b + (N - 1)/N n g
    tree all-reduce        start + 2 ((N/H - 1) a_in + ceil(log2 H) a_out) + 2 n / b + n g

with g the seconds to add a byte, and L(N - 1) = (N - H) a_in + (H - 1) a_out, since of a ring's N - 1 steps H - 1 cross
from host to host. Ring: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
2005, sections 4.1 to 4.3. Tree: chains inside of hosts and a double binary tree between them, Sanders, Speck, Traff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009. Both in the form of NCCL's own tuner
(src/graph/tuning.cc), which takes the quicker one for an all-reduce and knows rings only for the other two. Exchanging
slices in pairs, as this package does on gloo, has the ring's cost on one host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A way between two ranks.

    Attributes:
        latency: Seconds of a message without bytes.
        bandwidth: Bytes per second of one rank, in each direction.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective.

    Attributes:
        ranks: How many.
        hosts: On how many hosts they are, evenly.
        within: The link inside of a host.
        between: The link from host to host, of one rank: the ranks of a host use theirs together.
        start: Seconds before the first message of a collective.
        add: Seconds to add up a byte.
    """

    ranks: int
    hosts: int
    within: Link
    between: Link
    start: float = 0.0
    add: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.ranks:
            raise ValueError(f"{self.ranks} ranks on {self.hosts} hosts: there are 1 to {self.ranks} hosts")

    @property
    def bandwidth(self) -> float:
        """Bytes per second that pass through each rank of a ring: those of its slowest link."""
        if self.hosts == 1:
            return self.within.bandwidth
        return min(self.within.bandwidth, self.ranks / self.hosts * self.between.bandwidth)

    @property
    def share(self) -> float:
        """The part of the bytes that a rank sends in one turn of a ring: (N - 1)/N."""
        return (self.ranks - 1) / self.ranks

    @property
    def turn(self) -> float:
        """Latency of one turn of a ring, seconds."""
        return (self.ranks - self.hosts) * self.within.latency + (self.hosts - 1) * self.between.latency

    def all_gather(self, nbytes: float) -> float:
        """Seconds until every rank has all of `nbytes`, of which each had its part."""
        if self.ranks == 1:
            return 0.0
        return self.start + self.turn + self.share * nbytes / self.bandwidth

    def reduce_scatter(self, nbytes: float) -> float:
        """Seconds until every rank has its part of the sum of `nbytes` of each."""
        if self.ranks == 1:
            return 0.0
        return self.all_gather(nbytes) + self.share * nbytes * self.add

    def ring_all_reduce(self, nbytes: float) -> float:
        """Seconds until every rank has the sum of `nbytes` of each, around a ring."""
        if self.ranks == 1:
            return 0.0
        return self.start + 2 * self.turn + self.share * nbytes * (2 / self.bandwidth + self.add)

    def tree_all_reduce(self, nbytes: float) -> float:
        """The same up and down a tree."""
        if self.ranks == 1:
            return 0.0
        chain = (self.ranks / self.hosts - 1) * self.within.latency
        height = math.ceil(math.log2(self.hosts)) * self.between.latency
        return self.start + 2 * (chain + height) + nbytes * (2 / self.bandwidth + self.add)

    def all_reduce(self, nbytes: float) -> float:
        """The quicker of both."""
        return min(self.ring_all_reduce(nbytes), self.tree_all_reduce(nbytes))

    def message(self, nbytes: float) -> float:
        """Seconds of one message between two ranks of the group that are next to each other on different hosts."""
        link = self.within if self.hosts == 1 else self.between
        return link.latency + nbytes / link.bandwidth
