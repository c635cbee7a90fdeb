"""Checks of the launch of a `ZeroAccelerator`, and what Accelerate's `ParallelismConfig` says as settings of ours.

One owner of sharding, and as many processes as were asked for.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig

from zero_strategy.comm.process_group import unread_place
from zero_strategy.config import ZeroConfig, load_config
from zero_strategy.survive.membership import PLACE

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
    for argument in ("deepspeed_plugins", "torch_tp_plugin"):
        if keywords.get(argument) is not None:
            raise ValueError(f"{argument} is not supported by ZeroAccelerator: drop it")


def check_adoptable(accelerator: Any, environment: Mapping[str, str]) -> None:
    """Raise if an Accelerator that somebody else has made shards already, or has prepared something.

    Raises:
        ValueError: Naming what it was made with; or that it has prepared something.
    """
    names = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
    check_single_owner({name: getattr(accelerator.state, name, None) for name in names}, environment)
    if getattr(accelerator.state, "parallelism_config", None) is not None:
        raise ValueError(
            "this Accelerator was made with a parallelism_config, and has made its device mesh: give that to the "
            "ZeroAccelerator instead, or set mesh.sequence, mesh.tensor and mesh.replicate"
        )
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
    # A process of a run that survives deaths meets the others later.
    if count == 1 and PLACE not in environment and (place := unread_place(environment)) is not None:
        raise ValueError(
            f"{place.launcher} started {place.world_size} processes, but Accelerate does not read its variables, so "
            "every process would train alone: call zero_strategy.init_distributed() at the beginning of the script, "
            "before anything of Accelerate or transformers is made, or start one `accelerate launch` or torchrun per "
            "host. If each is to train alone, set WORLD_SIZE=1"
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
            "save_state writes directories, and save_model full weights: remove that setting"
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


# ---- ParallelismConfig ----

_PARALLEL = "ACCELERATE_USE_PARALLELISM_CONFIG"


def asked_parallelism(given: ParallelismConfig | None, environment: Mapping[str, str]) -> ParallelismConfig | None:
    """The sizes that a script, or `accelerate launch --use_parallelism_config`, asks for."""
    if given is None and environment.get(_PARALLEL, "false").lower() == "true":
        return ParallelismConfig()  # reads the launcher's variables
    return given


@contextmanager
def without_parallelism(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Inside, Accelerate makes no device mesh of its own for the sizes of the launch."""
    before = environment.pop(_PARALLEL, None)
    try:
        yield
    finally:
        if before is not None:
            environment[_PARALLEL] = before


def with_parallelism(config: ZeroConfig, asked: ParallelismConfig | None, processes: int) -> ZeroConfig:
    """The settings, with the sizes of a `ParallelismConfig`.

    | its size | setting |
    | --- | --- |
    | `dp_replicate_size` | `mesh.replicate` |
    | `dp_shard_size` | the ranks that shard, of which each has `cp_size` or `sp_size` that divide a sequence |
    | `cp_size` | `mesh.sequence`, as a ring |
    | `sp_size` | `mesh.sequence`, Ulysses |
    | `tp_size` | `mesh.tensor` |

    Experts have no size there: `mesh.expert` is set in the config.

    Raises:
        ValueError: If sizes do not make up the processes, or a setting says something else.
    """
    if asked is None:
        return config
    data, sequence = asked.dp_replicate_size * asked.dp_shard_size, asked.cp_size * asked.sp_size
    others = sequence * asked.tp_size
    if processes % others or (data > 1 and data * others != processes):
        raise ValueError(
            f"ParallelismConfig(dp_replicate_size={asked.dp_replicate_size}, dp_shard_size={asked.dp_shard_size}, "
            f"cp_size={asked.cp_size}, sp_size={asked.sp_size}, tp_size={asked.tp_size}) is of {data * others} "
            f"processes, and there are {processes}"
        )
    wanted = {"replicate": asked.dp_replicate_size, "sequence": sequence, "tensor": asked.tp_size}
    if asked.cp_size > 1:
        wanted["ulysses"] = 1
    found = {}
    for name, size in wanted.items():
        origin, value = config.origin_of(f"mesh.{name}"), getattr(config.mesh, name)
        if origin != "default" and value not in (None, size):
            raise ValueError(
                f"mesh.{name} is {value} [{origin}], and the ParallelismConfig says {size}: two sources of one size; "
                "drop one of them"
            )
        # 1 asks for a ring there, and is not the default.
        if size > 1 or name == "ulysses":
            found[name] = size
    return load_config(config, mesh=found) if found else config
