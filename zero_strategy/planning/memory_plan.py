"""The memory plan: the ledger of every rank, computed from shapes before anything is allocated.

    plan = load_config(stage=3).plan(model, world_size=8, compute_dtype=torch.bfloat16)
    print(plan.ledger().table())

Held entries are those of a run in which every trainable parameter has had a gradient and a step was taken; for the same
run they equal `ZeroEngine.ledger()` to the byte. Peaks are bounds (`buckets.peaks_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from zero_strategy.comm.shared_memory import LEAST_BYTES, SLOT_BYTES, used_bytes
from zero_strategy.config import ActivationCheckpointingConfig, ResolvedConfig, ZeroConfig, resolve
from zero_strategy.fsdp.layout import Piece, round_up
from zero_strategy.fsdp.tensor_plan import check_heads, models_with_plans
from zero_strategy.offload.chunk_store import TRANSFER_SLOTS
from zero_strategy.offload.stores import SLOTS
from zero_strategy.ops.dynamic_codes import blocks_of
from zero_strategy.planning.buckets import (
    BLOCK,
    BucketFacts,
    Offload,
    Staying,
    Units,
    facts_of,
    peaks_of,
    placement_of,
    staying,
    stop_of,
)
from zero_strategy.planning.ledger import COMMUNICATORS, DEQUANTISED, Category, Entry, Ledger, Owner, Tier, allocated
from zero_strategy.planning.model_shape import (
    BufferShape,
    ModelShape,
    OptimizerState,
    averaged_dtype,
    check_bits,
    optimizer_state,
    state_of,
)
from zero_strategy.planning.slot_bytes import sums_over_slots
from zero_strategy.runtime.host_bytes import PAGE

DeviceType = Literal["cpu", "cuda"]
_TIERS: dict[str, Tier] = {"none": "device", "cpu": "host", "nvme": "nvme"}
_CANDIDATES = 3
"""Ranks that are looked at for the fullest: rank 0 saves buffers, from rank 2 on there is one exchange buffer more.
Otherwise ranks differ by the counters of their pieces."""

_CHANNELS = 16
_CHANNEL_BYTES = (4 << 20) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
"""Of a connection: NCCL's default buffers for its protocols Simple, LL128 and LL (`init.cc`)."""
ASSUMED_COMMUNICATOR_BYTES = _CHANNELS * _CHANNEL_BYTES
"""Memory of a GPU for one of NCCL's communicators: a ring of as many channels as GPUs of one host have by NVLink. An
assumption: GPUs by PCIe have 2 to 4 channels, trees and a switch's own reductions take more. An engine measures it."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that each rank of a run will hold.

    Attributes:
        model: Shapes of the model.
        resolved: The settings, for a number of ranks.
        compute_dtype: Dtype that floating-point parameters take, or None to keep theirs.
        optimizer: What the optimizer keeps.
        offload: What lies outside of the device.
        device_type: "cpu" where the device tier is the host's memory.
        ranks_per_host: Ranks that share a host's memory and drives.
        snapshots: Checkpoints are written in the background, from a copy in host memory.
        activations: Bytes per rank to be kept free on the device for activations.
        tokens: Of a micro-batch, where activations shall be computed (models of plain numbers); ranks of
            `mesh.sequence` divide them.
        recompute: Blocks are run again in backward, whatever `activation_checkpointing` says.
        accumulation: Micro-batches of a step, all but the last under `no_sync`.
        communicator_bytes: Of one of NCCL's on a GPU; an engine's are `Mesh.communicator_bytes`, measured.
        autocast: Dtype of autocast around forwards; None: there is none.
    """

    model: ModelShape
    resolved: ResolvedConfig
    compute_dtype: torch.dtype | None = None
    optimizer: OptimizerState = field(default_factory=lambda: optimizer_state("AdamW"))
    offload: Offload = field(default_factory=Offload)
    device_type: DeviceType = "cpu"
    ranks_per_host: int = 1
    snapshots: bool = False
    activations: int = 0
    tokens: int = 0
    recompute: bool = False
    accumulation: int = 1
    communicator_bytes: int = ASSUMED_COMMUNICATOR_BYTES
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.tokens and self.model.costs is None:
            raise ValueError(
                "activations are computed for models of plain numbers only (--params ...); for others reserve bytes: "
                "activations=..., on the command line --activations 4GB"
            )
        self.offload.check_stage(self.resolved.config.stage)
        check_bits(self.optimizer, self.resolved.config.optimizer.state_bits)
        # Raise where nobody knows what is divided, or it cannot be.
        self.model.of_tensor_rank(self.ways).of_expert_rank(self.resolved.config)
        if self.accumulation < 1:
            raise ValueError(f"accumulation is {self.accumulation}; accepted: 1 or more")
        if not 1 <= self.ranks_per_host <= self.resolved.world_size:
            raise ValueError(
                f"ranks_per_host is {self.ranks_per_host}; accepted: 1 to the world size {self.resolved.world_size}"
            )

    def changed(
        self, *, world_size: int | None = None, settings: dict[str, Any] | None = None, **own: Any
    ) -> MemoryPlan:
        """The plan with other values: of its own attributes, of the config, of the number of ranks.

        A derived setting (mesh.shard, gradient_reduction) is derived anew, one that was set stays; mesh.shard is
        derived for another number of ranks in any case.
        """
        config = replace(self.resolved.config)
        config.mesh = replace(config.mesh)
        for key, part in (("mesh.shard", config.mesh), ("gradient_reduction", config)):
            other_ranks = key == "mesh.shard" and world_size is not None
            if other_ranks or self.resolved.config.origin_of(key).startswith("derived"):
                setattr(part, key.rpartition(".")[2], None)
        for key, value in (settings or {}).items():
            setattr(config, key, value)
        return replace(self, resolved=resolve(config, world_size or self.resolved.world_size), **own)

    def ledger(self, rank: int | None = None) -> Ledger:
        """The ledger of a rank; default: of the fullest one. Ranks that divide layers have the largest part's."""
        if rank is None:
            rank = self.fullest_rank()
        if not 0 <= rank < self.resolved.world_size:
            raise ValueError(f"rank {rank} is not one of {self.resolved.world_size} ranks")
        return self._ledger(facts_of(self.model, self.resolved, self.compute_dtype), rank // self.ways)

    @property
    def ways(self) -> int:
        """Ranks that divide each layer; neighbours have the same place among the data-parallel ranks."""
        return self.resolved.config.mesh.tensor or 1

    def fullest_rank(self) -> int:
        """The rank that takes most memory, of the first ranks."""
        units = facts_of(self.model, self.resolved, self.compute_dtype)
        candidates = range(min(self.resolved.world_size // self.ways, _CANDIDATES))
        return self.ways * max(candidates, key=lambda rank: (self._ledger(units, rank).total.taken, -rank))

    def _ledger(self, units: Units, rank: int) -> Ledger:
        """Ledgers by the place among the data-parallel ranks."""
        ledger = Ledger(device_type=self.device_type)
        shard, stays = self.resolved.shard, staying(units, self.resolved, self.offload)
        for unit in units:
            for bucket in unit:
                for entry in _BucketEntries(self, bucket, rank, stays[id(bucket)]).entries():
                    ledger.add(entry)
        for name, buffer in self.model.buffers.items():
            nbytes = self._buffer_bytes(buffer)
            ledger.add(Entry("buffers", "device", Owner(name), nbytes, self._allocated(nbytes)))
            if self.optimizer.average:
                own = self._buffer_dtype(buffer)
                widened = buffer.numel * (averaged_dtype(own) if own.is_floating_point else own).itemsize
                ledger.add(Entry("averages", "device", Owner(name), widened, self._allocated(widened)))
        for entry in (*self._exchange_buffers(units, rank), *self._staging(units, rank)):
            ledger.add(entry)
        if self.snapshots and rank < shard:  # the first replica writes for all
            ledger.add(self._snapshot_in_files(units, rank) if self.offload.in_files else self._snapshot(units, rank))
        config, tier = self.resolved.config, self.offload.parameters
        for entry in peaks_of(units, config, tier, self.device_type, self.accumulation):
            ledger.add(entry)
        if config.survive.enabled:
            ledger.add(self._copies(units, rank))
        for entry in (*self._sums_going_down(units, rank), *sums_over_slots(units, config, rank, self.device_type)):
            ledger.add(entry)
        device, host = self._activation_bytes()
        for owner, nbytes in (("reserved", self.activations), ("micro-batch", device)):
            ledger.add(Entry("activations", "device", Owner(owner), nbytes, nbytes, peak=True))
        ledger.add(Entry("activations", "host", Owner("units"), host, host))  # blocks stay for the next step
        casts = self._cast_bytes(units)
        ledger.add(Entry("activations", "device", Owner("casts of autocast"), casts, casts, peak=True))
        values = self.model.largest_quantised * (self.compute_dtype or torch.float32).itemsize
        ledger.add(Entry("activations", "device", DEQUANTISED, values, self._allocated(values), peak=True))
        return ledger

    def _activation_bytes(self) -> tuple[int, int]:
        """On the device and on the host."""
        if self.model.costs is None:
            return 0, 0
        itemsize, config = (self.compute_dtype or torch.float32).itemsize, self.resolved.config
        settings = config.activation_checkpointing
        if self.recompute:
            settings = ActivationCheckpointingConfig("full", tile_tokens=settings.tile_tokens)
        offload = config.offload.activations == "cpu" and self.device_type != "cpu"
        ranks = config.mesh.sequence
        return self.model.costs.of_tensor_rank(self.ways // self.model.ways).in_tiers(
            -(-self.tokens // ranks), itemsize, settings, offload=offload, divided=ranks > 1
        )

    def _cast_bytes(self, units: Units) -> int:
        """Copies that autocast makes of matrices, and autograd keeps from forward to backward: of all, on each rank.

        With units computed again in backward, of one unit. Embeddings, which are not cast, are among them, for a shape
        does not tell what it is used for.
        """
        if self.autocast is None:
            return 0
        found = [sum(map(self._cast_numel, unit)) * self.autocast.itemsize for unit in units]
        again = self.recompute or self.resolved.config.activation_checkpointing.mode == "full"
        return found[0] + max(found[1:], default=0) if again else sum(found)

    def _cast_numel(self, bucket: BucketFacts) -> int:
        """Elements of a bucket's matrices that autocast copies: what is gathered in its dtype has that already."""
        if bucket.gathered_as == "autocast" or bucket.dtype == self.autocast or not bucket.dtype.is_floating_point:
            return 0
        return sum(segment.numel for segment in bucket.layout.segments if len(segment.shape) > 1)

    def _buffer_bytes(self, buffer: BufferShape) -> int:
        return buffer.numel * self._buffer_dtype(buffer).itemsize

    def _buffer_dtype(self, buffer: BufferShape) -> torch.dtype:
        return (self.compute_dtype if buffer.dtype.is_floating_point else None) or buffer.dtype

    def is_coded(self, bucket: BucketFacts, index: int) -> bool:
        """True if the moments of a parameter have 8 bits."""
        return self.optimizer.codable and bucket.trainable and bucket.is_coded(index, self.optimizer.bits)

    def moment_itemsize(self, bucket: BucketFacts, index: int) -> int:
        """Bytes per element of a moment of a parameter, scales left out."""
        return 1 if self.is_coded(bucket, index) else (self.optimizer.dtype or bucket.updated_dtype).itemsize

    def scale_bytes(self, bucket: BucketFacts, pieces: Iterable[Piece]) -> list[int]:
        """Bytes of the scales of a moment, of each of these pieces that has them."""
        return [4 * blocks_of(piece.numel) for piece in pieces if self.is_coded(bucket, piece.index)]

    def _allocated(self, nbytes: int) -> int:
        return allocated(nbytes, self.device_type)

    @property
    def _nccl_groups(self) -> int:
        """Groups of ranks that this one is in, for which NCCL makes communicators."""
        mesh, shard = self.resolved.config.mesh, self.resolved.shard
        groups = 2 * (shard > 1) + (mesh.replicate > 1) + (mesh.sequence > 1)
        if mesh.expert > 1:  # those that divide experts, and those that have the same ones
            groups += 1 + 2 * (shard > mesh.expert)
        # The norm of a clip goes among these, too.
        return groups + ((mesh.tensor or 1) > 1) + (self.resolved.config.pipeline.stages > 1)

    def _exchange_buffers(self, units: Units, rank: int) -> Iterator[Entry]:
        """On gloo: memory shared with the host's other ranks, or a buffer for the slice of every other rank."""
        if self.device_type != "cpu":
            nbytes = self._nccl_groups * self.communicator_bytes
            yield Entry("communication", "device", COMMUNICATORS, nbytes, nbytes)
            return
        shard, mesh = self.resolved.shard, self.resolved.config.mesh
        buckets = [bucket for unit in units for bucket in unit]
        dense, divided = ([b for b in buckets if (b.neighbours > 1) == of_experts] for of_experts in (False, True))
        first = rank - rank % shard
        row, column = range(first, first + shard), range(rank % shard, shard * mesh.replicate, shard)
        # Those of a row that have the same experts as this rank.
        alike = range(first + rank % mesh.expert, first + shard, mesh.expert)
        for name, ranks, gathers, messages in (
            ("gather", row, True, self._gathered_messages(dense)),
            ("reduce", row, False, _reduced_messages(dense)),
            ("replicate", column, False, [each // mesh.replicate for each in _reduced_messages(buckets)]),
            ("expert_gather", alike, True, self._gathered_messages(divided)),
            ("expert_reduce", alike, False, _reduced_messages(divided)),
        ):
            size = len(ranks)
            together = self._on_one_host(ranks)
            shared = [each for each in messages if together and each >= LEAST_BYTES]
            sent = [each for each in messages if each not in shared]
            kept = 0 if size == 1 else used_bytes(max(shared, default=0), 1 if gathers else size - 1)
            if size > 1 and not gathers:
                kept += (size - 1) * max(sent, default=0)
            yield Entry("communication", "device", Owner(name), kept, kept)
        neighbours = range(rank - rank % mesh.expert, rank - rank % mesh.expert + mesh.expert)
        if mesh.expert > 1 and self._on_one_host(neighbours):
            # A bound, for as many tokens travel as a router says.
            kept = used_bytes(SLOT_BYTES, mesh.expert - 1)
            yield Entry("communication", "device", Owner("tokens for experts"), kept, kept, peak=True)

    def _on_one_host(self, ranks: Iterable[int]) -> bool:
        """True if data-parallel ranks share the memory of a host."""
        return len({rank * self.ways // self.ranks_per_host for rank in ranks}) == 1

    def _gathered_messages(self, buckets: Iterable[BucketFacts]) -> list[int]:
        """Bytes that a rank sends to each other one for gathers of buckets, of those that are gathered."""
        placement = placement_of(self.resolved)
        return [
            bucket.layout.slice_numel * bucket.dtype.itemsize
            for bucket in buckets
            if placement.shard_optimizer and (bucket.trainable or placement.shard_parameters)
        ]

    def _staging(self, units: Units, rank: int) -> Iterator[Entry]:
        """Memory of a step on state in files: for every vector in files, a chunk in each slot that is used."""
        slots, number = dict[tuple[int, str], int](), 0
        gradients_in_files = self.offload.gradient_tier(self.resolved.gradient_reduction) == "nvme"
        placement, in_files = placement_of(self.resolved), self.offload.optimizer == "nvme"
        stays = staying(units, self.resolved, self.offload)
        for bucket in (bucket for unit in units for bucket in unit if bucket.trainable):
            start, stop = bucket.owned(placement, rank)
            moment = self.moment_itemsize(bucket, 0)  # in a tier all of a bucket are alike
            form = "codes" if self.is_coded(bucket, 0) else "moment"  # under keys, and so in memory, of their own
            keys = {f"{form} {index}": moment for index in range(self.optimizer.moments) if in_files}
            if bucket.master and in_files:
                keys["master weights"] = 4
            if self.offload.parameters == "nvme":
                keys["weights"] = bucket.dtype.itemsize
            if gradients_in_files:
                keys["gradient"] = bucket.gradient_dtype.itemsize
            pieces = bucket.layout.pieces(start, stop)
            cuts, here = self.offload.cuts(stop - start), stays[id(bucket)]
            first = {"weights": here.weights, "gradient": cuts.heads + here.gradients}
            for index, (begin, end) in enumerate(cuts.chunks):
                if any(piece.offset < end and piece.offset + piece.numel > begin for piece in pieces):
                    for key, itemsize in keys.items():
                        place = (number % SLOTS, key)
                        if index >= first.get(key, cuts.heads):
                            slots[place] = max(slots.get(place, 0), cuts.size * itemsize)
                    number += 1
        step = sum(slots.values()) + self._copy_rooms(units, rank)
        for name, nbytes in (("optimizer step", step), ("transfers", self._transfers(units, rank))):
            if nbytes:
                yield Entry("staging", "host", Owner(name), nbytes, nbytes)

    def _copy_rooms(self, units: Units, rank: int) -> int:
        """The most page-locked memory through which a step's gradients and weights pass, of two chunks each way."""
        if self.device_type == "cpu" or self.offload.optimizer == "none":
            return 0
        placement, down, up = placement_of(self.resolved), 0, 0
        gradients = self.offload.gradient_tier(self.resolved.gradient_reduction) == "none"
        for bucket in (bucket for unit in units for bucket in unit if bucket.trainable):
            start, stop = bucket.owned(placement, rank)
            cuts, edges = self.offload.cuts(stop - start), 64 * len(bucket.layout.segments)
            most = min(cuts.size, cuts.numel - cuts.head)
            weights = (most * bucket.dtype.itemsize + edges) * (self.offload.parameters == "none" and most > 0)
            fetched = (most * bucket.gradient_dtype.itemsize + edges) * (gradients and most > 0)
            down, up = max(down, fetched + weights * (not bucket.master)), max(up, weights)
        return 2 * (round_up(down, BLOCK) + round_up(up, BLOCK))

    def _sums_going_down(self, units: Units, rank: int) -> Iterator[Entry]:
        """On a device: one bucket's gradients on their way to a tier, with the earlier sum that they are added to."""
        if self.device_type == "cpu" or self.offload.gradient_tier(self.resolved.gradient_reduction) == "none":
            return
        placement, asked, taken = placement_of(self.resolved), 0, 0
        for bucket in (bucket for unit in units for bucket in unit if bucket.trainable):
            start, stop = bucket.owned(placement, rank)
            sizes = [(stop - start) * bucket.gradient_dtype.itemsize]
            if self.accumulation > 1:
                sizes.append((stop - start) * bucket.reduce_dtype.itemsize)
            asked, taken = max(asked, sum(sizes)), max(taken, sum(map(self._allocated, sizes)))
        yield Entry("gradient buckets", "device", Owner("on their way to the host"), asked, taken, peak=True)

    def _transfers(self, units: Units, rank: int) -> int:
        """Memory through which whole vectors in files pass: slices to be gathered, and reduced gradients."""
        weights, gradients = dict[int, int](), dict[int, int]()
        placement = placement_of(self.resolved)
        in_files = self.offload.gradient_tier(self.resolved.gradient_reduction) == "nvme"
        stays = staying(units, self.resolved, self.offload)
        for bucket in (bucket for unit in units for bucket in unit):
            cuts, here = self.offload.cuts(bucket.layout.slice_numel), stays[id(bucket)]
            if self.offload.parameters == "nvme":
                _fill_slots(weights, range(len(cuts.chunks) - here.weights), cuts.size * bucket.dtype.itemsize)
            if in_files and bucket.trainable:
                start, stop = bucket.owned(placement, rank)
                cuts = self.offload.cuts(stop - start)
                used = range(cuts.heads + here.gradients, len(cuts.chunks))
                _fill_slots(gradients, used, cuts.size * bucket.gradient_dtype.itemsize)
        return sum(weights.values()) + sum(gradients.values())

    def _saved(self, units: Units) -> Iterator[BucketFacts]:
        """Buckets of which checkpoints hold values."""
        referenced = self.resolved.config.checkpoint.frozen == "reference"
        return (bucket for unit in units for bucket in unit if bucket.trainable or not referenced)

    def _copies(self, units: Units, rank: int) -> Entry:
        """Two copies of what this rank writes into a checkpoint, and two of a rank of the host before, if any."""
        shard, world = self.resolved.shard, self.resolved.world_size
        # The first replica writes for all; each host has the copies of the one before.
        ranks = [rank] if self.ranks_per_host == world else [rank, (rank - self.ranks_per_host) % world]
        asked = sum(2 * self._written(units, each)[0] for each in ranks if each < shard)
        return Entry("copies", "host", Owner("survive"), asked, asked)

    def _snapshot(self, units: Units, rank: int) -> Entry:
        """A copy of what this rank writes into a checkpoint, each piece at a page's offset of its own."""
        asked, pieces = self._written(units, rank)
        taken = asked + PAGE * pieces
        if self.device_type == "cuda" and taken:
            taken = round_up(taken, PAGE)
        return Entry("snapshot", "host", Owner("checkpoint"), asked, taken)

    def _written(self, units: Units, rank: int) -> tuple[int, int]:
        """Bytes and pieces that this rank writes into a checkpoint."""
        asked = pieces = 0
        for bucket in self._saved(units):
            found = bucket.layout.pieces(*bucket.slice_of(rank))
            elements = sum(piece.numel for piece in found)
            tensors, itemsizes = 1, bucket.dtype.itemsize
            if bucket.trainable:
                moments = self.optimizer.moments
                tensors += bucket.master + moments + self.optimizer.average
                itemsizes += 4 * bucket.master + self.optimizer.average_bytes(bucket.updated_dtype)
                asked += moments * sum(piece.numel * self.moment_itemsize(bucket, piece.index) for piece in found)
                scales = self.scale_bytes(bucket, found)
                asked += moments * sum(scales)
                pieces += moments * len(scales)
            asked += elements * itemsizes
            pieces += len(found) * tensors
        if rank == 0:
            persistent = [buffer for buffer in self.model.buffers.values() if buffer.persistent]
            asked += sum(self._buffer_bytes(buffer) for buffer in persistent)
            pieces += len(persistent)
        return asked, pieces

    def _snapshot_in_files(self, units: Units, rank: int) -> Entry:
        """One more place for what a save in the background writes: for chunks of tiers whole ones, else for pieces."""
        sizes: list[int] = []
        placement = placement_of(self.resolved)
        for bucket in self._saved(units):
            bounds = bucket.slice_of(rank)
            pieces, owned = bucket.layout.pieces(*bounds), bucket.owned(placement, rank)
            moment = self.moment_itemsize(bucket, 0)
            sizes += self.optimizer.moments * self.scale_bytes(bucket, pieces if bucket.trainable else ())
            averages = [self.optimizer.average_bytes(bucket.updated_dtype)] * self.optimizer.average
            states = [*[4] * bucket.master, *[moment] * self.optimizer.moments, *averages] if bucket.trainable else []
            for start, stop, tier, itemsizes in (
                (*bounds, self.offload.parameters, [bucket.dtype.itemsize]),
                (*owned, self.offload.optimizer, states),
            ):
                if tier == "none":
                    found = [piece.numel for piece in pieces]
                else:
                    cuts, lead = self.offload.cuts(stop - start), bounds[0] - start
                    places = [(lead + each.offset, lead + each.offset + each.numel) for each in pieces]
                    numbers = {number for place in places for number, *_ in cuts.overlapping(*place)}
                    found = [end - begin for begin, end in (cuts.chunks[number] for number in numbers)]
                sizes += [numel * itemsize for itemsize in itemsizes for numel in found]
        if rank == 0:
            sizes += [self._buffer_bytes(buffer) for buffer in self.model.buffers.values() if buffer.persistent]
        return Entry("snapshot", "nvme", Owner("checkpoint"), sum(sizes), sum(round_up(each, BLOCK) for each in sizes))


def _reduced_messages(buckets: Iterable[BucketFacts]) -> list[int]:
    """Bytes that a rank sends to each other one for reductions of buckets, of those that are trained."""
    return [bucket.layout.slice_numel * bucket.reduce_dtype.itemsize for bucket in buckets if bucket.trainable]


def _fill_slots(slots: dict[int, int], turns: Iterable[int], nbytes: int) -> None:
    """Account for a pass over chunks that takes memory at these turns."""
    for turn in turns:
        slot = turn % TRANSFER_SLOTS
        slots[slot] = max(slots.get(slot, 0), nbytes)


class _BucketEntries:
    """Memory that one rank holds of one bucket from step to step."""

    def __init__(self, plan: MemoryPlan, bucket: BucketFacts, rank: int, stays: Staying) -> None:
        self.plan, self.bucket, self.stays = plan, bucket, stays
        self.placement = bucket.placement(plan.resolved.config, plan.offload.parameters)
        self.slice = bucket.slice_of(rank)
        self.owned = bucket.owned(self.placement, rank)

    def entries(self) -> Iterator[Entry]:
        """All entries of the bucket."""
        bucket, offload = self.bucket, self.plan.offload
        count = len(bucket.owner.names)
        nbytes = count * bucket.dtype.itemsize
        yield Entry("handles", "device", bucket.owner, nbytes, self.plan._allocated(nbytes))
        if bucket.gathered_as == "float8":
            scales = count * torch.float32.itemsize  # agreed ones, and those of the codes that are there
            for _ in range(2):
                yield Entry("handles", "device", bucket.owner, scales, self.plan._allocated(scales))
        sliced = self.placement.shard_parameters and not self.placement.in_place
        where = self.slice if sliced else (0, bucket.layout.numel)
        tier = _TIERS[offload.parameters]
        yield from self._partly_staying("parameters", tier, where, self._weights_stop, bucket.dtype.itemsize)
        if not bucket.trainable:
            return
        reduction = self.plan.resolved.gradient_reduction
        tier = _TIERS[offload.gradient_tier(reduction)]
        whole = self.owned == (0, bucket.layout.numel) and tier == "device" and bucket.neighbours == 1
        if not (whole and bucket.gradient_dtype == bucket.dtype):  # else p.grad is the gradient itself
            each = self.plan._allocated(bucket.dtype.itemsize)
            yield Entry("handles", "device", bucket.owner, count * bucket.dtype.itemsize, count * each)
        if bucket.keeps_full(self.plan.resolved.config, self.plan.accumulation):
            yield self._buffer("gradients", "device", (0, bucket.layout.numel), bucket.gradient_dtype.itemsize)
        else:
            yield from self._state_buffers("gradients", tier, bucket.gradient_dtype.itemsize)
        yield from self._optimizer(_TIERS[offload.optimizer])

    def _optimizer(self, tier: Tier) -> Iterator[Entry]:
        bucket, state = self.bucket, self.plan.optimizer
        pieces = bucket.layout.pieces(*self.owned)
        if bucket.master:
            yield from self._state_buffers("master weights", tier, 4)
        if state.average:
            yield from self._state_buffers("averages", tier, state.average_bytes(bucket.updated_dtype))
        counters = len(pieces) * state.scalar_bytes
        at: Tier = "device" if self.plan.device_type == "cpu" else "host"
        scales = self.plan.scale_bytes(bucket, pieces)
        if tier == "device":
            sizes = [piece.numel * self.plan.moment_itemsize(bucket, piece.index) for piece in pieces] + scales
            taken = sum(map(self.plan._allocated, sizes)) * state.moments
            yield Entry("optimizer state", tier, bucket.owner, sum(sizes) * state.moments, taken)
        else:
            for _ in range(state.moments):
                yield from self._state_buffers("optimizer state", tier, self.plan.moment_itemsize(bucket, 0))
            counters += sum(scales) * state.moments  # they stay in host memory
        yield Entry("optimizer state", at, bucket.owner, counters, counters)

    def _state_buffers(self, category: Category, tier: Tier, itemsize: int) -> Iterator[Entry]:
        """A vector of state: in its tier, and a head on the device."""
        start, stop = self.owned
        if tier == "device":
            yield self._buffer(category, tier, self.owned, itemsize)
            return
        cuts = self.plan.offload.cuts(stop - start)
        split = start + cuts.head
        count = cuts.heads + self.stays.gradients if category == "gradients" else 0
        yield from self._partly_staying(category, tier, (split, stop), start + stop_of(cuts, count), itemsize)
        if split > start:
            yield self._buffer(category, "device", (start, split), itemsize)

    @property
    def _weights_stop(self) -> int:
        """One past the last element of the slice that stays in host memory; 0 if none does."""
        start, stop = self.slice
        if not self.stays.weights:
            return 0
        return start + stop_of(self.plan.offload.cuts(stop - start), self.stays.weights)

    def _partly_staying(
        self, category: Category, tier: Tier, where: tuple[int, int], split: int, itemsize: int
    ) -> Iterator[Entry]:
        """A buffer in a tier, but for what stays in host memory: all that is before element `split`."""
        start, stop = where
        split = min(max(split, start), stop)
        if split > start:
            yield self._buffer(category, "host", (start, split), itemsize)
        if split < stop or start == stop:
            yield self._buffer(category, tier, (split, stop), itemsize)

    def _buffer(self, category: Category, tier: Tier, where: tuple[int, int], itemsize: int) -> Entry:
        """A flat buffer for the elements [start, stop) of the bucket."""
        pieces: Sequence[Piece] = self.bucket.layout.pieces(*where)
        asked = sum(piece.numel for piece in pieces) * itemsize
        nbytes = (where[1] - where[0]) * itemsize
        taken = self.plan._allocated(nbytes) if tier == "device" else round_up(nbytes, BLOCK)
        return Entry(category, tier, self.bucket.owner, asked, taken)


def _device_type(device: str | torch.device | None) -> DeviceType:
    kind = device.type if isinstance(device, torch.device) else device
    if kind is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {kind!r}; a plan is for 'cpu' or 'cuda'")
    return "cuda" if kind == "cuda" else "cpu"


def plan_model(
    model: nn.Module | ModelShape,
    config: ZeroConfig | ResolvedConfig,
    *,
    world_size: int = 1,
    compute_dtype: torch.dtype | None = None,
    optimizer: str | OptimizerState | Optimizer = "AdamW",
    offload: Offload | None = None,
    device: str | torch.device | None = None,
    ranks_per_host: int | None = None,
    snapshots: bool | None = None,
    activations: int = 0,
    tokens: int = 0,
    recompute: bool = False,
    accumulation: int = 1,
    autocast: torch.dtype | None = None,
) -> MemoryPlan:
    """Plan a run. See `ZeroConfig.plan`."""
    units = config.config.units if isinstance(config, ResolvedConfig) else config.units
    shape = model if isinstance(model, ModelShape) else ModelShape.of(model, units)
    if shape.ways > 1 and isinstance(config, ZeroConfig) and config.mesh.tensor is None:
        config = deepcopy(config)
        config.mesh.record("tensor", shape.ways, "derived: the device mesh of the module's DTensors")
    resolved = config if isinstance(config, ResolvedConfig) else resolve(config, world_size)
    settings = resolved.config
    if isinstance(model, nn.Module) and (settings.mesh.tensor or 1) > 1:
        for _, each in models_with_plans(model):
            check_heads(type(each).__name__, getattr(each, "config", None), settings.mesh.tensor or 1)
    if settings.pipeline.stages > 1:
        assert settings.pipeline.micro_batches and settings.pipeline.chunks, "resolve() derives them"
        accumulation = max(accumulation, settings.pipeline.micro_batches * settings.pipeline.chunks)
    if isinstance(optimizer, Optimizer):
        optimizer = state_of(optimizer)
    elif isinstance(optimizer, str):
        optimizer = optimizer_state(optimizer)
    return MemoryPlan(
        shape,
        resolved,
        compute_dtype,
        optimizer,
        offload or Offload.of(settings.offload),
        _device_type(device),
        resolved.world_size if ranks_per_host is None else ranks_per_host,
        settings.checkpoint.asynchronous if snapshots is None else snapshots,
        activations,
        tokens,
        recompute,
        accumulation,
        autocast=autocast,
    )
