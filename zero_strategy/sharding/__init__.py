"""Units, buckets, placements, and the scheduling of gathers and reductions."""

from zero_strategy.sharding.construction import Init
from zero_strategy.sharding.context import GatheredParameters
from zero_strategy.sharding.layout import BucketLayout, build_layout
from zero_strategy.sharding.model import ShardedModel
from zero_strategy.sharding.placement import PLACEMENTS, Placement

__all__ = [
    "PLACEMENTS",
    "BucketLayout",
    "GatheredParameters",
    "Init",
    "Placement",
    "ShardedModel",
    "build_layout",
]
