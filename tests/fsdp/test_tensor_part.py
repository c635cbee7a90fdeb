"""Elements of a tensor that a tensor-parallel rank has: against torch's own slicing."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launcher import Launcher
from zero_strategy.checkpoint.contents import pieces_in_whole, wanted_in_whole
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.process_group import own_group
from zero_strategy.fsdp.dtensor import TensorPart

CASES = [((6,), 0), ((4, 3), 0), ((4, 6), 1), ((2, 3, 4), 1), ((2, 3, 4), 2), ((1, 5), 1), ((3, 4), None), ((), None)]


def whole_of(shape: tuple[int, ...]) -> Tensor:
    numel = int(torch.tensor(shape).prod()) if shape else 1
    return torch.arange(numel).view(shape)


def parts(shape: tuple[int, ...], dim: int | None, lengths: list[int]) -> list[TensorPart]:
    starts = [0, *accumulate(lengths)]
    return [TensorPart(shape, dim, *place, rank) for rank, place in enumerate(zip(starts, lengths))]


def divided(shape: tuple[int, ...], dim: int | None) -> list[TensorPart]:
    """Between two ranks, unevenly where that is possible."""
    if dim is None:
        return [TensorPart(shape, rank=rank) for rank in range(2)]
    first = -(-shape[dim] // 2)
    return parts(shape, dim, [first, shape[dim] - first])


@pytest.mark.parametrize(("shape", "dim"), CASES)
def test_ranges_of_the_whole_are_the_part(shape: tuple[int, ...], dim: int | None) -> None:
    whole = whole_of(shape)
    for part in divided(shape, dim):
        mine = part.of_whole(whole)
        assert mine.shape == part.local_shape
        flat, everything = mine.reshape(-1), whole.reshape(-1)
        for start in range(flat.numel() + 1):
            for stop in range(start, flat.numel() + 1):
                spans = list(part.spans(start, stop))
                found = [everything[span.start : span.stop] for span in spans]
                assert torch.cat([everything[:0], *found]).equal(flat[start:stop])
                assert all(one.local + one.stop - one.start == other.local for one, other in pairwise(spans))
                assert len(spans) <= 1 or not part.is_one_range
        assert part.counts == (dim is not None or part.rank == 0)


@pytest.mark.parametrize(("shape", "dim"), CASES)
def test_what_is_read_of_the_whole_is_the_part(
    shape: tuple[int, ...], dim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero_strategy.checkpoint.contents._READ_BYTES", 16 * 8)  # two rows or so
    everything = whole_of(shape).reshape(-1)
    for part in divided(shape, dim):
        flat = part.of_whole(whole_of(shape)).reshape(-1)
        for start in range(flat.numel() + 1):
            for stop in range(start, flat.numel() + 1):
                out, taken = torch.full((stop - start,), -1), torch.full((stop - start,), -1)

                def write(first: int, values: Tensor, taken: Tensor = taken) -> None:
                    taken[first : first + values.numel()] = values

                for item in wanted_in_whole(part, "x", (start, stop), itemsize=8, write=write):
                    assert item.then is not None
                    item.then(everything[item.start : item.stop])
                for item in wanted_in_whole(part, "x", (start, stop), itemsize=8, out=out):
                    values = everything[item.start : item.stop]
                    if item.out is not None:
                        item.out.copy_(values)
                    elif item.then is not None:
                        item.then(values)
                assert taken.equal(flat[start:stop])
                assert out.equal(flat[start:stop])


def written(late: bool) -> list[Any]:
    """Files that two ranks write of some tensors, each from a range of its own of its part."""
    rank = torch.distributed.get_rank()
    tensor = Communicator(own_group([[0, 1]]), CommunicationCounters())
    found = []
    for shape, dim, lengths, ranges in WRITTEN:
        part = parts(shape, dim, lengths)[rank]
        flat = part.of_whole(whole_of(shape)).reshape(-1)
        read = flat.__getitem__
        pieces = pieces_in_whole(
            part, tensor, "x", ranges[rank], torch.int64, lambda a, b, read=read: read(slice(a, b)), late=late
        )
        found.append([(piece.start, piece.loaded().data.tolist()) for piece in pieces])
    return found


WRITTEN: list[tuple[tuple[int, ...], int, list[int], list[tuple[int, int]]]] = [
    ((6, 4), 1, [2, 2], [(0, 12), (0, 12)]),  # equal rows
    ((6, 4), 1, [2, 2], [(3, 11), (3, 11)]),  # rows cut at both ends
    ((6, 5), 1, [3, 2], [(0, 18), (0, 12)]),  # unequal lengths
    ((6, 5), 1, [3, 2], [(4, 17), (1, 12)]),  # and ranges
    ((6, 4), 1, [2, 2], [(0, 6), (6, 12)]),  # no row in common
    ((6, 4), 1, [2, 2], [(0, 0), (0, 12)]),  # one has nothing
    ((6, 4), 1, [4, 0], [(0, 24), (0, 0)]),  # or no column
    ((6, 4), 0, [4, 2], [(2, 16), (0, 8)]),
]


@pytest.mark.parametrize("late", [False, True])
def test_together_ranks_write_what_they_have_of_the_whole(ranks: Launcher, late: bool) -> None:
    everyone = ranks(2)(written, late)
    for number, (shape, dim, lengths, ranges) in enumerate(WRITTEN):
        everything = whole_of(shape).reshape(-1)
        expected: list[int] = []
        for part, (start, stop) in zip(parts(shape, dim, lengths), ranges):
            expected += part.of_whole(whole_of(shape)).reshape(-1)[start:stop].tolist()
        pieces = [piece for found in everyone for piece in found[number]]
        assert all(values == everything[start:][: len(values)].tolist() for start, values in pieces)
        assert sorted(value for _, values in pieces for value in values) == sorted(expected)
    if not late:
        assert [len(found[0]) for found in everyone] == [1, 1]  # one long range each
