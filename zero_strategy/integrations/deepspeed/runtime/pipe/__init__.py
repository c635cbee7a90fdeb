"""`deepspeed.runtime.pipe`: its modules, which are not part of this version."""

from zero_strategy.integrations.deepspeed.on_demand import on_demand

__getattr__ = on_demand(__name__, ("engine", "module", "schedule", "topology"))
