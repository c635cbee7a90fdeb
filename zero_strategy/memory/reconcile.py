"""The ledger held against what is really taken: by the allocator of the device, by the process.

What the ledger does not know of is shown as activations and other: activations that live now, what the framework and
libraries keep, fragmentation.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from zero_strategy.memory.ledger import Ledger
from zero_strategy.runtime.terminal import size, table
from zero_strategy.sharding import ShardedModel

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Measured:
    """Bytes of one kind of memory.

    Attributes:
        what: Such as "device memory".
        known: By the ledger.
        now: Taken at this moment.
        peak: Taken at most so far.
        cached: Kept by the allocator without being in use.
    """

    what: str
    known: int
    now: int
    peak: int
    cached: int = 0

    @property
    def other(self) -> int:
        """What the ledger does not know of; negative where pages of a buffer were never touched."""
        return self.now - self.known


@dataclass(frozen=True)
class Reconciliation:
    """A ledger and what was measured at the same moment.

    Attributes:
        ledger: The ledger.
        measured: The device's allocator, where there is one, and the process.
    """

    ledger: Ledger
    measured: tuple[Measured, ...]

    def table(self) -> str:
        """Columns of text: memory, in the ledger, taken now, activations and other, at most so far, cached."""
        rows = [
            (found.what, *(_signed(n) for n in (found.known, found.now, found.other, found.peak, found.cached)))
            for found in self.measured
        ]
        header = ("memory", "in the ledger", "taken", "activations and other", "at most so far", "cached")
        return f"{self.ledger.table()}\n\n{table(rows, header, right=(1, 2, 3, 4, 5))}"

    def to_json(self) -> dict[str, object]:
        """The same as plain types."""
        return {
            "ledger": self.ledger.to_json(),
            "measured": [found.__dict__ | {"activations and other": found.other} for found in self.measured],
        }


class _Ledgered(Protocol):
    model: ShardedModel

    def ledger(self) -> Ledger: ...


def reconcile(engine: _Ledgered) -> Reconciliation:
    """The ledger of an engine, the allocator's numbers and those of this process, at this moment.

    On CUDA the device tier is held against `torch.cuda.memory_allocated`, the host tier against the process's resident
    memory; on the CPU both tiers are resident memory, Python and its libraries with it.
    """
    ledger = engine.ledger()
    device, host = ledger.tier_bytes("device"), ledger.tier_bytes("host")
    found = []
    if ledger.device_type == "cuda":
        place = engine.model.device
        allocated = torch.cuda.memory_allocated(place)
        cached = torch.cuda.memory_reserved(place) - allocated
        found.append(Measured("device memory", device, allocated, torch.cuda.max_memory_allocated(place), cached))
    else:
        host += device
    found.append(Measured("memory of this process", host, *resident()))
    return Reconciliation(ledger, tuple(found))


def resident() -> tuple[int, int]:
    """Bytes of this process that lie in memory: now, and at most so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:  # no Linux: the most is all that is told
        return peak, peak
    found = {line.split(":")[0]: line.split() for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
    return int(found["VmRSS"][1]) * 1024, int(found["VmHWM"][1]) * 1024


def _signed(nbytes: int) -> str:
    return size(nbytes) if nbytes >= 0 else "-" + size(-nbytes)
