"""Bytes that live at each moment of a run: what was made, what was let go of, and what of it were gradients.

autograd adds two gradients of one tensor up in place, but where a dispatch mode looks on. Such a sum, which is made
just before its first part goes, takes that part's memory here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

_LARGE = 4
"""Parameters count as large that have a fourth of the bytes of the largest one."""


@dataclass(frozen=True)
class Levels:
    """Bytes of a run, parameters left out.

    Attributes:
        peak: At most, gradients of parameters left out.
        with_gradients: At most, with those that autograd has not yet handed over.
        at_gradient: Of activations, when the first large gradient of the root unit is handed over.
        at_marks: At each mark.
        made: Of all blocks that were made, by their size.
    """

    peak: int = 0
    with_gradients: int = 0
    at_gradient: int = 0
    at_marks: tuple[int, ...] = ()
    made: Mapping[int, int] = field(default_factory=dict, repr=False)


class Timeline:
    """Changes in the order in which they come."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, int]] = []
        self._sums: dict[int, int] = {}
        self._gradients: set[int] = set()
        self._handed: list[tuple[int, int]] = []
        self._marks: list[int] = []

    def change(self, block: int, nbytes: int) -> None:
        """A block of so many bytes is made; less than none: it is let go of."""
        self._changes.append((block, nbytes))

    def sum(self, block: int, first: int) -> None:
        """A block is the sum of two, of which this is the first."""
        self._sums[block] = first

    def hand_over(self, block: int, nbytes: int) -> None:
        """A block is a gradient, and about to go: of a parameter of the root unit of so many bytes; 0: of another."""
        self._gradients.add(block)
        self._handed.append((nbytes, len(self._changes)))

    def mark(self) -> None:
        """Note this moment."""
        self._marks.append(len(self._changes))

    def levels(self) -> Levels:
        """Bytes of the whole run."""
        same, gone = self._sums_in_place()
        gradients = {same.get(block, block) for block in self._gradients}
        own, whole = [0], [0]  # after each change
        for at, (block, nbytes) in enumerate(self._changes):
            counts = nbytes if at not in gone and not (block in same and nbytes > 0) else 0
            whole.append(whole[-1] + counts)
            own.append(own[-1] + (0 if same.get(block, block) in gradients else counts))
        made = Counter(nbytes for _, nbytes in self._changes if nbytes > 0)
        largest = max((nbytes for nbytes, _ in self._handed), default=0)
        first = next((at for nbytes, at in self._handed if nbytes and nbytes * _LARGE >= largest), len(self._changes))
        return Levels(max(own), max(whole), own[first], tuple(own[at] for at in self._marks), made)

    def _sums_in_place(self) -> tuple[dict[int, int], set[int]]:
        """Sums by the block that they are in, and the places in the list where that one would go."""
        same: dict[int, int] = {}
        gone: set[int] = set()
        for at, (block, nbytes) in enumerate(self._changes):
            first = self._sums.get(block, 0)
            if nbytes <= 0 or not first:
                continue
            # It goes at once, before anything else comes: nobody else has it.
            after = takewhile(lambda place: self._changes[place][1] < 0, range(at + 1, min(at + 3, len(self._changes))))
            if (place := next((each for each in after if self._changes[each][0] == first), None)) is not None:
                same[block] = same.get(first, first)
                gone.add(place)
        return same, gone
