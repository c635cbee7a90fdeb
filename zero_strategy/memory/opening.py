"""From the config to the tier that keeps state."""

from __future__ import annotations

from zero_strategy.config import OffloadConfig
from zero_strategy.memory.chunked import ChunkStore
from zero_strategy.memory.nvme import NvmeTier

_SLOTS = 5
"""Chunks of each vector that a step has in memory: the one it updates, two read ahead, two written behind."""
_BYTES = 16
"""Of one element in all vectors of a bucket, at most: weights, master weights, two moments."""
_PAGE_NUMEL = 1024
"""Elements of four bytes in a page."""


def chunk_store(offload: OffloadConfig) -> ChunkStore | None:
    """Where state in files goes, None if there is none.

    Raises:
        OSError: If a directory cannot be used.
    """
    if "nvme" not in (offload.optimizer, offload.parameters):
        return None
    pages = max(1, offload.staging_bytes // (_SLOTS * _BYTES * _PAGE_NUMEL))
    return ChunkStore(NvmeTier(offload.nvme_path[0]), pages * _PAGE_NUMEL)
