"""What does not change during a run, for the head of its report."""

from __future__ import annotations

import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_strategy.version import __version__

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine

_PACKAGES = ("torch", "lightning", "pytorch-lightning", "accelerate", "transformers")


def facts_of(engine: ZeroEngine) -> dict[str, Any]:
    """Plain types: `model`, `ranks`, `device`, `versions`, `config` (key, value, origin), `written`."""
    zero, mesh, device = engine.config.config, engine.mesh, engine.model.device
    parameters = list(engine.module.parameters())
    return {
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "model": {
            "class": type(engine.module).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "units": len(engine.model.units),
        },
        "ranks": {
            "world": mesh.team.world_size,
            "data parallel": mesh.world_size,
            "shard": mesh.shard_size,
            "replicate": mesh.world_size // mesh.shard_size,
            "pipeline stages": zero.pipeline.stages,
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "optimizers": [type(sharded.optimizer).__name__ for sharded in engine.optimizers],
        "program": Path(sys.argv[0]).name,
        "versions": {
            "zero_strategy": __version__,
            "Python": platform.python_version(),
            **{name: found for name in _PACKAGES if (found := _version(name))},
        },
        "config": [[key, str(setting.value), setting.origin] for key, setting in zero.settings()],
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
