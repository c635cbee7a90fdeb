"""The state of a training as packages below the engine see it: the model, its ranks, its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn

from zero_strategy.activation.units import UnitActivations
from zero_strategy.config import ResolvedConfig
from zero_strategy.distributed import Mesh
from zero_strategy.memory.opening import OffloadStores
from zero_strategy.optim import LossScaler, ShardedOptimizer
from zero_strategy.sharding import ShardedModel


class TrainState(Protocol):
    """What `ZeroEngine` is to the code that saves, loads and measures it; see there for the attributes."""

    module: nn.Module
    config: ResolvedConfig
    mesh: Mesh
    model: ShardedModel
    activations: UnitActivations
    optimizers: list[ShardedOptimizer]
    scaler: LossScaler | None
    offloaded: OffloadStores
    order: Callable[[str], tuple[int, ...]] | None

    @property
    def stage(self) -> int: ...

    @property
    def aliases(self) -> dict[str, str]: ...

    @property
    def is_part(self) -> bool: ...
