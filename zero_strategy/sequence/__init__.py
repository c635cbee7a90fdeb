"""Sequence parallelism: attention over sequences whose tokens are divided among ranks."""

from zero_strategy.sequence.attention import attention
from zero_strategy.sequence.group import SequenceGroup
from zero_strategy.sequence.visible import Visible

__all__ = ["SequenceGroup", "Visible", "attention"]
