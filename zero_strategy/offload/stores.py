"""The stores of an engine: from the config to the tiers that keep its state, after a measurement of the drive.

The measurement finds speed by block size, within a second or two, before anything depends on it. A file that has no
name is written once, for a file system answers reads of space that was only reserved without asking the drive. Then
every pair of block size and depth reads and writes for a slice of the time. The pair with the fewest bytes under way
within 5 % of the best is chosen, and measured again by itself: the best of many short measurements is too good.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from zero_strategy.comm.mesh import Mesh
from zero_strategy.comm.store import together
from zero_strategy.config import OffloadConfig
from zero_strategy.offload import part_file as ownership
from zero_strategy.offload.chunk_store import TRANSFER_SLOTS, Allowance, ChunkStore
from zero_strategy.offload.file_io import FileQueue, Kind, Request
from zero_strategy.offload.file_queues import DEFAULT_BLOCK_BYTES, DEFAULT_DEPTH, Backend, open_queue
from zero_strategy.offload.part_file import PartFile
from zero_strategy.offload.tier import DeviceCopies, HostMemory, HostTier, NvmeTier, Tier

BLOCKS = (256 << 10, 1 << 20, 4 << 20)
DEPTHS = (4, 8, 32)
_FILE_BYTES = 256 << 20
_WINDOW_BYTES = 64 << 20
"""Memory that the probe takes."""
_MOST_REQUEST_BYTES = 16 << 20
_NEARLY = 0.95
_MIB = 1 << 20


@dataclass(frozen=True)
class Trial:
    """One block size and depth, and the bytes per second that they gave."""

    block_bytes: int
    depth: int
    read: float
    write: float

    @property
    def both(self) -> float:
        """Bytes per second of reading and writing the same bytes, each counted once."""
        return 2 / (1 / self.read + 1 / self.write)


@dataclass(frozen=True)
class DriveSpeed:
    """Result of a probe.

    Attributes:
        directory: Where.
        backend: Which file queue was used.
        direct: Whether that was past the page cache; if not, memory was measured as much as the drive.
        chosen: Block size, depth, and their speeds, measured anew.
        trials: All that was tried.
    """

    directory: Path
    backend: str
    direct: bool
    chosen: Trial
    trials: tuple[Trial, ...]

    def seconds(self, bytes_read: int, bytes_written: int) -> float:
        """Least time of a pass that reads and writes so many bytes."""
        return bytes_read / self.chosen.read + bytes_written / self.chosen.write

    def __str__(self) -> str:
        block = f"{self.chosen.block_bytes >> 10} KiB"
        manner = "past the page cache" if self.direct else "through the page cache, for O_DIRECT is refused"
        return (
            f"{self.directory}: reads {self.chosen.read / 1e9:.2f} GB/s, writes {self.chosen.write / 1e9:.2f} GB/s "
            f"(blocks of {block}, {self.chosen.depth} at once, by {self.backend}, {manner})"
        )


def probe(directory: str | Path, *, seconds: float = 1.5, backend: Backend | None = None) -> DriveSpeed:
    """Measures a drive, and leaves nothing on it.

    It takes about `seconds` where the drive moves 64 MiB in a twentieth of that. On a slower one requests take longer
    than the time for their measurement, and the whole up to about three times `seconds`.

    Args:
        directory: Made if need be. It needs 256 MiB of free space, or what there is.
        seconds: To be spent.
        backend: See `open_queue`.

    Raises:
        ValueError: If `seconds` is not positive.
        OSError: If a file cannot be made there, or is refused by the drive.
    """
    if not seconds > 0:
        raise ValueError(f"a probe needs a positive number of seconds, got {seconds}")
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    part = PartFile(place, ownership.new_name("probe", 0))
    try:
        nbytes = min(_FILE_BYTES, part.free_bytes() // 2 // _MIB * _MIB)
        part.reserve(max(nbytes, _MIB))
        window = HostMemory(_WINDOW_BYTES).bytes
        window.random_(0, 256, generator=torch.Generator())  # some drives are faster with zeros
        # A slice each for reads and writes of a trial; the last one has two for each, and the first writes have four.
        slice_seconds = seconds / (2 * len(BLOCKS) * len(DEPTHS) + 8)
        with open_queue(backend, depth=DEPTHS[-1]) as queue:
            ground = _Ground(part, window, max(nbytes, _MIB))
            # Reads of space that was only reserved would not ask the drive.
            ground.write_once(queue, 4 * slice_seconds)
            used = queue.backend
        trials = [
            _trial(ground, block, depth, slice_seconds, backend)
            for block in BLOCKS
            for depth in DEPTHS
            if block <= ground.request_bytes or block == BLOCKS[0]
        ]
        chosen = choose(trials)
        again = _trial(ground, chosen.block_bytes, chosen.depth, 2 * slice_seconds, backend)
        return DriveSpeed(place, used, part.rules is not None, again, tuple(trials))
    finally:
        part.close()


def choose(trials: Sequence[Trial]) -> Trial:
    """The one with the fewest bytes under way among those that are nearly as fast as the fastest."""
    best = max(trial.both for trial in trials)
    enough = [trial for trial in trials if trial.both >= _NEARLY * best]
    return min(enough, key=lambda trial: (trial.block_bytes * trial.depth, trial.depth))


class _Ground:
    """The part of the file that has been written, and how much of it a request takes."""

    def __init__(self, part: PartFile, window: Tensor, nbytes: int) -> None:
        self._part, self._window, self._nbytes = part, window, nbytes
        self.request_bytes = min(_MOST_REQUEST_BYTES, nbytes)

    def write_once(self, queue: FileQueue, seconds: float) -> None:
        """Writes all of it, or what can be written in this time, and sees how long requests should be."""
        begin, done = time.perf_counter(), 0
        while done < self._nbytes and (done == 0 or time.perf_counter() - begin < seconds):
            # A small one first, by which the others are made as long as this drive allows in the time.
            size = min(_MIB if done == 0 else self.request_bytes, self._nbytes - done)
            queue.submit("write", self._part.extents(self._window[:size], done)).wait()
            done += size
            speed = done / (time.perf_counter() - begin)
            wanted = int(speed * seconds / 16) // _MIB * _MIB  # a few of them in a trial's time, on a slow drive too
            self.request_bytes = min(max(wanted, _MIB), _MOST_REQUEST_BYTES, self._nbytes)
        self._nbytes = done
        self.request_bytes = min(self.request_bytes, done)

    def speed(self, queue: FileQueue, kind: Kind, seconds: float) -> float:
        """Bytes per second, with enough requests under way to keep the queue full."""
        size, under_way = self.request_bytes, deque[Request]()
        places = cycle(range(0, self._nbytes - size + 1, size))
        memories = cycle([self._window[at : at + size] for at in range(0, _WINDOW_BYTES - size + 1, size)][:64])
        most = max(2, min(_WINDOW_BYTES // size, 64, self._nbytes // size))
        begin, done = time.perf_counter(), 0
        while done == 0 or time.perf_counter() - begin < seconds:
            while len(under_way) < most:
                under_way.append(queue.submit(kind, self._part.extents(next(memories), next(places))))
            under_way.popleft().wait()
            done += size
        # They count as well, as the time is taken when they have ended.
        for request in under_way:
            request.wait()
        return (done + len(under_way) * size) / (time.perf_counter() - begin)


def _trial(ground: _Ground, block: int, depth: int, seconds: float, backend: Backend | None) -> Trial:
    with open_queue(backend, depth=depth, block_bytes=block) as queue:
        return Trial(block, depth, ground.speed(queue, "read", seconds), ground.speed(queue, "write", seconds))


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


def _check_directories(paths: Sequence[str]) -> None:
    """Raise where no directory is and none can be made.

    Raises:
        ValueError: Then; names the setting and the file.
    """
    for path in paths:
        place = Path(path)
        there = next((step for step in (place, *place.parents) if step.exists()), place)
        if there.exists() and not there.is_dir():
            stands = "is a file" if there == place else f"cannot be made, since {there} is a file"
            raise ValueError(
                f"offload.nvme_path {path!r} {stands}: state is kept in files of its own inside of a directory there; "
                "give a directory on the drive, which is made where there is none"
            )


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
        ValueError: If a path, or a folder on the way to it, is a file; names it, on all ranks that see it.
    """

    def __init__(self, offload: OffloadConfig, device: torch.device, mesh: Mesh) -> None:
        self._offload, self._device, self._mesh = offload, device, mesh
        self._tiers: dict[str, Tier] = {}
        self._made: dict[tuple[str, bool], ChunkStore] = {}
        self._allowance = Allowance(offload.resident_bytes)
        self.drive: DriveSpeed | None = None
        if "nvme" in (offload.optimizer, offload.parameters, offload.gradients):
            # All ranks together, here and in the probe: one that raised alone would leave the others waiting.
            together(mesh.control, lambda: _check_directories(offload.nvme_path))
            if offload.probe_seconds:
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
        # Optimizer state never stays in memory, so parameters that may have a store of their own.
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
