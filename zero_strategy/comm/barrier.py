"""A monitored barrier outside of any collective, and small exchanges of values by all ranks.

A call that only makes sense on all ranks (a gathering `state_dict`, a save) meets here first. A rank that does not
come is named within seconds, where a collective would block for the process group's timeout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zero_strategy.comm.collectives import Communicator
from zero_strategy.runtime.torch_private import default_store
from zero_strategy.watchdog.flight_recorder import CollectiveLog
from zero_strategy.watchdog.watchdog import Watchdog


class BarrierError(RuntimeError):
    """Some ranks did not arrive at a call that needs all of them."""


class StoreBarrier:
    """Numbered meeting points over the process group's key-value store.

    Args:
        rank: This rank in the world.
        world_size: Number of ranks that must arrive.
        timeout: Seconds to wait for the last one.
        prefix: Keeps meetings of different engines apart; equal on all ranks.

    Attributes:
        track: By which a watchdog watches these meetings.
    """

    def __init__(self, rank: int, world_size: int, timeout: float, prefix: str) -> None:
        self.rank, self.world_size, self.timeout, self.prefix = rank, world_size, timeout, prefix
        self._round = 0
        self.track: CollectiveLog | None = None

    def guarded(self, watchdog: Watchdog, ranks: Sequence[int]) -> None:
        """Let a watchdog watch these meetings.

        Args:
            watchdog: Of the engine.
            ranks: World ranks that meet.
        """
        if self.world_size > 1 and self.track is None:
            self.track = watchdog.track("meeting", ranks, compared=False)

    def wait_for_all(self, call: str) -> None:
        """Return when all ranks have reached this meeting with the same `call`.

        Raises:
            BarrierError: If a rank has not come in time, or came with another call; names ranks and calls.
            DesyncError: If a rank cannot come, where a watchdog watches.
        """
        if self.world_size == 1:
            return
        with nullcontext() if self.track is None else self.track.begin(call):
            self._meet(call)

    def _meet(self, call: str) -> None:
        store = default_store()
        self._round += 1
        key = f"zero_strategy/{self.prefix}/{self._round}"
        store.set(f"{key}/{self.rank}", call)
        deadline, pause = time.monotonic() + self.timeout, 0.0005
        waiting = [rank for rank in range(self.world_size) if rank != self.rank]
        while waiting:
            waiting = [rank for rank in waiting if not store.check([f"{key}/{rank}"])]
            if waiting and time.monotonic() > deadline:
                store.delete_key(f"{key}/{self.rank}")  # a rank that comes later shall not believe we are here
                self._round -= 1
                if self.track is not None:
                    self.track.withdraw()
                raise BarrierError(
                    f"{call} needs all {self.world_size} ranks; rank {self.rank} waited {self.timeout:g} s and rank(s) "
                    f"{waiting} did not come. Call it on every rank (not under `if rank == 0`)."
                )
            if self.track is not None:
                self.track.watchdog.check()
            time.sleep(pause if waiting else 0)
            pause = min(pause * 1.5, 0.05)
        if self._round > 1:  # everybody is here, so everybody has left the meeting before
            store.delete_key(f"zero_strategy/{self.prefix}/{self._round - 1}/{self.rank}")
        calls = {rank: store.get(f"{key}/{rank}").decode() for rank in range(self.world_size)}
        if len(set(calls.values())) > 1:
            raise BarrierError(f"ranks came to different calls: {calls}")


def next_number(what: str) -> int:
    """Number things that all ranks make in the same order: 1, 2, ... on every rank, anew in every process group.

    The process group's store counts, for each rank: a count of this process would go on when the group is made
    again, and differ between ranks of which one had been in another group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 1
    store = default_store()
    return int(store.add(f"zero_strategy/{what}/of{dist.get_rank()}", 1))


def check_same_values(name: str, values: Mapping[str, str], *, timeout: float) -> None:
    """Compare named values with those of all other ranks, over the process group's store; needs no group of its own.

    Every rank sends its values to the store once and reads one answer: rank 0 compares.

    Args:
        name: Keeps comparisons apart; equal on all ranks, and used once.
        values: This rank's, in words.
        timeout: Seconds to wait for the slowest rank.

    Raises:
        ValueError: On all ranks, if values differ; names them, and the ranks.
        BarrierError: If a rank has not come in time; names it where rank 0 still answers.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, rank, world = default_store(), dist.get_rank(), dist.get_world_size()
    prefix, limit = f"zero_strategy/{name}", timedelta(seconds=timeout)
    call = f"the construction of a ZeroEngine needs all {world} ranks"
    if rank == 0:
        ranks = range(1, world)
        try:
            store.wait([f"{prefix}/{other}" for other in ranks], limit)
        except dist.DistStoreError:
            absent = [other for other in ranks if not store.check([f"{prefix}/{other}"])]
            problem = {
                "kind": "absent",
                "text": f"{call}; rank 0 waited {timeout:g} s, and rank(s) {absent} did not come",
            }
        else:
            everyone = [dict(values), *(json.loads(store.get(f"{prefix}/{other}")) for other in ranks)]
            problem = {"kind": "different", "text": _differences(everyone)}
            for other in ranks:
                store.delete_key(f"{prefix}/{other}")
        store.set(f"{prefix}/answer", json.dumps(problem))
    else:
        store.set(f"{prefix}/{rank}", json.dumps(dict(values)))
        try:
            store.wait([f"{prefix}/answer"], limit + timedelta(seconds=5))
        except dist.DistStoreError:
            raise BarrierError(f"{call}; rank {rank} waited {timeout:g} s, and rank 0 did not come") from None
        problem = json.loads(store.get(f"{prefix}/answer"))
    if problem["kind"] == "absent":
        raise BarrierError(problem["text"])
    if problem["text"]:
        raise ValueError(f"ranks were given different settings: {problem['text']}. Give all ranks the same")


def _differences(everyone: list[dict[str, str]]) -> str:
    found = []
    for key in dict.fromkeys(key for mine in everyone for key in mine):
        ranks: dict[str, list[int]] = {}
        for rank, mine in enumerate(everyone):
            ranks.setdefault(mine.get(key, "absent"), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on rank(s) {where}" for value, where in ranks.items())
            found.append(f"{key} is {values}")
    return "; ".join(found)


def all_gather_row(row: Sequence[float]) -> list[list[float]]:
    """Every rank's row, in rank order; one collective of a fixed size, none where there is no process group.

    Args:
        row: As many numbers on every rank; NaN passes.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [list(row)]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    found: list[list[float]] = torch.stack(rows).tolist()
    return found


def gather_everywhere(value: Any) -> list[Any]:
    """Every rank's picklable value, in rank order, over the default process group; this one's alone without one."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


T = TypeVar("T")


def together(control: Communicator, action: Callable[[], T]) -> T:
    """Run `action` on this rank; if it fails on any rank, raise on all. A collective.

    Args:
        control: The ranks.
        action: What this rank does; without collectives.

    Raises:
        Exception: What `action` raised here.
        RuntimeError: What it raised on other ranks.
    """
    found: list[T] = []
    error: Exception | None = None
    try:
        found.append(action())
    except Exception as caught:
        error = caught
    reports = control.all_gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(reports) if text is not None}
    if failed:
        raise RuntimeError(f"failed on other rank(s): {failed}")
    return found[0]
