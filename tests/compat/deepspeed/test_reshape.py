"""Grids of ranks: every file belongs to one position, blocks stay together, and DeepSpeed has the same maps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_strategy.compat.deepspeed.checkpoint.reshape_meg_2d import (
    flatten_dp_dimension,
    get_mpu_ranks,
    meg_2d_parallel_map,
    model_3d_desc,
    reshape_meg_2d_parallel,
    unflatten_dp_dimension,
)
from zero_strategy.convert.deepspeed import Degrees, groups_of, obstacles

SMALL = st.integers(1, 3)


@given(pp=SMALL, tp=SMALL, tall=SMALL, wide=SMALL)
def test_blocks_of_a_2d_grid(pp: int, tp: int, tall: int, wide: int) -> None:
    made = reshape_meg_2d_parallel(pp * tall, tp * wide, pp, tp)
    assert sorted(made.get_data()) == list(range(pp * tall * tp * wide))
    for i in range(pp):
        for j in range(tp):
            for number in made.get_data(i, j):
                old_pp, old_tp = divmod(number, tp * wide)
                assert (old_pp // tall, old_tp // wide) == (i, j)


@given(pp=SMALL, tp=SMALL, dp=SMALL, tall=SMALL, wide=SMALL, deep=SMALL)
def test_blocks_of_a_3d_grid(pp: int, tp: int, dp: int, tall: int, wide: int, deep: int) -> None:
    source, target = model_3d_desc(pp * tall, tp * wide, dp * deep), model_3d_desc(pp, tp, dp)
    assert source.can_reshape(target) == (True, [])
    made = source.reshape(target)
    assert len(made) == dp
    assert sorted(number for grid in made for number in grid.get_data()) == list(range(source.world_size()))
    stride = pp * tall * tp * wide
    models = reshape_meg_2d_parallel(pp * tall, tp * wide, pp, tp)
    row = flatten_dp_dimension(models, stride, dp * deep)
    assert [grid.map for grid in unflatten_dp_dimension(row, dp)] == [grid.map for grid in made]
    for grid in made:
        for i in range(pp):
            for j in range(tp):
                assert {number % stride for number in grid.get_data(i, j)} <= set(models.get_data(i, j))


def test_what_would_have_to_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="tp would grow from 2 to 4; files are merged, not divided"):
        reshape_meg_2d_parallel(1, 2, 1, 4)
    with pytest.raises(ValueError, match="pp 3 is not a multiple of 2"):
        reshape_meg_2d_parallel(3, 2, 2, 1)
    valid, why = model_3d_desc(1, 1, 2).can_reshape(model_3d_desc(2, 1, 4))
    assert not valid and len(why) == 2 and "pp would grow" in why[0]
    with pytest.raises(ValueError, match="3 optimizer files of a position cannot be divided into 2"):
        model_3d_desc(1, 1, 3).reshape(model_3d_desc(1, 1, 2))
    with pytest.raises(ValueError, match="the dp degree of a grid must be at least 1, got 0"):
        model_3d_desc(1, 1, 0).reshape(model_3d_desc())


def test_a_map_refuses_positions_it_does_not_have() -> None:
    grid = meg_2d_parallel_map(2, 2)
    grid.simple_init()
    assert grid.map == {"0,0": [0], "0,1": [1], "1,0": [2], "1,1": [3]}
    grid.add_data(0, 0, [7])
    assert grid.get_data(0) == [0, 7, 1] and grid.get_data(tp_index=1) == [1, 3]
    with pytest.raises(ValueError, match="pp index 2 is not within the pp degree 2"):
        grid.get_data(2, 0)
    with pytest.raises(TypeError, match="must be a list"):
        grid.add_data(0, 0, (1,))  # type: ignore[arg-type]


def test_descriptor_of_a_grid() -> None:
    grid = model_3d_desc(2, 3, 4)
    assert grid.world_size() == 24 and grid.get_desc() == "PP,TP,DP = (2, 3, 4)"
    assert grid.is_valid(1, 2, 3) == (True, [])
    assert grid.is_valid(2, 0, 4)[1] == ["PP index 2 is not within 2", "DP index 4 is not within 4"]


@given(pp=SMALL, tp=SMALL, dp=SMALL)
def test_each_rank_is_in_one_group_of_each_kind(pp: int, tp: int, dp: int) -> None:
    for groups, size in zip(groups_of(Degrees(pp, tp, dp)), (tp, pp, dp), strict=True):
        assert sorted(rank for group in groups for rank in group) == list(range(pp * tp * dp))
        assert {len(group) for group in groups} == {size}


@pytest.mark.parametrize("source", [(1, 1, 1), (2, 2, 2), (4, 2, 2), (2, 4, 1), (4, 4, 4), (1, 3, 2)])
@pytest.mark.parametrize("target", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2), (1, 3, 1), (1, 1, 2)])
def test_deepspeed_has_the_same_maps(source: tuple[int, int, int], target: tuple[int, int, int]) -> None:
    theirs = pytest.importorskip("deepspeed.checkpoint.reshape_3d_utils")
    if obstacles(Degrees(*source), Degrees(*target)):
        return
    expected = theirs.model_3d_desc(*source).reshape(theirs.model_3d_desc(*target))
    made = model_3d_desc(*source).reshape(model_3d_desc(*target))
    assert [grid.map for grid in made] == [grid.map for grid in expected]
    flat = theirs.reshape_meg_2d_parallel(source[0], source[1], target[0], target[1])
    assert reshape_meg_2d_parallel(source[0], source[1], target[0], target[1]).map == flat.map


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 4, 2), (2, 2, 1), (1, 1, 4), (4, 1, 2)])
def test_deepspeed_has_the_same_groups(tp: int, pp: int, dp: int) -> None:
    theirs = pytest.importorskip("deepspeed.checkpoint.reshape_meg_2d")
    expected, made = theirs.get_mpu_ranks(tp, pp, dp), get_mpu_ranks(tp, pp, dp)
    assert (made[0], made[2]) == (expected[0], expected[2])  # theirs[1] are model-parallel groups, not pipelines
