"""What a rank computes, one micro-batch and chunk at a time."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """What is computed; the value is its letter in drawings and CSV tables."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both halves of a backward."""
    BACKWARD_INPUT = "I"
    """The half that other stages wait for: gradients of the stage's inputs."""
    BACKWARD_WEIGHT = "W"
    """The half that nobody waits for: gradients of the stage's parameters."""


class Action(NamedTuple):
    """One computation of a rank: of this micro-batch, in the rank's stage number `chunk`."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}.{self.chunk}"
