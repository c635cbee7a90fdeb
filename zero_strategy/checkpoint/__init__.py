"""Checkpoints: plain safetensors files under the model's own names, written in place by all ranks."""

from zero_strategy.checkpoint.layout import FileLayout, TensorSpec
from zero_strategy.checkpoint.manifest import (
    LATEST_NAME,
    MANIFEST_NAME,
    FileKind,
    Manifest,
    OptimizerRecord,
    WeightRecord,
)
from zero_strategy.checkpoint.plan import CheckpointPlan, plan_files
from zero_strategy.checkpoint.reader import CheckpointReader, StateReader
from zero_strategy.checkpoint.writer import CheckpointWriter, LatePiece, Piece, SaveWriter

__all__ = [
    "LATEST_NAME",
    "MANIFEST_NAME",
    "CheckpointPlan",
    "CheckpointReader",
    "CheckpointWriter",
    "FileKind",
    "FileLayout",
    "Manifest",
    "OptimizerRecord",
    "LatePiece",
    "Piece",
    "SaveWriter",
    "StateReader",
    "TensorSpec",
    "WeightRecord",
    "plan_files",
]
