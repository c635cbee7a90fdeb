"""`megatron.core.utils`: its names, each the package's own function or class.

What is a global there is read off `STATE` when it is asked for (`_nvtx_enabled`, `_ASYNC_IO_LOOP`, ...): groups,
buffers and tasks of a process, as one object. The functions behind them (in the modules beside this one) are given
groups and buffers. Here they take those of a state, whose methods are exported under the documented names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_strategy.compat.megatron.diagnostics as diagnostics
import zero_strategy.compat.megatron.gradients as gradients
import zero_strategy.compat.megatron.groups as groups
import zero_strategy.compat.megatron.lifecycle as lifecycle
import zero_strategy.compat.megatron.tensors as sharded_tensors
from zero_strategy.compat.megatron.diagnostics import (
    AsyncTasks,
    NvtxRanges,
    StragglerDetector,
    __straggler__,
    _nvtx_decorator_get_func_path,
    _nvtx_range_get_func_path,
    check_param_hashes_across_dp_replicas,
    log_single_rank,
)
from zero_strategy.compat.megatron.gradients import prepare_input_tensors_for_wgrad_compute
from zero_strategy.compat.megatron.groups import (
    ParallelGroups,
    get_pg_rank,
    get_pg_size,
    get_pg_src_rank,
    tensor_parallel_group,
)
from zero_strategy.compat.megatron.lifecycle import (
    ExperimentalNotEnabledError,
    check_mamba_sequence_packing_support,
    deprecated,
    experimental_api,
    experimental_cls,
    experimental_fn,
    get_causal_conv1d_version,
    get_fa_version,
    get_mamba_version,
    get_te_version,
    get_torch_version,
    internal_api,
    is_causal_conv1d_min_version,
    is_fa_min_version,
    is_mamba_min_version,
    is_te_min_version,
    is_torch_min_version,
    null_decorator,
)
from zero_strategy.compat.megatron.models import (
    deprecate_inference_params,
    divide,
    ensure_divisibility,
    get_attr_wrapped_model,
    get_mamba_inference_state_config_from_model,
    get_model_config,
    get_model_type,
    get_model_xattn,
    init_method_normal,
    is_submodule,
    maybe_cat,
    scaled_init_method_normal,
    unwrap_model,
)
from zero_strategy.compat.megatron.straggler import StragglerData as _StragglerData
from zero_strategy.compat.megatron.straggler import ValueWithRank as _ValueWithRank
from zero_strategy.compat.megatron.tensors import (
    GlobalMemoryBuffer,
    GlobalSymmetricMemoryBuffer,
    MakeViewlessTensor,
    ReplicaId,
    ShardedTensor,
    WrappedTensor,
    _kernel_make_viewless_tensor,
    assert_viewless_tensor,
    make_viewless_tensor,
    safely_set_viewless_tensor_data,
)
from zero_strategy.fsdp.dtensor import (
    get_data_parallel_group_if_dtensor,
    get_full_tensor_if_necessary,
    to_local_if_dtensor,
)
from zero_strategy.ops.multi_tensor import (
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
)

logger = logging.getLogger(__name__)

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
        self.groups = groups if isinstance(groups, ParallelGroups) else ParallelGroups.from_mesh(groups, expert_mesh)

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
        """This rank's part of a batch; see `distributed.groups.get_batch_on_this_cp_rank`."""
        return groups.get_batch_on_this_cp_rank(batch, self.groups.context)

    def log_on_each_pipeline_stage(
        self,
        logger: logging.Logger,
        *args: Any,
        tp_group: dist.ProcessGroup | None = None,
        dp_cp_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        """One log line per pipeline stage; see `compat.megatron.diagnostics`.

        Args:
            logger: Whose.
            args: Of `Logger.log`.
            tp_group: Default: the run's.
            dp_cp_group: Default: the run's.
            kwargs: Of `Logger.log`.
        """
        diagnostics.log_on_each_pipeline_stage(
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
        """A tensor divided among tensor-parallel ranks; see `compat.megatron.tensors`."""
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
        """A tensor that all ranks have; see `compat.megatron.tensors`."""
        return sharded_tensors.make_sharded_tensor_for_checkpoint(
            tensor, key, prepend_offsets, replica_id, groups=self.groups, **kwargs
        )

    def drain_embedding_wgrad_compute(
        self,
        config: gradients.DrainConfig,
        embedding_activation_buffer: list[Tensor],
        grad_output_buffer: list[Tensor],
        weight: nn.Parameter,
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        """Weight gradients that were put off; see `compat.megatron.gradients`."""
        gradients.drain_embedding_wgrad_compute(
            config, embedding_activation_buffer, grad_output_buffer, weight, tp_group, scratch=self.scratch
        )


STATE = UtilityState()
"""This process's, since the documented functions are a process's."""

configure_nvtx_profiling = STATE.ranges.configure
drain_embedding_wgrad_compute = STATE.drain_embedding_wgrad_compute
get_asyncio_loop = STATE.tasks.get_asyncio_loop
get_batch_on_this_cp_rank = STATE.get_batch_on_this_cp_rank
get_tensor_model_parallel_group_if_none = STATE.get_tensor_model_parallel_group_if_none
log_on_each_pipeline_stage = STATE.log_on_each_pipeline_stage
make_sharded_tensor_for_checkpoint = STATE.make_sharded_tensor_for_checkpoint
make_tp_sharded_tensor_for_checkpoint = STATE.make_tp_sharded_tensor_for_checkpoint
nvtx_decorator = STATE.ranges.decorator
nvtx_range_pop = STATE.ranges.pop
nvtx_range_push = STATE.ranges.push
trace_async_exceptions = STATE.tasks.trace_async_exceptions

_LIVE = {
    "ENABLE_EXPERIMENTAL": lifecycle.experimental_enabled,
    "_ASYNC_IO_LOOP": lambda: STATE.tasks.loop,
    "_ASYNC_TASK_STATS": lambda: STATE.tasks.stats,
    "_causal_conv1d_version": lifecycle.get_causal_conv1d_version,
    "_fa_version": lifecycle.get_fa_version,
    "_mamba_ssm_version": lifecycle.get_mamba_version,
    "_nvtx_enabled": lambda: STATE.ranges.enabled,
    "_nvtx_range_messages": lambda: STATE.ranges.messages,
    "_te_version": lifecycle.get_te_version,
}

__all__ = [
    "ExperimentalNotEnabledError",
    "GlobalMemoryBuffer",
    "GlobalSymmetricMemoryBuffer",
    "MakeViewlessTensor",
    "StragglerDetector",
    "WrappedTensor",
    "_StragglerData",
    "_ValueWithRank",
    "__straggler__",
    "_kernel_make_viewless_tensor",
    "_nvtx_decorator_get_func_path",
    "_nvtx_range_get_func_path",
    "assert_viewless_tensor",
    "check_mamba_sequence_packing_support",
    "check_param_hashes_across_dp_replicas",
    "configure_nvtx_profiling",
    "deprecate_inference_params",
    "deprecated",
    "divide",
    "drain_embedding_wgrad_compute",
    "ensure_divisibility",
    "experimental_api",
    "experimental_cls",
    "experimental_fn",
    "get_asyncio_loop",
    "get_attr_wrapped_model",
    "get_batch_on_this_cp_rank",
    "get_causal_conv1d_version",
    "get_data_parallel_group_if_dtensor",
    "get_fa_version",
    "get_full_tensor_if_necessary",
    "get_mamba_inference_state_config_from_model",
    "get_mamba_version",
    "get_model_config",
    "get_model_type",
    "get_model_xattn",
    "get_pg_rank",
    "get_pg_size",
    "get_pg_src_rank",
    "get_te_version",
    "get_tensor_model_parallel_group_if_none",
    "get_torch_version",
    "init_method_normal",
    "internal_api",
    "is_causal_conv1d_min_version",
    "is_fa_min_version",
    "is_mamba_min_version",
    "is_submodule",
    "is_te_min_version",
    "is_torch_min_version",
    "local_multi_tensor_applier",
    "local_multi_tensor_l2_norm",
    "local_multi_tensor_scale",
    "log_on_each_pipeline_stage",
    "log_single_rank",
    "logger",
    "make_sharded_tensor_for_checkpoint",
    "make_tp_sharded_tensor_for_checkpoint",
    "make_viewless_tensor",
    "maybe_cat",
    "null_decorator",
    "nvtx_decorator",
    "nvtx_range_pop",
    "nvtx_range_push",
    "prepare_input_tensors_for_wgrad_compute",
    "safely_set_viewless_tensor_data",
    "scaled_init_method_normal",
    "to_local_if_dtensor",
    "trace_async_exceptions",
    "unwrap_model",
]


def __getattr__(name: str) -> Any:
    if name in _LIVE:
        return _LIVE[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIVE})
