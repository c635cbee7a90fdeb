"""Tokens that a token sees, as rectangles and triangles that fused kernels compute: no mask has a memory of its own.

A fused kernel computes all scores of a rectangle, or those of a square on and below its diagonal. Padding, packed
samples and sliding windows are cut into such pieces here; a square of which the scores on and above the diagonal count
is one below it with rows and columns in reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int]
"""Tokens from the first number up to the second, of a whole sequence."""


class Shape(Enum):
    """Scores of a piece that count."""

    FULL = auto()
    CAUSAL = auto()  # of a square: on and below the diagonal
    REVERSED = auto()  # of a square: on and above it


class Piece(NamedTuple):
    """Scores for one call of a kernel.

    Attributes:
        sample: Sample of the batch; None: all of them.
        rows: Queries, as places among those here.
        columns: Keys, likewise.
        shape: Scores that count.
    """

    sample: int | None
    rows: slice
    columns: slice
    shape: Shape

    @property
    def batch(self) -> slice:
        """The samples."""
        return slice(None) if self.sample is None else slice(self.sample, self.sample + 1)


@dataclass(frozen=True)
class Visible:
    """Queries and the keys they may see, beside what a causal mask and a window say.

    Attributes:
        samples: Of each sample: pairs of a span of queries and one of keys. One entry only: of all samples.
    """

    samples: tuple[tuple[tuple[Span, Span], ...], ...]

    @classmethod
    def documents(cls, numbers: Tensor) -> Visible | None:
        """Tokens see those of their own document.

        Args:
            numbers: (batch, tokens) integers; a document begins wherever the number changes.

        Returns:
            None: each sample is one document.
        """
        return _of([tuple((span, span) for span in _runs(row)) for row in numbers.cpu()], numbers.shape[1])

    @classmethod
    def positions(cls, places: Tensor) -> Visible | None:
        """Tokens see those of their own document; one begins wherever places do not go on by one.

        Args:
            places: (batch, tokens) integers, as `position_ids` of packed samples.
        """
        begins = torch.ones_like(places, dtype=torch.bool)
        begins[:, 1:] = places.diff(dim=1) != 1
        return cls.documents(begins.cumsum(dim=1))

    @classmethod
    def padding(cls, mask: Tensor) -> Visible | None:
        """Tokens see those that the mask has.

        Args:
            mask: (batch, tokens); nonzero: a token to be seen.
        """
        tokens = mask.shape[1]
        rows = [tuple(((0, tokens), span) for span in _runs(row) if row[span[0]]) for row in (mask != 0).cpu()]
        return _of(rows, tokens)


def _runs(values: Tensor) -> list[Span]:
    """Spans of equal neighbours."""
    edges = [0, *((values.diff() != 0).nonzero().flatten() + 1).tolist(), len(values)]
    return list(pairwise(edges))


def _of(samples: list[tuple[tuple[Span, Span], ...]], tokens: int) -> Visible | None:
    if len(set(samples)) == 1:
        samples = samples[:1]
    return None if samples == [(((0, tokens), (0, tokens)),)] else Visible(tuple(samples))


def pieces(
    rows: Sequence[Span], columns: Sequence[Span], visible: Visible | None, causal: bool, window: int | None
) -> list[Piece]:
    """The scores to compute between some queries and some keys.

    Args:
        rows: Spans of the queries here, in their order.
        columns: Of the keys.
        visible: Who may see whom; None: everybody.
        causal: A token sees those before it, and itself.
        window: Of these the last so many, with itself; None: all. For causal attention.
    """
    last = max(stop for _, stop in (*rows, *columns))
    samples = ((((0, last), (0, last)),),) if visible is None else visible.samples
    found = []
    for number, pairs in enumerate(samples):
        for seeing, seen in pairs:
            for row, row_start in _within(rows, seeing):
                for column, column_start in _within(columns, seen):
                    for r, c, shape in _cover(row, column, causal, window):
                        found.append(
                            Piece(
                                None if len(samples) == 1 else number,
                                slice(r[0] - row_start, r[1] - row_start),
                                slice(c[0] - column_start, c[1] - column_start),
                                shape,
                            )
                        )
    return found


def _within(spans: Sequence[Span], bounds: Span) -> Iterator[tuple[Span, int]]:
    """Parts of spans within bounds, each with what turns a place in the sequence into one among the spans' tokens."""
    before = 0
    for start, stop in spans:
        inside = max(start, bounds[0]), min(stop, bounds[1])
        if inside[0] < inside[1]:
            yield inside, start - before
        before += stop - start


def _cover(row: Span, column: Span, causal: bool, window: int | None) -> Iterator[tuple[Span, Span, Shape]]:
    """Pieces of a rectangle that count."""
    if not causal:
        yield row, column, Shape.FULL
        return
    first, last = max(row[0], column[0]), min(row[1], column[1])  # a square on the diagonal, if first < last
    if column[0] < row[0]:
        yield from _earlier(row, (column[0], min(column[1], row[0])), window)
    if first < last:
        yield from _square((first, last), window)
        if last < row[1]:
            yield from _earlier((last, row[1]), (first, last), window)


def _square(both: Span, window: int | None) -> Iterator[tuple[Span, Span, Shape]]:
    """Causal attention of tokens to themselves."""
    start, stop = both
    if window is None or stop - start <= window:
        yield both, both, Shape.CAUSAL
        return
    for first in range(start, stop, window):
        tile = first, min(first + window, stop)
        yield tile, tile, Shape.CAUSAL
        if first > start:
            yield from _earlier(tile, (max(start, first - window + 1), first), window)


def _earlier(row: Span, column: Span, window: int | None) -> Iterator[tuple[Span, Span, Shape]]:
    """Keys that all are before the queries."""
    if row[0] >= row[1] or column[0] >= column[1]:
        return
    if window is None:
        yield row, column, Shape.FULL
        return
    near = min(row[1], column[0] + window)  # queries before it see all of these keys
    if row[0] < near:
        yield (row[0], near), column, Shape.FULL
    first, last = max(row[0], column[0] + window), min(row[1], column[1] + window - 1)
    if first >= last:
        return
    edge = last - window + 1
    yield (first, last), (first - window + 1, edge), Shape.REVERSED
    if edge < column[1]:
        yield (first, last), (edge, column[1]), Shape.FULL
