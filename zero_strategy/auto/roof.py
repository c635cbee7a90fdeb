"""The roof of a machine: how fast it computes, moves memory, sends and stores; and the time of work under it.

An operation takes the longer of two times, that of its floating-point operations and that of its bytes, and some time
to begin (the roofline model: Williams, Waterman, Patterson, CACM 2009). Speeds are measured, in tenths of a second.
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from zero_strategy.auto.foreseen import Work, states_kept
from zero_strategy.offload.stores import probe

_SIDE = 512
"""Of the matrices that are multiplied."""
_BYTES = 32 << 20
"""That are copied, sent, and stored."""
_LEAST_BYTES = 1 << 18
_BLOCK = 1 << 20
"""That is mapped anew."""
_LAYERS, _OF_LAYER = 20, 6
"""Small layers that are run forward and backward, and operations of one."""
_TIMES = 3
_WINDOW = 0.06
_SHARED_COPIES = 4
"""Times that memory moves a byte where ranks of a host exchange it: copied in and out, each read and written."""
_DRIVE_SECONDS = 0.5


@dataclass(frozen=True)
class Roof:
    """Speeds of one rank while all ranks of its host work.

    Attributes:
        flops: Floating-point operations per second, of matrix products in the dtype of the computation.
        memory: Bytes per second that an operation reads and writes.
        begin: Seconds that an operation takes to begin.
        link: Bytes per second that a rank gets from the others.
        write, read: Bytes per second of the drives of a host; 0: not known.
        bus: Bytes per second between a device and the host; 0: the device is the host.
        host: Bytes per second of the host's memory, where it takes the optimizer's steps.
        fresh: Bytes per second for which mapped blocks get pages, beside being filled; 0: not known.
    """

    flops: float
    memory: float
    begin: float
    link: float = 0.0
    write: float = 0.0
    read: float = 0.0
    bus: float = 0.0
    host: float = 0.0
    fresh: float = 0.0

    def seconds(self, work: Iterable[Work]) -> float:
        """Time of operations after each other."""
        return sum(each.count * max(each.flops / self.flops, each.nbytes / self.memory, self.begin) for each in work)

    def mapping(self, nbytes: float) -> float:
        """Time of mapping blocks of so many bytes in all; none on a device, whose memory stays its allocator's."""
        return nbytes / self.fresh if self.fresh and not self.bus else 0.0

    def mean(self, others: Iterable[Roof]) -> Roof:
        """The roof of ranks that share a host's cores: a moment gives one of them more, and a step evens it out."""
        everyone = [self, *others]
        return Roof(**{name: statistics.fmean(getattr(each, name) for each in everyone) for name in vars(self)})

    def slowest(self, others: Iterable[Roof]) -> Roof:
        """The roof of the slowest of several ranks, whom the others wait for."""
        everyone = [self, *others]
        least = {name: min(getattr(each, name) for each in everyone) for name in vars(self)}
        return Roof(**{**least, "begin": max(each.begin for each in everyone)})


ASSUMED_GPU = Roof(flops=4e14, memory=2.4e12, begin=5e-6, link=2e11, write=3e9, read=6e9, bus=2.5e10, host=1e10)
"""Of a GPU that is not here, in 16 bits: an H100's matrix products and memory at 60 %, NVLink, PCIe, a drive."""


def measure(device: torch.device, dtype: torch.dtype, room: int | None = None) -> Roof:
    """The roof of this rank, links and drives left out. All ranks of a host measure at once, as they share its cores.

    Args:
        device: Where it computes.
        dtype: In which.
        room: Bytes that the rank may take, of which it takes a small part; None: not known.
    """
    nbytes = probed_bytes(room)
    side = min(_SIDE, math.isqrt(nbytes // dtype.itemsize))
    a = torch.ones(side, side, device=device, dtype=dtype)
    flops = 2 * side**3 / _mean(lambda: a @ a, device)
    source, into = (_apart(nbytes).to(device) for _ in range(2))
    memory = 2 * nbytes / _mean(lambda: into.copy_(source), device)
    with states_kept():
        layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(_LAYERS)]).to(device)
    given = torch.ones(1, 8, device=device)
    begin = _mean(lambda: layers(given).sum().backward(), device) / (_LAYERS * _OF_LAYER)
    block = min(_BLOCK, nbytes)
    again = _mean(source[: block // 4].zero_, device)
    fresh = block / max(_mean(lambda: _apart(block), torch.device("cpu")) - again, 1e-9)
    roof = Roof(flops, memory, begin, link=memory / _SHARED_COPIES, fresh=fresh)
    if device.type != "cpu":
        pinned = torch.empty(nbytes // 4, pin_memory=True)
        bus = nbytes / _mean(lambda: pinned.copy_(source, non_blocking=True), device)
        roof = replace(roof, bus=bus, host=2 * nbytes / _mean(lambda: pinned.clone(), torch.device("cpu")))
    return roof


def _apart(nbytes: int) -> torch.Tensor:
    """Memory that malloc has no part in: large blocks that are freed would let it keep others of their size."""
    return torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.float32).fill_(
        1.0
    )


def probed_bytes(room: int | None) -> int:
    """Bytes that a measurement of memory takes, twice."""
    return _BYTES if room is None else max(_LEAST_BYTES, min(_BYTES, room // 32)) // 4096 * 4096


def _mean(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one of many times: of several slices of a core's time, where ranks share it."""
    run()
    begun, count = time.perf_counter(), 0
    while count < _TIMES or time.perf_counter() - begun < _WINDOW:
        run()
        count += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / count


def measure_link(device: torch.device, nbytes: int) -> float:
    """Bytes per second that a gather among all ranks brings. A collective of the default process group.

    Args:
        device: Where the ranks compute.
        nbytes: That a rank gets from all, itself included.
    """
    ranks = dist.get_world_size()
    part = torch.ones(nbytes // 4 // ranks, device=device)
    parts = [torch.empty_like(part) for _ in range(ranks)]
    begun = 0.0
    for turn in range(_TIMES + 1):  # as many on all ranks
        begun = time.perf_counter() if turn == 1 else begun
        dist.all_gather(parts, part)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _TIMES * (ranks - 1) * part.nbytes / (time.perf_counter() - begun)


def measure_drive(drive: str | os.PathLike[str]) -> tuple[float, float]:
    """Bytes per second that a drive takes and gives; zeros where nothing can be written there."""
    with suppress(OSError):
        speed = probe(os.fspath(drive), seconds=_DRIVE_SECONDS).chosen
        return speed.write, speed.read
    return 0.0, 0.0
