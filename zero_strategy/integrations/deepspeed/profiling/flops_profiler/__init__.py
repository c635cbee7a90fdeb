"""`deepspeed.profiling.flops_profiler`."""

from zero_strategy.integrations.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
