"""`deepspeed.profiling.flops_profiler`."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
