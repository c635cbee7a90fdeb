"""The plan's buckets and shapes, before anything is allocated: the engine's rules, offloaded chunks, peaks of a step.

The engine's rules and layout are applied to shapes. Peaks are units that are unsharded, gradients on their way, the
largest hand-over. Each is a bound that a step reaches when units are used one after the other, in the order of
registration.

Shapes of a model and of optimizer states are all that a plan needs to know.

They are taken from a module on any device, the meta device included, or made of the plain numbers of a GPT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from zero_strategy.config import (
    DEFAULT_BUDGET,
    ActivationCheckpointingConfig,
    OffloadConfig,
    PipelineConfig,
    ResolvedConfig,
    UnitsConfig,
    ZeroConfig,
)
from zero_strategy.fsdp.dtensor import held_by, tensor_ranks
from zero_strategy.fsdp.layout import (
    PLACEMENTS,
    BucketLayout,
    Placement,
    aliases,
    build_layout,
    find_units,
    gradient_dtypes,
    group_parameters,
    wants_master,
)
from zero_strategy.fsdp.packing import lies_apart
from zero_strategy.fsdp.reduce import MAX_IN_FLIGHT
from zero_strategy.fsdp.tensor_plan import divided_dimensions, models_with_plans, own_plan, styles_of
from zero_strategy.offload.chunk_pass import Cuts, head_numel
from zero_strategy.offload.chunk_store import Allowance
from zero_strategy.offload.stores import chunk_numel
from zero_strategy.planning.ledger import Entry, Owner, allocated
from zero_strategy.runtime.torch_private import non_persistent_buffers
from zero_strategy.sequence.tiling import loss_tile

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
        """Of reduced gradients, under a `gradient_reduction`."""
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
        handed: Bytes of the largest gradient that autograd hands over; of a tied one, two and their
            sum, all at once.
    """

    owner: Owner
    dtype: torch.dtype
    trainable: bool
    layout: BucketLayout
    gradient_dtype: torch.dtype
    reduce_dtype: torch.dtype
    master: bool
    handed: int

    @property
    def updated_dtype(self) -> torch.dtype:
        """Of what the optimizer updates."""
        return torch.float32 if self.master else self.dtype

    @property
    def elements(self) -> int:
        """Elements of its parameters, padding left out."""
        return sum(segment.numel for segment in self.layout.segments)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a buffer of full gradients; 0 if it takes none."""
        return self.layout.numel * self.gradient_dtype.itemsize if self.trainable else 0

    def owned(self, placement: Placement, shard_rank: int) -> tuple[int, int]:
        """First and one-past-last element whose optimizer state a rank holds."""
        return self.layout.slice_bounds(shard_rank) if placement.shard_optimizer else (0, self.layout.numel)

    def keeps_full(self, config: ZeroConfig, accumulation: int) -> bool:
        """True if a buffer of full gradients stays from step to step, as in a `GradientBucket`."""
        all_owned = not PLACEMENTS[config.stage].shard_optimizer or self.layout.slice_numel == self.layout.numel
        return config.gradient_reduction == "per_step" and (accumulation > 1 or all_owned)


Units = Sequence[Sequence[BucketFacts]]
"""By unit, the root first."""


def facts_of(model: ModelShape, resolved: ResolvedConfig, compute_dtype: torch.dtype | None) -> Units:
    """The buckets that an engine would make of a model; of layers that ranks divide, of the largest part."""
    model = model.of_tensor_rank(resolved.config.mesh.tensor or 1)
    replicas, packed = resolved.config.mesh.replicate, bool(resolved.config.matrix_optimizers)

    def kept_in(unit: str) -> Callable[[str, ParameterShape], bool]:
        return lambda name, shape: lies_apart(resolved.config, unit, name, shape.shape, shape.requires_grad)

    return [
        [
            _facts(unit.name, number, dtype, apart and packed, tuple(named), resolved, replicas)
            for dtype, apart, named in group_parameters(unit.parameters, compute_dtype, apart=kept_in(unit.name))
        ]
        for number, unit in enumerate(model.units)
    ]


def _facts(
    unit: str, turn: int, dtype: torch.dtype, whole: bool, named: NamedShapes, resolved: ResolvedConfig, replicas: int
) -> BucketFacts:
    precision = resolved.config.precision
    trainable = named[0][1].requires_grad
    shapes = [(name, shape.shape) for name, shape in named]
    layout = build_layout(shapes, dtype.itemsize, resolved.shard, replicas, whole=whole, turn=turn)
    owner = Owner(unit, tuple(segment.name for segment in layout.segments))
    master = trainable and wants_master(dtype, precision)
    handed = max((3 if shape.tied else 1) * shape.numel * dtype.itemsize for _, shape in named) if trainable else 0
    return BucketFacts(owner, dtype, trainable, layout, *gradient_dtypes(dtype, precision), master, handed)


def placement_of(resolved: ResolvedConfig) -> Placement:
    """The row of the stage; where own slices are (`Placement.in_place`) is for the plan's offload to say."""
    return PLACEMENTS[resolved.config.stage]


@dataclass(frozen=True)
class Staying:
    """Of one bucket.

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


def peaks_of(
    units: Units, config: ZeroConfig, placement: Placement, device_type: str, accumulation: int
) -> Iterator[Entry]:
    """The peaks of a training step on the device, activations left out.

    Args:
        units: Buckets by unit, the root first.
        config: A resolved config.
        placement: What is divided, and whether it stays in place.
        device_type: "cpu" or "cuda".
        accumulation: Micro-batches of a step.
    """
    if placement.shard_parameters and not placement.in_place:
        yield _gathered(units, config, device_type)
    yield from _in_flight(units, config, device_type, accumulation)
    largest = max((bucket.handed for unit in units for bucket in unit), default=0)  # until it is added to the bucket
    yield Entry("gradient buckets", "device", Owner("autograd"), largest, allocated(largest, device_type), peak=True)


def _gathered(units: Units, config: ZeroConfig, device_type: str) -> Entry:
    """The root, and the unit in use with those fetched ahead of it; all, if they stay until backward."""

    def asked(buckets: Sequence[BucketFacts]) -> int:
        return sum(bucket.elements * bucket.dtype.itemsize for bucket in buckets)

    def taken(buckets: Sequence[BucketFacts]) -> int:
        return sum(allocated(bucket.layout.numel * bucket.dtype.itemsize, device_type) for bucket in buckets)

    releases = config.reshard_after_forward and config.reshard_after_backward  # the latter where they are offloaded
    width = 1 + config.prefetch if releases else len(units)
    stay = held_whole([taken(unit) for unit in units], config.pipeline)
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
    trained = [[bucket for bucket in unit if bucket.trainable] for unit in units]
    root, others = trained[0], [bucket for unit in trained[1:] for bucket in unit]
    if all(bucket.keeps_full(config, accumulation) for bucket in (*root, *others)):  # of one config all do, or none
        filling: list[BucketFacts] = []
        sending = [*root, *others]
    else:
        filled = windows(others, MAX_IN_FLIGHT + 1)
        filling = [*root, *max(filled, key=lambda found: sum(b.gradient_bytes for b in found), default=[])]
        sent = windows([*root, *others], MAX_IN_FLIGHT)
        sending = list(max(sent, key=lambda found: sum(map(_copy_bytes, found)), default=[]))
    asked = sum(bucket.elements * bucket.gradient_dtype.itemsize for bucket in filling)
    taken = sum(allocated(bucket.gradient_bytes, device_type) for bucket in filling)
    yield Entry("gradient buckets", "device", Owner("reduction"), asked, taken, peak=True)
    asked = sum(bucket.elements * bucket.reduce_dtype.itemsize for bucket in sending if _copy_bytes(bucket))
    taken = sum(allocated(_copy_bytes(bucket), device_type) for bucket in sending)
    yield Entry("gradient buckets", "device", Owner("reduction copies"), asked, taken, peak=True)


def _copy_bytes(bucket: BucketFacts) -> int:
    same = bucket.reduce_dtype == bucket.gradient_dtype
    return 0 if same or not bucket.trainable else bucket.layout.numel * bucket.reduce_dtype.itemsize


def windows(items: Sequence[T], width: int) -> list[Sequence[T]]:
    """All runs of `width` neighbours; the whole, if it is shorter."""
    return [items[start : start + width] for start in range(max(1, len(items) - width + 1))] if items else []


_ANYWHERE = torch.device("cpu")


@dataclass(frozen=True)
class ParameterShape:
    """A parameter without memory.

    Attributes:
        shape: Its logical shape.
        dtype: The dtype that it is built in.
        requires_grad: Whether it is trained.
        device: Where it is; parameters of different devices share no bucket.
        tied: It has several names, so that autograd adds up several gradients of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True
    device: torch.device = _ANYWHERE
    tied: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class BufferShape(NamedTuple):
    """A buffer of a module."""

    numel: int
    """Elements."""
    dtype: torch.dtype
    """As it is built."""
    persistent: bool = True
    """Whether checkpoints hold it."""


GRADIENTS = 8
"""Of a block in its backward, beside the inside of an MLP: norms, queries, keys, values, outputs; in model widths."""
MESSAGES = 10
"""Of attention over divided sequences: what is sent, what arrives, and the same of gradients."""


class TokenCosts(NamedTuple):
    """Elements that a forward of a transformer keeps for backward, per token; no matrix of attention scores."""

    layers: int
    """Blocks."""
    per_layer: int
    """Inside a block."""
    boundary: int
    """Between blocks: all that stays of a block which is recomputed."""
    logits: int
    """At the end; kept in the parameters' dtype, and in float32 as probabilities and as their gradient."""

    products: int = 0
    """Inside a block: results of matrix products and of attention."""
    inner: int = 0
    """Inside a block's MLP, between its input and its output."""
    heads: int = 0
    """Inside a block: queries, keys, values and what attention gives."""

    def of_tensor_rank(self, ways: int) -> TokenCosts:
        """Those of a rank that has a part of the heads and of the inside of the MLP."""
        heads, inner = -(-self.heads // ways), -(-self.inner // ways)
        return self._replace(
            per_layer=self.per_layer - self.heads - self.inner + heads + inner,
            products=self.products - self.heads - self.inner // 2 + heads + inner // 2,
            inner=inner,
            heads=heads,
        )

    def nbytes(self, tokens: int, itemsize: int, *, recompute: bool = False) -> int:
        """Bytes for a micro-batch of `tokens`; `recompute`: every block is run again in backward."""
        return sum(self.in_tiers(tokens, itemsize, ActivationCheckpointingConfig("full" if recompute else "none")))

    def in_tiers(
        self,
        tokens: int,
        itemsize: int,
        settings: ActivationCheckpointingConfig,
        *,
        offload: bool = False,
        divided: bool = False,
    ) -> tuple[int, int]:
        """Bytes for a micro-batch of `tokens`, on the device and on the host.

        Args:
            tokens: Of a rank's micro-batch.
            itemsize: Of the dtype that is computed in.
            settings: What is run again in backward.
            offload: What autograd keeps of blocks waits on the host; two blocks' part of it is on the device.
            divided: Ranks divide sequences; `tokens` are those of one.
        """
        costs = self._replace(per_layer=self.per_layer - self.inner, inner=0) if settings.tile_tokens else self
        moving, staying, again = costs._blocks(settings)
        here = min(moving, 2 * -(-moving // self.layers)) if offload else moving
        last_norm = 2 * self.boundary
        kept = tokens * itemsize * (here + staying + last_norm)
        # The loss is done with before the backward of a block, with gradients and messages of its attention.
        backward = again + (GRADIENTS + (MESSAGES if divided else 0)) * self.boundary
        moment = max(self._loss(tokens, itemsize, settings), tokens * itemsize * backward)
        return kept + moment, tokens * itemsize * moving if offload else 0

    def _loss(self, tokens: int, itemsize: int, settings: ActivationCheckpointingConfig) -> int:
        """Bytes of logits and what is made of them; in tiles, of one tile, and of the gradients that the loss makes."""
        if not settings.tile_tokens:
            return tokens * self.logits * (itemsize + 2 * 4)
        tile = min(tokens, settings.tile_tokens)
        gradients = (4 * self.logits + itemsize * tokens) * self.boundary  # of the head's weight, and of its inputs
        logits = loss_tile(tile, self.logits) * self.logits * (4 + (itemsize if itemsize < 4 else 0))
        return max(gradients + logits, 2 * itemsize * tile * self.inner)

    def _blocks(self, settings: ActivationCheckpointingConfig) -> tuple[int, int, int]:
        """Elements per token that autograd keeps of blocks, that checkpoints keep, and of a block that is run again."""
        whole = self.layers * self.per_layer
        if settings.mode == "none":
            return whole, 0, 0
        if settings.mode == "budget":  # at any moment
            return int((settings.budget or DEFAULT_BUDGET) * whole), 0, 0
        again = -(-self.layers // settings.every_n) if settings.mode == "every_n" else self.layers
        kept = again * self.boundary + (self.layers - again) * self.per_layer
        products = self.layers * self.products if settings.mode == "selective" else 0
        return kept, products, self.per_layer - (self.products if settings.mode == "selective" else 0)


NamedShapes = tuple[tuple[str, ParameterShape], ...]


@dataclass(frozen=True)
class UnitShape:
    """A unit: what is gathered and reduced together.

    Attributes:
        name: Module name, "" for the root.
        parameters: (first name, shape), in registration order.
    """

    name: str
    parameters: NamedShapes


@dataclass(frozen=True)
class ModelShape:
    """All units of a model, the root first, in the order in which a forward uses them.

    Attributes:
        units: The units.
        buffers: Module buffers by name.
        title: What the model is called in reports.
        costs: Of activations, where they are known.
        divided: {first name of a parameter: the dimension that ranks of `mesh.tensor` divide}; empty where no plan of
            tensor parallelism is known.
        ways: Ranks that divide layers already: shapes are of the largest part.
    """

    units: tuple[UnitShape, ...]
    buffers: Mapping[str, BufferShape] = field(default_factory=dict)
    title: str = "model"
    costs: TokenCosts | None = None
    divided: Mapping[str, int] = field(default_factory=dict)
    ways: int = 1

    @property
    def parameters(self) -> int:
        """Elements of all parameters; tied ones count once."""
        return sum(shape.numel for unit in self.units for _, shape in unit.parameters)

    @property
    def trainable(self) -> int:
        """Elements of the parameters that are trained."""
        return sum(shape.numel for unit in self.units for _, shape in unit.parameters if shape.requires_grad)

    @classmethod
    def of(cls, module: nn.Module, units: UnitsConfig | None = None, title: str | None = None) -> ModelShape:
        """The shape of a module, which may be on the meta device; it is not changed.

        Parameters that are `DTensor`s have the shapes of this rank's parts.

        Raises:
            ValueError: If a class or pattern of `units` matches no module, or a parameter has no shape yet; names it.
        """
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(f"parameter {name!r} is lazy and has no shape yet: give its module its sizes")
        chosen = units or UnitsConfig()
        found = find_units(module, classes=chosen.classes, patterns=chosen.patterns, min_numel=chosen.min_numel)
        ties = set(aliases(module).values())
        made = tuple(
            UnitShape(spec.name, tuple((name, _shape_of(p, name in ties)) for name, p in spec.parameters))
            for spec in found
        )
        return cls(
            made,
            _buffers_of(module),
            title or type(module).__name__,
            divided=_divided_by_plan(module),
            ways=len(tensor_ranks(module) or [0]),
        )

    def of_tensor_rank(self, ways: int) -> ModelShape:
        """The shapes of the largest part that one of the ranks has which divide layers.

        Args:
            ways: Those ranks.

        Raises:
            ValueError: If nobody knows which layers are divided.
        """
        if ways == self.ways:
            return self
        if self.ways > 1:
            raise ValueError(f"mesh.tensor is {ways}, but {self.title}'s layers are divided among {self.ways} ranks")
        if not self.divided:
            raise ValueError(
                f"mesh.tensor is {ways}, and {self.title} has no plan of which layers are divided (a Hugging Face "
                "model's tp_plan): plan the model as parallelize_module has divided it, or leave mesh.tensor at 1"
            )
        units = tuple(
            replace(unit, parameters=tuple((name, self._part(name, shape, ways)) for name, shape in unit.parameters))
            for unit in self.units
        )
        costs = None if self.costs is None else self.costs.of_tensor_rank(ways)
        return replace(self, units=units, costs=costs, ways=ways)

    def _part(self, name: str, shape: ParameterShape, ways: int) -> ParameterShape:
        if name not in self.divided:
            return shape
        sizes = list(shape.shape)
        sizes[self.divided[name]] = -(-sizes[self.divided[name]] // ways)
        return replace(shape, shape=tuple(sizes))


def _divided_by_plan(module: nn.Module) -> dict[str, int]:
    """By the names that tied parameters have first."""
    first, found = aliases(module), dict[str, int]()
    for prefix, model in models_with_plans(module):
        if tensor_ranks(model) is not None:
            continue
        dims = divided_dimensions(model, styles_of(model, own_plan(model), type(model).__name__))
        named = {f"{prefix}.{name}" if prefix else name: dim for name, dim in dims.items()}
        found.update({first.get(name, name): dim for name, dim in named.items()})
    return found


def _shape_of(parameter: nn.Parameter, tied: bool) -> ParameterShape:
    device = _ANYWHERE if parameter.is_meta else parameter.device  # as the engine will make it
    return ParameterShape(tuple(held_by(parameter).shape), parameter.dtype, parameter.requires_grad, device, tied)


def _buffers_of(module: nn.Module) -> dict[str, BufferShape]:
    fleeting = {
        id(buffer)
        for child in module.modules()
        for key, buffer in child.named_buffers(recurse=False)
        if key in non_persistent_buffers(child)
    }
    return {
        name: BufferShape(buffer.numel(), buffer.dtype, id(buffer) not in fleeting)
        for name, buffer in module.named_buffers()
    }


def averaged_dtype(own: torch.dtype) -> torch.dtype:
    """Dtype of a running average of floating-point numbers."""
    return torch.promote_types(own, torch.float32)


_SCALAR_BYTES = 4
"""Step counts and the like are 0-d float32 tensors on the CPU."""


@dataclass(frozen=True)
class OptimizerState:
    """State of an elementwise optimizer.

    Attributes:
        name: Class name.
        moments: Tensors per parameter with an entry per element.
        scalars: 0-d tensors per parameter, or per piece of one.
        dtype: Of the moments; None: that of what the optimizer updates (fp32 where there are master weights).
        average: A running average of the weights is kept besides, see `WeightAverage`.
    """

    name: str
    moments: int
    scalars: int
    dtype: torch.dtype | None = None
    average: bool = False

    def average_bytes(self, updated: torch.dtype) -> int:
        """Bytes per element of the running average, if there is one."""
        return averaged_dtype(updated).itemsize if self.average else 0

    def moment_bytes(self, updated: torch.dtype) -> int:
        """Bytes per element of all moments, for an optimizer that updates elements of dtype `updated`."""
        return self.moments * (self.dtype or updated).itemsize

    @property
    def scalar_bytes(self) -> int:
        """Bytes of the 0-d tensors of one piece."""
        return self.scalars * _SCALAR_BYTES


_STATES: dict[str, tuple[int, int]] = {
    "adadelta": (2, 1),
    "adagrad": (1, 1),
    "adam": (2, 1),
    "adamax": (2, 1),
    "adamw": (2, 1),
    "asgd": (1, 3),
    "lamb": (2, 1),
    "lion": (1, 0),
    "muon": (1, 0),
    "nadam": (2, 2),
    "radam": (2, 1),
    "rmsprop": (1, 1),
    "rprop": (2, 1),
    "sgd": (0, 0),
}
"""(moments, scalars) of a class with its default options."""


def optimizer_state(name: str, **options: Any) -> OptimizerState:
    """The state of an optimizer by class name.

    Args:
        name: Such as "AdamW", "sgd", "FusedLion"; upper and lower case are alike.
        **options: Hyper-parameters that change the state: `momentum`, `amsgrad`, `centered`, `moment_dtype`.

    Raises:
        ValueError: If the name is not known; names those that are.
    """
    key = name.lower().removeprefix("fused")
    if key not in _STATES:
        known = ", ".join(sorted(_STATES))
        raise ValueError(
            f"optimizer {name!r} is not known to the planner; known: {known}. For another one give "
            "OptimizerState(name, moments, scalars), on the command line --optimizer-bytes PER_ELEMENT"
        )
    moments, scalars = _STATES[key]
    if key == "sgd" and options.get("momentum"):
        moments += 1
    if key == "rmsprop":
        moments += bool(options.get("momentum")) + bool(options.get("centered"))
    if key in ("adam", "adamw") and options.get("amsgrad"):
        moments += 1
    dtype = options.get("moment_dtype")
    return OptimizerState(name, moments, scalars, getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def state_of(optimizer: Optimizer) -> OptimizerState:
    """The state that a torch optimizer will keep, all its groups having the options of the first.

    Raises:
        ValueError: If its class is not known, or the groups' options lead to different states.
    """
    name = type(optimizer).__name__
    found = {optimizer_state(name, **{**optimizer.defaults, **_plain(group)}) for group in optimizer.param_groups}
    if len(found) != 1:
        raise ValueError(
            f"the param groups of this {name} keep different states ({sorted(map(str, found))}); plan them one by one"
        )
    return found.pop()


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
