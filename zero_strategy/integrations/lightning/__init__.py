"""ZeRO for Lightning's Trainer and Fabric. The classes for `lightning.pytorch` are here, imported when asked for.

The other namespaces have theirs beside this package (`namespaces`). What they share is in this package's modules,
which import no namespace, so that either of Lightning's packages does without the other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from zero_strategy.integrations.lightning.namespaces import strategy_class

if TYPE_CHECKING:
    from zero_strategy.integrations.lightning.pytorch import (
        ParameterNorms,
        PipelineStrategy,
        ZeroPrecision,
        ZeroStrategy,
    )

__all__ = ["ParameterNorms", "PipelineStrategy", "ZeroPrecision", "ZeroStrategy", "strategy_class"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in __all__ or name == "SaveOnSignal":
            return getattr(import_module("zero_strategy.integrations.lightning.pytorch"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
