"""Units, buckets, placements, and the scheduling of gathers and reductions."""

from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.fsdp.init import Init
from zero_strategy.fsdp.layout import PLACEMENTS, BucketLayout, Placement, build_layout
from zero_strategy.fsdp.model import ShardedModel

__all__ = [
    "PLACEMENTS",
    "BucketLayout",
    "GatheredParameters",
    "Init",
    "Placement",
    "ShardedModel",
    "build_layout",
]
