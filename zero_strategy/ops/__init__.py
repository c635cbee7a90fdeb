"""Native ops with references in plain torch; see `optimizers.py` and `multi_tensor.py` for what each computes.

Importing this defines the ops and compiles nothing. `ensure("cpu")` loads the native kernels, building them if need be.
"""

from __future__ import annotations

from zero_strategy.ops.multi_tensor import accumulate_, axpby_, flatten_, grad_stats, l2norm, scale_, unflatten_
from zero_strategy.ops.native import libraries, ops_report
from zero_strategy.ops.optimizers import (
    adagrad_,
    adam_,
    lamb_apply_,
    lamb_direction_,
    lamb_rates,
    lion_,
    sgd_,
)

ensure = libraries.ensure

__all__ = [
    "ensure",
    "ops_report",
    "adam_",
    "lion_",
    "adagrad_",
    "sgd_",
    "lamb_direction_",
    "lamb_apply_",
    "lamb_rates",
    "grad_stats",
    "l2norm",
    "scale_",
    "axpby_",
    "accumulate_",
    "flatten_",
    "unflatten_",
]
