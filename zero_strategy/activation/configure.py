"""`deepspeed.checkpointing.configure` and what goes with it: the options of this process's checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zero_strategy.activation.model_parallel import ModelParallel
from zero_strategy.activation.process import PROCESS
from zero_strategy.activation.settings import CheckpointSettings, of_section, read_settings
from zero_strategy.activation.timings import CheckpointTimings


def configure(
    mpu_: Any,
    deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set what `checkpoint` does in this process; see `CheckpointSettings` for the options.

    Args:
        mpu_: The model-parallel unit (see `ModelParallel.of`), or None: every process is a group of one.
        deepspeed_config: A DeepSpeed JSON (path or mapping), of which the section `activation_checkpointing` counts.
        partition_activations: Wins over the JSON, as the following ones do, unless it is None.
        contiguous_checkpointing: `contiguous_memory_optimization` in the JSON.
        num_checkpoints: `number_checkpoints` in the JSON.
        checkpoint_in_cpu: `cpu_checkpointing` in the JSON.
        synchronize: `synchronize_checkpoint_boundary` in the JSON.
        profile: The same in the JSON; `timings()` has the results.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If a value is of another type, or the unit lacks a method.
        ValueError: If an option lacks what it needs; names the option and the accepted values.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    settings = read_settings(deepspeed_config, given)
    PROCESS.configure(settings, None if mpu_ is None else ModelParallel.of(mpu_), by_script=True)


def configure_from(section: Mapping[str, Any]) -> None:
    """Set the options of an engine's config, unless the script has said them by `configure`.

    Args:
        section: `activation_checkpointing` of a DeepSpeed JSON. One that asks for nothing changes nothing.

    Raises:
        ValueError: If an option lacks what it needs.
    """
    settings = CheckpointSettings(**of_section(section))
    if settings != CheckpointSettings() and not PROCESS.by_script:
        PROCESS.configure(settings, None, by_script=False)


def is_configured() -> bool:
    """Whether the options were set, by `configure` or by an engine's config."""
    return PROCESS.configured


def reset() -> None:
    """Let go of the buffers of kept inputs: for evaluations of several forwards without a backward."""
    PROCESS.checkpointer.reset()


def timings() -> CheckpointTimings:
    """What `profile` has measured since `configure`."""
    return PROCESS.checkpointer.timings
