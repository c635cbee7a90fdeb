"""The state behind Megatron's utilities: groups, buffers and tasks of a process, as one object.

what watches a run, which scripts without it should not load.

`UtilityState`.

The functions behind them (in the rooms where they belong) are given groups and buffers. Here they take those of a
state, and the modules beside this one export the methods of one such object, `STATE`, under the documented names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_strategy.compat.megatron.diagnostics as rank_logging
import zero_strategy.compat.megatron.gradients as deferred_embedding
import zero_strategy.compat.megatron.groups as context_parallel
import zero_strategy.compat.megatron.sharded_tensors as sharded_tensors
from zero_strategy.compat.megatron.diagnostics import AsyncTasks, NvtxRanges
from zero_strategy.compat.megatron.groups import ParallelGroups, tensor_parallel_group
from zero_strategy.compat.megatron.sharded_tensors import ReplicaId, ShardedTensor
from zero_strategy.compat.megatron.tensors import GlobalMemoryBuffer

_DIAGNOSTICS = "zero_strategy.diagnostics."
_OWN = "zero_strategy.compat.megatron."

LATER = MappingProxyType(
    {
        "StragglerDetector": (_OWN + "diagnostics", "StragglerDetector"),
        "_StragglerData": (_DIAGNOSTICS + "straggler", "StragglerData"),
        "_ValueWithRank": (_DIAGNOSTICS + "straggler", "ValueWithRank"),
        "__straggler__": (_OWN + "diagnostics", "__straggler__"),
        "check_param_hashes_across_dp_replicas": (
            _DIAGNOSTICS + "replica_check",
            "check_param_hashes_across_dp_replicas",
        ),
    }
)
"""Name to the module that has it, and what it is called there."""


def later(name: str) -> Any:
    """The object of this name."""
    module, attribute = LATER[name]
    return getattr(import_module(module), attribute)

Offsets = tuple[tuple[int, int, int], ...]


class UtilityState:
    """Groups of a run, scratch memory, ranges and tasks, and the functions that use them without being given them.

    Attributes:
        groups: The run's process groups; none until `set_parallel_groups`.
        scratch: Named buffers.
        ranges: Of the profiler.
        tasks: The event loop and traced coroutines.
    """

    def __init__(self) -> None:
        self.groups = ParallelGroups()
        self.scratch = GlobalMemoryBuffer()
        self.ranges = NvtxRanges()
        self.tasks = AsyncTasks()

    def set_parallel_groups(self, groups: ParallelGroups | DeviceMesh, expert_mesh: DeviceMesh | None = None) -> None:
        """Say which groups the run has, once `torch.distributed` is initialized.

        Args:
            groups: The groups, or a mesh with the axes that `ParallelGroups.from_mesh` knows.
            expert_mesh: The experts', beside a mesh.
        """
        self.groups = (
            groups if isinstance(groups, ParallelGroups) else ParallelGroups.from_mesh(groups, expert_mesh)
        )

    def get_parallel_groups(self) -> ParallelGroups:
        """The groups that were set."""
        return self.groups

    def get_global_memory_buffer(self) -> GlobalMemoryBuffer:
        """This process's scratch buffers."""
        return self.scratch

    def get_tensor_model_parallel_group_if_none(
        self, tp_group: dist.ProcessGroup | None, is_expert: bool = False, check_initialized: bool = True
    ) -> dist.ProcessGroup | None:
        """`tp_group`, or the run's own with a warning; see `distributed.parallel_groups.tensor_parallel_group`."""
        return tensor_parallel_group(tp_group, self.groups, is_expert, check_initialized)

    def get_batch_on_this_cp_rank(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch; see `distributed.context_parallel.get_batch_on_this_cp_rank`."""
        return context_parallel.get_batch_on_this_cp_rank(batch, self.groups.context)

    def log_on_each_pipeline_stage(
        self,
        logger: logging.Logger,
        *args: Any,
        tp_group: dist.ProcessGroup | None = None,
        dp_cp_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        """One log line per pipeline stage; see `diagnostics.rank_logging.log_on_each_pipeline_stage`.

        Args:
            logger: Whose.
            args: Of `Logger.log`.
            tp_group: Default: the run's.
            dp_cp_group: Default: the run's.
            kwargs: Of `Logger.log`.
        """
        rank_logging.log_on_each_pipeline_stage(
            logger,
            *args,
            tp_group=tp_group or self.groups.tensor,
            dp_cp_group=dp_cp_group or self.groups.data_context,
            **kwargs,
        )

    def make_tp_sharded_tensor_for_checkpoint(
        self,
        tensor: Tensor,
        key: str,
        tp_axis: int = 0,
        replica_id: ReplicaId | None = None,
        prepend_offsets: Offsets = (),
        **kwargs: Any,
    ) -> ShardedTensor:
        """A tensor divided among tensor-parallel ranks; see `saving.sharded_tensors`."""
        return sharded_tensors.make_tp_sharded_tensor_for_checkpoint(
            tensor, key, tp_axis, replica_id, prepend_offsets, groups=self.groups, **kwargs
        )

    def make_sharded_tensor_for_checkpoint(
        self,
        tensor: Tensor,
        key: str,
        prepend_offsets: Offsets = (),
        replica_id: ReplicaId | None = None,
        **kwargs: Any,
    ) -> ShardedTensor:
        """A tensor that all ranks have; see `saving.sharded_tensors`."""
        return sharded_tensors.make_sharded_tensor_for_checkpoint(
            tensor, key, prepend_offsets, replica_id, groups=self.groups, **kwargs
        )

    def drain_embedding_wgrad_compute(
        self,
        config: deferred_embedding.DrainConfig,
        embedding_activation_buffer: list[Tensor],
        grad_output_buffer: list[Tensor],
        weight: nn.Parameter,
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        """Weight gradients that were put off; see `pipeline.deferred_embedding`."""
        deferred_embedding.drain_embedding_wgrad_compute(
            config, embedding_activation_buffer, grad_output_buffer, weight, tp_group, scratch=self.scratch
        )


STATE = UtilityState()
"""This process's, since the documented functions are a process's."""
