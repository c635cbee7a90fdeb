"""`deepspeed.checkpointing`: activations that are computed again, and random states."""

from __future__ import annotations

from zero_strategy.activation.functional import (
    CheckpointFunction,
    checkpoint,
    configure,
    get_cuda_rng_tracker,
    initialize_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    non_reentrant_checkpoint,
    reset,
    timings,
)
from zero_strategy.activation.rng import CudaRNGStatesTracker, _get_cuda_rng_state, _set_cuda_rng_state

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "_get_cuda_rng_state",
    "_set_cuda_rng_state",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "initialize_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
    "timings",
]
