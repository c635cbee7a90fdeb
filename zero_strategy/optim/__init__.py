"""The sharded optimizer, gradient norm and clipping, loss scaling, fused optimizers."""

from zero_strategy.optim.fused import (
    DummyOptim,
    FusedAdagrad,
    FusedAdam,
    FusedAdamW,
    FusedLamb,
    FusedLion,
    FusedOptimizer,
    FusedSGD,
)
from zero_strategy.optim.grad_norm import GradientNorm
from zero_strategy.optim.loss_scale import LossScaler
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

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
]
