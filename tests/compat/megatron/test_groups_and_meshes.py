"""Groups, meshes with named axes, sequences divided among ranks: who is where, by formulas, without other processes."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.comm.pretended import pretend
from zero_strategy.compat.megatron.fsdp_utils import FSDPDistributedIndex
from zero_strategy.compat.megatron.groups import (
    ParallelGroups,
    batch_from_ranks,
    batch_on_rank,
    contains_submesh,
    get_batch_on_this_cp_rank,
    get_mesh_names,
    get_pg_rank,
    get_pg_size,
    get_pg_src_rank,
    tensor_parallel_group,
)
from zero_strategy.compat.megatron.tensors import GlobalSymmetricMemoryBuffer


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    assert group is not None
    return dist.get_process_group_ranks(group)


# ---- groups ----


def test_none_is_a_group_of_one_with_and_without_processes() -> None:
    assert (get_pg_size(), get_pg_rank(), get_pg_src_rank()) == (1, 0, 0)
    with pretend(3, 4):
        assert (get_pg_size(None), get_pg_rank(None), get_pg_src_rank(None)) == (1, 0, 0)
        world = dist.group.WORLD
        assert (get_pg_size(world), get_pg_rank(world), get_pg_src_rank(world)) == (4, 3, 0)
        pair = dist.new_group([1, 3])
        assert (get_pg_size(pair), get_pg_rank(pair), get_pg_src_rank(pair)) == (2, 1, 1)
        others = dist.new_group([0, 2])
        for ask in (get_pg_size, get_pg_rank, get_pg_src_rank):
            with pytest.raises(ValueError, match=r"rank 3 asks for the .* of a group that it is not a member of"):
                ask(others)
        left = pair
    assert (get_pg_size(left), get_pg_rank(left), get_pg_src_rank(left)) == (1, 0, 0)  # torch is down


def test_groups_of_a_mesh_by_their_usual_names() -> None:
    with pretend(5, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        with pytest.raises(ValueError, match=r"mesh\['dp', 'cp'\]._flatten\('dp_cp'\)"):
            ParallelGroups.from_mesh(mesh)
        mesh["dp", "cp"]._flatten("dp_cp")
        experts = init_device_mesh("cpu", (4, 2), mesh_dim_names=("ep", "expt_tp"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            groups = ParallelGroups.from_mesh(mesh, experts)
        assert ranks_of(groups.tensor) == [4, 5] and groups.pipeline is None
        assert ranks_of(groups.context) == [5, 7] and ranks_of(groups.data) == [1, 5]
        assert ranks_of(groups.data_context) == [1, 3, 5, 7]
        assert ranks_of(groups.expert) == [1, 3, 5, 7] and ranks_of(groups.expert_tensor) == [4, 5]
        simple = ParallelGroups.from_mesh(init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")))
        assert ranks_of(simple.data_context) == ranks_of(simple.data) == [1, 3, 5, 7]


def test_a_missing_tensor_parallel_group_is_the_run_s_with_a_warning() -> None:
    assert tensor_parallel_group(None, ParallelGroups()) is None  # nothing is initialized
    with pretend(0, 4):
        mine, experts = dist.new_group([0, 1]), dist.new_group([0, 2])
        groups = ParallelGroups(tensor=mine, expert_tensor=experts)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tensor_parallel_group(experts, groups) is experts
        with pytest.warns(DeprecationWarning, match="tp_group is None"):
            assert tensor_parallel_group(None, groups) is mine
        with pytest.warns(DeprecationWarning):
            assert tensor_parallel_group(None, groups, is_expert=True) is experts
        with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="no expert_tensor-parallel group"):
            tensor_parallel_group(None, ParallelGroups(), is_expert=True)
        with pytest.warns(DeprecationWarning):
            assert tensor_parallel_group(None, ParallelGroups(), check_initialized=False) is None


# ---- meshes ----


def test_names_of_a_mesh_are_those_of_its_axes_and_of_flattened_ones() -> None:
    assert get_mesh_names() == [] and get_mesh_names(None, only_submesh_dims=True) == []
    assert not contains_submesh(None, "dp")
    with pretend(0, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        mesh["dp", "cp"]._flatten("dp_cp")
        assert get_mesh_names(mesh) == ["dp", "cp", "tp", "dp_cp"]
        assert get_mesh_names(mesh, only_submesh_dims=True) == ["dp", "cp", "tp"]
        assert get_mesh_names(mesh["tp"]) == ["tp"]
        for names in ("dp_cp", ("dp", "tp"), ["cp"]):
            assert contains_submesh(mesh, names)
        assert not contains_submesh(mesh, ("dp", "ep")) and not contains_submesh(mesh["tp"], "dp")
        assert not contains_submesh(mesh, None) and not contains_submesh(mesh, ())


def hybrid_mesh() -> tuple[DeviceMesh, dist.ProcessGroup]:
    mesh = init_device_mesh("cpu", (3, 2, 2), mesh_dim_names=("outer", "inner", "tp"))
    return mesh, mesh["outer", "inner"]._flatten("hybrid").get_group()


def test_an_index_of_one_axis() -> None:
    with pretend(3, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        index = FSDPDistributedIndex(mesh, "dp", tp_dim="tp")
        assert index.get_root_mesh() is mesh and index.expt_fsdp_group is None and not index.use_hybrid_fsdp
        assert ranks_of(index.get_dp_group()) == ranks_of(index.get_fsdp_group()) == [1, 3]
        assert index.get_outer_fsdp_group() is None
        assert index.get_submesh("tp").mesh.tolist() == [2, 3]
        assert index.get_submesh(("dp", "tp")).mesh.tolist() == [[0, 1], [2, 3]]
        with pytest.raises(AssertionError, match="hsdp_outer_dp_shard=True"):
            index.get_logical_hybrid_fsdp_rank()
        with pytest.raises(ValueError, match=r"no axes \['pp'\]; it has \['dp', 'tp'\]"):
            index.get_submesh("pp")
        for ask in (index.get_dp_group, index.get_fsdp_group, index.get_root_mesh):
            with pytest.raises(ValueError, match="pass expt_device_mesh"):
                ask(is_expert_parallel=True)


def test_a_full_hybrid_divides_among_inner_ranks_first() -> None:
    logical = []
    for rank in range(12):
        with pretend(rank, 12):
            mesh, both = hybrid_mesh()
            index = FSDPDistributedIndex(mesh, "inner", "outer", "tp", both, True)
            assert index.get_dp_group() is both and index.use_hybrid_fsdp
            outer, inner, tensor = rank // 4, rank // 2 % 2, rank % 2
            assert ranks_of(index.get_fsdp_group()) == [4 * outer + 2 * i + tensor for i in range(2)]
            assert ranks_of(index.get_outer_fsdp_group()) == [4 * o + 2 * inner + tensor for o in range(3)]
            assert index.get_submesh("hybrid").mesh.tolist() == ranks_of(both)
            assert index.get_logical_hybrid_fsdp_rank() == inner * 3 + outer
            logical.append(index.get_logical_hybrid_fsdp_rank())
            copies = FSDPDistributedIndex(mesh, "inner", "outer", hybrid_fsdp_group=both)
            with pytest.raises(AssertionError, match="inner axis only"):
                copies.get_logical_hybrid_fsdp_rank()
    assert sorted(logical[::2]) == sorted(logical[1::2]) == list(range(6))  # each part once per tensor-parallel rank


def test_experts_have_a_mesh_of_their_own() -> None:
    with pretend(6, 12):
        mesh, both = hybrid_mesh()
        experts = init_device_mesh("cpu", (4, 3), mesh_dim_names=("ep", "inner"))
        index = FSDPDistributedIndex(mesh, "inner", "outer", hybrid_fsdp_group=both, expt_device_mesh=experts)
        assert index.get_root_mesh(is_expert_parallel=True) is experts
        assert index.get_dp_group(is_expert_parallel=True) is index.get_fsdp_group(True) is index.expt_fsdp_group
        assert ranks_of(index.expt_fsdp_group) == [6, 7, 8]
        assert index.get_submesh("ep", is_expert_parallel=True).mesh.tolist() == [0, 3, 6, 9]
        with pytest.raises(ValueError, match=r"the expert device mesh has no axes \['outer'\]"):
            index.get_submesh("outer", is_expert_parallel=True)


def test_an_index_that_cannot_be_is_refused_by_name() -> None:
    with pretend(0, 12):
        mesh, _ = hybrid_mesh()
        wrong: list[tuple[dict[str, Any], str]] = [
            ({}, r"dp_shard_dim must name the axis .* axes: \['outer', 'inner', 'tp', 'hybrid'\]"),
            ({"dp_shard_dim": "dp"}, "dp_shard_dim 'dp' is no axis"),
            ({"dp_shard_dim": "inner", "tp_dim": "mp"}, "tp_dim 'mp' is no axis"),
            ({"dp_shard_dim": "inner", "dp_outer_dim": "outer"}, "dp_outer_dim 'outer' needs hybrid_fsdp_group"),
            ({"dp_shard_dim": "inner", "hsdp_outer_dp_shard": True}, "hsdp_outer_dp_shard needs dp_outer_dim"),
            ({"dp_shard_dim": "inner", "expt_device_mesh": mesh["tp"]}, "expt_device_mesh has no axis 'inner'"),
        ]
        for arguments, message in wrong:
            with pytest.raises(ValueError, match=message):
                FSDPDistributedIndex(mesh, **arguments)


# ---- sequences ----


def test_a_sequence_is_cut_from_both_ends_and_put_together_again() -> None:
    batch = {
        "tokens": torch.arange(24).reshape(2, 12),
        "attention_mask": torch.arange(2 * 12 * 12).reshape(2, 1, 12, 12),
        "loss_mask": None,
        "names": "kept",
    }
    for size in (1, 2, 3):
        parts = [batch_on_rank(batch, rank, size) for rank in range(size)]
        whole = batch_from_ranks(parts)
        assert whole.keys() == batch.keys() and whole["names"] == "kept" and whole["loss_mask"] is None
        for name in ("tokens", "attention_mask"):
            assert torch.equal(whole[name], batch[name])  # type: ignore[arg-type]
    first, second = (batch_on_rank(batch, rank, 2)["tokens"][0].tolist() for rank in range(2))
    assert first == [0, 1, 2, 9, 10, 11] and second == [3, 4, 5, 6, 7, 8]
    rows = batch_on_rank(batch, 1, 2)["attention_mask"][0, 0, :, 0].tolist()
    assert rows == [12 * row for row in range(3, 9)]
    # the causal work of a rank: each position attends to those before it
    work = [sum(position + 1 for position in part) for part in (first, second)]
    assert work[0] == work[1]
    assert batch["tokens"].shape == (2, 12)  # the batch itself is as it was
    with pytest.raises(ValueError, match=r"'tokens' of shape \[2, 10\].* a multiple of 4; pad it"):
        batch_on_rank({"tokens": torch.zeros(2, 10)}, 0, 2)
    with pytest.raises(ValueError, match="parts have different entries"):
        batch_from_ranks([{"a": torch.zeros(1, 2)}, {}])


def test_the_group_says_which_part_is_this_rank_s() -> None:
    batch = {"tokens": torch.arange(8).reshape(1, 8)}
    assert torch.equal(get_batch_on_this_cp_rank(batch)["tokens"], batch["tokens"])
    with pretend(3, 4):
        mine = get_batch_on_this_cp_rank(batch, dist.new_group([1, 3]))
        assert mine["tokens"].tolist() == [[2, 3, 4, 5]]


# ---- symmetric memory ----


def test_symmetric_memory_answers_none_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pretend(0, 2):
        for group in (dist.group.WORLD, None):
            buffer = GlobalSymmetricMemoryBuffer(1, group)
            assert buffer.maybe_get_tensor((2, 3), torch.bfloat16) is None
            assert buffer.reason == "there is no CUDA device" and not buffer._can_allocate(1, torch.uint8)
    with pytest.raises(ValueError, match="size_in_mb must be positive"):
        GlobalSymmetricMemoryBuffer(0, None)


def test_a_symmetric_buffer_gives_its_beginning_while_it_is_large_enough() -> None:
    buffer = GlobalSymmetricMemoryBuffer(0.5, None)
    buffer.symm_buffer = torch.zeros(2**19, dtype=torch.uint8)  # what torch gives on machines that have it
    found = buffer.maybe_get_tensor((2, 3), torch.bfloat16)
    assert found is not None and found.shape == (2, 3) and found.dtype == torch.bfloat16
    assert found.data_ptr() == buffer.symm_buffer.data_ptr()
    for numel, dtype in itertools.product((2**18, 2**19), (torch.uint8, torch.bfloat16)):
        fits = numel * dtype.itemsize <= 2**19
        assert buffer._can_allocate(numel, dtype) is fits
        assert (buffer.maybe_get_tensor([numel], dtype) is None) is not fits
