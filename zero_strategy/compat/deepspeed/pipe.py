"""`deepspeed.pipe`: models as sequences of layers."""

from __future__ import annotations

from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.specs import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
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
