"""A process group of the members of a quorum, and its end when one of them is gone.

Groups of gloo connect ranks within their time-out, and one that dies meanwhile would hold the others up as long. So
they meet in the first member's store before, looking at each other's processes, and connect within seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from zero_strategy.comm.meeting import introduce
from zero_strategy.comm.store_connection import connect
from zero_strategy.runtime.compute_device import gpu_of_local_rank, occupy
from zero_strategy.runtime.torch_private import PrefixStore, Store, set_group_timeout
from zero_strategy.survive.membership import Membership, World

CONNECT_SECONDS = 5.0
"""In which the ranks of a formation connect."""
_LOOK_SECONDS = 0.02

_when_formed: list[Callable[[], None]] = []


class MembersChangedError(RuntimeError):
    """The members are others than those of the process group: some are gone, or new ones wait.

    Attributes:
        world: Those who are there now, as all of them know; None: nobody has asked.
    """

    def __init__(self, message: str, world: World | None = None) -> None:
        super().__init__(message)
        self.world = world


def when_formed(forget: Callable[[], None]) -> None:
    """Call this whenever ranks have formed in this process: a framework keeps what it knows of the ranks of before."""
    if forget not in _when_formed:
        _when_formed.append(forget)


def form(membership: Membership, world: World, timeout: timedelta, told: str, agree: Callable[[list[str]], str]) -> str:
    """Start the default process group of a world. All its members call it.

    Args:
        membership: This process's.
        world: As the lighthouse has given it to all.
        timeout: Of collectives, once the ranks are connected.
        told: Something for the others.
        agree: Called on the first rank, with what all have told.

    Returns:
        What `agree` has made of it, on all ranks.

    Raises:
        MembersChangedError: If a member has died meanwhile, or does not come.
    """
    # The answer may be of before a death: connecting to a store that is gone takes all of the time-out.
    _check_alive(world, range(world.size))
    first, seconds = world.members[0], timedelta(seconds=CONNECT_SECONDS)
    os.environ.update(
        RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.local_rank),
        MASTER_ADDR=first.address, MASTER_PORT=str(first.port),
    )  # fmt: skip
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        occupy(gpu_of_local_rank(world.local_rank))
    try:
        # Every later wait in this store, and in further connections to it, ends soon where its host is cut off.
        store = PrefixStore(world.key, connect(first.address, first.port, CONNECT_SECONDS))
        agreed = _meet(store, world, told, agree)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=seconds)
        introduce([each.card for each in world.members])
    except (RuntimeError, dist.DistStoreError) as error:
        dissolve()
        raise MembersChangedError(f"formation {world.number} of {world.size} ranks failed: {error}") from error
    set_group_timeout(timeout)
    for forget in _when_formed:
        forget()
    return agreed


def _meet(store: Store, world: World, told: str, agree: Callable[[list[str]], str]) -> str:
    """Return when all are here, with what the first one has made of what they have told."""
    store.set(f"here{world.rank}", told)
    end = time.monotonic() + CONNECT_SECONDS
    missing = [rank for rank in range(world.size) if rank != world.rank]
    while missing := [rank for rank in missing if not store.check([f"here{rank}"])]:
        _check_alive(world, missing)
        if time.monotonic() > end:
            raise MembersChangedError(f"ranks {missing} of formation {world.number} did not come")
        time.sleep(_LOOK_SECONDS)
    if world.rank == 0:
        # It has the store itself; of the others each asks once.
        store.set("agreed", agree([store.get(f"here{rank}").decode() for rank in range(world.size)]))
    return store.get("agreed").decode()


def _check_alive(world: World, ranks: Iterable[int]) -> None:
    if gone := [rank for rank in ranks if world.members[rank].is_gone]:
        raise MembersChangedError(f"rank {gone[0]} of formation {world.number} has died before it began")


def dissolve() -> None:
    """End the default process group and all others, without the ranks of it."""
    if dist.is_initialized():
        with suppress(Exception):  # a group that is broken is no reason to stay in it
            dist.destroy_process_group()
