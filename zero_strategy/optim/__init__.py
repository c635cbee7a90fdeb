"""The sharded optimizer, gradient norm and clipping, loss scaling, fused optimizers."""

from importlib import import_module
from typing import Any

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
from zero_strategy.optim.muon import MatrixSplit, MuonAdamW, split_matrices
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
    "MatrixSplit",
    "MuonAdamW",
    "ShardedOptimizer",
    "split_matrices",
]

_MEGATRON = ("clip_grad_norm_", "clip_tensors_by_global_norm", "get_global_norm_of_tensors", "get_grad_norm")
"""Names that moved to `compat.megatron.gradients`, and are found here as before."""


def __getattr__(name: str) -> Any:
    if name in _MEGATRON:
        return getattr(import_module("zero_strategy.compat.megatron.gradients"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
