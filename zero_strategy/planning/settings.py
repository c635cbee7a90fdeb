"""The settings of a plan: a config file of either kind, with the command line on top of it."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

from zero_strategy.config import ZeroConfig, load_config
from zero_strategy.config.deepspeed_json import DeepSpeedSettings, inspect_deepspeed
from zero_strategy.config.load import config_of, read_layer
from zero_strategy.memory.offload import Offload

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


class PlannedSettings(NamedTuple):
    """What a plan takes from files and options."""

    config: ZeroConfig
    """The config."""
    offload: Offload
    """What lies outside of the device."""
    dtype: str | None = None
    """Of the computation, as far as the file says it."""
    optimizer: str | None = None
    """Its class name, likewise."""
    accumulation: int = 1
    """Micro-batches of a step, likewise."""


def planned_settings(options: argparse.Namespace) -> PlannedSettings:
    """Read `--config` and put the options on top of it.

    Raises:
        ValueError: If a key or an option is not accepted; names it.
        OSError: If the file cannot be read.
    """
    config, deepspeed = _config(options.config)
    changes: dict[str, Any] = {"stage": options.stage, "gradient_reduction": options.gradient_reduction}
    mesh = {} if options.replicate is None else {"mesh": {"replicate": options.replicate, "shard": None}}
    changes = {key: value for key, value in changes.items() if value is not None} | mesh
    if changes:
        config = load_config(config, **changes)
    given = {
        "optimizer": options.offload_optimizer,
        "ratio": options.optimizer_ratio,
        "gradients": options.offload_gradients,
        "parameters": options.offload_parameters,
        "resident_bytes": options.resident,
    }
    offload = replace(Offload.of(config.offload), **{key: value for key, value in given.items() if value is not None})
    if deepspeed is None:
        return PlannedSettings(config, offload)
    named = deepspeed.optimizer
    return PlannedSettings(
        config,
        offload,
        _DTYPES.get(deepspeed.precision.value),
        None if named is None else named.type,
        _accumulation(deepspeed, config, options.world),
    )


def _accumulation(deepspeed: DeepSpeedSettings, config: ZeroConfig, world_size: int) -> int:
    """Micro-batches of a step; 1 where the file leaves it open.

    Raises:
        ValueError: If its batch sizes do not fit the ranks.
    """
    copies = world_size // (config.pipeline.stages * (config.mesh.tensor or 1))
    return deepspeed.batch.derive(max(1, copies)).gradient_accumulation_steps or 1


def _config(path: str | None) -> tuple[ZeroConfig, DeepSpeedSettings | None]:
    if path is None:
        return load_config(), None
    layer = read_layer(path)
    if layer.is_deepspeed:
        found = inspect_deepspeed(layer)
        return config_of(found), found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_config(path), None
