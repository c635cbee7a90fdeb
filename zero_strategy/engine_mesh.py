"""Before an engine shards anything: its settings, resolved and equal on all ranks, and the groups of its ranks.

settle      the config resolved for this world, and the ranks that train the same part of the model
connect     native ops built, settings compared with the other ranks', groups made and tried
"""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from zero_strategy import ops
from zero_strategy.comm.mesh import Mesh, dp_groups_across, tensor_groups_of
from zero_strategy.comm.process_group import default_group, world_size
from zero_strategy.comm.store import check_same_values, next_number
from zero_strategy.config import ResolvedConfig, check_owned, dtype_fact, load_config, resolve
from zero_strategy.fsdp.divided_elsewhere import check_not_divided
from zero_strategy.fsdp.dtensor import tensor_ranks
from zero_strategy.fsdp.materialize import device_of
from zero_strategy.runtime.compute_device import occupy
from zero_strategy.runtime.host_heap import map_blocks
from zero_strategy.train_state import ModelPart

if TYPE_CHECKING:
    from zero_strategy.auto.example import Example

_OF_EACH_HOST = frozenset(
    {
        "checkpoint.bytes_per_second", "diagnostics.run_dir", "offload.nvme_path", "offload.probe_seconds",
        "offload.resident_bytes", "offload.staging_bytes", "pipeline.timeline", "timeout_seconds",
    }
)  # fmt: skip
"""Settings that may differ between ranks: places and speeds of a host, and bounds of time."""

_meshes: WeakSet[Mesh] = WeakSet()
"""Groups of the engines of this process that were not forgotten yet."""


def settle(
    module: nn.Module,
    config: Any,
    compute_dtype: torch.dtype | None,
    part: ModelPart,
    device: torch.device | None = None,
    example: Example | None = None,
) -> tuple[ResolvedConfig, ModelPart]:
    """The settings with every open choice resolved for this world, and the groups of ranks that follow from them.

    Args:
        module: The module; its `DTensor`s say which ranks divide its layers.
        config: Anything `load_config` takes, or a resolved config.
        compute_dtype: See `ZeroEngine`.
        part: See `ZeroEngine`.
        device: Where the engine computes; None: where the module is.
        example: See `ZeroEngine`.

    Returns:
        The config; the part, with the groups that tensor parallelism makes.

    Raises:
        ValueError: If a setting is wrong, does not fit the world, or asks for pipeline stages of a whole module; if
            transformers has sharded the module.
    """
    check_not_divided(module)
    divided = tensor_ranks(module)
    if isinstance(config, ResolvedConfig):
        resolved = config
    else:
        asked = load_config(config)
        if asked.auto.enabled:
            from zero_strategy.auto.decide import decide

            # NCCL's collectives, by which ranks decide, are those of the current device.
            place = occupy(device or device_of(module), default_group())
            asked = decide(
                asked, module, world_size=world_size(), compute_dtype=compute_dtype, device=place, example=example
            ).config
        if asked.mesh.tensor is None and divided is not None:
            asked.mesh.record("tensor", len(divided), "derived: the device mesh of the module's DTensors")
        ways = asked.mesh.tensor or 1
        world = world_size() if part.dp_groups is None else len(part.dp_groups[0]) * asked.pipeline.stages * ways
        resolved = resolve(asked, world)
        check_owned(resolved.config, dtype_fact(compute_dtype))
    zero = resolved.config
    if zero.mmap_threshold and not map_blocks(zero.mmap_threshold):
        warnings.warn(f"mmap_threshold is {zero.mmap_threshold}, and malloc here is not glibc's", stacklevel=3)
    if (ways := zero.mesh.tensor or 1) > 1 and part.tensor_groups is None:
        groups = tensor_groups_of(divided, ways)
        part = replace(
            part, tensor_groups=groups, dp_groups=dp_groups_across(groups) if part.dp_groups is None else part.dp_groups
        )
    if part.dp_groups is None and zero.pipeline.stages > 1:
        raise ValueError(
            f"pipeline.stages is {zero.pipeline.stages} [{zero.origin_of('pipeline.stages')}]: a ZeroEngine trains "
            "a whole module; give the layers as a PipelineModule to a PipelineEngine, or leave the setting out"
        )
    return resolved, part


def connect(config: ResolvedConfig, part: ModelPart, compute_dtype: torch.dtype | None, device: torch.device) -> Mesh:
    """Compare the settings with the other ranks', then make and try the groups of this rank. A collective.

    Args:
        config: The resolved settings.
        part: With the groups of ranks, as `settle` gives it.
        compute_dtype: See `ZeroEngine`.
        device: Where the engine computes; the thread's current one.

    Raises:
        ValueError: If ranks were given different settings; names them.
    """
    zero = config.config
    name = f"engine{next_number('engines')}"
    settings = {key: str(setting.value) for key, setting in zero.settings() if key not in _OF_EACH_HOST}
    if zero.pipeline.stages > 1:
        del settings["units.patterns"]  # the layers of this rank's stage
    settings["compute_dtype"] = str(compute_dtype)
    # Built on some hosts only, a library takes a minute: now, since here ranks wait for `timeout_seconds`, and
    # elsewhere for `barrier_seconds`.
    for kind in sorted({device.type} | ({"cpu"} if zero.offload.optimizer != "none" else set())):
        ops.ensure(kind)
    # An engine whose Trainer and module nobody holds any more is in their reference cycles. It has sockets and threads,
    # which Python's collector does not count: a search that makes a Trainer per trial would keep dozens of both. Ranks
    # come to this place together, so that groups of NCCL end together, too.
    if any(not mesh.closed for mesh in _meshes):
        gc.collect()
    # Before groups are made, since ranks with other settings would make other groups, and wait for each other.
    check_same_values(f"{name}.settings", settings, timeout=zero.timeout_seconds)
    mesh = Mesh.build(
        replicate=zero.mesh.replicate,
        shard=config.shard,
        timeout=zero.timeout_seconds,
        barrier_seconds=zero.barrier_seconds,
        name=name,
        dp_groups=part.dp_groups,
        watchdog=zero.watchdog,
        tensor_groups=part.tensor_groups,
        sequence=zero.mesh.sequence,
        expert=zero.mesh.expert,
        further=part.further_groups,
        rank_labels=part.rank_labels,
    )
    mesh.warm_up(device)
    _meshes.add(mesh)
    return mesh
