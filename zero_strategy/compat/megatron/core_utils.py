"""`megatron.core.utils`: its names, each the package's own function or class.

What is a global there is read off `STATE` when it is asked for (`_nvtx_enabled`, `_ASYNC_IO_LOOP`, ...).
"""

from __future__ import annotations

import logging
from typing import Any

from zero_strategy.compat.megatron import lifecycle
from zero_strategy.compat.megatron import lifecycle as versions
from zero_strategy.compat.megatron.diagnostics import (
    _nvtx_decorator_get_func_path,
    _nvtx_range_get_func_path,
    log_single_rank,
)
from zero_strategy.compat.megatron.gradients import prepare_input_tensors_for_wgrad_compute
from zero_strategy.compat.megatron.groups import get_pg_rank, get_pg_size, get_pg_src_rank
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
from zero_strategy.compat.megatron.state import LATER, STATE, later
from zero_strategy.compat.megatron.tensors import (
    GlobalMemoryBuffer,
    GlobalSymmetricMemoryBuffer,
    MakeViewlessTensor,
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
    "_causal_conv1d_version": versions.get_causal_conv1d_version,
    "_fa_version": versions.get_fa_version,
    "_mamba_ssm_version": versions.get_mamba_version,
    "_nvtx_enabled": lambda: STATE.ranges.enabled,
    "_nvtx_range_messages": lambda: STATE.ranges.messages,
    "_te_version": versions.get_te_version,
}

__all__ = [
    "ExperimentalNotEnabledError",
    "GlobalMemoryBuffer",
    "GlobalSymmetricMemoryBuffer",
    "MakeViewlessTensor",
    "WrappedTensor",
    "_kernel_make_viewless_tensor",
    "_nvtx_decorator_get_func_path",
    "_nvtx_range_get_func_path",
    "assert_viewless_tensor",
    "check_mamba_sequence_packing_support",
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
    if name in LATER:
        return later(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIVE, *LATER})
