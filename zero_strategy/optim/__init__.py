"""The sharded optimizer, gradient norm and clipping, loss scaling."""

from zero_strategy.optim.loss_scale import LossScaler
from zero_strategy.optim.norm import GradientNorm, clip_tensors_by_global_norm, get_global_norm_of_tensors
from zero_strategy.optim.sharded import ShardedOptimizer

__all__ = [
    "GradientNorm",
    "LossScaler",
    "ShardedOptimizer",
    "clip_tensors_by_global_norm",
    "get_global_norm_of_tensors",
]
