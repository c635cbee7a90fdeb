"""Logged figures of memory, against another reader of the same figures."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path

import pytest
import torch

from tests.comm.pretended import pretend
from zero_strategy.diagnostics import recorder as memory_use
from zero_strategy.diagnostics.recorder import MemoryUse, get_autocast_status, get_ma_status, see_memory_usage


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_host_figures_are_the_system_s() -> None:
    psutil = pytest.importorskip("psutil")
    found, process, host = MemoryUse.now(), psutil.Process().memory_info(), psutil.virtual_memory()
    assert found.resident == pytest.approx(process.rss, rel=0.05)
    assert found.virtual == pytest.approx(process.vms, rel=0.05)
    assert found.host_total == host.total
    assert found.host_used == pytest.approx(host.total - host.available, abs=0.05 * host.total)


def test_a_line_has_figures_of_the_device_and_the_host(caplog: pytest.LogCaptureFixture) -> None:
    gib = 2**30
    use = MemoryUse(gib, 2 * gib, 3 * gib, 4 * gib, gib // 2, 8 * gib, 4 * gib, 16 * gib)
    assert use.lines() == [
        "device memory: allocated 1.00 GiB, at most 2.00 GiB; cached 3.00 GiB, at most 4.00 GiB",
        "host memory: process 0.50 GiB resident, 8.00 GiB virtual; all processes 4.00 GiB of 16.00 GiB (25.0 %)",
    ]
    with caplog.at_level(logging.INFO, logger=memory_use.__name__):
        see_memory_usage("after the forward")
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("after the forward | device memory: ") and " | host memory: process " in text
    assert torch.cuda.is_available() or "no CUDA device" in text


def test_force_collects_garbage_and_without_it_nothing_is_collected() -> None:
    gc.disable()
    try:
        for force in (False, True):
            seen = weakref.ref(Ring())
            see_memory_usage("there was garbage", force)
            assert (seen() is None) is force
    finally:
        gc.enable()


def test_one_rank_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=memory_use.__name__), pretend(1, 2):
        see_memory_usage("not here")
        see_memory_usage("here", rank=1)
        see_memory_usage("everywhere", rank=None)
    assert [record.getMessage().split(" | ")[0] for record in caplog.records] == ["here", "everywhere"]


def test_systems_without_these_files_have_unknown_figures(tmp_path: Path) -> None:
    found = MemoryUse.now(tmp_path)
    assert found.resident is None and found.host_total is None and "unknown resident" in found.lines()[-1]


def test_allocated_bytes_and_autocast_are_two_questions() -> None:
    if not torch.cuda.is_available():
        assert get_ma_status() == 0
    assert get_autocast_status() == {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert get_autocast_status() == {"cpu": torch.bfloat16}
