"""`deepspeed.profiling`: its module, imported when it is asked for."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.on_demand import on_demand

__getattr__ = on_demand(__name__, ("flops_profiler",))
