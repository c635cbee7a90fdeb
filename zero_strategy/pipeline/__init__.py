"""Pipelines: schedules as data, lowered to instructions that an engine carries out.

build_table          a schedule by name: gpipe, 1f1b, interleaved_1f1b, zb_h1, interleaved_zb, zbv, csv:PATH
Table                a row of actions per rank: what is computed, in which order
  lower              messages, buffers, loads: a TableSchedule per rank
PipeSchedule         steps of instructions for one rank, DeepSpeed's or a table's

PipelineModule       a model as layers, of which a rank builds its own; LayerSpec, TiedLayerSpec
ProcessTopology      which rank is where on named axes; PipelineParallelGrid: with process groups
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_strategy.pipeline.instructions import (
    DataParallelSchedule,
    InferenceSchedule,
    PipeSchedule,
    TableSchedule,
    TrainSchedule,
)
from zero_strategy.pipeline.lowering import lower
from zero_strategy.pipeline.schedules import SCHEDULES, Action, Kind, Placement, Table, build_table, inference

if TYPE_CHECKING:
    from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec
    from zero_strategy.pipeline.module import PipelineModule
    from zero_strategy.pipeline.topology import (
        PipeDataParallelTopology,
        PipelineParallelGrid,
        PipeModelDataParallelTopology,
        ProcessTopology,
    )

_MODELS = {
    "LayerSpec": "building",
    "TiedLayerSpec": "building",
    "PipelineModule": "module",
    "ProcessTopology": "topology",
    "PipeDataParallelTopology": "topology",
    "PipeModelDataParallelTopology": "topology",
    "PipelineParallelGrid": "topology",
}
"""Loaded when they are used: schedules need no torch."""

__all__ = [
    "Action",
    "Kind",
    "Placement",
    "Table",
    "SCHEDULES",
    "build_table",
    "inference",
    "lower",
    "PipeSchedule",
    "TrainSchedule",
    "InferenceSchedule",
    "DataParallelSchedule",
    "TableSchedule",
    "LayerSpec",
    "TiedLayerSpec",
    "PipelineModule",
    "ProcessTopology",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
]


def __getattr__(name: str) -> Any:
    if name in _MODELS:
        return getattr(import_module(f"zero_strategy.pipeline.{_MODELS[name]}"), name)
    raise AttributeError(f"module 'zero_strategy.pipeline' has no attribute {name!r}")
