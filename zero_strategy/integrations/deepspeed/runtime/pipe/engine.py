"""`deepspeed.runtime.pipe.engine`."""

from zero_strategy.scripts.pipeline import ScriptPipelineEngine as PipelineEngine

__all__ = ["PipelineEngine"]
