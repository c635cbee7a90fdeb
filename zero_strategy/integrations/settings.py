"""Settings given to a strategy, and checks of what the framework set up. Shared by Trainer and Fabric."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero_strategy.config import ZeroConfig, load_config


def read_settings(config: Any, timeout: Any, **keywords: Any) -> ZeroConfig:
    """The config with keywords on top; None means not given.

    Raises:
        ValueError: If the timeout is given twice, or a setting is not accepted.
        TypeError: If a value is not of its type.
    """
    settings = load_config(config, **{key: value for key, value in keywords.items() if value is not None})
    if timeout is None:
        return settings
    if not isinstance(timeout, timedelta):
        kind = type(timeout).__name__
        raise TypeError(f"timeout is {timeout!r} ({kind}); expected a timedelta, or timeout_seconds in seconds")
    if settings.origin_of("timeout_seconds") != "default":
        raise ValueError(
            f"timeout={timeout} and timeout_seconds={settings.timeout_seconds} "
            f"[{settings.origin_of('timeout_seconds')}] set the same thing; give one of them"
        )
    return load_config(settings, timeout_seconds=timeout.total_seconds())


def check_device(device: torch.device, owner: str) -> None:
    """Raise unless the device has the collectives that sharding needs.

    Raises:
        ValueError: Naming the device and the way out.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f'device {device} has no collectives for sharding; use {owner}(accelerator="cpu") or "cuda", or a '
            "single-device strategy"
        )


def check_world_size(nodes: int, processes: int, owner: str) -> None:
    """Raise if the process group is not as large as the framework's flags say.

    Raises:
        ValueError: Naming both numbers.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != nodes * processes:
        raise ValueError(
            f"{owner}(devices={processes}, num_nodes={nodes}) means {nodes * processes} process(es), but the process "
            f"group has {world}; set devices and num_nodes to what was launched"
        )
