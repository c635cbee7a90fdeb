"""`deepspeed.runtime.pipe.engine`."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.scripts.pipeline import ScriptPipelineEngine as PipelineEngine

__all__ = ["PipelineEngine"]
