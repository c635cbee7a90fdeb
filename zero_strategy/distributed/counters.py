"""Counts of what the collectives room sends: exact, so that tests can compare them with formulas."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class CommunicationCounters:
    """What this rank sent since the last `reset`.

    Attributes:
        calls: Number of collectives by kind ("all_gather", "reduce_scatter", "broadcast", "control").
        elements: Elements of model state sent by kind. An all-gather of a bucket sends the own slice to each of the
            other N - 1 ranks (or passes N - 1 slices on, in a ring: the same number).
        bytes: The same in bytes.
    """

    calls: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, elements: int, itemsize: int) -> None:
        """Record one collective in which this rank sends `elements` elements of `itemsize` bytes."""
        self.calls[kind] += 1
        self.elements[kind] += elements
        self.bytes[kind] += elements * itemsize

    @property
    def elements_sent(self) -> int:
        """Elements of model state sent by this rank, control messages left out."""
        return sum(count for kind, count in self.elements.items() if kind != "control")

    def reset(self) -> None:
        """Start again from zero."""
        self.calls.clear()
        self.elements.clear()
        self.bytes.clear()
