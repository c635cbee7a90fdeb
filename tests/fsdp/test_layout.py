"""The layout of a bucket, by properties: nothing is lost, nothing lies twice, and everybody owns the same amount."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_strategy.fsdp.layout import ALIGN_BYTES, BucketLayout, build_layout, cuts, round_up

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])
WORLDS = st.integers(1, 9)


def named(shapes: list[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{number}", shape) for number, shape in enumerate(shapes)]


def owned(layout: BucketLayout, ranges: list[tuple[int, int]]) -> dict[int, list[int]]:
    """Elements of each parameter, in the order in which the ranges give them."""
    found: dict[int, list[int]] = {}
    for start, stop in ranges:
        for piece in layout.pieces(start, stop):
            found.setdefault(piece.index, []).extend(range(piece.start, piece.stop))
    return found


@given(SHAPES, ITEMSIZES, WORLDS, st.integers(1, 3))
def test_slices_are_equal_and_aligned(shapes: list[tuple[int, ...]], itemsize: int, world: int, replicas: int) -> None:
    layout = build_layout(named(shapes), itemsize, world, replicas)
    assert layout.align * itemsize == ALIGN_BYTES
    assert layout.numel % (world * layout.align * replicas) == 0
    bounds = [layout.slice_bounds(rank) for rank in range(world)]
    assert bounds[0][0] == 0 and bounds[-1][1] == layout.numel
    assert all(stop - start == layout.slice_numel for start, stop in bounds)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    assert all(start % layout.align == 0 for start, _ in bounds)
    assert layout.slice_numel % replicas == 0


@given(SHAPES, ITEMSIZES, WORLDS)
def test_parameters_keep_order_and_do_not_overlap(shapes: list[tuple[int, ...]], itemsize: int, world: int) -> None:
    layout = build_layout(named(shapes), itemsize, world)
    assert [(s.name, s.shape, s.numel) for s in layout.segments] == [
        (name, shape, math.prod(shape)) for name, shape in named(shapes)
    ]
    stop = 0
    for segment in layout.segments:
        assert segment.offset % layout.align == 0
        assert segment.offset >= stop
        stop = segment.stop
    assert stop <= layout.numel


@given(SHAPES, ITEMSIZES, WORLDS)
def test_padding_is_less_than_a_line_per_parameter_and_rank(
    shapes: list[tuple[int, ...]], itemsize: int, world: int
) -> None:
    layout = build_layout(named(shapes), itemsize, world)
    elements = sum(math.prod(shape) for shape in shapes)
    filled = sum(1 for shape in shapes if math.prod(shape))
    assert layout.numel - elements < layout.align * (filled + world) or layout.numel == elements


@given(SHAPES, ITEMSIZES, WORLDS)
def test_every_element_is_owned_once(shapes: list[tuple[int, ...]], itemsize: int, world: int) -> None:
    layout = build_layout(named(shapes), itemsize, world)
    found = owned(layout, [layout.slice_bounds(rank) for rank in range(world)])
    # Zero-size parameters too have an owner: their optimizer state exists somewhere.
    assert found == {index: list(range(math.prod(shape))) for index, shape in enumerate(shapes)}


@given(SHAPES, ITEMSIZES, WORLDS, st.data())
def test_pieces_of_any_division_of_the_bucket(
    shapes: list[tuple[int, ...]], itemsize: int, world: int, data: st.DataObject
) -> None:
    layout = build_layout(named(shapes), itemsize, world)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, layout.numel - 1)), max_size=5)))
    cuts = [cut for cut in cuts if cut < layout.numel]
    edges = [0, *cuts, layout.numel]
    ranges = list(itertools.pairwise(edges))
    assert owned(layout, ranges) == {index: list(range(math.prod(shape))) for index, shape in enumerate(shapes)}
    for start, stop in ranges:
        last = 0
        for piece in layout.pieces(start, stop):
            segment = layout.segments[piece.index]
            assert 0 <= piece.start <= piece.stop <= segment.numel
            assert 0 <= piece.offset <= piece.offset + piece.numel <= stop - start
            assert piece.offset >= last, "in order, without overlap"
            last = piece.offset + piece.numel
            if piece.numel:
                assert start + piece.offset == segment.offset + piece.start


@given(SHAPES, ITEMSIZES, WORLDS)
def test_an_owner_of_a_zero_size_parameter_is_the_same_for_all(
    shapes: list[tuple[int, ...]], itemsize: int, world: int
) -> None:
    layout = build_layout(named(shapes), itemsize, world)
    for index, segment in enumerate(layout.segments):
        if segment.numel == 0:
            holders = [
                rank
                for rank in range(world)
                for piece in layout.pieces(*layout.slice_bounds(rank))
                if piece.index == index
            ]
            if layout.numel:
                assert len(holders) == 1
            else:
                assert holders, "with no elements at all, every slice is the same empty range"


@given(SHAPES, ITEMSIZES, WORLDS)
def test_cuts_are_the_pieces(shapes: list[tuple[int, ...]], itemsize: int, world: int) -> None:
    layout = build_layout(named(shapes), itemsize, world)
    for start, stop in map(layout.slice_bounds, range(world)):
        pieces = layout.pieces(start, stop)
        sizes, places = cuts(pieces, stop - start)
        ends = list(itertools.accumulate(sizes, initial=0))
        assert min(sizes) >= 0 and ends[-1] == stop - start
        assert [(index, ends[place], sizes[place]) for index, place in places] == [
            (piece.index, piece.offset, piece.numel) for piece in pieces
        ]


@given(st.integers(0, 1000), st.integers(1, 100))
def test_round_up(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0 and value <= rounded < value + multiple


def test_the_picture_in_the_docstring() -> None:
    layout = build_layout([("w0", (30, 2)), ("b0", (30,)), ("w1", (100,))], itemsize=4, world_size=2)
    assert [segment.offset for segment in layout.segments] == [0, 64, 96]
    assert layout.numel == 256 and layout.slice_numel == 128
    first, second = (layout.pieces(*layout.slice_bounds(rank)) for rank in range(2))
    assert [(p.index, p.start, p.stop, p.offset) for p in first] == [(0, 0, 60, 0), (1, 0, 30, 64), (2, 0, 32, 96)]
    assert [(p.index, p.start, p.stop, p.offset) for p in second] == [(2, 32, 100, 0)]


def test_a_name_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        build_layout([("w", (2,)), ("w", (3,))], 4, 2)
