"""The norm of a clip where ranks are connected by devices: one wait of the host, no message, the bits of messages."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.device.fake_ranks import fake_world
from tests.device.recorder import Recorder
from tests.device.test_device_collectives import RANK, WORLD, Calls
from tests.device.test_streams import CPU, OFFLOADED, device
from tests.engine.nets import loss_of, net
from tests.launcher import Launcher
from zero_strategy.comm.collectives import CommunicationCounters, Communicator, PendingWork
from zero_strategy.comm.mesh import Mesh
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.ops import multi_tensor
from zero_strategy.optim.grad_norm import global_norm
from zero_strategy.pipeline import engine_setup
from zero_strategy.watchdog.diagnosis import DesyncError, Failure
from zero_strategy.watchdog.flight_recorder import CollectiveLog


def clip(recorder: Recorder, *, exact: bool = False, **settings: Any) -> list[str]:
    """Waits of the host in the clips of two steps of an engine on the device on paper."""
    model = net(depth=4)
    engine = ZeroEngine(model, load_config(units={"min_numel": 0}, watchdog="off", **settings))
    engine.model.exact_norms = exact
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.attach(optimizer)
    for axis in engine.model.norm_groups:
        axis.numbers_on = CPU  # as `Mesh.warm_up` says on a GPU
    waits: list[str] = []
    with recorder:
        for _ in range(2):
            loss_of(model(torch.ones(4, 6, device=CPU))).backward()
            engine.model.reducer.settle()
            for kind, values in [held for each in engine.model.gradients for held in each.held() if exact]:
                if kind != "handles":
                    values.fill_(1.0)  # ranks that are not there have sent nothing: any numbers, and maybe no number
            recorder.syncs.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Communicator, "all_gather_small", None)  # no message
                engine.clip_grad_norm_(1.0)
            waits += recorder.syncs
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    return waits


@pytest.mark.parametrize("settings", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}], ids=str)
def test_a_clip_waits_once_and_sends_no_message(settings: dict[str, Any]) -> None:
    with device() as recorder:
        assert clip(recorder, **settings) == ["cpu()"] * 2
    assert not recorder.races


@pytest.mark.parametrize("settings", [{"stage": 0}, {"stage": 3}], ids=str)
def test_a_clip_by_an_exact_norm_waits_once_and_sends_no_message(settings: dict[str, Any]) -> None:
    with device() as recorder:
        assert clip(recorder, exact=True, **settings) == ["cpu()"] * 2
    assert not recorder.races


@pytest.mark.parametrize("exact", [False, True])
def test_a_clip_of_offloaded_gradients_sends_no_message(exact: bool) -> None:
    """Their sums come from the host, where the reduction has left them."""
    with device() as recorder:
        clip(recorder, exact=exact, **OFFLOADED[1])
    assert not recorder.races


def test_a_clip_among_replicas_waits_once() -> None:
    with device(4) as recorder:
        assert clip(recorder, stage=3, mesh={"replicate": 2}) == ["cpu()"] * 2
    assert not recorder.races


def test_numbers_read_before_all_ranks_have_sent_theirs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = PendingWork.wait
    monkeypatch.setattr(PendingWork, "wait", lambda self: None if self._kinds == ("control",) else wait(self))
    with device() as recorder:
        clip(recorder, stage=2)
    assert any("all_reduce" in race for race in recorder.races)


# ---- the bits ----

VALUES: dict[str, tuple[float, ...]] = {
    "plain": (1.0, -0.3, 7.25, 1e-3, 5.5, -2.0),
    "large": (3e38, -1e38, 2.0, 1e30, 0.1, 3e38),
    "one bad": (1.0, math.nan, 2.0, 3.0, 4.0, 5.0),
    "infinite": (1.0, 2.0, math.inf, 3.0, 4.0, 5.0),
}


def parts_of(rank: int, values: tuple[float, ...]) -> list[Tensor]:
    """Of a rank: two of one dtype, one that the op does not take, one that is empty; the last rank has none."""
    if rank == 3:
        return []
    own = torch.tensor(values).mul(rank + 1) if rank else torch.tensor(values)
    return [own[:2].clone(), own[2:5].bfloat16(), own.double()[1::2].clone(), own[:0]]


Found = tuple[float, bool, list[float], list[int]]
"""Norm, whether all is finite; of the own parts the sums, and how many values are not finite."""


def found_by(parts: list[Tensor], order: float, groups: list[Communicator], factors: list[float]) -> Found:
    looks: list[tuple[Tensor, Tensor]] = []
    norm = global_norm(parts, order, groups, factors[: len(parts)], lambda *stats: looks.append(stats))
    assert looks[0][1].dtype == torch.int64
    return norm.value, norm.finite, looks[0][0].tolist(), looks[0][1].tolist()


def both_ways(
    world: int, axes: tuple[int, ...], lacking: tuple[int, ...] = ()
) -> tuple[list[tuple[Found, Found]], int]:
    """Results by messages and by the device's collectives, over one axis or two; elements of state that were counted.

    Args:
        world: Ranks.
        axes: Ranks of each axis.
        lacking: Ranks without kernels.
    """
    rank, counters = dist.get_rank(), CommunicationCounters()
    groups = [Communicator(group, counters) for group in axis_groups(world, axes)]
    results = []
    cases = product(VALUES, (1.0, 2.0, 3.5, math.inf), ([1.0] * 4, [0.5, 1.0, -0.25, 3.0], [1.0, math.inf, 1.0, 1.0]))
    with pytest.MonkeyPatch.context() as patch:
        for name, order, factors in cases:
            parts = parts_of(rank, VALUES[name])
            for group in groups:
                group.numbers_on = None
            by_messages = found_by(parts, order, groups, factors)
            for group in groups:
                group.numbers_on = CPU
            patch.setattr(multi_tensor, "lacks_kernels", lambda device: rank in lacking)
            results.append((by_messages, found_by(parts, order, groups, factors)))
            patch.undo()
    return results, counters.elements_sent


def axis_groups(world: int, axes: tuple[int, ...]) -> list[Any]:
    """This rank's group of each axis; the first one has neighbours."""
    mine, step = [], 1
    for size in axes:
        lists = [[start + step * place for place in range(size)] for start in range(world) if start // step % size == 0]
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine.append(group)
        step *= size
    return mine


@pytest.mark.parametrize(("world", "axes"), [(2, (2,)), (3, (3,)), (4, (4,)), (4, (2, 2))], ids=str)
def test_norms_by_collectives_have_the_bits_of_messages(ranks: Launcher, world: int, axes: tuple[int, ...]) -> None:
    for results, elements in ranks(world)(both_ways, world, axes):
        assert elements == 0
        for by_messages, by_collectives in results:
            assert repr(by_collectives) == repr(by_messages)  # as text, which tells all floats apart, and NaN is itself


def test_ranks_without_kernels_count_only_what_is_not_finite(ranks: Launcher) -> None:
    """Of two, one has no kernels: it guesses, and all come once more where a guess has to be looked at."""
    for results, _ in ranks(2)(both_ways, 2, (2,), (1,)):
        for (norm, finite, _, counts), (there, *others) in results:
            assert others[0] == finite and others[2] == counts
            assert there == pytest.approx(norm, rel=1e-12, nan_ok=True)


def by_an_axis_of_messages(world: int) -> bool:
    """The second axis has no collectives of the device: the first one goes by them all the same."""
    counters = CommunicationCounters()
    groups = [Communicator(group, counters) for group in axis_groups(world, (2, 2))]
    parts = parts_of(dist.get_rank(), VALUES["plain"])
    expected = global_norm(parts, 2.0, groups)
    groups[0].numbers_on = CPU
    return global_norm(parts, 2.0, groups) == expected


def test_an_axis_without_a_device_goes_by_messages(ranks: Launcher) -> None:
    assert ranks(4)(by_an_axis_of_messages, 4) == [True] * 4


# ---- the calls, the groups, the watchdog ----


def test_numbers_are_one_sum_with_zeros_in_the_group_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def all_reduce(flat: Tensor, *, group: Any, async_op: bool, op: Any) -> None:
        made.append((group, op, flat.tolist()))
        flat.copy_(torch.arange(flat.numel()))

    with fake_world(RANK, WORLD):
        gpus: Any = dist.new_group()
        Calls(monkeypatch, "nccl")
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        communicator = Communicator(dist.group.WORLD, CommunicationCounters(), gpu_group=gpus)
        monkeypatch.setattr(communicator, "_host", communicator._numbers)  # these tensors are on the CPU
        found = communicator.all_gather_numbers(torch.tensor([5.0, 7.0], dtype=torch.float64))
        monkeypatch.undo()
    assert made == [(gpus, dist.ReduceOp.SUM, [0.0] * 2 * RANK + [5.0, 7.0] + [0.0] * 2 * (WORLD - RANK - 1))]
    assert found.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert communicator.counters.elements_sent == 0 and communicator.counters.calls["control"] == 1


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "gloo"])
def test_a_mesh_on_gpus_has_collectives_for_each_axis_of_a_norm(backend: str) -> None:
    """Of ranks that divide layers a group more; those of the shard axis are there for gradients."""
    ended: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, fake_world(RANK, WORLD):
        patch.setattr(dist, "get_backend", lambda group=None: backend)
        patch.setattr("zero_strategy.comm.mesh.bytes_beside_torch", lambda device: 0)
        patch.setattr("zero_strategy.comm.transport.DeviceCollectives.warm_up", lambda self, device: None)
        patch.setattr("zero_strategy.comm.mesh.end_group", ended.append)
        groups: dict[str, Any] = {"dp_groups": [[0, 2], [1, 3]], "tensor_groups": [[0, 1], [2, 3]]}
        mesh = Mesh.build(replicate=1, shard=2, timeout=9.0, barrier_seconds=0.1, name="test", **groups)
        gpu = torch.device("cuda", 1)
        assert mesh.shard_control.numbers_on is None
        mesh.warm_up(CPU)
        assert mesh.shard_control.numbers_on is None
        mesh.warm_up(gpu)
        axes = mesh.shard_control, mesh.tensor
        assert [axis.numbers_on for axis in axes] == ([gpu, gpu] if backend != "gloo" else [None, None])
        assert (mesh.tensor.gpu_group is not None) == (backend != "gloo")
        mesh.close()
    assert len(ended) == len(set(ended)) == (6 if backend != "gloo" else 5)


class Stages:
    """Of a module of two stages, on two ranks each."""

    num_stages, pipe_groups = 2, ((0, 2), (1, 3))

    def mpu(self) -> Stages:
        return self


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_stages_on_gpus_have_collectives_for_a_norm(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(RANK, WORLD):
        monkeypatch.setattr(dist, "get_backend", lambda group=None: backend)
        module: Any = Stages()
        pipe = engine_setup._pipe(module, 9.0)
        monkeypatch.undo()
        assert pipe.size == 2 and (pipe.gpu_group is not None) == (backend == "nccl")


class Told:
    """A watchdog that may have been told of a failure."""

    rank, waiting, ended = 0, dict[int, Any](), 0
    failure: Failure | None = None

    def explained(self, error: BaseException | None, watched: Any) -> DesyncError:
        assert self.failure is not None
        return DesyncError(self.failure.text, self.failure)

    def check(self) -> None:
        if self.failure is not None:
            raise self.explained(None, None)


@pytest.mark.parametrize("error", [None, RuntimeError("NCCL communicator was aborted")], ids=str)
def test_what_is_read_after_connections_broke_is_no_norm(error: RuntimeError | None) -> None:
    """The host's wait ends with the collective that the watchdog breaks, with or without an error."""
    owner: Any = Told()
    log = CollectiveLog(owner, "control", [0, 1])
    with log.reading():
        pass
    with pytest.raises(DesyncError, match="rank 1 is gone"), log.reading():
        owner.failure = Failure("gone", 1, "rank 1 is gone", {})
        if error is not None:
            raise error
    owner.failure = None
    with pytest.raises(RuntimeError, match="illegal"), log.reading():
        raise RuntimeError("CUDA error: an illegal memory access")


def norm_in_the_record() -> Any:
    """The last collectives of an engine's groups after a clip by collectives."""
    model = net(depth=2)
    engine = ZeroEngine(model, load_config(units={"min_numel": 0}, stage=2))
    engine.attach(torch.optim.AdamW(model.parameters()))
    for axis in engine.model.norm_groups:
        axis.numbers_on = CPU
    loss_of(model(torch.ones(4, 6))).backward()
    engine.clip_grad_norm_(1.0)
    track = engine.mesh.shard_control.track
    assert track is not None
    found = list(track.recent().values())[-1][:3]
    engine.close()
    return found


def test_the_flight_recorder_names_the_norm(ranks: Launcher) -> None:
    assert ranks(2)(norm_in_the_record) == [("all_reduce", "the gradient norm", 48)] * 2
