"""From the config to the tier that keeps state."""

from __future__ import annotations

from zero_strategy.config import OffloadConfig
from zero_strategy.memory.chunked import ChunkStore
from zero_strategy.memory.nvme import NvmeTier

_SLOTS = 5
"""Chunks of each vector that a step has in memory: the one it updates, two read ahead, two written behind."""
_VECTORS = 3
"""Of a bucket, at most: master weights and two moments."""
_PAGE_NUMEL = 1024
"""Elements of four bytes in a page."""


def optimizer_store(offload: OffloadConfig) -> ChunkStore | None:
    """Where master weights and optimizer state go, None for memory.

    Raises:
        OSError: If a directory cannot be used.
    """
    if offload.optimizer != "nvme":
        return None
    pages = max(1, offload.staging_bytes // (_SLOTS * _VECTORS * 4 * _PAGE_NUMEL))
    return ChunkStore(NvmeTier(offload.nvme_path[0]), pages * _PAGE_NUMEL)
