"""A buffer in parts is what it would be in one piece, and a sum of such parts has the same bits."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher import Launcher
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.shared_memory import LEAST_BYTES, SLOT_BYTES, Scattered


def scattered(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Scattered, Tensor]:
    """A random division with gaps and empty parts, and the whole."""
    chosen, whole, parts, end = random.Random(seed), torch.zeros(numel, dtype=dtype), list[tuple[int, Tensor]](), 0
    generator = torch.Generator().manual_seed(seed)
    while end < numel:
        start = min(numel, end + chosen.choice((0, 0, 3, numel // 7)))
        size = min(numel - start, chosen.choice((0, 1, 5, numel // 5)))
        values = torch.randn(size, generator=generator).to(dtype)
        whole[start : start + size] = values
        parts.append((start, values))
        end = start + size
    return Scattered(numel, parts, whole), whole


@pytest.mark.parametrize("seed", range(20))
def test_parts_between_any_two_elements(seed: int) -> None:
    source, whole = scattered(300, seed)
    assert source.numel == 300 and source.nbytes == 1200
    for start in range(0, 300, 23):
        for stop in range(start, 301, 31):
            end, found = start, torch.full((300,), -1.0)
            for low, high, values in source.between(start, stop):
                assert low == end < high
                found[low:high] = 0.0 if values is None else values
                end = high
            assert end == stop or start == stop
            assert torch.equal(found[start:stop], whole[start:stop])
            target = torch.full((4 * (stop - start),), 77, dtype=torch.uint8)
            source.slice(start, stop).write(0, target.numel(), target)
            assert torch.equal(target.view(torch.float32), whole[start:stop])


def test_a_message_is_written_in_parts() -> None:
    source, whole = scattered(1000, 3)
    message, target = source.slice(100, 900), torch.empty(800)
    for start in range(0, message.nbytes, 192):
        stop = min(start + 192, message.nbytes)
        message.write(start, stop, target.view(torch.uint8)[start:stop])
    assert torch.equal(target, whole[100:900])


def test_nothing_but_zeros() -> None:
    source = Scattered(10, [], torch.zeros(0, dtype=torch.bfloat16))
    assert list(source.between(2, 10)) == [(2, 10, None)] and source.dtype == torch.bfloat16


def sums(dtype: torch.dtype) -> list[str]:
    exchange = Communicator(dist.group.WORLD, CommunicationCounters())
    size, wrong = exchange.size, []
    assert not exchange.takes_scattered(size * SLOT_BYTES, dtype)  # nobody has looked for such memory yet
    exchange.all_gather(torch.zeros(size * LEAST_BYTES)).wait()
    assert exchange.takes_scattered(size * LEAST_BYTES, dtype)
    assert not exchange.takes_scattered(size * (LEAST_BYTES // dtype.itemsize - 1), dtype)
    for number, count in enumerate((LEAST_BYTES // 2, SLOT_BYTES // 2 + 320)):
        for factor in (1.0, 1 / size):
            source, whole = scattered(size * count, 10 * number + exchange.rank, dtype)
            before, into, aside = whole.clone(), torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
            exchange.reduce_scatter(whole, factor=factor, into=aside).wait()
            if not torch.equal(whole, before):
                wrong.append(f"{count} {factor}: what was summed has changed")
            if exchange.rank == 0:  # ranks need not agree on how theirs lie
                exchange.reduce_scatter(whole, factor=factor).wait()
                into = whole.chunk(size)[0]
            else:
                exchange.reduce_scatter_scattered(source, into, factor=factor).wait()
            if not (torch.equal(into, aside) and into.any()):
                wrong.append(f"{count} {factor}: {into} instead of {aside}")
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_have_the_bits_of_those_in_place(ranks: Launcher, world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for wrong in ranks(world)(sums, dtype):
            assert wrong == []
