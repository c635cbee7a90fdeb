"""Small messages among many ranks: every rank's, in rank order, in a number of rounds that grows as a logarithm."""

from __future__ import annotations

import math
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm.transport import gather_by_doubling, gather_parts_by_doubling


class Ranks:
    """Ranks of one process, each in a thread, connected by gloo.

    Attributes:
        rounds: By rank, from and to whom it has swapped.
    """

    def __init__(self, size: int) -> None:
        self.size, self.rounds = size, [list[tuple[int, int]]() for _ in range(size)]
        self._store = dist.HashStore()

    def gather(self, values: list[Tensor], lengths: list[int] | None = None) -> list[list[Tensor]]:
        """Every rank's result; of parts of different lengths, if these are given."""
        found: list[list[Tensor]] = [[] for _ in values]

        def run(rank: int) -> None:
            group = dist.ProcessGroupGloo(
                dist.PrefixStore("ranks", self._store), rank, self.size, timedelta(seconds=60)
            )

            def swap(sent: Tensor, target: int, room: Tensor, source: int) -> None:
                self.rounds[rank].append((target, source))
                works = group.recv([room], source, 1), group.send([sent.contiguous()], target, 1)
                for work in works:
                    work.wait()

            if lengths is None:
                found[rank] = gather_by_doubling(values[rank], rank, self.size, swap)
            else:
                found[rank] = gather_parts_by_doubling(values[rank], lengths, rank, self.size, swap)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


@pytest.mark.parametrize("size", [2, 3, 9, 16])
def test_every_rank_gets_every_value_in_few_rounds(size: int) -> None:
    ranks = Ranks(size)
    values = [torch.tensor([[rank, -rank, 1 << rank]], dtype=torch.int64) for rank in range(size)]
    for found in ranks.gather(values):
        assert len(found) == size and all(torch.equal(one, other) for one, other in zip(found, values, strict=True))
    for rounds in ranks.rounds:
        assert len(rounds) == math.ceil(math.log2(size))


@pytest.mark.parametrize("size", [2, 3, 9, 12, 16])
def test_every_rank_gets_parts_of_all_lengths_in_few_rounds(size: int) -> None:
    ranks = Ranks(size)
    parts = [torch.arange(rank, 3 * rank + 1) for rank in range(size)]
    for found in ranks.gather(parts, [part.numel() for part in parts]):
        assert len(found) == size and all(torch.equal(one, other) for one, other in zip(found, parts, strict=True))
    for rounds in ranks.rounds:
        assert len(rounds) == math.ceil(math.log2(size))


def test_rounds_and_peers_of_thousands_of_ranks() -> None:
    """4,096 ranks: 12 rounds, and no rank speaks with more than 24 others."""
    peers = set()

    def swap(sent: Tensor, target: int, room: Tensor, source: int) -> None:
        peers.update((target, source))
        rounds.append(len(sent))

    rounds: list[int] = []
    gather_by_doubling(torch.zeros(1), 5, 4096, swap)
    assert rounds == [1 << n for n in range(12)] and len(peers) <= 24
