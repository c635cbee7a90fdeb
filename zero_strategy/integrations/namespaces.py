"""Lightning comes under four import names, each with classes of its own that do not recognise one another's.

| namespace           | what                                      | its strategy is defined in                       |
| ------------------- | ----------------------------------------- | ------------------------------------------------ |
| `lightning.pytorch` | the Trainer of the `lightning` package    | `zero_strategy.integrations.lightning`           |
| `pytorch_lightning` | the Trainer of the package of that name   | `zero_strategy.integrations.pytorch_lightning`   |
| `lightning.fabric`  | Fabric of the `lightning` package         | `zero_strategy.integrations.fabric`              |
| `lightning_fabric`  | Fabric of the package of that name        | `zero_strategy.integrations.lightning_fabric`    |
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

MODULES = {
    "lightning.pytorch": "zero_strategy.integrations.lightning",
    "pytorch_lightning": "zero_strategy.integrations.pytorch_lightning",
    "lightning.fabric": "zero_strategy.integrations.fabric",
    "lightning_fabric": "zero_strategy.integrations.lightning_fabric",
}
_TRAINERS = ("lightning.pytorch", "pytorch_lightning")


def strategy_class(namespace: str) -> type[Any]:
    """The `ZeroStrategy` for one of Lightning's import names; imports that framework.

    Args:
        namespace: `lightning.pytorch`, `pytorch_lightning`, `lightning.fabric` or `lightning_fabric`.

    Raises:
        ValueError: If there is no such namespace.
        ImportError: If the framework is not installed.
    """
    if namespace not in MODULES:
        raise ValueError(f"unknown namespace {namespace!r}; accepted: {', '.join(map(repr, MODULES))}")
    found: type[Any] = import_module(MODULES[namespace]).ZeroStrategy
    return found


def pipeline_strategy_class(namespace: str) -> type[Any]:
    """The `PipelineStrategy` for one of the Trainer's import names; imports that framework.

    Args:
        namespace: `lightning.pytorch` or `pytorch_lightning`.

    Raises:
        ValueError: If there is none for it.
        ImportError: If the framework is not installed.
    """
    if namespace not in _TRAINERS:
        raise ValueError(f"no PipelineStrategy for {namespace!r}; accepted: {', '.join(map(repr, _TRAINERS))}")
    found: type[Any] = import_module(MODULES[namespace]).PipelineStrategy
    return found


def default_trainer_namespace() -> str:
    """Which Trainer `zero_strategy.ZeroStrategy` is for: the one imported already, else the one installed.

    Raises:
        ImportError: If neither is installed.
    """
    imported = [name for name in _TRAINERS if name in sys.modules]
    if len(imported) == 1:
        return imported[0]
    for name in _TRAINERS:
        if find_spec(name.partition(".")[0]) is not None:
            return name
    raise ImportError(
        "zero_strategy.ZeroStrategy needs PyTorch Lightning: pip install lightning (or pytorch-lightning)"
    )
