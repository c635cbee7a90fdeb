"""`deepspeed.pipe`: models as sequences of layers."""

from zero_strategy.pipeline.grid import PipelineParallelGrid
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.specs import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
]
