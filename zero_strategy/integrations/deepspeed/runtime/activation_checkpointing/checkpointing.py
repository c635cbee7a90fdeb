"""`deepspeed.runtime.activation_checkpointing.checkpointing`: what `deepspeed.checkpointing` has."""

from zero_strategy.activation.checkpoint import CheckpointFunction, checkpoint, non_reentrant_checkpoint
from zero_strategy.activation.configure import configure, is_configured, reset, timings
from zero_strategy.activation.rng import CudaRNGStatesTracker, _get_cuda_rng_state, _set_cuda_rng_state
from zero_strategy.activation.tracking import (
    get_cuda_rng_tracker,
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)

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
