"""Memory in use at one moment, of the device and the host.

`see_memory_usage`.

What of it belongs to an engine, buffer by buffer, is in its ledger (`ZeroEngine.ledger()`).
"""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zero_strategy.comm.process_group import world_rank
from zero_strategy.diagnostics.run_files import MemorySample
from zero_strategy.planning.held import host_memory, resident
from zero_strategy.runtime.terminal import report

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine


def sample_memory(engine: ZeroEngine) -> MemorySample:
    """The ledger's sums, and what the process and the device's allocator say."""
    tiers: dict[str, dict[str, int]] = {}
    for (tier, category), total in engine.ledger().sums("tier", "category").items():
        tiers.setdefault(tier, {})[category] = total.taken
    now, peak = resident()
    device = engine.model.device
    if device.type != "cuda":
        return MemorySample(tiers, now, peak)
    allocated, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return MemorySample(tiers, now, peak, allocated, most)


logger = logging.getLogger(__name__)

_GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes. None: there is no such thing here.

    Attributes:
        allocated: Of tensors on the current CUDA device.
        max_allocated: The most of it since the last `see_memory_usage` or reset.
        reserved: What torch's allocator has taken from the device (its cache included).
        max_reserved: The most of it.
        resident: Host memory that this process occupies.
        virtual: Its address space.
        host_used: Host memory of all processes that cannot be had.
        host_total: All there is.
    """

    allocated: int | None
    max_allocated: int | None
    reserved: int | None
    max_reserved: int | None
    resident: int | None
    virtual: int | None
    host_used: int | None
    host_total: int | None

    @classmethod
    def now(cls, root: Path = Path("/")) -> MemoryUse:
        """At this moment.

        Args:
            root: Where `proc` is.
        """
        has_device = torch.cuda.is_available()
        return cls(
            torch.cuda.memory_allocated() if has_device else None,
            torch.cuda.max_memory_allocated() if has_device else None,
            torch.cuda.memory_reserved() if has_device else None,
            torch.cuda.max_memory_reserved() if has_device else None,
            *_process(root),
            *_host(root),
        )

    def lines(self) -> list[str]:
        """For people: the device's, then the host's."""
        host = f"host memory: process {_gib(self.resident)} resident, {_gib(self.virtual)} virtual"
        if self.host_used is not None and self.host_total:
            percent = 100 * self.host_used / self.host_total
            host += f"; all processes {_gib(self.host_used)} of {_gib(self.host_total)} ({percent:.1f} %)"
        if self.allocated is None:
            return ["device memory: no CUDA device", host]
        return [
            f"device memory: allocated {_gib(self.allocated)}, at most {_gib(self.max_allocated)}; "
            f"cached {_gib(self.reserved)}, at most {_gib(self.max_reserved)}",
            host,
        ]


def see_memory_usage(message: str, force: bool = False, *, rank: int | None = 0) -> None:
    """Log memory of the device and the host, and begin with new peaks.

    The logger is this module's, the level INFO; where no logging is set up, the line goes to stderr.

    Args:
        message: What it is about.
        force: Collect garbage before, and give the allocator's cache back to the device.
        rank: The global rank that logs; None: all of them. Garbage is collected on every rank.
    """
    if force:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if rank is None or world_rank() == rank:
        report(logger, "%s | %s", message, " | ".join(MemoryUse.now().lines()))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def get_ma_status() -> int:
    """Bytes of tensors on the current CUDA device; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def get_autocast_status() -> dict[str, torch.dtype]:
    """Kinds of devices whose operations run in mixed precision here, and the lower dtype that they use."""
    kinds = ("cpu", "cuda")
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}


def _gib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / _GIB:.2f} GiB"


def _process(root: Path) -> tuple[int | None, int | None]:
    """Resident and virtual bytes of this process."""
    try:
        pages = (root / "proc/self/statm").read_text().split()
    except OSError:  # not Linux
        return None, None
    size = os.sysconf("SC_PAGE_SIZE")
    return int(pages[1]) * size, int(pages[0]) * size


def _host(root: Path) -> tuple[int | None, int | None]:
    """Bytes of host memory that cannot be had, and all of it."""
    known = host_memory(root)
    total, available = known.get("MemTotal"), known.get("MemAvailable")
    return (None, None) if total is None or available is None else (total - available, total)
