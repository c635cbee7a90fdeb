"""`deepspeed.utils.groups`: the data-parallel ranks, which are all ranks, as in DeepSpeed without an `mpu`.

A pipeline's own are those of `engine.grid`, tensor parallelism's those of the model's device mesh.
"""

from __future__ import annotations

import torch.distributed as dist

from zero_strategy.comm.process_group import world_rank, world_size
from zero_strategy.compat.deepspeed.names import named


def get_world_group() -> dist.ProcessGroup:
    """All ranks.

    Raises:
        RuntimeError: If there is no process group yet.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group yet: call init_distributed() or initialize() before")
    group = dist.group.WORLD
    assert group is not None
    return group


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks among which samples are divided."""
    return get_world_group()


def get_data_parallel_world_size() -> int:
    """Their number."""
    return world_size()


def get_data_parallel_rank() -> int:
    """This process among them."""
    return world_rank()


def get_model_parallel_world_size() -> int:
    """1."""
    return 1


def get_model_parallel_rank() -> int:
    """0."""
    return 0


_get_world_group = get_world_group
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = _get_sequence_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_rank = _get_sequence_parallel_rank = get_model_parallel_rank

__getattr__ = named(__name__)
