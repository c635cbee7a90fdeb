"""Settings given to a strategy, and checks of what the framework set up. Shared by Trainer and Fabric."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, get_type_hints

import torch
import torch.distributed as dist

from zero_strategy.config import ZeroConfig, ZeroSettings, load_config

F = TypeVar("F", bound=Callable[..., None])


def shows_settings(init: F) -> F:
    """Shows `**settings` of a constructor as what they are: keywords of its signature, with types and descriptions.

    For `help`, editors and LightningCLI; type checkers read `ZeroSettings`.
    """
    shown: Any = init
    signature = inspect.signature(init)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(ZeroSettings)
    settings = [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in hints.items()]
    shown.__signature__ = signature.replace(parameters=[*own, *settings])
    described = (inspect.getdoc(ZeroSettings) or "").partition("Args:\n")[2]
    if init.__doc__:  # there is none under `python -OO`
        shown.__doc__ = f"{inspect.cleandoc(init.__doc__)}\n{textwrap.indent(textwrap.dedent(described), '    ')}"
    return init


def read_settings(config: Any, timeout: Any, keywords: Mapping[str, Any]) -> ZeroConfig:
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
