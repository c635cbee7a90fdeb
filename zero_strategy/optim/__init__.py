"""The sharded optimizer, gradient norm and clipping, loss scaling, fused optimizers."""

from zero_strategy.optim.fused import (
    FusedAdagrad,
    FusedAdam,
    FusedAdamW,
    FusedLamb,
    FusedLion,
    FusedOptimizer,
    FusedSGD,
)
from zero_strategy.optim.loss_scale import LossScaler
from zero_strategy.optim.model_parallel_norm import (
    clip_grad_norm_,
    clip_tensors_by_global_norm,
    get_global_norm_of_tensors,
    get_grad_norm,
)
from zero_strategy.optim.no_optimizer import DummyOptim
from zero_strategy.optim.norm import GradientNorm
from zero_strategy.optim.sharded import ShardedOptimizer

__all__ = [
    "DummyOptim",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLamb",
    "FusedLion",
    "FusedOptimizer",
    "FusedSGD",
    "GradientNorm",
    "LossScaler",
    "ShardedOptimizer",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "get_global_norm_of_tensors",
    "get_grad_norm",
]
