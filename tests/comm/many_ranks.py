"""Forks as many ranks as are asked for, each of which makes the groups of an engine, and prints their sockets.

python many_ranks.py RANKS FOLDER
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist

from tests.comm.forked import fork_ranks
from zero_strategy.comm.mesh import Mesh
from zero_strategy.comm.process_group import init_distributed
from zero_strategy.comm.transport import HostCollectives
from zero_strategy.watchdog.flight_recorder import TransportError


def sockets() -> int:
    """Open sockets of this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def every_collective(number: int, ranks: int) -> None:
    """Collectives that users call on the default group, whose ranks connect as they need each other."""
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    assert total.item() == sum(range(ranks))
    values = [torch.zeros(1) for _ in range(ranks)]
    dist.all_gather(values, torch.tensor([float(number)]))
    assert [value.item() for value in values] == list(range(ranks))
    dist.all_to_all_single(swapped := torch.zeros(ranks), torch.full((ranks,), float(number)))
    assert swapped.tolist() == list(range(ranks))
    dist.gather(torch.tensor([float(number)]), values if number == 1 else None, dst=1)
    dist.scatter(swapped[:1], values if number == 1 else None, src=1)
    assert swapped[0].item() == number
    dist.broadcast_object_list(told := [number], src=ranks - 1)
    assert told == [ranks - 1]
    everyone: list[object] = [None] * ranks
    dist.all_gather_object(everyone, number)
    assert everyone == list(range(ranks))
    dist.monitored_barrier()


def break_connections(mesh: Mesh, number: int) -> None:
    """One rank fails: it breaks its connections, as every rank does whose wait ends by that."""
    try:
        if number != 3:  # of more than eight ranks it has no connection to rank 0
            mesh.control.all_gather_small(torch.tensor([number]))
            raise AssertionError("a gather without rank 3")
    except TransportError as error:
        assert "Timed out waiting" not in str(error), error
    mesh.control.abort()


def rank(number: int, ranks: int, folder: Path) -> dict[str, int]:
    """One rank: groups, a gather of objects, and small messages of a step."""
    before = sockets()
    init_distributed("gloo", init_method=f"file://{folder}/store", rank=number, world_size=ranks, verbose=False)
    dist.barrier()
    started, before = sockets() - before, sockets()
    mesh = Mesh.build(replicate=1, shard=ranks, timeout=120.0, barrier_seconds=120.0, name="many")
    made = sockets() - before
    dist.barrier()  # or a rank that is ahead connects to one that is still counting
    mesh.warm_up(torch.device("cpu"))
    said = ["rank " * (1 + 100 * other) for other in range(ranks)]
    assert mesh.control.all_gather_objects(said[number]) == said
    for step in range(3):
        flags = HostCollectives(mesh.control.group).all_gather_small(torch.tensor([number, step]))
        assert [flag.tolist() for flag in flags] == [[other, step] for other in range(ranks)]
    found = {"started": started, "made": made, "used": sockets() - before}
    dist.barrier()
    every_collective(number, ranks)
    break_connections(mesh, number)
    dist.barrier()
    return found


if __name__ == "__main__":
    fork_ranks(rank)
