"""Sequence parallelism and tiles: attention over sequences whose tokens are divided among ranks, layers over some."""

from zero_strategy.sequence.attention import attention
from zero_strategy.sequence.group import SequenceGroup
from zero_strategy.sequence.tiling import tiled
from zero_strategy.sequence.visible import Visible
from zero_strategy.sequence.vocabulary_loss import linear_cross_entropy

__all__ = ["SequenceGroup", "Visible", "attention", "linear_cross_entropy", "tiled"]
