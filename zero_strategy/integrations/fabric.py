"""ZeRO for `lightning.fabric`: `Fabric(strategy="zero3")` or `Fabric(strategy=ZeroStrategy(stage=3))`."""

from __future__ import annotations

from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.ddp import DDPStrategy

from zero_strategy.integrations.lightning.fabric_strategy import FabricStrategy
from zero_strategy.integrations.lightning.precision import FabricPrecision, ScaledFabricPrecision


class ZeroPrecision(FabricPrecision, Precision):
    """Precision plugin of `ZeroStrategy`; made from `Fabric(precision=...)`."""


class ZeroScaledPrecision(ScaledFabricPrecision, Precision):
    """Fabric's precision for fp16, with loss scaling."""


class ZeroStrategy(FabricStrategy, DDPStrategy):
    """Shards optimizer state, gradients and parameters over the ranks."""

    plain_precision = ZeroPrecision
    scaled_precision = ZeroScaledPrecision
