"""Collectives: right values in place, sums in rank order, every dtype, exact counts; the mesh; the rendezvous."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_strategy.comm.transport as transport
from tests.launcher import Launcher
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.mesh import Mesh
from zero_strategy.comm.store import BarrierError, SaveBoard, StoreBarrier

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def filled(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 2 if dtype == torch.bool else 50, (size,), generator=generator)
    return values.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def values_of_collectives() -> list[str]:
    """Names of what came out wrong."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = Communicator(dist.group.WORLD, CommunicationCounters())
    wrong = []
    for dtype in DTYPES:
        flat = torch.zeros(8 * world).to(dtype)
        flat.view(world, 8)[rank] = filled(rank, 8, dtype)
        work = group.all_gather(flat)
        work.wait()
        work.wait()  # again: nothing happens
        if not same(flat, torch.cat([filled(other, 8, dtype) for other in range(world)])):
            wrong.append(f"all_gather {dtype}")
        for source in range(world):
            value = filled(rank, 5, dtype)
            group.broadcast(value, source)
            if not same(value, filled(source, 5, dtype)):
                wrong.append(f"broadcast {dtype} {source}")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        generators = [torch.Generator().manual_seed(other) for other in range(world)]
        parts = [torch.randn(6 * world, generator=generator).mul(9).to(dtype) for generator in generators]
        total = parts[0].clone()
        for part in parts[1:]:  # in rank order, in this dtype
            total = total + part
        flat = parts[rank].clone()
        group.reduce_scatter(flat).wait()
        if not torch.equal(flat.view(world, 6)[rank], total.view(world, 6)[rank]):
            wrong.append(f"reduce_scatter {dtype}")
        others = [r for r in range(world) if r != rank]
        if not torch.equal(flat.view(world, 6)[others], parts[rank].view(world, 6)[others]):
            wrong.append(f"reduce_scatter {dtype} changed other slices")
        flat = parts[rank].clone()
        group.all_reduce(flat).wait()
        if not torch.equal(flat, total):
            wrong.append(f"all_reduce {dtype}")
    if [int(v) for v in group.all_gather_small(torch.tensor([rank * 3]))] != [3 * r for r in range(world)]:
        wrong.append("all_gather_small")
    if group.all_gather_objects({"rank": rank}) != [{"rank": r} for r in range(world)]:
        wrong.append("all_gather_objects")
    for call in (group.all_gather, group.reduce_scatter):
        call(torch.empty(0)).wait()
    group.broadcast(torch.empty(0), 0)
    scalar = torch.tensor(float(rank))
    group.broadcast(scalar, world - 1)
    if scalar.item() != world - 1:
        wrong.append("broadcast of a 0-d tensor")
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_values(ranks: Launcher, world: int) -> None:
    for wrong in ranks(world)(values_of_collectives):
        assert not wrong


def small_messages_of_many(least: int) -> list[Any]:
    """As where there are more ranks than `least`."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "MOST_DIRECT", least)
        group = Communicator(dist.group.WORLD, CommunicationCounters())
        values = torch.tensor([rank, 2 * rank]), torch.tensor(0.5 * rank), torch.tensor([rank % 2 == 0]), torch.empty(0)
        return [[one.tolist() for one in group.all_gather_small(value)] for value in values]


def test_small_messages_among_many(ranks: Launcher) -> None:
    expected = [[[0, 0], [1, 2], [2, 4]], [0.0, 0.5, 1.0], [[True], [False], [True]], [[], [], []]]
    assert ranks(3)(small_messages_of_many, 1) == ranks(3)(small_messages_of_many, 8) == [expected] * 3


def several_at_once() -> bool:
    """Many collectives under way, of two communicators over the same ranks, waited for in another order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    counters = CommunicationCounters()
    first = Communicator(dist.new_group(), counters)
    second = Communicator(dist.new_group(), counters)
    gathers = [torch.full((4 * world,), float(10 * n + rank)) for n in range(6)]
    sums = [torch.full((4 * world,), float(n + rank)) for n in range(6)]
    works = []
    for gather, total in zip(gathers, sums, strict=True):
        works += [first.all_gather(gather), second.reduce_scatter(total)]
    for work in reversed(works):
        work.wait()
    good = True
    for n, (gather, total) in enumerate(zip(gathers, sums, strict=True)):
        good &= gather.view(world, 4)[:, 0].tolist() == [10.0 * n + r for r in range(world)]
        good &= total.view(world, 4)[rank, 0].item() == sum(n + r for r in range(world))
    return good


@pytest.mark.parametrize("world", [2, 4])
def test_several_under_way(ranks: Launcher, world: int) -> None:
    assert all(ranks(world)(several_at_once))


def counts() -> dict[str, Any]:
    world = dist.get_world_size()
    counters = CommunicationCounters()
    group = Communicator(dist.group.WORLD, counters)
    group.all_gather(torch.zeros(8 * world, dtype=torch.bfloat16)).wait()
    group.reduce_scatter(torch.zeros(8 * world)).wait()
    group.broadcast(torch.zeros(10), 0)
    group.all_gather_small(torch.zeros(3, dtype=torch.uint8))
    found = {"calls": dict(counters.calls), "bytes": dict(counters.bytes), "sent": counters.elements_sent}
    counters.reset()
    return found | {"after": counters.elements_sent}


def test_counts_are_exact(ranks: Launcher) -> None:
    for rank, found in enumerate(ranks(3)(counts)):
        assert found["bytes"]["all_gather"] == 2 * 8 * 2
        assert found["bytes"]["reduce_scatter"] == 2 * 8 * 4
        assert found["bytes"].get("broadcast", 0) == (2 * 10 * 4 if rank == 0 else 0)
        assert found["bytes"]["control"] == 2 * 3
        assert found["sent"] == 16 + 16 + (20 if rank == 0 else 0), "control messages are left out"
        assert found["after"] == 0


# --------------------------------------------------------------------------------------------------------- mesh


def mesh_of(replicate: int, shard: int) -> dict[str, Any]:
    mesh = Mesh.build(replicate=replicate, shard=shard, timeout=60.0, barrier_seconds=5.0, name="mesh")
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "gather": mesh.gather.all_gather_objects(rank),
        "reduce": mesh.reduce.all_gather_objects(rank),
        "replicate": mesh.replicate.all_gather_objects(rank),
        "control": mesh.control.all_gather_objects(rank),
        "shard control": mesh.shard_control.all_gather_objects(rank),
        "place": (mesh.rank, mesh.shard_rank, mesh.world_size, mesh.shard_size),
    }


def test_neighbours_shard_and_others_replicate(ranks: Launcher) -> None:
    for rank, found in enumerate(ranks(4)(mesh_of, 2, 2)):
        row = [0, 1] if rank < 2 else [2, 3]
        assert found["gather"] == found["reduce"] == found["shard control"] == row
        assert found["replicate"] == [rank % 2, rank % 2 + 2]
        assert found["control"] == [0, 1, 2, 3]
        assert found["place"] == (rank, rank % 2, 4, 2)


@pytest.mark.parametrize("world, replicate", [(1, 1), (2, 1), (2, 2), (3, 3)])
def test_meshes_of_one_axis(ranks: Launcher, world: int, replicate: int) -> None:
    shard = world // replicate
    for rank, found in enumerate(ranks(world)(mesh_of, replicate, shard)):
        everyone = list(range(world))
        assert found["gather"] == found["shard control"] == (everyone if replicate == 1 else [rank])
        assert found["replicate"] == ([rank] if replicate == 1 else everyone)
        assert found["control"] == everyone


def bad_mesh() -> str:
    try:
        mesh_of(2, 2)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_mesh_that_is_not_the_world(ranks: Launcher) -> None:
    for message in ranks(2)(bad_mesh):
        assert "2 x mesh.shard 2" in message and "world size 2" in message


# --------------------------------------------------------------------------------------------------- rendezvous


def meetings(case: str, timeout: float = 1.5) -> tuple[str, float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    meeting = StoreBarrier(rank, world, timeout, "tests")
    for number in range(20):
        meeting.wait_for_all(f"call {number}")
    start = time.monotonic()
    try:
        if case == "missing" and rank == 1:
            time.sleep(2.0)
            return "stayed away", 0.0
        if case == "late" and rank == 1:
            time.sleep(3.0)
        if case == "slow" and rank == 1:
            time.sleep(0.7)
        meeting.wait_for_all("save" if case != "other" or rank == 0 else "load")
    except BarrierError as error:
        return str(error), time.monotonic() - start
    return "met", time.monotonic() - start


def test_meeting_rank_that_does_not_come_is_named(ranks: Launcher) -> None:
    first, _, third = ranks(3)(meetings, "missing")
    for message, seconds in (first, third):
        assert "save needs all 3 ranks" in message and "rank(s) [1] did not come" in message
        assert 1.4 <= seconds < 8.0


def test_a_slow_rank_is_waited_for(ranks: Launcher) -> None:
    assert [message for message, _ in ranks(3)(meetings, "slow")] == ["met"] * 3


def test_a_late_rank_does_not_believe_the_others_are_there(ranks: Launcher) -> None:
    first, late = ranks(2)(meetings, "late")
    assert "rank(s) [1] did not come" in first[0]
    assert "rank(s) [0] did not come" in late[0]


class Interrupted:
    """The store of one rank. That rank calls `leaving` to count itself out, and `looking` before it looks for a key."""

    def __init__(
        self,
        store: Any,
        leaving: Callable[[Callable[[], int]], int] = lambda count_out: count_out(),
        looking: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._leaving, self._looking = store, leaving, looking

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        def count() -> int:
            return int(self._store.add(key, amount))

        return self._leaving(count) if key.endswith("/arrived") and amount < 0 else count()

    def check(self, keys: list[str]) -> bool:
        self._looking()
        return bool(self._store.check(keys))


def test_two_ranks_that_would_leave_as_the_last_one_comes_stay() -> None:
    store, passed = dist.HashStore(), list[int]()
    first_out, counted = list[Callable[[], int]](), list[int]()

    def meet(rank: int) -> None:
        barriers[rank].wait_for_all("save")
        passed.append(rank)

    def first_leaves(count_out: Callable[[], int]) -> int:
        first_out.append(count_out)
        meet(1)
        return counted.pop()

    def second_leaves(count_out: Callable[[], int]) -> int:
        meet(2)
        counted.append(first_out.pop()())  # and has not counted itself in again
        return count_out()

    stores = [Interrupted(store, first_leaves), Interrupted(store, second_leaves), store]
    barriers = [StoreBarrier(rank, 3, -1.0, "tests", each) for rank, each in enumerate(stores)]
    meet(0)
    assert passed == [2, 1, 0] and [barrier._round for barrier in barriers] == [1, 1, 1]


def test_a_rank_that_stays_answers_where_that_completes_a_meeting() -> None:
    store, looked = dist.HashStore(), threading.Event()

    def leaves(count_out: Callable[[], int]) -> int:
        left = count_out()
        meetings.append(pool.submit(second.wait_for_all, "save"))
        assert looked.wait(30)  # it has counted itself in, and was not the last one
        return left

    first = StoreBarrier(0, 2, -1.0, "tests", Interrupted(store, leaves))
    second = StoreBarrier(1, 2, 30.0, "tests", Interrupted(store, looking=looked.set))
    meetings = list[Future[None]]()
    with ThreadPoolExecutor(1) as pool:
        first.wait_for_all("save")
        meetings[0].result(30)


def test_a_rank_that_dies_as_it_comes_is_not_waited_for_without_end() -> None:
    store = dist.HashStore()
    store.set("zero_strategy/tests/1/1", "save")  # its last words: it does not count itself in
    with pytest.raises(BarrierError, match=r"save needs all 2 ranks.*a rank that had come and has died"):
        StoreBarrier(0, 2, -1.0, "tests", store).wait_for_all("save")


def test_different_calls_are_an_error_on_all_ranks(ranks: Launcher) -> None:
    for message, seconds in ranks(2)(meetings, "other", 30.0):
        assert "save" in message and "load" in message and seconds < 15.0


class Counting:
    """A store that counts the keys that calls name."""

    def __init__(self) -> None:
        self.store, self.keys, self.lock = dist.HashStore(), Counter[str](), threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.lock:
                self.keys[name] += len(args[0]) if isinstance(args[0], list) else 1
                self.keys[name + " calls"] += 1
            return getattr(self.store, name)(*args)

        return call


def test_messages_of_a_meeting_grow_with_the_ranks_and_not_with_their_square() -> None:
    world, rounds = 64, 3
    store = Counting()
    barriers = [StoreBarrier(rank, world, 60.0, "tests", store) for rank in range(world)]

    def meet(barrier: StoreBarrier) -> None:
        for number in range(rounds):
            barrier.wait_for_all(f"call {number}")

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(meet, barriers))
    assert store.keys["set"] == rounds * (world + 1)
    assert store.keys["add"] == rounds * (3 * world + 1)
    assert store.keys["get"] == rounds * world
    assert store.keys["delete_key"] == (rounds - 1) * (world + 4)
    assert store.keys["check"] == store.keys["check calls"]  # one key each


def test_each_rank_of_a_save_is_watched_and_each_watches_few() -> None:
    world = 512
    boards = [SaveBoard(rank, world, 5.0, "t", object()) for rank in range(world)]
    watched = Counter(other for board in boards for other in board._neighbours())
    assert set(watched) == set(range(world)) and sum(watched.values()) <= 10 * world
    assert SaveBoard(1, 4, 5.0, "t", object())._neighbours() == [0, 2, 3]


def exchanged(numel: int, dtype: torch.dtype) -> tuple[list[str], CommunicationCounters]:
    """Messages of any sizes, some of them empty, of `numel` elements at most."""
    world, rank = dist.get_world_size(), dist.get_rank()
    counters = CommunicationCounters()
    group = Communicator(dist.group.WORLD, counters)

    def size(source: int, target: int) -> int:
        return 0 if source == target else numel * ((source + 2 * target) % world) // max(1, world - 1)

    def message(source: int, target: int) -> Tensor:
        return filled(10 * source + target, size(source, target), dtype)

    wrong = []
    for _ in range(2):  # one under way beside the other
        pending = []
        for _ in range(2):
            incoming = [torch.empty(size(other, rank), dtype=dtype) for other in range(world)]
            outgoing = [message(rank, other) for other in range(world)]
            pending.append((group.all_to_all(outgoing, incoming, numel), incoming))
        for work, incoming in pending:
            work.wait()
            wrong += [str(r) for r, values in enumerate(incoming) if not same(values, message(r, rank))]
    sent = sum(size(rank, other) for other in range(world))
    assert counters.elements["all_to_all"] == 4 * sent and counters.bytes["all_to_all"] == 4 * sent * dtype.itemsize
    group.close()
    return wrong, counters


@pytest.mark.parametrize("world", [2, 3, 4])
def test_messages_of_any_sizes_to_all(ranks: Launcher, world: int) -> None:
    for numel in (7, 300_000):  # by gloo, and by shared memory in several rounds
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            for wrong, counters in ranks(world)(exchanged, numel, dtype):
                assert not wrong and counters.calls["all_to_all"] == 4
    for wrong, _ in ranks(world, env={"ZERO_STRATEGY_SHARED_MEMORY": "0"})(exchanged, 300_000, torch.float32):
        assert not wrong
