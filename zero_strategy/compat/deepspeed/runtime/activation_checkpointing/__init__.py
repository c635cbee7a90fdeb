"""`deepspeed.runtime.activation_checkpointing`."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.on_demand import on_demand

__getattr__ = on_demand(__name__, ("checkpointing",))
