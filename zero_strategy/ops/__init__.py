"""Native ops with references in plain torch; what each computes is said at the top of its module.

Importing this defines the ops and compiles nothing. `ensure("cpu")` loads the native kernels, building them if need be.
"""

from __future__ import annotations

from zero_strategy.ops.block_sums import exact_sums, exact_sums_and_flags, exact_sums_on_host
from zero_strategy.ops.coded_optimizers import adam8_, lion8_, sgd8_
from zero_strategy.ops.fused_layers import (
    bias_dropout_residual,
    bias_gelu,
    layer_norm,
    masked_softmax_dropout,
    random_state,
    rms_norm,
)
from zero_strategy.ops.library import libraries, ops_report
from zero_strategy.ops.multi_tensor import (
    accumulate_,
    axpby_,
    flatten_,
    grad_stats,
    l2norm,
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
    scale_,
    stats_on_host,
    stats_to_host,
    sums_and_flags,
    unflatten_,
)
from zero_strategy.ops.optimizers import (
    adagrad_,
    adam_,
    lamb_apply_,
    lamb_direction_,
    lamb_rates,
    lion_,
    sgd_,
)
from zero_strategy.ops.quantization import dequantize_blocks, dequantize_reduce, quantize_blocks

ensure = libraries.ensure

__all__ = [
    "ensure",
    "libraries",
    "ops_report",
    "adam_",
    "lion_",
    "adagrad_",
    "sgd_",
    "lamb_direction_",
    "lamb_apply_",
    "lamb_rates",
    "adam8_",
    "lion8_",
    "sgd8_",
    "grad_stats",
    "stats_on_host",
    "stats_to_host",
    "sums_and_flags",
    "exact_sums",
    "exact_sums_and_flags",
    "exact_sums_on_host",
    "l2norm",
    "scale_",
    "axpby_",
    "accumulate_",
    "flatten_",
    "local_multi_tensor_applier",
    "local_multi_tensor_l2_norm",
    "local_multi_tensor_scale",
    "unflatten_",
    "layer_norm",
    "rms_norm",
    "bias_gelu",
    "bias_dropout_residual",
    "masked_softmax_dropout",
    "random_state",
    "quantize_blocks",
    "dequantize_blocks",
    "dequantize_reduce",
]
