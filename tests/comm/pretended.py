"""A process group of any size in this process alone, for what asks who is where and sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretend(rank: int, world: int) -> Iterator[None]:
    """Inside, this process is `rank` of `world`, with torch's own backend that does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
