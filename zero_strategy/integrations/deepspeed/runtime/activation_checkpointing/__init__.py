"""`deepspeed.runtime.activation_checkpointing`."""

from zero_strategy.integrations.deepspeed.on_demand import on_demand

__getattr__ = on_demand(__name__, ("checkpointing",))
