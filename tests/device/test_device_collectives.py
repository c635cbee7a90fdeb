"""Calls of NCCL, told by a stand-in for torch's functions: into place, and without anything left to do afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_strategy.comm.transport as transport
from tests.device.fake_ranks import fake_world
from tests.device.gpus import Gpus
from tests.experts.model import make
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.mesh import Mesh
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

RANK, WORLD = 2, 4


INTEGERS = torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64
NCCL = frozenset((*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64))
"""What `torch.distributed` has a type of NCCL's for."""


class Calls:
    """Torch's functions for a device, in notes; what they return is done at once, each rank's part being this one's."""

    def __init__(self, patch: pytest.MonkeyPatch, backend: str = "cpu:gloo,cuda:nccl", size: int = WORLD) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.size = size
        patch.setattr(transport, "_native_all_gather", self.all_gather)
        patch.setattr(transport, "_native_reduce_scatter", self.reduce_scatter)
        patch.setattr(dist, "all_to_all_single", self.all_to_all)
        patch.setattr(dist, "get_backend", lambda group=None: backend)

    def all_gather(self, into: Tensor, own: Tensor, *, group: Any, async_op: bool = False) -> None:
        assert into.dtype in NCCL
        into.view(self.size, -1).copy_(own.clone())
        self.made.append(("all_gather", into.data_ptr(), own.data_ptr(), async_op))

    def reduce_scatter(self, into: Tensor, flat: Tensor, *, group: Any, op: Any = None, async_op: bool = False) -> None:
        self.made.append(("reduce_scatter", into.data_ptr(), flat.data_ptr(), op, async_op))
        parts = flat.view(self.size, -1)
        own = parts[RANK].clone()
        if op == dist.ReduceOp.AVG:  # the factor has the tensors' dtype
            own *= torch.tensor(1 / self.size).to(own.dtype)
        into.copy_(own.double() * self.size)

    def all_to_all(
        self,
        into: Tensor,
        sent: Tensor,
        *,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: Any,
        async_op: bool,
    ) -> None:
        assert into.dtype in NCCL
        assert sum(output_split_sizes) == into.numel() and sum(input_split_sizes) == sent.numel()
        into.copy_(sent)
        self.made.append(("all_to_all", into.dtype))


def run(call: str, backend: str = "cpu:gloo,cuda:nccl", **options: Any) -> tuple[Tensor, list[tuple[Any, ...]]]:
    """One collective of 4 x 8 elements, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch, fake_world(RANK, WORLD):
        group: Any = dist.group.WORLD
        calls = Calls(patch, backend)
        communicator = Communicator(group, CommunicationCounters())
        patch.setattr(communicator, "_carrier", lambda tensor: communicator.by_device)
        flat = torch.full((WORLD * 8,), 0.25)
        getattr(communicator, call)(flat, **options).wait()
        return flat, calls.made


def test_a_gather_sends_the_own_slice_from_where_the_result_has_it() -> None:
    flat, made = run("all_gather")
    assert made == [("all_gather", flat.data_ptr(), flat[RANK * 8 :].data_ptr(), True)]


def test_a_mean_is_the_collectives_own() -> None:
    flat, made = run("reduce_scatter", factor=1.0 / WORLD)
    assert made == [("reduce_scatter", flat[RANK * 8 :].data_ptr(), flat.data_ptr(), dist.ReduceOp.AVG, True)]
    assert flat[RANK * 8 :][:8].tolist() == [0.25] * 8  # not divided again


@pytest.mark.parametrize(("backend", "factor"), [("gloo", 1.0 / WORLD), ("nccl", 0.5)])
def test_any_other_multiple_is_taken_of_the_sum(backend: str, factor: float) -> None:
    flat, made = run("reduce_scatter", backend, factor=factor)
    assert made[0][3] == dist.ReduceOp.SUM
    assert flat[RANK * 8 :][:8].tolist() == [factor] * 8


def test_a_sum_is_left_as_it_is() -> None:
    flat, made = run("reduce_scatter")
    assert made[0][3] == dist.ReduceOp.SUM
    assert flat[RANK * 8 :][:8].tolist() == [1.0] * 8


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ranks_are_connected_before_the_first_collective(backend: str) -> None:
    """By each way that buckets go; gloo has connected them when the group was made."""
    with pytest.MonkeyPatch.context() as patch, fake_world(RANK, WORLD):
        Gpus(patch, WORLD)
        calls = Calls(patch, backend)
        made: list[Any] = []
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *size, device=None: made.append(device) or zeros(*size))
        Communicator(dist.group.WORLD, CommunicationCounters()).warm_up(torch.device("cpu"))
        assert not calls.made
        Communicator(dist.group.WORLD, CommunicationCounters()).warm_up(torch.device("cuda", 1))
        assert [call[0] for call in calls.made] == (["all_gather", "reduce_scatter"] if backend == "nccl" else [])
        assert made == ([torch.device("cuda", 1)] if backend == "nccl" else [])


def test_an_engine_connects_each_of_its_groups_and_measures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that is in no tensor: 100 bytes before, 50 more by each communicator, 8 tensors' in between."""
    gpus, gpu = Gpus(monkeypatch, WORLD), torch.device("cuda", 1)
    asked: list[torch.device] = []
    warmed: list[tuple[Communicator, torch.device]] = []

    def warm_up(self: Communicator, device: torch.device) -> None:
        warmed.append((self, device))
        gpus.held[device] = gpus.held.get(device, 0) + 8

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        return 1000 - 100 - 50 * len(warmed) - gpus.held.get(device, 0), 1000

    monkeypatch.setattr(Mesh, "warm_up", lambda self, device: asked.append(device))
    with fake_world(RANK, WORLD):
        settings = load_config(stage=2, watchdog="off", mesh={"replicate": 2, "shard": 2})
        engine = ZeroEngine(torch.nn.Linear(4, 4), settings, device=torch.device("cpu"))
        assert asked == [engine.device]
        monkeypatch.undo()
        engine.mesh.warm_up(torch.device("cpu"))
        gpus = Gpus(monkeypatch, WORLD)
        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        monkeypatch.setattr(Communicator, "warm_up", warm_up)
        mesh = engine.mesh
        before = engine.ledger()
        mesh.warm_up(gpu)
        assert warmed == [(one, gpu) for one in (mesh.gather, mesh.reduce, mesh.replicate, mesh.sequence)]
        assert mesh.communicator_bytes == 200
        after = engine.ledger()
        assert after.tier_bytes("device") == before.tier_bytes("device") + 200
        engine.close()


def test_an_engine_connects_the_groups_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that exchange tokens and those with the same experts; counts of rows go by the former's own collective."""
    warmed: list[Communicator] = []
    with fake_world(RANK, WORLD):
        settings = load_config(stage=2, watchdog="off", mesh={"expert": 2})
        mesh = ZeroEngine(make(), settings).mesh
        Gpus(monkeypatch, WORLD)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1000))
        monkeypatch.setattr(Communicator, "warm_up", lambda self, device: warmed.append(self))
        monkeypatch.setattr(Communicator, "is_native", True)
        mesh.warm_up(torch.device("cuda", 1))
        experts = [mesh.expert, mesh.expert_gather, mesh.expert_reduce]
        assert [one for one in warmed if one.size > 1] == [mesh.gather, mesh.reduce, *experts]
        assert mesh.expert.numbers_on == torch.device("cuda", 1)
        mesh.close()


def test_a_sum_may_be_written_elsewhere() -> None:
    into = torch.zeros(8)
    _, made = run("reduce_scatter", into=into, factor=1.0 / WORLD)
    assert made[0][1] == into.data_ptr()
    assert into.tolist() == [0.25] * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("ranks", [3, 4, 6, 12, 64, 96])
def test_a_mean_is_as_exact_as_its_dtype(ranks: int, dtype: torch.dtype) -> None:
    """NCCL's own multiplies by 1/ranks in the tensors' dtype: in 16 bits all gradients grow by 0.2 % at 3, 6, 12 ..."""
    with pytest.MonkeyPatch.context() as patch, fake_world(RANK, ranks):
        group: Any = dist.group.WORLD
        calls = Calls(patch, size=ranks)
        device = transport.DeviceCollectives(group)
        values = torch.tensor([1.0, 1.5, 0.375, -2.0]).to(dtype)  # whose sums have no rounding of their own
        flat = values.repeat(ranks)
        job = device.reduce_scatter(flat, None, 1.0 / ranks)
        job.run()
        if job.then is not None:
            job.then()
        assert torch.equal(flat.view(ranks, -1)[RANK], values) or dtype == torch.float32
        assert torch.allclose(flat.view(ranks, -1)[RANK].double(), values.double(), rtol=torch.finfo(dtype).eps)
        own_mean = dtype == torch.float32 or ranks in (4, 64)
        assert calls.made[0][3] == (dist.ReduceOp.AVG if own_mean else dist.ReduceOp.SUM)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.bool, torch.float8_e5m2], ids=str)
def test_what_nccl_does_not_know_travels_as_bytes(dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch, fake_world(RANK, WORLD):
        group: Any = dist.group.WORLD
        Calls(patch)
        device = transport.DeviceCollectives(group)
        flat = torch.zeros(WORLD * 4, dtype=dtype)
        own = torch.tensor([1, 0, 3, 2]).to(dtype)
        flat[RANK * 4 : RANK * 4 + 4] = own
        device.all_gather(flat).run()
        assert flat.view(WORLD, 4).float().tolist() == [own.float().tolist()] * WORLD
        sent = [torch.full((rank + 1,), 1).to(dtype) for rank in range(WORLD)]
        wanted = [torch.zeros(rank + 1).to(dtype) for rank in range(WORLD)]
        job = device.all_to_all(sent, wanted, WORLD)
        job.run()
        assert job.then is not None
        job.then()
        assert [one.float().sum().item() for one in wanted] == [1.0, 2.0, 0.0, 4.0]


def test_only_the_first_wait_of_gloo_s_work_is_torch_s() -> None:
    """Its works of a device's tensors copy their result in each wait."""

    class Work:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

        def is_completed(self) -> bool:
            return False

    work = Work()
    once = transport.WaitedOnce(work, torch.device("cpu"))
    assert not once.is_completed()
    once.wait()
    once.wait()
    assert work.waits == 1 and once.is_completed()
