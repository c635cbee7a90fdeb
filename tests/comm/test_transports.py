"""Both transports keep one contract: into place, nothing else changed, and whoever waits has the result."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher import Launcher
from zero_strategy.comm.collectives import PendingWork
from zero_strategy.comm.transport import Collectives, DeviceCollectives, HostCollectives, Job

COUNT = 1000
"""Elements of a slice: by gloo."""
TRANSPORTS: dict[str, type[Collectives]] = {"host": HostCollectives, "device": DeviceCollectives}
"""The device's library is gloo here: what is tested is how it is called."""


def _finish(transport: Collectives, job: Job) -> None:
    PendingWork([transport.start(job.run)], then=job.then).wait()


def _values(rank: int, size: int) -> Tensor:
    return torch.randn(size * COUNT, generator=torch.Generator().manual_seed(rank))


def _found(kind: str) -> dict[str, bool]:
    transport = TRANSPORTS[kind](dist.group.WORLD)
    rank, size = transport.rank, transport.size
    everyone = [_values(one, size) for one in range(size)]
    slices = [values.chunk(size)[one] for one, values in enumerate(everyone)]
    found = {}

    flat = torch.zeros(size * COUNT)
    flat.chunk(size)[rank].copy_(slices[rank])
    _finish(transport, transport.all_gather(flat))
    found["gathered"] = torch.equal(flat, torch.cat(slices))

    total = (everyone[0] + everyone[1]).mul_(0.5).chunk(size)[rank]
    flat, into = everyone[rank].clone(), torch.empty(COUNT)
    _finish(transport, transport.reduce_scatter(flat, into, 0.5))
    found["summed elsewhere"] = torch.equal(into, total) and torch.equal(flat, everyone[rank])
    _finish(transport, transport.reduce_scatter(flat, None, 0.5))
    expected = everyone[rank].clone()
    expected.chunk(size)[rank].copy_(total)
    found["summed in place"] = torch.equal(flat, expected)

    flags = torch.arange(6) % 2 == rank
    transport.broadcast(flags, 1)
    found["broadcast"] = torch.equal(flags, torch.arange(6) % 2 == 1)
    transport.close()
    return found


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_results_are_in_place_and_nothing_else_is(ranks: Launcher, kind: str) -> None:
    for found in ranks(2)(_found, kind):
        assert all(found.values()) and len(found) == 4, found


def _available() -> list[bool]:
    group = dist.new_group(backend="cpu:gloo")
    return [one.available for one in (HostCollectives(group), DeviceCollectives(group), HostCollectives(None))]


def test_a_transport_knows_whether_the_group_has_connections_for_it(ranks: Launcher) -> None:
    assert ranks(2)(_available) == [[True, False, True]] * 2


class _Broken:
    def wait(self) -> None:
        raise ConnectionError


def test_what_follows_a_collective_does_not_run_after_one_that_failed() -> None:
    ran: list[str] = []
    work = PendingWork([_Broken()], then=lambda: ran.append("then"))
    with pytest.raises(ConnectionError):
        work.wait()
    work.wait()
    assert ran == []
