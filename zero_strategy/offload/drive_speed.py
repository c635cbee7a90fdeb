"""A measurement of a directory's drive: speed by block size, within a second.

measured in a second or two before anything depends on it.

A file that has no name is written once, for a file system answers reads of space that was only reserved without asking
the drive. Then every pair of block size and depth reads and writes for a slice of the time. The pair with the fewest
bytes under way within 5 % of the best is chosen, and measured again by itself: the best of many short measurements is
too good.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from zero_strategy.offload import part_file as ownership
from zero_strategy.offload.file_io import FileQueue, Kind, Request
from zero_strategy.offload.file_queues import Backend, open_queue
from zero_strategy.offload.part_file import PartFile
from zero_strategy.offload.tier import HostMemory

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
    """Measures a drive, and leaves nothing on it. It takes about `seconds`, and longer on one slower than 200 MB/s.

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
        slice_seconds = seconds / (2 * len(BLOCKS) * len(DEPTHS) + 6)
        with open_queue(backend, depth=DEPTHS[-1]) as queue:
            ground = _Ground(part, window, max(nbytes, _MIB))
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
        while done < self._nbytes and (done == 0 or time.perf_counter() - begin < 4 * seconds):
            size = min(_MIB if done == 0 else self.request_bytes, self._nbytes - done)
            queue.submit("write", self._part.extents(self._window[:size], done)).wait()
            done += size
            speed = done / (time.perf_counter() - begin)
            wanted = int(speed * seconds / 16) // _MIB * _MIB  # a few of them in a slice, on a slow drive too
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
        for request in under_way:
            request.wait()
        return (done + len(under_way) * size) / (time.perf_counter() - begin)


def _trial(ground: _Ground, block: int, depth: int, seconds: float, backend: Backend | None) -> Trial:
    with open_queue(backend, depth=depth, block_bytes=block) as queue:
        return Trial(block, depth, ground.speed(queue, "read", seconds), ground.speed(queue, "write", seconds))
