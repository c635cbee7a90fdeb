"""Memory that a run may take, and whether a plan fits in it."""

from __future__ import annotations

from dataclasses import dataclass

from zero_strategy.planning.ledger import TIERS, Ledger
from zero_strategy.planning.machine import Machine
from zero_strategy.planning.memory_plan import MemoryPlan


@dataclass(frozen=True)
class Budget:
    """Bytes that may be taken; None: not known, so that nothing is said of it.

    Attributes:
        device: Per rank, of a device with memory of its own.
        host: Per host, for all its ranks together.
        process: Host memory per rank, by limits of a process.
        disk: Per host, on the drives for offload.
        gpus: Devices that are there; 0: not known.
        margin: Fraction that stays free: for fragmentation and the CUDA context.
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    gpus: int = 0
    margin: float = 0.05
    process: int | None = None

    @classmethod
    def of(cls, machine: Machine) -> Budget:
        """Memory that a machine has now."""
        return cls(machine.gpu_free, machine.host_free, machine.disk_free, machine.gpus, process=machine.process_free)


@dataclass(frozen=True)
class Need:
    """One kind of memory.

    Attributes:
        what: Such as "device memory, per rank".
        needed: Bytes.
        there: Bytes that may be taken, the margin left out; None: not known.
    """

    what: str
    needed: int
    there: int | None

    @property
    def fits(self) -> bool:
        """True if it is enough, or not known."""
        return self.there is None or self.needed <= self.there


def needs(plan: MemoryPlan, budget: Budget, ledger: Ledger | None = None) -> list[Need]:
    """Needs of the fullest rank by kind of memory, peaks included, with what there is."""
    ledger = plan.ledger() if ledger is None else ledger
    device, host, nvme = (ledger.tier_bytes(tier) for tier in TIERS)
    ranks, keep = plan.ranks_per_host, 1.0 - budget.margin

    def usable(there: int | None) -> int | None:
        return None if there is None else int(there * keep)

    found = []
    on_host = host
    if plan.device_type == "cuda":
        found.append(Need("device memory, per rank", device, usable(budget.device)))
    else:  # the device tier is the host's memory
        on_host += device
    found.append(Need(f"host memory, {_ranks(ranks)} per host", on_host * ranks, usable(budget.host)))
    if budget.process is not None:
        found.append(Need("host memory, by the limit of a process", on_host, usable(budget.process)))
    if nvme:
        found.append(Need(f"disk, {_ranks(ranks)} per host", nvme * ranks, usable(budget.disk)))
    return found


def fits(plan: MemoryPlan, budget: Budget) -> bool:
    """True if everything fits that is known."""
    return all(need.fits for need in needs(plan, budget))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
