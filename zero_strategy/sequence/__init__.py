"""Sequence parallelism: attention over sequences whose tokens are divided among ranks."""

from zero_strategy.sequence.attention import attention
from zero_strategy.sequence.group import SequenceGroup

__all__ = ["SequenceGroup", "attention"]
