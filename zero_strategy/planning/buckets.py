"""The plan's buckets and shapes, before anything is allocated: the engine's rules, offloaded chunks, peaks of a step.

The engine's rules and layout are applied to shapes. Peaks are units that are unsharded, gradients on their way, the
largest hand-over. Each is a bound that a step reaches when units are used one after the other, in the order of
registration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from zero_strategy.config import (
    OffloadConfig,
    PipelineConfig,
    ResolvedConfig,
    ZeroConfig,
)
from zero_strategy.fsdp.backward import MAX_IN_FLIGHT
from zero_strategy.fsdp.grad_accumulation import most_waiting
from zero_strategy.fsdp.layout import (
    PLACEMENTS,
    BucketLayout,
    Placement,
    build_layout,
    gradient_dtypes,
    group_parameters,
    lies_apart,
    placement_for,
    wants_master,
)
from zero_strategy.fsdp.state_bits import block_of, is_coded, may_be_coded
from zero_strategy.offload.chunk_store import Allowance
from zero_strategy.offload.chunks import Cuts, head_numel
from zero_strategy.offload.stores import chunk_numel
from zero_strategy.planning.ledger import Entry, Owner, allocated
from zero_strategy.planning.model_shape import ModelShape, NamedShapes, ParameterShape

TIER_ORDER = ("none", "cpu", "nvme")
"""From the fastest to the largest; "none" is the device."""
BLOCK = 4096
"""Bytes that host memory and records on a drive are rounded up to."""


@dataclass(frozen=True)
class Offload:
    """Tiers of the parts of model state, by the names of the config's settings.

    Attributes:
        optimizer: Of optimizer state and master weights: "none" (the device), "cpu", "nvme".
        ratio: The part of optimizer state and master weights that its tier holds; the rest stays on the device.
        parameters: Of the owned slices of parameters, under stage 3.
        gradients: Of reduced gradients; None: the optimizer's, where gradients are reduced per micro-batch.
        staging_bytes: Host memory through which state in files passes.
        resident_bytes: Host memory in which parameters and gradients stay that would be in files.
    """

    optimizer: str = "none"
    parameters: str = "none"
    ratio: float = 1.0
    gradients: str | None = None
    staging_bytes: int = OffloadConfig().staging_bytes
    resident_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("optimizer", "parameters", "gradients"):
            if getattr(self, name) not in (*TIER_ORDER, *([None] if name == "gradients" else [])):
                raise ValueError(f"offload.{name} is {getattr(self, name)!r}; accepted: none, cpu, nvme")
        if self.gradients not in (None, "none") and self.optimizer == "none":
            raise ValueError(
                f"offload.gradients is {self.gradients!r} and offload.optimizer is 'none': offload the optimizer too"
            )
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"offload.optimizer_ratio is {self.ratio:g}; accepted: 0 to 1")
        if self.parameters != "none" and self.optimizer == "none":
            raise ValueError(
                f"offload.parameters is {self.parameters!r} and offload.optimizer is 'none': what is not on the device "
                "is updated on the host; offload the optimizer too"
            )

    @classmethod
    def of(cls, config: OffloadConfig) -> Offload:
        """Settings of a config."""
        explicit = None if config.is_derived("gradients") else config.gradients
        return cls(
            config.optimizer,
            config.parameters,
            config.optimizer_ratio,
            explicit,
            config.staging_bytes,
            config.resident_bytes,
        )

    def check_stage(self, stage: int) -> None:
        """Raise if parameters are offloaded below stage 3, where every rank computes with whole ones.

        Raises:
            ValueError: Saying so.
        """
        if self.parameters != "none" and stage != 3:
            raise ValueError(f"offload.parameters is {self.parameters!r} at stage {stage}; it needs stage 3")

    @property
    def in_files(self) -> bool:
        """True if anything is kept in files."""
        return "nvme" in (self.optimizer, self.parameters, self.gradients)

    def gradient_tier(self, reduction: str) -> str:
        """The tier of reduced gradients, under a `gradient_reduction`."""
        return "none" if reduction == "per_step" else self.gradients or self.optimizer

    @property
    def chunk_numel(self) -> int:
        """Elements of the chunks that a step takes."""
        return chunk_numel(self.staging_bytes)

    def cuts(self, numel: int) -> Cuts:
        """Cuts of the vectors of a bucket of which a rank owns `numel` elements."""
        return Cuts(numel, self.chunk_numel, head_numel(numel, self.ratio if self.optimizer != "none" else 1.0))

    def describe(self) -> str:
        """Such as "optimizer cpu, parameters nvme"; "none"."""
        parts = [f"{name} {tier}" for name in ("optimizer", "parameters") if (tier := getattr(self, name)) != "none"]
        if self.ratio != 1.0 and self.optimizer != "none":
            parts.insert(1, f"ratio {self.ratio:g}")
        if self.gradients is not None:
            parts.append(f"gradients {self.gradients}")
        if self.resident_bytes and self.in_files:
            parts.append(f"resident bytes {self.resident_bytes}")
        return ", ".join(parts) or "none"


@dataclass(frozen=True)
class BucketFacts:
    """One bucket.

    Attributes:
        owner: Its unit and parameters.
        dtype: Of its parameters, once the engine has them.
        trainable: Whether they take gradients.
        layout: Where each lies.
        gradient_dtype: In what gradients are accumulated.
        reduce_dtype: In what they are summed over ranks.
        master: Whether there is an fp32 copy for the optimizer.
        state_bits: What the config says of each parameter's states: 8 or 32.
        gathered_as: `communication.parameters`, if it is gathered as its layers cast it; else "".
        handed: Bytes of the largest gradient that autograd hands over; of a tied one, two and their
            sum, all at once.
        neighbours: Data-parallel ranks side by side that have the same slice, each of other experts; 1: they have
            slices of their own.
    """

    owner: Owner
    dtype: torch.dtype
    trainable: bool
    layout: BucketLayout
    gradient_dtype: torch.dtype
    reduce_dtype: torch.dtype
    master: bool
    handed: int
    state_bits: tuple[int, ...]
    gathered_as: str
    neighbours: int = 1

    @property
    def gathered_itemsize(self) -> int:
        """Bytes of an element where it is gathered for a forward."""
        return {"float8": 1, "autocast": 2}.get(self.gathered_as, self.dtype.itemsize)

    @property
    def updated_dtype(self) -> torch.dtype:
        """The dtype of what the optimizer updates."""
        return torch.float32 if self.master else self.dtype

    @property
    def elements(self) -> int:
        """Elements of its parameters, padding left out."""
        return sum(segment.numel for segment in self.layout.segments)

    def is_coded(self, index: int, asked: int | None) -> bool:
        """True if the states of a parameter have 8 bits where its param group asks for so many, or for none."""
        return is_coded(asked, self.state_bits[index], self.layout.segments[index].numel)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a buffer of full gradients; 0 if it takes none."""
        return self.layout.numel * self.gradient_dtype.itemsize if self.trainable else 0

    def slice_of(self, rank: int) -> tuple[int, int]:
        """First and one-past-last element of the slice of a data-parallel rank."""
        return self.layout.slice_bounds(rank // self.neighbours % self.layout.world_size)

    def owned(self, placement: Placement, rank: int) -> tuple[int, int]:
        """First and one-past-last element whose optimizer state a data-parallel rank holds."""
        return self.slice_of(rank) if placement.shard_optimizer else (0, self.layout.numel)

    def placement(self, config: ZeroConfig, tier: str) -> Placement:
        """The row of the stage, and whether the own slice is in place; `tier`: of slices of parameters."""
        return placement_for(config, self.layout.world_size, tier)

    def keeps_full(self, config: ZeroConfig, accumulation: int) -> bool:
        """True if a buffer of full gradients stays from step to step, as in a `GradientBucket`."""
        if config.reproducible.slots:
            return False
        all_owned = not PLACEMENTS[config.stage].shard_optimizer or self.layout.slice_numel == self.layout.numel
        return config.gradient_reduction == "per_step" and (accumulation > 1 or all_owned)


Units = Sequence[Sequence[BucketFacts]]
"""By unit, the root first."""


def facts_of(model: ModelShape, resolved: ResolvedConfig, compute_dtype: torch.dtype | None) -> Units:
    """The buckets that an engine would make of a model; of layers that ranks divide, of the largest part.

    Raises:
        ValueError: If it is not known which layers are divided, or ranks cannot divide their experts.
    """
    model = model.of_tensor_rank(resolved.config.mesh.tensor or 1).of_expert_rank(resolved.config)
    replicas, packed = resolved.config.mesh.replicate, bool(resolved.config.matrix_optimizers)

    # A rank alone gathers nothing, and autocast leaves 16 bits as they are.
    form = resolved.config.communication.parameters
    casts = resolved.shard > 1 and (form != "autocast" or compute_dtype in (None, torch.float32))

    def kind_in(unit: str) -> Callable[[str, ParameterShape], tuple[bool, bool, int]]:
        def kind(name: str, shape: ParameterShape) -> tuple[bool, bool, int]:
            of_steps = lies_apart(resolved.config, unit, name, shape.shape, shape.requires_grad)
            return of_steps, casts and shape.cast_as == form, shape.expert_ranks

        return kind

    return [
        [
            _facts(
                unit.name, number, dtype, of_steps and packed, tuple(named), resolved, replicas, form if cast else ""
            )
            for dtype, (of_steps, cast, _), named in group_parameters(
                unit.parameters, compute_dtype, apart=kind_in(unit.name), kept=lambda shape: shape.keeps_dtype
            )
        ]
        for number, unit in enumerate(model.units)
    ]


def _facts(
    unit: str,
    turn: int,
    dtype: torch.dtype,
    whole: bool,
    named: NamedShapes,
    resolved: ResolvedConfig,
    replicas: int,
    gathered_as: str,
) -> BucketFacts:
    precision = resolved.config.precision
    trainable, neighbours = named[0][1].requires_grad, named[0][1].expert_ranks
    shapes = [(name, shape.shape) for name, shape in named]
    block = block_of(resolved.config)
    slices = resolved.shard // neighbours
    layout = build_layout(shapes, dtype.itemsize, slices, replicas, whole=whole, turn=turn, block=block)
    owner = Owner(unit, tuple(segment.name for segment in layout.segments))
    master = trainable and wants_master(dtype, precision)
    handed = max((3 if shape.tied else 1) * shape.numel * dtype.itemsize for _, shape in named) if trainable else 0
    bits = [
        resolved.config.optimizer.state_bits if may_be_coded(resolved.config, segment.name, segment.numel) else 32
        for segment in layout.segments
    ]
    dtypes = gradient_dtypes(dtype, precision)
    return BucketFacts(owner, dtype, trainable, layout, *dtypes, master, handed, tuple(bits), gathered_as, neighbours)


def placement_of(resolved: ResolvedConfig) -> Placement:
    """The row of the stage; where own slices are (`Placement.in_place`) is for the plan's offload to say."""
    return PLACEMENTS[resolved.config.stage]


@dataclass(frozen=True)
class Staying:
    """Bytes of one bucket that stay.

    Attributes:
        weights: How many of the first chunks of its slice stay.
        gradients: How many of those of its reduced gradients, after the head.
    """

    weights: int = 0
    gradients: int = 0


def staying(units: Units, resolved: ResolvedConfig, offload: Offload) -> dict[int, Staying]:
    """Bytes of every bucket that stay, by its id: of parameters first, unit by unit, then of gradients."""
    return _given(units, resolved, offload)[0]


def staying_bytes(units: Units, resolved: ResolvedConfig, offload: Offload) -> int:
    """Bytes of what stays: the least `offload.resident_bytes` by which it does."""
    return offload.resident_bytes - _given(units, resolved, offload)[1]


def _given(units: Units, resolved: ResolvedConfig, offload: Offload) -> tuple[dict[int, Staying], int]:
    """Buckets that stay, and the bytes that are left."""
    buckets = [bucket for unit in units for bucket in unit]
    allowance = Allowance(offload.resident_bytes)
    weights, gradients = dict[int, int](), dict[int, int]()
    if offload.parameters == "nvme":
        for bucket in buckets:
            weights[id(bucket)] = allowance.take(_weights_costs(bucket, offload))
    if offload.gradient_tier(resolved.gradient_reduction) == "nvme":
        for bucket in (bucket for bucket in buckets if bucket.trainable):
            start, stop = bucket.owned(placement_of(resolved), 0)
            cuts = offload.cuts(stop - start)
            sizes = [(high - low) * bucket.gradient_dtype.itemsize for low, high in cuts.chunks]
            gradients[id(bucket)] = allowance.take(sizes[cuts.heads :])
    found = {id(each): Staying(weights.get(id(each), 0), gradients.get(id(each), 0)) for each in buckets}
    return found, allowance.left


def stop_of(cuts: Cuts, count: int) -> int:
    """One past the last element of the first `count` chunks."""
    return cuts.chunks[count - 1][1] if count else 0


def _weights_costs(bucket: BucketFacts, offload: Offload) -> list[int]:
    """Bytes of each chunk of the slice."""
    chunks = offload.cuts(bucket.layout.slice_numel).chunks
    return [(stop - start) * bucket.dtype.itemsize for start, stop in chunks]


T = TypeVar("T")


def peaks_of(units: Units, config: ZeroConfig, tier: str, device_type: str, accumulation: int) -> Iterator[Entry]:
    """The peaks of a training step on the device, activations left out.

    Args:
        units: Buckets by unit, the root first.
        config: A resolved config.
        tier: Of slices of parameters.
        device_type: "cpu" or "cuda".
        accumulation: Micro-batches of a step.
    """
    if PLACEMENTS[config.stage].shard_parameters:
        yield _gathered(units, config, tier, device_type)
    yield from _in_flight(units, config, device_type, accumulation)
    largest = max((bucket.handed for unit in units for bucket in unit), default=0)  # until it is added to the bucket
    yield Entry("gradient buckets", "device", Owner("autograd"), largest, allocated(largest, device_type), peak=True)


def _gathered(units: Units, config: ZeroConfig, tier: str, device_type: str) -> Entry:
    """The root, and the unit in use with those fetched ahead of it; all, if they stay until backward.

    Buckets that are in place take no memory when they are gathered.
    """

    def asked(buckets: Sequence[BucketFacts]) -> int:
        return sum(bucket.elements * bucket.gathered_itemsize for bucket in buckets)

    def taken(buckets: Sequence[BucketFacts]) -> int:
        return sum(allocated(bucket.layout.numel * bucket.gathered_itemsize, device_type) for bucket in buckets)

    releases = config.reshard_after_forward and config.reshard_after_backward  # the latter where they are offloaded
    width = 1 + config.prefetch if releases else len(units)
    stay = held_whole([taken(unit) for unit in units], config.pipeline)
    units = [[bucket for bucket in unit if not bucket.placement(config, tier).in_place] for unit in units]
    others = [unit for number, unit in enumerate(units) if number and number not in stay]
    window = max(windows(others, width), key=lambda found: sum(map(taken, found)), default=[])
    held = [units[number] for number in sorted({0, *stay})]
    together = [bucket for unit in (*held, *window) for bucket in unit]
    return Entry("gather buffers", "device", Owner("units"), asked(together), taken(together), peak=True)


def held_whole(sizes: Sequence[int], pipeline: PipelineConfig) -> list[int]:
    """Units that a rank of a pipeline holds whole during a step, instead of gathering them for each micro-batch.

    Args:
        sizes: Bytes of each unit when it is whole, the root's first.
        pipeline: Of a resolved config.

    Returns:
        Their numbers; all that fit, in order.
    """
    assert pipeline.gather_bytes is not None, "resolve() derives pipeline.gather_bytes"
    left, found = pipeline.gather_bytes, list[int]()
    for number, size in enumerate(sizes):
        if size <= left:
            found.append(number)
            left -= size
    return found


def _in_flight(units: Units, config: ZeroConfig, device_type: str, accumulation: int) -> Iterator[Entry]:
    """Buffers of local gradients that live as long as their reduction, and copies in the dtype of the sum."""
    trained = [bucket for unit in units for bucket in unit if bucket.trainable]
    # Without experts that ranks divide all of a config are kept, or none.
    kept = [bucket for bucket in trained if bucket.keeps_full(config, accumulation)]
    passing = [[b for b in unit if b.trainable and not b.keeps_full(config, accumulation)] for unit in units]
    root, others = passing[0], [unit for unit in passing[:0:-1] if unit]  # in the order of a backward
    filled = [[*_leaving(others, number), *unit] for number, unit in enumerate(others)]
    filling = [*root, *max(filled, key=lambda found: sum(b.gradient_bytes for b in found), default=[])]
    sent = windows([*(bucket for unit in others for bucket in unit), *root], MAX_IN_FLIGHT)
    sending = [*kept, *max(sent, key=lambda found: sum(map(_copy_bytes, found)), default=[])]
    if PLACEMENTS[config.stage].shard_optimizer:  # else they are shown as they are
        first = [bucket for bucket in units[0] if bucket.trainable]
        waiting = sum(most_waiting(bucket.gradient_bytes) for bucket in first)
        waiting += max((most_waiting(b.gradient_bytes) for b in trained[len(first) :]), default=0)
        yield Entry("gradient buckets", "device", Owner("small gradients"), waiting, waiting, peak=True)
    asked = sum(bucket.elements * bucket.gradient_dtype.itemsize for bucket in filling)
    taken = sum(allocated(bucket.gradient_bytes, device_type) for bucket in filling)
    yield Entry("gradient buckets", "device", Owner("reduction"), asked, taken, peak=True)
    asked = sum(bucket.elements * bucket.reduce_dtype.itemsize for bucket in sending if _copy_bytes(bucket))
    taken = sum(allocated(_copy_bytes(bucket), device_type) for bucket in sending)
    yield Entry("gradient buckets", "device", Owner("reduction copies"), asked, taken, peak=True)


def _leaving(units: Units, number: int) -> Sequence[BucketFacts]:
    """Buckets on their way to other ranks when a backward comes to a unit, all units being in its order."""
    before = units[max(0, number - MAX_IN_FLIGHT) : number]  # of which each has one or more
    return [bucket for unit in before for bucket in unit][-MAX_IN_FLIGHT:]


def _copy_bytes(bucket: BucketFacts) -> int:
    same = bucket.reduce_dtype == bucket.gradient_dtype
    return 0 if same or not bucket.trainable else bucket.layout.numel * bucket.reduce_dtype.itemsize


def windows(items: Sequence[T], width: int) -> list[Sequence[T]]:
    """All runs of `width` neighbours; the whole, if it is shorter."""
    return [items[start : start + width] for start in range(max(1, len(items) - width + 1))] if items else []
