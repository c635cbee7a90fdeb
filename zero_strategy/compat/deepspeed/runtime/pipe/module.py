"""`deepspeed.runtime.pipe.module`."""

from __future__ import annotations

from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.specs import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline.transport import PipelineError

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
