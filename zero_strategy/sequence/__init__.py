"""Sequence parallelism and tiles: attention over sequences whose tokens are divided among ranks, layers over some."""

from zero_strategy.sequence.attention import Visible, attention
from zero_strategy.sequence.group import SequenceGroup
from zero_strategy.sequence.tiling import linear_cross_entropy, tiled

__all__ = ["SequenceGroup", "Visible", "attention", "linear_cross_entropy", "tiled"]
