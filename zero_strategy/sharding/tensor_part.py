"""Which part of a parameter a tensor-parallel rank has. Pure arithmetic.

    whole, shape (3, 4), divided along dimension 1 between two ranks; rank 1 has the elements in brackets

        . . [2 3]          the row-major whole:  . . 2 3 . . 6 7 . . 10 11
        . . [6 7]          of this rank:             2 3     6 7     10 11     (rows of 2 in rows of 4, from column 2)
        . . [10 11]

What comes after the divided dimension is one run of elements, so a part is a number of equal runs ("rows"): a single
one where the first dimension is divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Elements of a part that are one range of the whole.

    Attributes:
        start, stop: In the flattened whole.
        local: Index of the first in the flattened part.
    """

    start: int
    stop: int
    local: int


@dataclass(frozen=True)
class TensorPart:
    """One rank's part of a parameter.

    Attributes:
        shape: Of the whole.
        dim: The divided dimension; None: every rank has the whole.
        start: Index of this rank's first element along it.
        length: How many it has along it.
        rank: This rank among the tensor-parallel ones.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    length: int = 0
    rank: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    @property
    def counts(self) -> bool:
        """Whether these elements are this rank's in sums over the ranks, and its to write: copies count once."""
        return self.dim is not None or self.rank == 0

    @property
    def rows(self) -> int:
        """Number of runs."""
        return 1 if self.dim is None else math.prod(self.shape[: self.dim])

    @property
    def row(self) -> int:
        """Elements of a run."""
        return math.prod(self.local_shape if self.dim is None else self.local_shape[self.dim :])

    @property
    def whole_row(self) -> int:
        """From the beginning of a run to that of the next, in the whole."""
        return math.prod(self.shape if self.dim is None else self.shape[self.dim :])

    @property
    def offset(self) -> int:
        """Of the first run in the whole."""
        return 0 if self.dim is None else self.start * math.prod(self.shape[self.dim + 1 :])

    @property
    def is_one_range(self) -> bool:
        """Whether every rank's part is a single range of the whole."""
        return self.rows <= 1

    def whole_index(self, local: int) -> int:
        """Where an element of the part lies in the flattened whole."""
        row, column = divmod(local, max(self.row, 1))
        return row * self.whole_row + self.offset + column

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Elements [start, stop) of the flattened part as ranges of the whole, in order."""
        if self.is_one_range or self.row == self.whole_row:
            first = self.offset + start
            yield Span(first, first + stop - start, start)
            return
        while start < stop:
            end = min((start // self.row + 1) * self.row, stop)
            first = self.whole_index(start)
            yield Span(first, first + end - start, start)
            start = end

    def whole_rows(self, start: int, stop: int) -> tuple[int, int]:
        """The runs that lie in elements [start, stop) of the part from end to end: first, one past the last."""
        first, last = -(-start // max(self.row, 1)), stop // max(self.row, 1)
        return first, max(first, last)

    def pick(self, values: Tensor, rows: int) -> Tensor:
        """This rank's elements of so many rows.

        Args:
            values: Of the whole, flat, from the beginning of the first run to the end of the last.

        Returns:
            Flat, (rows * row,).
        """
        return values.as_strided((rows, self.row), (self.whole_row, 1)).reshape(-1)

    def of_whole(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole's shape: a view."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.length)
