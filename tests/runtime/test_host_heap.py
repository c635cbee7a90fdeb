"""Blocks of host memory: kept in malloc's heap, or mapped."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.launcher import Launcher
from zero_strategy.runtime import host_heap


def mapped_bytes() -> int:
    call = ctypes.CDLL(None).mallinfo2
    call.restype = host_heap._Mallinfo
    found: int = call().hblkhd
    return found


def blocks(threshold: int) -> tuple[int, int, int]:
    """(mapped bytes of sixteen blocks of 16 MiB and of 8, bytes after all went, free ones when the first had gone).

    A block of 24 MiB has come and gone before, with which glibc's own rule stops to map smaller ones.
    """
    if threshold:
        assert host_heap.map_blocks(threshold)
    torch.empty(24 << 20, dtype=torch.uint8)
    before = mapped_bytes()
    kept, between = [], []
    for _ in range(16):
        kept.append(torch.empty(16 << 20, dtype=torch.uint8))
        # The heap does not end with the others: there are more of these than free places elsewhere.
        between.append(torch.empty(8 << 20, dtype=torch.uint8))
    made = mapped_bytes() - before
    kept.clear()
    free = host_heap.free_in_heap()
    between.clear()
    return made, mapped_bytes() - before, free


def test_blocks_that_go_leave_gaps(fresh_ranks: Launcher) -> None:
    ((made, left, free),) = fresh_ranks(1)(blocks, 0)
    assert made == left == 0 and free >= 64 << 20  # but for what lay at its end


def test_mapped_blocks_leave_none(fresh_ranks: Launcher) -> None:
    ((made, left, _),) = fresh_ranks(1)(blocks, host_heap.MAPPED)
    assert made >= 128 << 20 and left == 0  # a few may find free places in the heap


def test_the_environment_decides_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert host_heap.is_open() and not host_heap.is_mapped(0) and host_heap.is_mapped(65536)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert not host_heap.is_open() and host_heap.is_mapped(0)


def threshold_of_an_engine(threshold: int) -> int:
    """Mapped bytes of sixteen blocks of 16 MiB beside an engine with this setting."""
    from zero_strategy import ZeroEngine

    torch.empty(24 << 20, dtype=torch.uint8)
    engine = ZeroEngine(torch.nn.Linear(8, 8), {"stage": 0, "mmap_threshold": threshold})
    before = mapped_bytes()
    kept = [torch.empty(16 << 20, dtype=torch.uint8) for _ in range(16)]
    made = mapped_bytes() - before
    del kept, engine
    return made


def test_a_setting_maps_blocks(fresh_ranks: Launcher) -> None:
    assert fresh_ranks(1)(threshold_of_an_engine, 131072)[0] >= 128 << 20
