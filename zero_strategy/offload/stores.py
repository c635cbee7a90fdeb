"""The stores of an engine: from the config to the tiers that keep its state."""

from __future__ import annotations

import logging

import torch

from zero_strategy.comm.barrier import together
from zero_strategy.comm.mesh import Mesh
from zero_strategy.config import OffloadConfig
from zero_strategy.offload.chunk_store import TRANSFER_SLOTS, Allowance, ChunkStore
from zero_strategy.offload.drive_speed import DriveSpeed, probe
from zero_strategy.offload.file_queues import DEFAULT_BLOCK_BYTES, DEFAULT_DEPTH
from zero_strategy.offload.tier import DeviceCopies, HostTier, NvmeTier, Tier

_logger = logging.getLogger(__name__)
SLOTS = 5
"""Chunks of each vector that a step has in memory: the one it updates, two read ahead, two written behind."""
_BYTES = 4 * TRANSFER_SLOTS + 20 * SLOTS
"""Of memory for an element of a chunk, at most: weights, master weights, gradient and two moments in the slots of a
step, and one of them where whole vectors pass."""
_PAGE_NUMEL = 2048
"""Elements of two bytes in a page."""


def chunk_numel(staging_bytes: int) -> int:
    """Elements of a chunk such that a step stays within these bytes of memory: whole pages in every dtype."""
    return max(1, staging_bytes // (_BYTES * _PAGE_NUMEL)) * _PAGE_NUMEL


class OffloadStores:
    """Tiers of an engine; vectors of one bucket are cut alike in all of them. A collective.

    Args:
        offload: The settings.
        device: Of the model.
        mesh: The ranks.

    Attributes:
        optimizer: For master weights and optimizer state; None: on the device.
        parameters: For the slices of parameters; None: on the device.
        gradients: For reduced gradients; None: on the device.
        drive: What the drive was measured to do, on rank 0; None: not measured.

    Raises:
        OSError: If a directory cannot be used.
        RuntimeError: If another rank cannot use it.
    """

    def __init__(self, offload: OffloadConfig, device: torch.device, mesh: Mesh) -> None:
        self._offload, self._device, self._mesh = offload, device, mesh
        self._tiers: dict[str, Tier] = {}
        self._made: dict[tuple[str, bool], ChunkStore] = {}
        self._allowance = Allowance(offload.resident_bytes)
        self.drive: DriveSpeed | None = None
        if "nvme" in (offload.optimizer, offload.parameters, offload.gradients) and offload.probe_seconds:
            self.drive = self._probe()
        self.optimizer = self._store(offload.optimizer)
        self.parameters = self._store(offload.parameters, may_stay=True)
        # Of their own, as a gather reads parameters in another thread while gradients are written.
        self.gradients = self._new_store(offload.gradients or "none", may_stay=True)

    def _probe(self) -> DriveSpeed:
        """One rank measures for all, for together they would measure each other."""
        path, seconds = self._offload.nvme_path[0], self._offload.probe_seconds
        first = self._mesh.rank == 0
        speed = together(self._mesh.control, lambda: probe(path, seconds=seconds) if first else None)
        found: DriveSpeed = self._mesh.control.all_gather_objects(speed)[0]
        if first:
            _logger.info("offload.nvme_path %s", found)
        return found

    def _store(self, tier: str, *, may_stay: bool = False) -> ChunkStore | None:
        key = tier, may_stay and self._stays(tier)
        if key not in self._made and (store := self._new_store(tier, may_stay=may_stay)) is not None:
            self._made[key] = store
        return self._made.get(key)

    def _stays(self, tier: str) -> bool:
        """True if what is to be in this tier may stay in host memory."""
        return tier == "nvme" and self._offload.resident_bytes > 0

    def _new_store(self, tier: str, *, may_stay: bool) -> ChunkStore | None:
        if tier == "none":
            return None
        if tier not in self._tiers:
            self._tiers[tier] = self._open(tier)
        size, ratio = chunk_numel(self._offload.staging_bytes), self._offload.optimizer_ratio
        allowance = self._allowance if may_stay and self._stays(tier) else None
        return ChunkStore(
            self._tiers[tier],
            size,
            ratio=ratio,
            allowance=allowance,
            pinned=self._device.type == "cuda",
            copies=DeviceCopies(self._device),
            observed=self._mesh.observed,
        )

    @property
    def stores(self) -> list[ChunkStore]:
        """All of them."""
        return [*self._made.values(), *([] if self.gradients is None else [self.gradients])]

    @property
    def staging_bytes(self) -> int:
        """Host memory through which whole vectors have passed."""
        return sum(store.transfers.nbytes for store in self.stores)

    def _open(self, tier: str) -> Tier:
        if tier == "cpu":
            return HostTier(pinned=self._device.type == "cuda")
        block, depth = DEFAULT_BLOCK_BYTES, DEFAULT_DEPTH
        if self.drive is not None:
            block, depth = self.drive.chosen.block_bytes, self.drive.chosen.depth
        label, paths = self._mesh.barrier.prefix, self._offload.nvme_path
        return NvmeTier(
            paths,
            self._mesh.rank,
            label,
            block_bytes=block,
            depth=depth,
            checksums=self._offload.checksums,
            observed=self._mesh.observed,
        )

    def tell_step(self) -> None:
        """Log what a step will read and write, and how long that takes at least."""
        stores = [store for (tier, _), store in self._made.items() if tier == "nvme"]
        if self.drive is None or not stores or self._mesh.rank:
            return
        nbytes = sum(vector.nbytes for store in stores for vector in store.vectors.values())
        ranks = self._mesh.world_size
        _logger.info(
            "an optimizer step reads and writes %.2f GB of offloaded state per rank: %.2f s at least if %d rank(s) "
            "share the drive",
            nbytes / 1e9,
            self.drive.seconds(nbytes, nbytes) * ranks,
            ranks,
        )

    def in_files(self) -> bool:
        """True if anything is kept in files."""
        return self.files is not None

    @property
    def files(self) -> Tier | None:
        """The tier in files, if anything is kept there."""
        return self._tiers.get("nvme")

    @property
    def spare_bytes(self) -> tuple[int, int]:
        """Bytes in files of places for what changes while a save in the background goes on: asked for, and taken."""
        found = [store.spare_bytes for store in self.stores]
        return sum(asked for asked, _ in found), sum(taken for _, taken in found)

    def settle(self) -> None:
        """Wait for what steps and reductions have left under way; all of it, also where some fails.

        Raises:
            OSError: The first error of writing; what could not be written is refused from then on.
        """
        error: OSError | None = None
        for store in self.stores:
            try:
                store.settle()
            except OSError as caught:
                error = error or caught
        if error is not None:
            raise error

    def close(self) -> None:
        """Give all of it up."""
        for store in self.stores:
            store.close()
