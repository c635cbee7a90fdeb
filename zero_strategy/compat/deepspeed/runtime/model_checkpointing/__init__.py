"""`deepspeed.runtime.model_checkpointing`: its modules, each imported when it is asked for."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.on_demand import on_demand

__getattr__ = on_demand(__name__, ("data_parallel_writer_factory",))
