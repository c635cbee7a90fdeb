"""`deepspeed.runtime.pipe.topology`."""

from zero_strategy.pipeline.grid import PipelineParallelGrid
from zero_strategy.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]
