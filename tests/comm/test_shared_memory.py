"""Large exchanges through memory that ranks share: the bits of gloo's, or gloo itself where there is no such memory."""

from __future__ import annotations

import os
import re
import resource
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.launcher import Launcher
from zero_strategy.comm import shared_memory
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.shared_memory import LEAST_BYTES, SLOT_BYTES, VARIABLE

SIZES = (LEAST_BYTES // 4, LEAST_BYTES // 2 + 7, SLOT_BYTES // 2 + 333)
"""Elements of a slice: one round or several, below and above what one holds."""


def results(size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Results of three kinds of exchanges, one after the other, with a small one in between."""
    exchange = Communicator(dist.group.WORLD, CommunicationCounters())
    generator = torch.Generator().manual_seed(17 * exchange.rank)
    found = []
    for _ in range(2):
        numbers = torch.randn(size * exchange.size, generator=generator).mul(50).to(dtype)
        gathered = numbers.clone()
        exchange.all_gather(gathered).wait()
        found.append(gathered)
        summed = numbers.clone()
        exchange.reduce_scatter(summed).wait()
        found.append(summed.chunk(exchange.size)[exchange.rank].clone())
        found += exchange.all_gather_small(numbers[:2])
        everywhere = numbers.clone()
        exchange.all_reduce(everywhere).wait()
        found.append(everywhere)
    wanted = size * dtype.itemsize >= LEAST_BYTES and os.environ.get(VARIABLE) != "0"
    assert (exchange._host._shared is not None and exchange._host._shared.available) == wanted
    return found


def unequal(dtype: torch.dtype) -> list[str]:
    wrong = []
    for size in SIZES:
        ours = results(size, dtype)
        os.environ[VARIABLE] = "0"
        try:
            theirs = results(size, dtype)
        finally:
            del os.environ[VARIABLE]
        same = [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True)]
        wrong += [f"{size} {dtype}: result {index}" for index, equal in enumerate(same) if not equal]
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_bits_are_those_of_gloo(ranks: Launcher, world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for wrong in ranks(world)(unequal, dtype):
            assert wrong == []


def fallen_back(how: str) -> tuple[bool, bool, int]:
    rank, known = dist.get_rank(), shared_memory._host
    if rank == 1 and how == "switched off":
        os.environ[VARIABLE] = "0"
    if rank == 1 and how == "another host":
        shared_memory._host = lambda: "elsewhere"
    before = len(os.listdir("/proc/self/fd"))
    try:
        exchange = Communicator(dist.group.WORLD, CommunicationCounters())
        flat = torch.full((2 * LEAST_BYTES,), float(rank))
        exchange.all_gather(flat).wait()
        right = flat.view(2, -1).mean(dim=1).tolist() == [0.0, 1.0]
    finally:
        os.environ.pop(VARIABLE, None)
        shared_memory._host = known
    assert exchange._host._shared is not None
    return right, exchange._host._shared.available, len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize("how", ["switched off", "another host", "nothing"])
def test_all_ranks_share_or_none_does(ranks: Launcher, how: str) -> None:
    for right, available, descriptors in ranks(2)(fallen_back, how):
        assert right and available == (how == "nothing")
        assert descriptors <= 6  # two mappings' own, this rank's pipe, the other's, and one of its process


def no_memory(first_rank: int, what: int, most: int) -> tuple[bool, int, list[str]]:
    """As where a limit of the system, of this rank's and those after it, does not allow it."""
    rank, (soft, hard) = dist.get_rank(), resource.getrlimit(what)
    before, available = len(os.listdir("/proc/self/fd")), False
    fillers: list[int] = []
    if most < 0:  # no descriptor: earlier tests have left gaps below the largest one, in which some would be free
        largest = max(map(int, os.listdir("/proc/self/fd")))
        while not fillers or fillers[-1] <= largest:
            fillers.append(os.dup(0))
        most = fillers[-1] + 1
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                exchange = Communicator(dist.group.WORLD, CommunicationCounters())
                flat = torch.full((2 * LEAST_BYTES,), float(rank))
                dist.barrier()
                resource.setrlimit(what, (most if rank >= first_rank else soft, hard))
                exchange.all_gather(flat).wait()
                resource.setrlimit(what, (soft, hard))
                assert exchange._host._shared is not None
                assert flat.view(2, -1).mean(dim=1).tolist() == [0.0, 1.0]
                available = available or exchange._host._shared.available
    finally:
        resource.setrlimit(what, (soft, hard))
        for filler in fillers:
            os.close(filler)
    return available, len(os.listdir("/proc/self/fd")) - before, [str(each.message) for each in caught]


@pytest.mark.parametrize("first_rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "most", "says"),
    [(resource.RLIMIT_FSIZE, 1 << 16, r"File too large.*ulimit -f"), (resource.RLIMIT_NOFILE, -1, r"ulimit -n")],
    ids=["no such large file", "no descriptor"],
)
def test_memory_that_cannot_be_had_is_named_and_leaves_no_descriptor(
    ranks: Launcher, first_rank: int, what: int, most: int, says: str
) -> None:
    for rank, (available, descriptors, said) in enumerate(ranks(2)(no_memory, first_rank, what, most)):
        assert (available, descriptors) == (False, 0)
        assert len(said) == (3 if rank >= first_rank else 0)
        place = rf"rank {rank} of 2.*its own, 2101248 bytes of anonymous memory \(memfd.*{says}.*{VARIABLE}=0"
        assert all(re.search(place, each) for each in said), said


@pytest.mark.skipif(os.geteuid() == 0, reason="this user may look into any process")
def test_memory_of_another_user_is_refused_by_name() -> None:
    with pytest.raises(PermissionError):
        shared_memory._open(f"{shared_memory._host()} 1 0 0 x")


def different() -> str:
    exchange = Communicator(dist.group.WORLD, CommunicationCounters())
    exchange.all_gather(torch.zeros(2 * LEAST_BYTES)).wait()
    try:
        exchange.all_gather(torch.zeros((2 + 2 * exchange.rank) * LEAST_BYTES)).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_that_exchange_different_things(ranks: Launcher) -> None:
    for said in ranks(2)(different):
        assert "do not run the same program" in said and "exchange 1" in said
