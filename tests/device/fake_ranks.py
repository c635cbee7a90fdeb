"""A world of any number of ranks in this one process: this rank is real, what comes from the others equals its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

from zero_strategy.comm import collectives
from zero_strategy.comm.transport import DeviceCollectives


class Mirror(dist.Store):
    """A store in which every rank has written what this one has."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self.data: dict[str, bytes] = {}
        self.messages = 0

    def _own(self, key: str) -> str:
        return re.sub(r"/\d+$", f"/{self.rank}", key)

    def set(self, key: str, value: Any) -> None:
        self.messages += 1
        self.data[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        self.messages += 1
        if key.endswith("/answer") and key not in self.data:
            return b'{"kind": "different", "text": ""}'
        found = self.data.get(key, self.data.get(self._own(key)))
        assert found is not None, key
        return found

    def add(self, key: str, amount: int) -> int:
        self.messages += 1
        mine = key.endswith(f"/of{self.rank}") or re.search(r"/\d+$", key)
        self.data[key] = str(int(self.data.get(key, b"0")) + amount * (1 if mine else self.world)).encode()
        return int(self.data[key])

    def check(self, keys: list[str]) -> bool:
        self.messages += 1
        return all(key in self.data or self._own(key) in self.data or key.endswith("answer") for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        assert self.check(keys), keys

    def deleteKey(self, key: str) -> bool:
        # So torch calls it, for `delete_key`, where a store is of Python.
        self.messages += 1
        return self.data.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.data)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.data.setdefault(key, desired.encode() if isinstance(desired, str) else desired)
        return self.data[key]

    def set_timeout(self, timeout: Any) -> None:
        pass

    def clone(self) -> Mirror:
        return self


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[Mirror]:
    """Inside, this process is one of so many ranks, and no group sends anything."""
    assert not dist.is_initialized()
    store, new_group = Mirror(rank, world), dist.new_group

    def fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        return new_group(ranks, timeout=timeout, backend="fake", **options)

    dist.init_process_group("fake", store=store, rank=rank, world_size=world)
    try:
        with patch.object(dist, "new_group", fake_group):
            yield store
    finally:
        dist.destroy_process_group()


class SilentCollectives(DeviceCollectives):
    """A device's collectives, of tensors on the CPU and of a group that sends nothing; others say what this rank does.

    For what calls cost on the host: `torch.distributed` is asked as it is for a device.
    """

    device = "cpu"
    buffer_bytes = 0
    available = True

    def takes_scattered(self, numel: int, dtype: torch.dtype) -> bool:
        """As a device: never."""
        return False

    def _begin(self, collective: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Any:
        """As with NCCL, whose work may be waited for several times."""
        work = collective(*tensors, group=self.group, async_op=True, **options)
        if len(tensors) == 2:
            self.arrive(*tensors)
        return work

    def arrive(self, into: torch.Tensor, sent: torch.Tensor) -> None:
        """Write something: were it what lay in memory, chance would say what a norm is, and whether it clips."""
        into.copy_(sent) if into.numel() == sent.numel() else into.fill_(1)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See `Collectives`."""

    def all_gather_small(self, value: torch.Tensor) -> list[torch.Tensor]:
        """See `Collectives`."""
        return [value] * self.size

    def all_gather_objects(self, value: Any) -> list[Any]:
        """See `Collectives`."""
        return [value] * self.size


@contextmanager
def silent_world(rank: int, world: int) -> Iterator[None]:
    """Inside, this process is one of so many ranks, and calls of collectives cost what they cost the host."""
    with patch.object(collectives, "HostCollectives", SilentCollectives), fake_world(rank, world):
        yield
