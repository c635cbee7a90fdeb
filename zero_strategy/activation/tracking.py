"""This process's tracker of random states, and seeding it."""

from __future__ import annotations

import warnings

from zero_strategy.activation.process import PROCESS
from zero_strategy.activation.rng import CudaRNGStatesTracker, InferenceRNGStatesTracker
from zero_strategy.activation.seeds import seed_model_parallel


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Make this process's tracker, unless there is one.

    Args:
        use_te_rng_tracker: What Transformer Engine's tracker is there for, states that CUDA graphs can capture, is done
            by this package's own: the same as `use_cudagraphable_rng`.
        inference_rng_tracker: One that accepts all calls and draws nothing of its own.
        use_cudagraphable_rng: States that CUDA graphs can capture; without effect on the CPU.
        force_reset: Make a new one, without states, also if there is one.
    """
    kind = InferenceRNGStatesTracker if inference_rng_tracker else CudaRNGStatesTracker
    made = kind(graph_safe=use_te_rng_tracker or use_cudagraphable_rng)
    old = PROCESS.tracker
    if old is None or force_reset:
        PROCESS.tracker = made
    elif (use_te_rng_tracker or inference_rng_tracker or use_cudagraphable_rng) and (
        type(old) is not kind or old.graph_safe != made.graph_safe
    ):
        warnings.warn(
            "initialize_rng_tracker: there is a tracker of another kind already, which stays in use; pass "
            "force_reset=True for a new one",
            stacklevel=2,
        )


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """This process's tracker; one of the asked-for kind is made if there is none."""
    if PROCESS.tracker is None:
        initialize_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    assert PROCESS.tracker is not None
    return PROCESS.tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's default state and the tracker's, in place of `torch.cuda.manual_seed`; see `seeds.py`.

    To be called on all ranks with one seed, after `configure(mpu_)`, which says where this process is.

    Raises:
        TypeError: If the seed is no integer.
    """
    seed_model_parallel(get_cuda_rng_tracker(), seed, PROCESS.place)
