"""`deepspeed.runtime.utils`: what is documented of it, each the package's own function or class."""

from __future__ import annotations

from zero_strategy.activation.rng import set_random_seed
from zero_strategy.checkpoint.storage import ensure_directory_exists
from zero_strategy.compat.deepspeed.absent import absent
from zero_strategy.compat.megatron.fsdp_index import align_dense_tensors, all_gather_dp_groups
from zero_strategy.compat.megatron.gradients import (
    clip_grad_norm_,
    clip_tensors_by_global_norm,
    get_global_norm_of_tensors,
    get_grad_norm,
)
from zero_strategy.compat.megatron.models import bwc_tensor_model_parallel_rank, is_model_parallel_parameter
from zero_strategy.diagnostics.memory_use import get_ma_status, see_memory_usage
from zero_strategy.optim.fused import DummyOptim

__all__ = [
    "DummyOptim",
    "align_dense_tensors",
    "all_gather_dp_groups",
    "bwc_tensor_model_parallel_rank",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "ensure_directory_exists",
    "get_global_norm_of_tensors",
    "get_grad_norm",
    "get_ma_status",
    "is_model_parallel_parameter",
    "see_memory_usage",
    "set_random_seed",
]

__getattr__ = absent(__name__)
