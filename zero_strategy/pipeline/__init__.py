"""Pipelines: schedules as data, lowered to instructions that an engine carries out.

    Table                a row of actions per rank: what is computed, in which order
      lower              messages, buffers, loads: a TableSchedule per rank
    PipeSchedule         steps of instructions for one rank, DeepSpeed's or a table's
"""

from __future__ import annotations

from zero_strategy.pipeline.actions import Action, Kind
from zero_strategy.pipeline.lowering import lower
from zero_strategy.pipeline.placement import Placement
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
    "lower",
    "PipeSchedule",
    "TrainSchedule",
    "InferenceSchedule",
    "DataParallelSchedule",
    "TableSchedule",
]
