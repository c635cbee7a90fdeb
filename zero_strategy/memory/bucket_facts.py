"""Buckets before anything is allocated: the engine's own rules and layout, applied to shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_strategy.config import ResolvedConfig, ZeroConfig
from zero_strategy.memory.ledger import Owner
from zero_strategy.memory.shapes import ModelShape, NamedShapes
from zero_strategy.sharding.grouping import gradient_dtypes, group_parameters, wants_master
from zero_strategy.sharding.layout import BucketLayout, Piece, build_layout
from zero_strategy.sharding.placement import PLACEMENTS, Placement


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
        """Bytes of a buffer of whole gradients; 0 if it takes none."""
        return self.layout.numel * self.gradient_dtype.itemsize if self.trainable else 0

    def owned(self, placement: Placement, shard_rank: int) -> tuple[int, int]:
        """First and one-past-last element whose optimizer state a rank holds."""
        return self.layout.slice_bounds(shard_rank) if placement.shard_optimizer else (0, self.layout.numel)

    def keeps_whole(self, config: ZeroConfig, accumulation: int) -> bool:
        """Whether a buffer of whole gradients stays from step to step, as `GradientBucket.keeps_whole` says."""
        all_owned = not PLACEMENTS[config.stage].shard_optimizer or self.layout.slice_numel == self.layout.numel
        return config.gradient_reduction == "per_step" and (accumulation > 1 or all_owned)

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """The parts of parameters between two elements."""
        return self.layout.pieces(start, stop)


Units = Sequence[Sequence[BucketFacts]]
"""By unit, the root first."""


def facts_of(model: ModelShape, resolved: ResolvedConfig, compute_dtype: torch.dtype | None) -> Units:
    """The buckets that an engine would make of a model."""
    replicas = resolved.config.mesh.replicate
    return [
        [
            _facts(unit.name, dtype, tuple(named), resolved, replicas)
            for dtype, named in group_parameters(unit.parameters, compute_dtype)
        ]
        for unit in model.units
    ]


def _facts(
    unit: str, dtype: torch.dtype, named: NamedShapes, resolved: ResolvedConfig, replicas: int
) -> BucketFacts:
    precision = resolved.config.precision
    trainable = named[0][1].requires_grad
    layout = build_layout([(name, shape.shape) for name, shape in named], dtype.itemsize, resolved.shard, replicas)
    owner = Owner(unit, tuple(name for name, _ in named))
    master = trainable and wants_master(dtype, precision)
    handed = max((3 if shape.tied else 1) * shape.numel * dtype.itemsize for _, shape in named) if trainable else 0
    return BucketFacts(owner, dtype, trainable, layout, *gradient_dtypes(dtype, precision), master, handed)


def placement_of(resolved: ResolvedConfig) -> Placement:
    """The row of the stage; where own slices are (`Placement.in_place`) is for the plan's offload to say."""
    return PLACEMENTS[resolved.config.stage]
