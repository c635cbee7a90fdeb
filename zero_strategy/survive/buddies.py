"""Copies once more, in the memory of another host, so that the death of a host loses none.

    hosts         A          B          C
    own copies    a0 a1      b0 b1      c0 c1
    of others     c0 c1      a0 a1      b0 b1

A rank's file lies on the buddy's host under the same name as on its own, so that whoever looks for files of a copy
finds it there. It travels beside the next step, by a group of its own, and gets its name when all of it has come. The
next copy begins when the last one has travelled: of two there is always one that is twice on two hosts.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from zero_strategy.checkpoint.memory_writer import KEPT, slices_bytes
from zero_strategy.comm.process_group import own_group
from zero_strategy.runtime.host_bytes import memory_of
from zero_strategy.survive.membership import World

_CHUNK_BYTES = 8 << 20
_TIMEOUT = timedelta(seconds=60)
_LOOK_SECONDS = 0.05

_logger = logging.getLogger(__name__)


def pairs(hosts: list[list[int]]) -> list[tuple[int, int]]:
    """(rank, its buddy), for every rank; none on one host.

    Args:
        hosts: Ranks of each.
    """
    if len(hosts) == 1:
        return []
    return [
        (rank, after[number % len(after)])
        for ranks, after in zip(hosts, hosts[1:] + hosts[:1], strict=True)
        for number, rank in enumerate(ranks)
    ]


class Buddies:
    """Exchange of copies between the hosts of one formation. All ranks make it together.

    Args:
        world: The ranks.

    Attributes:
        sent: Bytes that this rank has sent.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._pairs = world.rank, pairs(world.hosts())
        self._group = own_group([range(world.size)], timeout=_TIMEOUT, backend="gloo") if self._pairs else None
        self._thread: threading.Thread | None = None
        self._spare: dict[tuple[Path, int], Path] = {}
        self._sizes: dict[tuple[Path, int], int] = {}
        self.sent = 0

    def start(self, directory: Path, file: Path, small: list[Path]) -> None:
        """Let a copy travel; returns at once. All ranks call it, with a copy that is written.

        Args:
            directory: Of the copy.
            file: This rank's slices.
            small: Small files of this rank alone.
        """
        self.wait()
        if self._pairs:
            arguments = (directory, file, small)
            self._thread = threading.Thread(target=self._travel, args=arguments, name="copies to buddies", daemon=True)
            self._thread.start()

    def wait(self, check: Callable[[], object] = lambda: None) -> None:
        """Return when what travels has come.

        Args:
            check: Called meanwhile; it may raise.
        """
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            check()
        self._thread = None

    def make_room(self, directory: Path) -> None:
        """Keep the memory of what has come into a directory for what comes next; it is no copy any more."""
        for (place, rank), file in list(self._spare.items()):
            if place == directory and file.exists():
                self._spare[place, rank] = file.replace(directory / f"{KEPT}{rank}")

    def kept_bytes(self) -> int:
        """Bytes of slices of others that have come, and whose memory is kept."""
        return sum(self._sizes.values())

    def _travel(self, directory: Path, file: Path, small: list[Path]) -> None:
        try:
            works = [
                work for rank, buddy in self._pairs if rank == self._rank for work in self._send(buddy, file, small)
            ]
            for rank, buddy in self._pairs:
                if buddy == self._rank:
                    self._receive(rank, directory)
            for work in works:
                work.wait()
        except (RuntimeError, OSError) as error:
            # Whoever has died is noticed where ranks wait for it; the copy before is whole.
            _logger.warning("a copy has not come to a buddy: %s", str(error).partition("\n")[0])

    def _send(self, buddy: int, file: Path, small: list[Path]) -> Iterator[dist.Work]:
        root = file.parents[1]
        names = {str(path.relative_to(root)): path.read_bytes() for path in small}
        header = pickle.dumps((str(file.relative_to(root)), file.stat().st_size, names))
        yield self._isend(torch.tensor([len(header)]), buddy)
        yield self._isend(torch.frombuffer(bytearray(header), dtype=torch.uint8), buddy)
        # A private mapping: nobody writes to the file before `wait` has returned.
        values = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
        for begin in range(0, values.numel(), _CHUNK_BYTES):
            yield self._isend(values[begin : begin + _CHUNK_BYTES], buddy)

    def _isend(self, values: torch.Tensor, buddy: int) -> dist.Work:
        self.sent += values.nbytes
        work = dist.isend(values, buddy, group=self._group)
        assert work is not None
        return work

    def _receive(self, rank: int, directory: Path) -> None:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, group=self._group)
        header = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(header, rank, group=self._group)
        name, size, small = pickle.loads(bytes(memory_of(header)))
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        coming = target.with_suffix(".coming")
        if (spare := self._spare.get((directory, rank))) is not None and spare.exists():
            spare.replace(coming)  # its pages are used again
        with open(os.open(coming, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0) as file:
            file.truncate(size)
            chunk = torch.empty(min(_CHUNK_BYTES, size), dtype=torch.uint8)
            for begin in range(0, size, _CHUNK_BYTES):
                part = chunk[: min(_CHUNK_BYTES, size - begin)]
                dist.recv(part, rank, group=self._group)
                file.write(memory_of(part))
        for path, content in small.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content)
        coming.replace(target)
        self._spare[directory, rank], self._sizes[directory, rank] = target, slices_bytes(target)
