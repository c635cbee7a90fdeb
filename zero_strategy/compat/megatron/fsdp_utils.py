"""`megatron_fsdp.utils`: its names, each the package's own function or class."""

from __future__ import annotations

import logging

import zero_strategy.compat.megatron.lifecycle as versions
from zero_strategy.activation.functional import get_cuda_rng_tracker, initialize_rng_tracker
from zero_strategy.activation.rng import DEFAULT_NAME, _get_cuda_rng_state, _set_cuda_rng_state
from zero_strategy.compat.megatron.fsdp_index import FSDPDistributedIndex
from zero_strategy.compat.megatron.groups import contains_submesh, get_mesh_names
from zero_strategy.compat.megatron.lifecycle import get_te_version
from zero_strategy.compat.megatron.models import (
    create_updated_function_signature,
    get_mcore_tensor_parallel_partition_dim,
    is_mcore_tensor_model_parallel,
    is_mcore_tensor_parallel_duplicated,
    is_submodule,
)
from zero_strategy.compat.megatron.state import STATE
from zero_strategy.compat.megatron.tensors import GlobalMemoryBuffer

logger = logging.getLogger(__name__)

_MODEL_PARALLEL_RNG_TRACKER_NAME = DEFAULT_NAME

get_global_memory_buffer = STATE.get_global_memory_buffer

__all__ = [
    "FSDPDistributedIndex",
    "GlobalMemoryBuffer",
    "_MODEL_PARALLEL_RNG_TRACKER_NAME",
    "_get_cuda_rng_state",
    "_set_cuda_rng_state",
    "contains_submesh",
    "create_updated_function_signature",
    "get_cuda_rng_tracker",
    "get_global_memory_buffer",
    "get_mcore_tensor_parallel_partition_dim",
    "get_mesh_names",
    "get_te_version",
    "initialize_rng_tracker",
    "is_mcore_tensor_model_parallel",
    "is_mcore_tensor_parallel_duplicated",
    "is_submodule",
    "is_te_min_version",
    "logger",
]


def is_te_min_version(vers: str, check_equality: bool = True) -> bool:
    """`versions.is_te_min_version`, with the argument's name of this page."""
    return versions.is_te_min_version(vers, check_equality)
