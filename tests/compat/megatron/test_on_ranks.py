"""Results of the utilities among ranks: one run of two, against the full tensors that both know."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_strategy.compat.deepspeed.runtime.utils as deepspeed_utils
import zero_strategy.compat.megatron as megatron
from tests.launcher import Launcher
from zero_strategy.compat.megatron.groups import ParallelGroups, batch_from_ranks
from zero_strategy.compat.megatron.tensors import assemble
from zero_strategy.engine import ZeroEngine

ORDERS = (1.0, 2, math.inf)


def parameter(gradient: torch.Tensor, **marks: Any) -> nn.Parameter:
    made = nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient.clone()
    for name, value in marks.items():
        setattr(made, name, value)
    return made


def unit(prefix: str, group: Any, rank: int, **others: Any) -> SimpleNamespace:
    methods = {f"get_{prefix}model_parallel_group": lambda: group, f"get_{prefix}model_parallel_rank": lambda: rank}
    return SimpleNamespace(**methods, **others)


def everybody_s(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def norms(rank: int, world: Any) -> None:
    torch.manual_seed(7)
    whole, divided, expert = torch.randn(5), torch.randn(8), torch.randn(6)
    mine = divided.chunk(2)[rank]
    for prefix, mark in (("", "model_parallel"), ("tensor_", "tensor_model_parallel")):
        mpu = unit(prefix, world, rank)
        wanted = torch.cat([whole, divided])
        for order in ORDERS:
            norm = float(torch.linalg.vector_norm(wanted.double(), order))
            parameters = [parameter(whole), parameter(mine, **{mark: True})]
            assert deepspeed_utils.get_grad_norm(parameters, order, mpu) == pytest.approx(norm, rel=1e-6)
            assert deepspeed_utils.clip_grad_norm_(parameters, 0.5, order, mpu) == pytest.approx(norm, rel=1e-6)
            for found, old in zip(parameters, (whole, mine), strict=True):
                torch.testing.assert_close(found.grad, old * (0.5 / (norm + 1e-6)))
            assert deepspeed_utils.get_global_norm_of_tensors([mine], order, mpu) == pytest.approx(
                float(torch.linalg.vector_norm(divided.double(), order)), rel=1e-6
            )
    # experts: each rank of the expert group has others; what is dense is the same on both
    mpu = SimpleNamespace(
        get_model_parallel_group=lambda: None,
        get_model_parallel_rank=lambda: 0,
        get_expert_parallel_group=lambda: world,
    )
    wanted = torch.cat([whole, expert])
    for order in ORDERS:
        parameters = [parameter(whole), parameter(expert.chunk(2)[rank], allreduce=False)]
        norm = float(torch.linalg.vector_norm(wanted.double(), order))
        assert deepspeed_utils.clip_grad_norm_(iter(parameters), 0.1, order, mpu) == pytest.approx(norm, rel=1e-6)
    alone = [parameter(expert[:3], allreduce=False)] if rank == 0 else []  # a rank without experts takes part
    assert deepspeed_utils.get_grad_norm(alone, 2, mpu) == pytest.approx(float(expert[:3].norm()), rel=1e-6)
    tensors = [mine.clone()]
    found = deepspeed_utils.clip_tensors_by_global_norm(tensors, 0.5, None, unit("", world, rank))
    assert found == pytest.approx(float(divided.norm()), rel=1e-6)
    torch.testing.assert_close(tensors[0], mine * (0.5 / (float(divided.norm()) + 1e-6)))


def partitions(rank: int, world: Any) -> None:
    for room in (1, 6, 1000):
        groups = [[torch.arange(7.0) * (owner == rank) + 10 * owner for owner in range(2)] for _ in range(2)]
        groups[1] = [part.bfloat16()[:4].clone() for part in groups[1]]
        deepspeed_utils.all_gather_dp_groups(groups, [world, world], 2, room)
        for parts, length in zip(groups, (7, 4), strict=True):
            for owner, part in enumerate(parts):
                assert part.float().tolist() == [number + 10.0 * owner for number in range(length)]


def sequences_and_checkpoints(rank: int, world: Any) -> None:
    megatron.set_parallel_groups(ParallelGroups(tensor=world, context=world))
    batch = {"tokens": torch.arange(24).reshape(2, 12), "attention_mask": torch.ones(2, 1, 12, 12).tril()}
    parts = everybody_s(megatron.get_batch_on_this_cp_rank(batch))
    assert parts[0]["tokens"][0].tolist() == [0, 1, 2, 9, 10, 11]
    assert all(torch.equal(batch[name], value) for name, value in batch_from_ranks(parts).items())
    whole = torch.arange(40.0).reshape(4, 10)
    described = megatron.make_tp_sharded_tensor_for_checkpoint(whole.chunk(2, 1)[rank], "w", 1)
    assert torch.equal(assemble(everybody_s(described)), whole)
    copies = everybody_s(megatron.make_sharded_tensor_for_checkpoint(whole, "w").is_main_replica)
    assert copies == [True, False]
    with pytest.warns(DeprecationWarning) if rank == 0 else nullcontext():
        assert megatron.get_tensor_model_parallel_group_if_none(None) is world


def embedding(rank: int, world: Any) -> None:
    config = SimpleNamespace(sequence_parallel=True, gradient_accumulation_fusion=True)
    for micro_batches in (0, 1, 2, 5):
        torch.manual_seed(micro_batches)
        weight = nn.Parameter(torch.randn(7, 3))
        weight.main_grad = torch.zeros(7, 3)  # type: ignore[attr-defined]
        inputs = [torch.randn(4, 2, 3) for _ in range(micro_batches)]
        gradients = [torch.randn(4, 2, 7) for _ in range(micro_batches)]
        for one, gradient in zip(inputs, gradients, strict=True):
            nn.functional.linear(one, weight).backward(gradient)
        mine = [one.chunk(2)[rank] for one in inputs]
        megatron.drain_embedding_wgrad_compute(config, mine, gradients, weight, world)
        wanted = torch.zeros(7, 3) if weight.grad is None else weight.grad
        torch.testing.assert_close(weight.main_grad, wanted)  # type: ignore[attr-defined]
        assert mine == [] and gradients == []
    assert megatron.get_global_memory_buffer().nbytes == 2 * 4 * 2 * 3 * 4  # two whole inputs, used again and again


def dtensors(rank: int, world: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for rows, gathered in ((1, True), (3, False)):
        whole = torch.arange(2.0 * rows).reshape(rows, 2)
        parts = whole.chunk(2)
        local = parts[rank] if rank < len(parts) else whole[:0]
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        found = megatron.get_full_tensor_if_necessary(tensor)
        assert isinstance(found, DTensor) is not gathered
        assert torch.equal(found if gathered else megatron.to_local_if_dtensor(found), whole if gathered else local)


def sharded_gradients(rank: int) -> None:
    """They are read as they are under data parallelism; their owner clips them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    engine = ZeroEngine(model, {"stage": 2, "units": {"min_numel": 0}})
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.arange(16.0).reshape(2, 2, 4)
    model(data[rank]).sum().backward()
    (sum(plain(half).sum() for half in data) / 2).backward()  # type: ignore[union-attr]
    norm = deepspeed_utils.get_grad_norm(plain.parameters())
    assert deepspeed_utils.get_grad_norm(model.parameters()) == pytest.approx(norm, rel=1e-6)
    assert float(engine.clip_grad_norm_(0.5)) == pytest.approx(norm, rel=1e-6)
    assert deepspeed_utils.get_grad_norm(model.parameters()) == pytest.approx(0.5, rel=1e-5)
    alone = copy.deepcopy(plain)
    alone.zero_grad()
    kept = ZeroEngine(alone, {"stage": 3, "units": {"min_numel": 0}})  # no optimizer at all
    dummy = deepspeed_utils.DummyOptim(alone.parameters())
    alone(data[rank]).sum().backward()
    for one, other in zip(dummy.param_groups[0]["params"], plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad + 0, other.grad)
    assert deepspeed_utils.get_grad_norm(alone.parameters()) == pytest.approx(norm, rel=1e-6)
    assert kept.optimizers == []


def everything() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    norms(rank, world)
    partitions(rank, world)
    sequences_and_checkpoints(rank, world)
    embedding(rank, world)
    dtensors(rank, world)
    sharded_gradients(rank)
    megatron.set_parallel_groups(ParallelGroups())  # ranks serve other tests afterwards


def test_groups_add_up_gather_and_divide(ranks: Launcher) -> None:
    ranks(2)(everything)
