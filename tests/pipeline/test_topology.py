"""Coordinates and ranks; the values are those that DeepSpeed 0.19.8 gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_strategy.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


def test_the_last_axis_runs_fastest() -> None:
    topology = ProcessTopology(axes=["row", "col"], dims=[2, 3])
    assert [topology.get_rank(row=row, col=col) for row, col in product(range(2), range(3))] == list(range(6))
    assert topology.world_size() == 6 and topology.get_axis_names() == ["row", "col"]
    assert (topology.get_dim("row"), topology.get_dim("col"), topology.get_dim("none")) == (2, 3, 0)
    assert topology.get_coord(rank=4) == topology.ProcessCoord(row=1, col=1) and topology.get_coord(4).col == 1
    assert list(topology.mapping.values()) == list(range(6))


def test_ranks_of_an_index() -> None:
    topology = ProcessTopology(axes=["a", "b", "c"], dims=[2, 2, 2])
    assert topology.get_axis_list(axis="a", idx=1) == [4, 5, 6, 7]
    assert topology.get_axis_list(axis="c", idx=0) == [0, 2, 4, 6]
    assert topology.filter_match(a=0, c=1) == [1, 3] and topology.filter_match() == list(range(8))
    assert topology.filter_match(a=2) == [] == topology.get_axis_list("b", 7)


def test_groups_of_an_axis() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"] and topology.dims == [2, 2, 2]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("expert") == []
    assert PipeDataParallelTopology(3, 2).get_axis_comm_lists("pipe") == [[0, 2, 4], [1, 3, 5]]


def test_a_rank_as_text() -> None:
    topology = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    assert topology.get_rank_repr(rank=3) == "a_01-b_01"
    assert topology.get_rank_repr(rank=3, omit_axes=["a"]) == "b_01"
    assert topology.get_rank_repr(2, inner_sep="+", outer_sep="/") == "a+01/b+00"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3, omit_axes=["data"]) == "pipe_01"
    assert PipeModelDataParallelTopology(2, 2, 2).get_rank_repr(7) == "model_01"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_ranks_and_coordinates_are_one_to_one(dims: list[int]) -> None:
    axes = ["pipe", "data", "model", "expert"][: len(dims)]
    topology = ProcessTopology(axes, dims)
    everyone = list(range(topology.world_size()))
    assert [topology.get_rank(**topology.get_coord(rank)._asdict()) for rank in everyone] == everyone
    for axis, dim in zip(axes, dims):
        groups = topology.get_axis_comm_lists(axis)
        assert sorted(rank for group in groups for rank in group) == everyone
        for group in groups:
            assert [getattr(topology.get_coord(rank), axis) for rank in group] == list(range(dim))
        assert sorted(rank for idx in range(dim) for rank in topology.get_axis_list(axis, idx)) == everyone


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda topology: pickle.loads(pickle.dumps(topology))])
def test_copies(duplicate: Callable[[ProcessTopology], ProcessTopology]) -> None:
    topology = PipeModelDataParallelTopology(2, 3, 2)
    other = duplicate(topology)
    assert type(other) is PipeModelDataParallelTopology and str(other) == str(topology)
    assert other.get_rank(pipe=1, data=0, model=2) == topology.get_rank(pipe=1, data=0, model=2) == 8


def test_topology_mistakes_are_named() -> None:
    topology = PipeDataParallelTopology(2, 2)
    with pytest.raises(ValueError, match=r"get_rank\(pipe=1\) must name each axis of \['pipe', 'data'\]"):
        topology.get_rank(pipe=1)
    with pytest.raises(ValueError, match=r"no rank at pipe=2, data=0 in PipeDataParallelTopology\(pipe=2, data=2\)"):
        topology.get_rank(pipe=2, data=0)
    with pytest.raises(ValueError, match="rank 4 is not one of the 4 ranks"):
        topology.get_coord(4)
    with pytest.raises(ValueError, match="no axis 'model'"):
        topology.filter_match(model=0)
    with pytest.raises(ValueError, match="no axis 'model'"):
        topology.get_axis_list("model", 0)
    with pytest.raises(ValueError, match="differ in length"):
        ProcessTopology(["pipe"], [2, 2])
    with pytest.raises(ValueError, match="axis 'data' has 0 ranks"):
        ProcessTopology(["pipe", "data"], [2, 0])
