"""The state of a training as packages below the engine see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from zero_strategy.activation.units import UnitActivations
from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.mesh import Mesh
from zero_strategy.config import ResolvedConfig
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.offload.stores import OffloadStores
from zero_strategy.optim import LossScaler, ShardedOptimizer
from zero_strategy.optim.averaging import WeightAverage
from zero_strategy.watchdog.diagnosis import RankLabels, rank_label


class WeightCopies(Protocol):
    """Weights that layers of several parts have in common: one rank trains each, the others have copies."""

    def aliases(self) -> Mapping[str, str]:
        """Names that copies have on this rank, where the weights have others: {alias: name}."""
        ...

    def publish(self, gathered: Callable[[Sequence[nn.Parameter]], AbstractContextManager[object]]) -> None:
        """Give the copies their weights' values. A collective.

        Args:
            gathered: Makes parameters of the engine whole inside of a block.
        """
        ...


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that one data-parallel group trains, and what joins it to the parts of the others.

    Attributes:
        dp_groups: The ranks that train each part; None: all ranks train the whole model.
        tensor_groups: The ranks that divide the same layers, of every such group; None: what the `DTensor`s say.
        further_groups: Makes the groups of ranks that train the other parts, by names that are equal on all ranks; all
            of them call it, once their settings are known to agree. Gradient norms are sums over these groups, too, and
            flags go to all. The mesh has them from then on, watches and closes them.
        rank_labels: Ranks in words, for reports of the watchdog.
        order: Where a name of a tensor comes in the whole model's state dict, as a key to sort by; None: in the order
            of the module's own.
        copies: Weights that the parts have in common; the engine publishes them whenever it has changed weights.
    """

    dp_groups: Sequence[Sequence[int]] | None = None
    tensor_groups: Sequence[Sequence[int]] | None = None
    further_groups: Callable[[], Mapping[str, Communicator]] = dict
    rank_labels: RankLabels = rank_label
    order: Callable[[str], tuple[int, ...]] | None = None
    copies: WeightCopies | None = None


WHOLE = ModelPart()
"""A model that is in one part."""


class TrainState(Protocol):
    """View of `ZeroEngine` for the code that saves, loads and measures it; see there for the attributes."""

    module: nn.Module
    config: ResolvedConfig
    device: torch.device
    mesh: Mesh
    activations: UnitActivations
    optimizers: list[ShardedOptimizer]
    scaler: LossScaler | None
    offloaded: OffloadStores
    average: WeightAverage | None

    @property
    def model(self) -> ShardedModel: ...

    @property
    def stage(self) -> int: ...

    @property
    def order(self) -> Callable[[str], tuple[int, ...]] | None: ...

    @property
    def aliases(self) -> dict[str, str]: ...

    @property
    def is_part(self) -> bool: ...
