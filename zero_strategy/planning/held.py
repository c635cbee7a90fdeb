"""Memory that is held: an engine's ledger at this moment, and the allocator's and the process's account.

The ledger is read from the engine's tensors. What it does not know of is shown as activations and other: activations
that live now, what the framework and libraries keep, fragmentation.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.layout import round_up
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.planning.buckets import BLOCK
from zero_strategy.planning.ledger import COMMUNICATORS, Category, Entry, Ledger, Owner, Tier, allocated
from zero_strategy.runtime.terminal import size, table

if TYPE_CHECKING:
    from zero_strategy.activation.units import UnitActivations
    from zero_strategy.comm.mesh import Mesh
    from zero_strategy.fsdp.param_bucket import ParameterBucket
    from zero_strategy.offload.chunks import OffloadedVector
    from zero_strategy.offload.stores import OffloadStores
    from zero_strategy.optim import ShardedOptimizer
    from zero_strategy.optim.averaging import WeightAverage


EXCHANGES = ("gather", "reduce", "replicate")
"""The groups of a mesh that carry whole buckets."""
EXPERT_EXCHANGES = ("expert_gather", "expert_reduce")
"""Those that do where ranks divide experts; else they are the first two."""


class Snapshots(Protocol):
    """Saves in the background, as far as they keep memory between steps; see `Saver`."""

    @property
    def snapshot_bytes(self) -> int: ...

    @property
    def snapshot_file_bytes(self) -> tuple[int, int]: ...

    copied_bytes: int


class LedgeredEngine(Protocol):
    """A training, as far as it holds memory; see `ZeroEngine`."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def model(self) -> ShardedModel: ...
    @property
    def activations(self) -> UnitActivations: ...
    @property
    def average(self) -> WeightAverage | None: ...
    @property
    def optimizers(self) -> list[ShardedOptimizer]: ...
    @property
    def offloaded(self) -> OffloadStores: ...
    @property
    def saver(self) -> Snapshots: ...


def state_bytes(
    model: ShardedModel, optimizers: Sequence[ShardedOptimizer], average: WeightAverage | None
) -> dict[str, int]:
    """Persistent bytes of model state on this rank, by kind; see `ZeroEngine.state_bytes`."""
    masters = sum(bucket.master_bytes() for bucket in model.buckets)
    found = {
        "parameters": sum(bucket.persistent_bytes() for bucket in model.buckets),
        "gradients": sum(bucket.persistent_bytes() for bucket in model.gradients),
        "optimizer": masters + sum(sharded.state_bytes() for sharded in optimizers),
    }
    if average is not None:
        found["average"] = sum(bucket.average_bytes() for bucket in model.buckets)
    return found


def ledger_of(engine: LedgeredEngine) -> Ledger:
    """Every long-lived buffer of this rank; between steps none of them is a peak.

    Memory of others (activations, what a framework keeps) is not in it; see `reconcile`.
    """
    device = engine.model.device
    ledger = Ledger(device_type=device.type)
    owners: dict[int, Owner] = {}
    for unit in engine.model.units:
        for bucket in unit.buckets:
            owner = owners[id(bucket)] = Owner(unit.name, tuple(bucket.names))
            for category, tensor in _tensors(engine, bucket):
                category, elements = cast("Category", category), _elements(bucket, tensor)
                asked = tensor.untyped_storage().nbytes() if category == "handles" else elements * tensor.itemsize
                tier: Tier = "host" if engine.model.moved.holds(tensor) else tier_of(tensor, device)
                ledger.add_tensor(category, tier, owner, tensor, asked)
            for category, vector in bucket.offloaded():
                where = bucket.slice if category == "parameters" else bucket.owned
                for entry in _in_a_tier(cast("Category", category), bucket, owner, vector, where.start):
                    ledger.add(entry)
            for vector in engine.model.gradient_of(bucket).offloaded():
                for entry in _in_a_tier("gradients", bucket, owner, vector, bucket.owned.start):
                    ledger.add(entry)
    _add_optimizer_state(ledger, engine, owners)
    for name, staging in (
        ("optimizer step", sum(sharded.staging_bytes for sharded in engine.optimizers)),
        ("transfers", engine.offloaded.staging_bytes),
    ):
        if staging:
            ledger.add(Entry("staging", "host", Owner(name), staging, staging))
    store = engine.activations.store
    if store is not None:  # blocks stay for the next step
        ledger.add(Entry("activations", "host", Owner("units"), store.blocks.taken, store.blocks.taken))
    for name, buffer in engine.module.named_buffers():
        nbytes = buffer.numel() * buffer.itemsize
        taken = allocated(nbytes, buffer.device.type)
        ledger.add(Entry("buffers", tier_of(buffer, device), Owner(name), nbytes, taken))
    for name, average in ({} if engine.average is None else engine.average.held_buffers()).items():
        ledger.add_tensor("averages", tier_of(average, device), Owner(name), average, average.nbytes)
    for name in (*EXCHANGES, *(EXPERT_EXCHANGES if engine.mesh.expert.size > 1 else ())):
        kept = getattr(engine.mesh, name).buffer_bytes
        ledger.add(Entry("communication", tier_on_host(device), Owner(name), kept, kept))
    measured = engine.mesh.communicator_bytes
    ledger.add(Entry("communication", "device", COMMUNICATORS, measured, measured))
    snapshot = engine.saver.snapshot_bytes
    ledger.add(Entry("snapshot", "host", Owner("checkpoint"), snapshot, snapshot))
    copied = engine.saver.copied_bytes
    ledger.add(Entry("copies", "host", Owner("survive"), copied, copied))
    asked, taken = engine.saver.snapshot_file_bytes
    ledger.add(Entry("snapshot", "nvme", Owner("checkpoint"), asked, taken))
    return ledger


def tier_of(tensor: Tensor, device: torch.device) -> Tier:
    """The tier of a tensor of a module that computes on `device`."""
    return "device" if tensor.device.type == device.type else "host"


def tier_on_host(device: torch.device) -> Tier:
    """The tier of a CPU tensor that takes part in the computation."""
    return "device" if device.type == "cpu" else "host"


def _tensors(engine: LedgeredEngine, bucket: ParameterBucket) -> Iterator[tuple[str, Tensor]]:
    yield from bucket.held()
    yield from engine.model.gradient_of(bucket).held()


def _elements(bucket: ParameterBucket, tensor: Tensor) -> int:
    """Elements of parameters in a buffer of the bucket: a whole one, the owned part, one parameter."""
    if tensor.numel() == bucket.layout.numel:
        return sum(segment.numel for segment in bucket.layout.segments)
    if tensor.numel() == bucket.layout.slice_numel:
        return sum(piece.numel for piece in bucket.slice_pieces)
    return tensor.numel()


def _in_a_tier(
    category: Category, bucket: ParameterBucket, owner: Owner, vector: OffloadedVector, start: int
) -> Iterator[Entry]:
    """The entries of a vector for the bucket's elements from `start` on: in its tier, and a head on the device."""
    tier: Tier = "nvme" if vector.tier.name == "nvme" else "host"

    def asked(low: int, high: int) -> int:
        return sum(piece.numel for piece in bucket.layout.pieces(start + low, start + high)) * vector.dtype.itemsize

    split = vector.staying_stop
    places: list[tuple[Tier, int, int]] = [("host", vector.in_tier[0], split), (tier, split, vector.numel)]
    for where, low, high in places:
        yield Entry(category, where, owner, asked(low, high), round_up((high - low) * vector.dtype.itemsize, BLOCK))
    if vector.kept is not None:
        taken = allocated(vector.kept.nbytes, vector.kept.device.type)
        yield Entry(category, "device", owner, asked(0, vector.in_tier[0]), taken)


def _add_optimizer_state(ledger: Ledger, engine: LedgeredEngine, owners: dict[int, Owner]) -> None:
    for sharded in engine.optimizers:
        for bucket, vector in sharded.offloaded():
            for entry in _in_a_tier("optimizer state", bucket, owners[id(bucket)], vector, bucket.owned.start):
                ledger.add(entry)
        for parameter in sharded.parameters():
            place = engine.model.place(parameter)
            assert place is not None
            for value in sharded.tensors_of(parameter):
                nbytes = value.numel() * value.itemsize
                tier: Tier = "host" if engine.model.moved.holds(value) else tier_of(value, engine.model.device)
                ledger.add_tensor("optimizer state", tier, owners[id(place[0])], value, nbytes)


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
        """Memory that the ledger does not know of; negative where pages of a buffer were never touched."""
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
        """The figures as plain types."""
        return {
            "ledger": self.ledger.to_json(),
            "measured": [found.__dict__ | {"activations and other": found.other} for found in self.measured],
        }


class _Ledgered(Protocol):
    @property
    def model(self) -> ShardedModel: ...

    def ledger(self) -> Ledger: ...


def reconcile(engine: _Ledgered) -> Reconciliation:
    """The ledger of an engine, the allocator's numbers and those of this process, at this moment.

    On CUDA the device tier is held against `torch.cuda.memory_allocated`, the host tier against the process's resident
    memory; on the CPU both tiers are resident memory, Python and its libraries with it.
    """
    ledger = engine.ledger()
    device, host = ledger.tier_bytes("device"), ledger.tier_bytes("host")
    device -= sum(entry.taken for entry in ledger if entry.owner == COMMUNICATORS)  # not of torch's allocator
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
