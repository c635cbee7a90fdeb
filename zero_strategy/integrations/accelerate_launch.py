"""Checks of the launch of an Accelerate script: one owner of sharding, and as many processes as were asked for.

`accelerate launch --cpu --num_processes 2` starts one process (Accelerate wants `mpirun` there), and with
`--multi_gpu` on a machine without a GPU every process believes to be alone unless `cpu=True` is given.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from zero_strategy.config import ZeroConfig

CONFIG_VARIABLE = "ZERO_STRATEGY_CONFIG"
"""Names the config of a `ZeroAccelerator` that is given none: a YAML or DeepSpeed JSON file."""

_PLUGINS = {
    "ACCELERATE_USE_DEEPSPEED": ("deepspeed_plugin", "distributed_type: DEEPSPEED", "--use_deepspeed"),
    "ACCELERATE_USE_FSDP": ("fsdp_plugin", "distributed_type: FSDP", "--use_fsdp"),
    "ACCELERATE_USE_MEGATRON_LM": ("megatron_lm_plugin", "distributed_type: MEGATRON_LM", "--use_megatron_lm"),
}
_RIGHT_COMMAND = (
    "accelerate launch --multi_gpu --num_processes {count} --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0 SCRIPT"
)


def check_single_owner(keywords: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Raise if the launch or the script asks for another way of sharding, too.

    Args:
        keywords: What the Accelerator was given.
        environment: The environment's variables.

    Raises:
        ValueError: Naming the setting to drop.
    """
    for variable, (argument, line, flag) in _PLUGINS.items():
        if environment.get(variable, "false").lower() == "true":
            raise ValueError(
                f"{variable}={environment[variable]} asks for another way of sharding beside ZeroAccelerator: in the "
                f"file of `accelerate launch --config_file` replace `{line}` by `distributed_type: MULTI_GPU` (which "
                f"only means one process per device), or drop {flag} from the command"
            )
        if keywords.get(argument) is not None:
            raise ValueError(f"{argument} asks for another way of sharding beside ZeroAccelerator's; drop one of them")
    for argument in ("deepspeed_plugins", "torch_tp_plugin", "parallelism_config"):
        if keywords.get(argument) is not None:
            raise ValueError(
                f"{argument} is not supported by ZeroAccelerator, which shards by data parallelism alone: drop it"
            )
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        raise ValueError(
            "ACCELERATE_USE_PARALLELISM_CONFIG: ZeroAccelerator shards by data parallelism and has no other axes; drop "
            "`parallelism_config` from the launch"
        )


def check_adoptable(accelerator: Any, environment: Mapping[str, str]) -> None:
    """Raise if an Accelerator that somebody else has made shards already, or has prepared something.

    Raises:
        ValueError: Naming what it was made with; or that it has prepared something.
    """
    names = ("parallelism_config", "deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
    check_single_owner({name: getattr(accelerator.state, name, None) for name in names}, environment)
    if accelerator._models or accelerator._optimizers:
        raise ValueError("this Accelerator has prepared models or optimizers already, which cannot be undone")


def needs_cpu(environment: Mapping[str, str]) -> bool:
    """True if a launcher started several processes where there is no device, which Accelerate must be told."""
    return "LOCAL_RANK" in environment and not torch.accelerator.is_available()


def check_processes(count: int, environment: Mapping[str, str]) -> None:
    """Compare the number of processes that Accelerate found with what the launcher started.

    Args:
        count: Accelerate's.
        environment: The environment's variables.

    Raises:
        ValueError: If the launcher started more than that: each would train alone.
    """
    launched = int(environment.get("WORLD_SIZE") or 1)
    if launched > 1 and count == 1:
        raise ValueError(
            f"WORLD_SIZE is {launched}, but Accelerate runs as one process, so every process would train alone. A "
            "PartialState() or Accelerator() made before the ZeroAccelerator fixes this: make the ZeroAccelerator "
            "first, or set ACCELERATE_USE_CPU=true where there is no GPU"
        )
    alone = count == 1 and "WORLD_SIZE" not in environment and "MASTER_ADDR" in environment
    if alone and environment.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes"):
        warnings.warn(
            "this is one process, though the launcher prepared for several (MASTER_ADDR is set): `accelerate launch "
            "--cpu --num_processes N` starts one unless it has mpirun. To start 2: " + _RIGHT_COMMAND.format(count=2),
            stacklevel=3,
        )


def check_uneven_batches(config: ZeroConfig, owner: str) -> None:
    """Raise for a setting that Accelerate has a call of its own for.

    Raises:
        ValueError: Naming it.
    """
    if config.uneven_batches != "error":
        raise ValueError(
            f"uneven_batches is {config.uneven_batches!r} [{config.origin_of('uneven_batches')}], and under {owner} "
            "loaders repeat samples (even_batches=True), unless the loop is inside of `with "
            "accelerator.join_uneven_inputs([model], even_batches=False):`; use that, and leave the setting out"
        )


def check_format(config: ZeroConfig) -> None:
    """Raise for a form of checkpoints that Accelerate does not have.

    Raises:
        ValueError: Naming the setting.
    """
    if config.checkpoint.format != "directory":
        raise ValueError(
            f"checkpoint.format={config.checkpoint.format!r} is for Lightning's Trainer and Fabric. "
            "save_state writes directories, and save_model whole weights: remove that setting"
        )


def configured(given: Any = None) -> Any:
    """The config of a script, or else the file that the environment names; None for neither.

    Raises:
        ValueError: If there are both; names them.
    """
    named = os.environ.get(CONFIG_VARIABLE) or None
    if given is not None and named is not None:
        raise ValueError(
            f"the script has a zero_config, and the variable {CONFIG_VARIABLE} names {named}: two sources of one "
            f"config; drop zero_config=... so that the file counts, or unset {CONFIG_VARIABLE}"
        )
    return named if given is None else given
