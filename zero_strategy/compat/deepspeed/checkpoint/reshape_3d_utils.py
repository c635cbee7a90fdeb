"""`deepspeed.checkpoint.reshape_3d_utils`."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.checkpoint.reshape_meg_2d import (
    flatten_dp_dimension,
    get_model_3d_descriptor,
    model_3d_desc,
    unflatten_dp_dimension,
)

__all__ = ["flatten_dp_dimension", "get_model_3d_descriptor", "model_3d_desc", "unflatten_dp_dimension"]
