"""Parts of tensors that ranks describe for a checkpoint: put together, they are the whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, zeros

from tests.comm.pretended import pretend
from zero_strategy.compat.megatron.groups import ParallelGroups
from zero_strategy.compat.megatron.tensors import (
    ShardedTensor,
    assemble,
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from zero_strategy.fsdp.dtensor import (
    get_data_parallel_group_if_dtensor,
    get_full_tensor_if_necessary,
    to_local_if_dtensor,
)

LAYERS, TENSOR, DATA = 2, 2, 3
WHOLE = torch.arange(LAYERS * 6 * 12.0).reshape(LAYERS, 6, 12)


def everyone(make: Any) -> list[ShardedTensor]:
    """`make(tp rank, dp rank, groups)` on every rank; ranks = data x tensor."""
    found = []
    for data, tensor in itertools.product(range(DATA), range(TENSOR)):
        with pretend(data * TENSOR + tensor, DATA * TENSOR):
            mesh = init_device_mesh("cpu", (DATA, TENSOR), mesh_dim_names=("dp", "tp"))
            found.append(make(tensor, data, ParallelGroups.from_mesh(mesh), mesh))
    return found


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_parts_of_tensor_parallel_ranks_are_the_whole_and_copies_are_told_apart(axis: int) -> None:
    whole = WHOLE[0]

    def make(tensor: int, data: int, groups: ParallelGroups, mesh: Any) -> ShardedTensor:
        part = whole.chunk(TENSOR, axis)[tensor]
        by_name = make_tp_sharded_tensor_for_checkpoint(
            part, "w", tp_axis=axis, tp_group=groups.tensor, dp_cp_group=groups.data_context
        )
        by_run = make_tp_sharded_tensor_for_checkpoint(part, "w", axis, groups=groups)
        assert vars(by_name) | {"data": 0} == vars(by_run) | {"data": 0}
        assert by_name.replica_id == (0, 0, data) and by_name.data is part
        return by_name

    parts = everyone(make)
    assert torch.equal(assemble(parts), whole)
    assert [part.is_main_replica for part in parts] == [True] * TENSOR + [False] * (DATA - 1) * TENSOR
    cut = [1, 1]
    cut[axis] = TENSOR
    assert parts[1].axis_fragmentations == tuple(cut) and parts[1].global_shape == (6, 12)


def test_layers_are_leading_axes_and_parts_are_runs_of_elements() -> None:
    def make(tensor: int, data: int, groups: ParallelGroups, mesh: Any) -> list[ShardedTensor]:
        return [
            make_tp_sharded_tensor_for_checkpoint(
                WHOLE[layer].chunk(TENSOR, axis)[tensor], "w", axis, None, ((0, layer, LAYERS),), groups=groups
            )
            for layer, axis in ((0, 1), (1, 1))
        ]

    parts = [part for made in everyone(make) for part in made]  # type: ignore[union-attr]
    assert torch.equal(assemble(parts), WHOLE)
    assert parts[0].prepend_axis_num == 1 and parts[0].local_shape == (6, 6) and parts[0].global_shape == (2, 6, 12)
    flat, seen = WHOLE.flatten(), torch.zeros(WHOLE.numel())
    for part in parts:
        assert part.data is not None
        for start, stop, local in part.runs():
            assert torch.equal(flat[start:stop], part.data.flatten()[local : local + stop - start])
            seen[start:stop] += part.is_main_replica
    assert bool((seen == 1).all())


def test_runs_are_as_long_as_they_can_be() -> None:
    def runs(*offsets: tuple[int, int, int], shape: tuple[int, ...] = (4, 3, 2)) -> list[tuple[int, int, int]]:
        return list(ShardedTensor.from_rank_offsets("w", torch.zeros(shape), *offsets).runs())

    assert runs() == [(0, 24, 0)] and runs((0, 2, 3)) == [(48, 72, 0)]
    assert runs((1, 1, 2)) == [(6, 12, 0), (18, 24, 6), (30, 36, 12), (42, 48, 18)]
    assert len(runs((2, 0, 5))) == 12 and runs(shape=()) == [(0, 1, 0)] and runs(shape=(0, 3)) == []


def test_a_tensor_that_every_rank_has_is_written_once() -> None:
    def make(tensor: int, data: int, groups: ParallelGroups, mesh: Any) -> ShardedTensor:
        found = make_sharded_tensor_for_checkpoint(
            WHOLE[0], "norm", tp_group=groups.tensor, dp_cp_group=groups.data_context, allow_shape_mismatch=True
        )
        assert found.replica_id == (0, tensor, data) and found.allow_shape_mismatch
        assert make_sharded_tensor_for_checkpoint(WHOLE[0], "norm", replica_id=7, groups=groups).replica_id == 7
        return found

    parts = everyone(make)
    assert sum(part.is_main_replica for part in parts) == 1 and torch.equal(assemble(parts), WHOLE[0])
    alone = make_sharded_tensor_for_checkpoint(WHOLE[1], "norm", ((0, 1, LAYERS),))
    assert alone.global_offset == (1, 0, 0) and alone.replica_id == (0, 0, 0)  # without any group


@pytest.mark.parametrize("tp_axis", [0, 1])
def test_a_dtensor_is_divided_inside_of_its_tensor_parallel_part(tp_axis: int) -> None:
    whole = WHOLE[0]

    def make(tensor: int, data: int, groups: ParallelGroups, mesh: Any) -> tuple[ShardedTensor, ShardedTensor]:
        part = whole.chunk(TENSOR, tp_axis)[tensor]
        divided = DTensor.from_local(part.chunk(DATA, 0)[data], mesh["dp"], [Shard(0)], run_check=False)
        copied = DTensor.from_local(part, mesh["dp"], [Replicate()], run_check=False)
        both = [make_tp_sharded_tensor_for_checkpoint(one, "w", tp_axis, groups=groups) for one in (divided, copied)]
        assert both[0].replica_id == (0, 0, 0) and both[1].replica_id == (0, 0, data)
        with pytest.raises(ValueError, match=r"'w': a DTensor with placements .* is a sum that is not taken yet"):
            summed = DTensor.from_local(part, mesh["dp"], [Partial()], run_check=False)
            make_tp_sharded_tensor_for_checkpoint(summed, "w", groups=groups)
        return both[0], both[1]

    made = everyone(make)
    for which in range(2):
        assert torch.equal(assemble([pair[which] for pair in made]), whole)  # type: ignore[index]


def test_an_uneven_dtensor_is_refused() -> None:
    with pretend(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        uneven = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False, shape=(5,), stride=(1,))
        with pytest.raises(ValueError, match=r"'w': axis 0 of a DTensor of shape \[5\] is not divided evenly among 2"):
            make_sharded_tensor_for_checkpoint(uneven, "w")


def test_places_that_cannot_be_are_refused() -> None:
    wrong: list[tuple[tuple[tuple[int, int, int], ...], int, str]] = [
        (((2, 0, 2),), 0, "'w': an offset is for axis 2, but it has axes 0 to 1"),
        (((0, 0, 2), (0, 1, 2)), 0, "axis 0, twice"),
        (((0, 2, 2),), 0, "'w': place 2 of 2 along axis 0"),
        ((), 1, r"'w': prepended axes \[0\] have no offsets"),
    ]
    for offsets, prepended, message in wrong:
        with pytest.raises(ValueError, match=message):
            ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), *offsets, prepend_axis_num=prepended)
    half = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2))
    with pytest.raises(ValueError, match="'w': 2 of 4 elements are in no part"):
        assemble([half])
    with pytest.raises(ValueError, match=r"'w': elements at \[0\] are in two parts"):
        assemble([half, half])
    with pytest.raises(ValueError, match="no part with a replica_id of zeros"):
        assemble([])


# ---- DTensors ----


def test_local_parts_and_groups_of_dtensors_and_plain_tensors() -> None:
    plain = torch.ones(3)
    assert to_local_if_dtensor(plain) is plain and get_full_tensor_if_necessary(plain) is plain
    assert get_data_parallel_group_if_dtensor(plain) is None
    with pretend(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        local = torch.ones(2, 3)
        divided = DTensor.from_local(local, mesh["dp"], [Shard(0)], run_check=False)
        found = to_local_if_dtensor(divided)
        assert torch.equal(found, local) and not isinstance(found, DTensor)
        group = mesh["dp"].get_group()
        assert get_data_parallel_group_if_dtensor(divided) is group
        assert get_data_parallel_group_if_dtensor(divided, group) is group
        with pytest.raises(ValueError, match=r"among ranks \[1, 3\], but data_parallel_group has ranks \[0, 1\]"):
            get_data_parallel_group_if_dtensor(divided, mesh["tp"].get_group())
        two = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)
        assert get_data_parallel_group_if_dtensor(two) is mesh.get_group("dp")
        with pytest.raises(ValueError, match="divided along exactly one axis"):
            get_data_parallel_group_if_dtensor(DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=False))
        for placements, shape, empty in (
            ([Shard(0), Replicate()], (2, 3), False),
            ([Shard(0), Shard(0)], (3, 3), True),  # 2 and 1, of which a half is 1 and 0
            ([Shard(0), Shard(1)], (2, 1), True),
            ([Replicate(), Replicate()], (1, 1), False),
            ([Shard(0), Replicate()], (0, 3), False),
        ):
            made = zeros(*shape, device_mesh=mesh, placements=placements)
            assert (get_full_tensor_if_necessary(made) is not made) is empty
    assert dist.is_initialized() is False
