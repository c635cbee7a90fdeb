"""A tensor-parallel rank's part of a tensor as pieces of the whole, and back.

A checkpoint holds whole tensors. A part that is one range of its tensor is a piece like any other. One that is divided
inside of its rows (a row-parallel layer's) is many short ranges: ranks with the same rows exchange them, so that each
writes an equal share of whole rows, one long range. What lies in a tier is written row by row instead, for there is no
memory for a second copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from zero_strategy.checkpoint import FileKind, LatePiece, Piece
from zero_strategy.checkpoint.state_reader import Wanted
from zero_strategy.distributed import Communicator
from zero_strategy.sharding.tensor_part import TensorPart

_READ_BYTES = 16 << 20
"""Of rows that are read at once, other ranks' elements included."""


def pieces_in_whole(
    part: TensorPart,
    tensor: Communicator,
    name: str,
    bounds: tuple[int, int],
    dtype: torch.dtype,
    read: Callable[[int, int], Tensor],
    *,
    late: bool,
) -> Iterator[Piece | LatePiece]:
    """What this rank writes of a tensor. A collective of the tensor-parallel ranks where these divide its rows.

    Args:
        part: What this rank has of it.
        tensor: The tensor-parallel ranks.
        name: Of the tensor.
        bounds: First and one-past-last element that is this rank's, in the flattened part.
        dtype: In which it is written.
        read: Gives elements [start, stop) of the part, flat and of that dtype; called for some within `bounds`.
        late: They are in a tier: read when their turn comes. The same on all ranks.
    """
    if not part.counts:
        return
    start, stop = bounds
    if part.is_one_range or late:
        for span in part.spans(start, stop):
            load = partial(read, span.local, span.local + span.stop - span.start)
            if late:
                yield LatePiece(name, span.start, span.stop - span.start, dtype, load)
            elif part.is_one_range or start < stop:
                yield Piece(name, span.start, load())
        return
    values = read(start, stop).cpu() if start < stop else torch.empty(0, dtype=dtype)
    for first, found in _share_rows(part, tensor, start, values):
        yield Piece(name, first, found)


def _share_rows(part: TensorPart, tensor: Communicator, start: int, values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Whole rows for as many as all ranks have from end to end, an equal share for each; what is left, as it lies."""
    stop = start + values.numel()
    rows_here = part.whole_rows(start, stop) if part.row else (0, part.rows)
    own = torch.tensor([*rows_here, part.row, part.offset])
    table = torch.stack(tensor.exchange_small(own)).tolist()
    first, last = max(row[0] for row in table), min(row[1] for row in table)
    if first >= last:
        first = last = -(-stop // max(part.row, 1))  # none in common
    for low, high in ((start, min(first * part.row, stop)), (max(last * part.row, start), stop)):
        for span in part.spans(low, high) if low < high else ():
            yield span.start, values[span.local - start :][: span.stop - span.start]
    if first >= last:
        return
    share = -(-(last - first) // tensor.size)
    begins = [min(first + rank * share, last) for rank in range(tensor.size + 1)]
    room = share * max(row[2] for row in table)
    outgoing = []
    for begin, end in pairwise(begins):
        padded = values.new_zeros(room)
        padded[: (end - begin) * part.row] = values[begin * part.row - start : end * part.row - start]
        outgoing.append(padded)
    begin, end = begins[tensor.rank], begins[tensor.rank + 1]
    rows = values.new_empty(end - begin, part.whole_row)
    for arrived, (_, _, width, column) in zip(tensor.all_to_all(outgoing), table, strict=True):
        rows[:, column : column + width] = arrived[: (end - begin) * width].view(end - begin, width)
    if begin < end:
        yield begin * part.whole_row, rows.view(-1)


def wanted_in_whole(
    part: TensorPart,
    name: str,
    bounds: tuple[int, int],
    kind: FileKind = "model",
    *,
    itemsize: int,
    out: Tensor | None = None,
    write: Callable[[int, Tensor], object] | None = None,
) -> Iterator[Wanted]:
    """What this rank reads of a tensor.

    Args:
        part: What it has of it.
        name: Of the tensor in the checkpoint.
        bounds: First and one-past-last element that it wants, in the flattened part.
        kind: Weights, or which state.
        itemsize: Bytes per element there.
        out: Where they go, (wanted elements,).
        write: Or what takes them, with the index of the first in `bounds`; in any thread.
    """
    start, stop = bounds
    if part.is_one_range:
        then = None if write is None else partial(write, 0)
        yield Wanted(name, part.offset + start, part.offset + stop, kind, out=out, then=then)
        return
    most = max(1, _READ_BYTES // (part.whole_row * itemsize))
    at = start
    while at < stop:
        first, last = part.whole_rows(at, stop)
        rows = min(last - first, most) if first * part.row == at else 0
        end = at + rows * part.row if rows else min((at // part.row + 1) * part.row, stop)
        spread = partial(_spread, part, max(rows, 1), at - start, end - at, out, write)
        yield Wanted(name, part.whole_index(at), part.whole_index(end - 1) + 1, kind, then=spread)
        at = end


def _spread(
    part: TensorPart,
    rows: int,
    offset: int,
    numel: int,
    out: Tensor | None,
    write: Callable[[int, Tensor], object] | None,
    values: Tensor,
) -> None:
    found = part.pick(values, rows) if rows > 1 else values
    assert found.numel() == numel
    if out is not None:
        out[offset : offset + numel].copy_(found)
    else:
        assert write is not None
        write(offset, found)
