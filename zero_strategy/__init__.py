"""ZeRO-1/2/3 sharding for PyTorch Lightning, Fabric and plain torch.

Importing this package compiles nothing, touches no GPU and imports no framework: public names are loaded on first use.
It makes the strategy names "zero1", "zero2" and "zero3" known to Lightning, whichever of the two is imported first.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from zero_strategy.registration import install as _install

__version__ = "0.1.0"

_PUBLIC = {
    "ZeroConfig": "zero_strategy.config",
    "load_config": "zero_strategy.config",
    "ZeroEngine": "zero_strategy.engine",
    "PipelineEngine": "zero_strategy.pipeline_engine",
    "FusedAdagrad": "zero_strategy.optim",
    "FusedAdam": "zero_strategy.optim",
    "FusedAdamW": "zero_strategy.optim",
    "FusedLamb": "zero_strategy.optim",
    "FusedLion": "zero_strategy.optim",
    "FusedSGD": "zero_strategy.optim",
    "ZeroAccelerator": "zero_strategy.integrations.accelerate",
    "ZeroTrainer": "zero_strategy.integrations.transformers",
    "initialize": "zero_strategy.scripts",
    "LoadsFromDirectory": "zero_strategy.integrations.from_checkpoint",
    "load_from_checkpoint": "zero_strategy.integrations.from_checkpoint",
    "open_checkpoint": "zero_strategy.integrations.from_checkpoint",
}
_ROOMS = (
    "activation",
    "checkpoint",
    "config",
    "diagnostics",
    "distributed",
    "engine",
    "integrations",
    "memory",
    "ops",
    "optim",
    "pipeline",
    "registration",
    "scripts",
    "sharding",
    "transformer",
)

__all__ = ["__version__", "PipelineStrategy", "ZeroStrategy", *sorted(_PUBLIC)]

_install()


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if name == "ZeroStrategy":  # of the Lightning that is in use
        from zero_strategy.integrations.namespaces import default_trainer_namespace, strategy_class

        return strategy_class(default_trainer_namespace())
    if name == "PipelineStrategy":
        from zero_strategy.integrations.namespaces import default_trainer_namespace, pipeline_strategy_class

        return pipeline_strategy_class(default_trainer_namespace())
    if name in _ROOMS:
        return import_module(f"zero_strategy.{name}")
    raise AttributeError(f"module 'zero_strategy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_ROOMS, "PipelineStrategy", "ZeroStrategy"})
