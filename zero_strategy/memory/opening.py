"""From the config to the tiers that keep state."""

from __future__ import annotations

import torch

from zero_strategy.config import OffloadConfig
from zero_strategy.memory.chunked import ChunkStore, Tier
from zero_strategy.memory.host import HostTier
from zero_strategy.memory.nvme import NvmeTier

_SLOTS = 5
"""Chunks of each vector that a step has in memory: the one it updates, two read ahead, two written behind."""
_BYTES = 16
"""Of one element in all vectors of a bucket, at most: weights, master weights, two moments."""
_PAGE_NUMEL = 1024
"""Elements of four bytes in a page."""


class OffloadStores:
    """Where an engine keeps what is offloaded; vectors of one bucket are cut alike in all of them.

    Args:
        offload: The settings.
        device: Of the model.
        rank: This process.
        label: Tells engines of one process apart.

    Attributes:
        optimizer: For master weights and optimizer state; None: on the device.
        parameters: For the slices of parameters; None: on the device.

    Raises:
        OSError: If a directory cannot be used.
    """

    def __init__(self, offload: OffloadConfig, device: torch.device, rank: int = 0, label: str = "engine") -> None:
        self._offload, self._device, self._rank, self._label = offload, device, rank, label
        self._made: dict[str, ChunkStore] = {}
        self.optimizer = self._store(offload.optimizer)
        self.parameters = self._store(offload.parameters)

    def _store(self, tier: str) -> ChunkStore | None:
        if tier == "none":
            return None
        if tier not in self._made:
            pages = max(1, self._offload.staging_bytes // (_SLOTS * _BYTES * _PAGE_NUMEL))
            self._made[tier] = ChunkStore(self._open(tier), pages * _PAGE_NUMEL)
        return self._made[tier]

    def _open(self, tier: str) -> Tier:
        if tier == "cpu":
            return HostTier(pinned=self._device.type == "cuda")
        return NvmeTier(self._offload.nvme_path, self._rank, self._label)

    def in_files(self) -> bool:
        """Whether anything is kept in files."""
        return "nvme" in self._made

    def close(self) -> None:
        """Give all of it up."""
        for store in self._made.values():
            store.close()
