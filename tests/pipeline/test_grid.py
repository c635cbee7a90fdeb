"""A rank's place on the grid, and its process groups; the values are those that DeepSpeed 0.19.8 gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.launcher import Launcher, RankError
from zero_strategy.pipeline.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


def test_places_without_process_groups() -> None:
    topology = PipeDataParallelTopology(num_pp=3, num_dp=2)
    grids = [PipelineParallelGrid(topology, rank=rank) for rank in range(6)]
    assert [grid.stage_id for grid in grids] == [0, 0, 1, 1, 2, 2]
    assert [grid.get_data_parallel_id() for grid in grids] == [0, 1, 0, 1, 0, 1]
    assert [grid.is_first_stage for grid in grids] == [True, True, False, False, False, False]
    assert [grid.is_last_stage for grid in grids] == [False] * 4 + [True] * 2
    middle = grids[3]
    assert (middle.pp_group, middle.dp_group, middle.slice_group) == ([1, 3, 5], [2, 3], [3])
    assert middle.pipe_groups == [[0, 2, 4], [1, 3, 5]] and middle.dp_groups == [[0, 1], [2, 3], [4, 5]]
    assert middle.p2p_groups == [[0, 2], [1, 3], [2, 4], [3, 5], [4, 0], [5, 1]]
    assert [middle.stage_to_global(stage) for stage in range(3)] == [1, 3, 5]
    assert middle.stage_to_global(2, data=0) == 4 and middle.topology() is topology
    sizes = (middle.pipe_parallel_size, middle.data_parallel_size, middle.model_parallel_size)
    assert sizes == (3, 2, 1) and middle.get_data_parallel_group_ranks() == [2, 3]
    assert (middle.get_model_parallel_rank(), middle.get_model_parallel_world_size()) == (1, 3)
    assert middle.get_pipe_parallel_group() is None and middle.get_slice_parallel_group() is None


def test_places_with_slices() -> None:
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2), rank=5)
    assert (grid.get_pipe_parallel_rank(), grid.get_data_parallel_rank(), grid.get_slice_parallel_rank()) == (1, 0, 1)
    assert (grid.get_slice_parallel_world_size(), grid.get_tensor_model_parallel_world_size()) == (2, 2)
    assert (grid.slice_group, grid.pp_group, grid.dp_group) == ([4, 5], [1, 5], [5, 7])
    assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (3, 4)  # ranks 0, 1, 4, 5
    assert grid.stage_to_global(0, model=0) == 0 and grid.get_global_rank() == 5 and grid.world_size == 8


def test_axes_that_are_missing_have_one_rank() -> None:
    grid = PipelineParallelGrid(ProcessTopology(["data"], [2]), rank=1)
    assert (grid.stage_id, grid.pipe_parallel_size, grid.pp_group, grid.dp_group) == (0, 1, [1], [0, 1])
    assert grid.stage_to_global(0) == 1 and grid.is_first_stage and grid.is_last_stage
    with pytest.raises(ValueError, match=r"no stage 1: ProcessTopology\(data=2\) has no axis 'pipe'"):
        grid.stage_to_global(1)


def test_one_process_alone() -> None:
    grid = PipelineParallelGrid()
    assert (grid.world_size, grid.global_rank, grid.pipe_parallel_size, grid.data_parallel_size) == (1, 0, 1, 1)
    with pytest.raises(ValueError, match=r"PipeDataParallelTopology\(pipe=2, data=1\) has 2 ranks, but 1 take part"):
        PipelineParallelGrid(PipeDataParallelTopology(2, 1))


def sums(shape: tuple[int, ...] | None) -> dict[str, Any]:
    """Ranks that the groups sum over, as bits."""
    grid = PipelineParallelGrid(None if shape is None else PipeModelDataParallelTopology(*shape), dist.group.WORLD)
    groups = {
        "pipe": grid.get_pipe_parallel_group(),
        "data": grid.get_data_parallel_group(),
        "slice": grid.get_slice_parallel_group(),
        "model": grid.get_model_parallel_group(),
    }
    found: dict[str, Any] = {"dims": grid.topology().dims}
    for name, group in groups.items():
        bit = torch.tensor(1 << dist.get_rank())
        dist.all_reduce(bit, group=group)
        found[name] = bit.item()
    return found


def bits(*ranks: int) -> int:
    return sum(1 << rank for rank in ranks)


def test_groups_of_two_pipelines(ranks: Launcher) -> None:
    for rank, found in enumerate(ranks(4)(sums, None)):
        assert found["dims"] == [2, 2]
        pipe = bits(rank % 2, rank % 2 + 2)
        assert (found["pipe"], found["model"], found["slice"]) == (pipe, pipe, bits(rank))
        assert found["data"] == bits(rank // 2 * 2, rank // 2 * 2 + 1)


def test_groups_of_sliced_stages(ranks: Launcher) -> None:
    for rank, found in enumerate(ranks(4)(sums, (2, 2, 1))):
        assert found["slice"] == bits(rank // 2 * 2, rank // 2 * 2 + 1)
        assert (found["pipe"], found["model"]) == (bits(rank % 2, rank % 2 + 2), bits(0, 1, 2, 3))
        assert found["data"] == bits(rank)


def copy_beside_experts() -> tuple[int, int, int]:
    """Ranks of this one's copy of the model as bits, their number, and this one's place."""
    grid = PipelineParallelGrid(ProcessTopology(["pipe", "data", "expert"], [2, 1, 2]))
    bit = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(bit, group=grid.get_model_parallel_group())
    return int(bit), grid.get_model_parallel_world_size(), grid.get_model_parallel_rank()


def test_a_copy_of_the_model_is_divided_along_any_axis(ranks: Launcher) -> None:
    assert ranks(4)(copy_beside_experts) == [(bits(0, 1, 2, 3), 4, rank) for rank in range(4)]


def wrong_size(kind: str) -> None:
    group = dist.new_group([0])
    if kind == "topology":
        PipelineParallelGrid(PipeDataParallelTopology(3, 1))
    elif dist.get_rank() == 0:
        PipelineParallelGrid(process_group=group)


@pytest.mark.parametrize(
    ("kind", "message"), [("topology", "has 3 ranks, but 2 take part"), ("group", "process_group has 1 of 2 ranks")]
)
def test_sizes_that_do_not_fit(ranks: Launcher, kind: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks(2)(wrong_size, kind)
