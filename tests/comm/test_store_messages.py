"""Messages to the key-value store by how many ranks there are: waits of a save, meetings and saves that fail."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from zero_strategy.checkpoint import save_job
from zero_strategy.comm import meeting
from zero_strategy.comm import store as package
from zero_strategy.comm.store import (
    BarrierError,
    FailedElsewhereError,
    RankLostError,
    SaveBoard,
    StoreBarrier,
    check_same_values,
)


class Counted:
    """A store that counts the messages of all who use it, by operation and by the form of the key."""

    def __init__(self) -> None:
        self.inner, self.messages, self.lock = dist.HashStore(), Counter[tuple[str, str]](), threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            key = arguments[0] if isinstance(arguments[0], str) else arguments[0][0]
            with self.lock:
                self.messages[name, re.sub(r"\d+", "#", key)] += 1
            return getattr(self.inner, name)(*arguments)

        return call

    def total(self) -> int:
        return sum(self.messages.values())


class Clock:
    """Time that passes in `sleep` alone; ends a wait of two minutes."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.now, self._end = 0.0, end

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 120:
            self._end()


def waited(rank: int, world: int, phase: str, of: int | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """Messages of a rank that waits for two minutes in a save, in which nobody gets on and nobody is lost."""
    store = Counted()
    board = SaveBoard(rank, world, 300.0, "t", store)

    def end() -> None:
        store.inner.add(f"zero_strategy/save/t/{phase}", world)
        store.inner.set(f"zero_strategy/save/t/{phase}/{of}", "")

    with monkeypatch.context() as patch:
        patch.setattr(package, "time", Clock(end))
        board.wait(phase, of, before=None if of is None else "written")
    return store.total()


@pytest.mark.parametrize("world", [8, 64, 512, 4096])
def test_the_store_gets_as_many_messages_a_second_from_waits_of_a_save_among_all_numbers_of_ranks(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = waited(0, world, "written", None, monkeypatch)
    other = waited(world // 2, world, "committed", 0, monkeypatch)
    # Rank 0 does no more than the others: it looks at the count, and at eight ranks where few need look at it alone.
    assert first - other <= 121 * 3 * 8
    # Among few ranks every hundredth of a second, as the disk is what takes the time.
    assert (first + other * (world - 1)) / 120 <= max(2 * package._LOOKS, 260 * world)
    assert other / 120 <= 260 and (world < 4096 or other / 120 <= 12)


def test_a_lost_rank_is_named_to_rank_0_by_those_that_watch_it() -> None:
    world, store = 12, dist.HashStore()

    def lost(rank: int) -> str:
        return "its process has ended" if rank == 11 else ""

    boards = [SaveBoard(rank, world, 60.0, "t", store, lost=lost) for rank in range(world)]
    assert 11 not in boards[0]._neighbours()
    for board in boards[:-1]:
        board.post("written")

    def follow(board: SaveBoard) -> str:
        try:
            board.wait("committed", 0, before="written")
        except RankLostError as error:
            board.fail(f"RankLostError: {error}")
            return str(error)
        return ""

    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(follow, boards[10])
        with pytest.raises(FailedElsewhereError, match=r"10: .*rank 11 has not written its part.*has ended"):
            boards[0].wait("written")
        assert said.result(30).startswith("rank 11 has not written")


def test_each_rank_reads_a_few_reasons_where_all_ranks_have_failed() -> None:
    world, store = 64, Counted()
    boards = [SaveBoard(rank, world, 60.0, "t", store) for rank in range(world)]
    for board in reversed(boards):
        board.fail(f"rank {board.rank} has no room")
    before = store.total()
    with pytest.raises(FailedElsewhereError, match="rank 63 has no room"):
        boards[0].check()
    assert store.total() - before <= 1 + 3 * 8
    # Also who is among them itself is told of the others.
    with pytest.raises(FailedElsewhereError, match="62: 'rank 62 has no room'") as caught:
        boards[63].check()
    assert "rank 63 has no room" not in str(caught.value)


def test_nothing_of_a_failed_save_is_left_in_the_store() -> None:
    store = dist.HashStore()
    boards = [SaveBoard(rank, 3, 60.0, "t", store) for rank in range(3)]
    for board in boards:
        board.post("written")
        board.fail("no room")
        assert board.count("apart") == 0
    for board in boards:
        board.clear()
    assert store.num_keys() == 0


def test_one_rank_asks_for_all_where_many_give_up_a_meeting() -> None:
    world, store = 48, Counted()
    barriers = [StoreBarrier(rank, world, 1.0, "tests", store) for rank in range(world) if rank != 5]

    def meet(barrier: StoreBarrier) -> str:
        with pytest.raises(BarrierError) as caught:
            barrier.wait_for_all("save")
        return str(caught.value)

    with ThreadPoolExecutor(world) as pool:
        said = list(pool.map(meet, barriers))
    assert all("rank(s) [5] did not come" in text for text in said)
    # Each asks once for all keys together; one for each of them, and for those that have left.
    looks = store.messages["check", "zero_strategy/tests/#/#"]
    assert looks <= (world - 1) + world, looks


def test_who_comes_when_others_have_left_is_not_told_their_list() -> None:
    store = dist.HashStore()
    first, second, late = (StoreBarrier(rank, 3, -1.0, "tests", store) for rank in range(3))
    for barrier, absent in ((first, [1, 2]), (second, [0, 2]), (late, [0, 1])):
        with pytest.raises(BarrierError, match=re.escape(f"rank(s) {absent} did not come")):
            barrier.wait_for_all("save")


def compared(world: int, values: Callable[[int], dict[str, str]]) -> tuple[list[str], Counted]:
    """Errors of ranks, each in a thread, and the store that they have asked."""
    store = Counted()
    ranks = threading.local()

    def compare(rank: int) -> str:
        ranks.mine = rank
        try:
            check_same_values("engine1.settings", values(rank), timeout=60.0)
        except ValueError as error:
            return str(error)
        return ""

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world) as pool:
        for module in (package, meeting):
            patch.setattr(module, "default_store", lambda: store)
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: world)
        patch.setattr(dist, "get_rank", lambda: ranks.mine)
        return list(pool.map(compare, range(world))), store


def test_settings_are_compared_in_as_many_messages_by_each_rank() -> None:
    world = 48
    said, store = compared(world, lambda rank: {"stage": "3", "bucket": "7"})
    assert said == [""] * world
    by_operation = Counter[str]()
    for (operation, _), count in store.messages.items():
        by_operation[operation] += count
    # The last one reads the count of those with its values, and leaves the answer. Each looks whether the run survives.
    assert by_operation == {
        "check": world, "set": world + 1, "add": 2 * world + 2, "wait": world, "get": world, "delete_key": world,
    }  # fmt: skip


def test_settings_that_differ_are_named_with_their_ranks_whoever_comes_last() -> None:
    said, store = compared(12, lambda rank: {"stage": "2" if rank in (3, 7) else "3"})
    assert (
        len(set(said)) == 1 and "stage is 3 on rank(s) [0, 1, 2, 4, 5, 6, 8, 9, 10, 11], 2 on rank(s) [3, 7]" in said[0]
    )
    assert sum(count for (name, key), count in store.messages.items() if (name, key[-2:]) == ("get", "/#")) == 12


def test_rank_0_asks_no_rank_by_itself_whether_all_see_one_folder(tmp_path: Path) -> None:
    world, store, found = 16, Counted(), dict[int, save_job.Sharing]()

    def ask(rank: int) -> None:
        found[rank] = save_job.find_out(SaveBoard(rank, world, 60.0, "t", store), tmp_path, "token")

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(ask, range(world)))
    assert {(one.shared, one.leader) for one in found.values()} == {(True, 0)}
    assert found[0].leaders == (0,) * world
    # Each but rank 0 reads its answer, in two messages; nobody reads what each has seen.
    assert sum(count for (name, _), count in store.messages.items() if name == "get") == 2 * (world - 1)
