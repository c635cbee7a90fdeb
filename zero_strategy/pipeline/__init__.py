"""Pipelines: schedules as data, lowered to instructions that an engine carries out.

    build_table          a schedule by name: gpipe, 1f1b, interleaved_1f1b, zb_h1, interleaved_zb, zbv, csv:PATH
    Table                a row of actions per rank: what is computed, in which order
      lower              messages, buffers, loads: a TableSchedule per rank
    PipeSchedule         steps of instructions for one rank, DeepSpeed's or a table's
"""

from __future__ import annotations

from zero_strategy.pipeline.actions import Action, Kind
from zero_strategy.pipeline.inference import inference
from zero_strategy.pipeline.lowering import lower
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.registry import SCHEDULES, build_table
from zero_strategy.pipeline.schedule import (
    DataParallelSchedule,
    InferenceSchedule,
    PipeSchedule,
    TableSchedule,
    TrainSchedule,
)
from zero_strategy.pipeline.tables import Table

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
]
