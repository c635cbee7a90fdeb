"""`deepspeed.runtime.engine`."""

from zero_strategy.scripts.engine import ScriptEngine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
