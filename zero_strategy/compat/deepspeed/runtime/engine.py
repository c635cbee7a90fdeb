"""`deepspeed.runtime.engine`."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
