"""`deepspeed.runtime.pipe.module`."""

from zero_strategy.pipeline.errors import PipelineError
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.specs import LayerSpec, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
