"""Threads share a tier in files: one that waits for its bytes keeps nobody from reading and writing other records."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_strategy.offload import file_queues as thread_queue
from zero_strategy.offload import state_file
from zero_strategy.offload.file_queues import IO_VARIABLE
from zero_strategy.offload.tier import NvmeTier

NBYTES = 8192


class SlowDrive:
    """Holds the first call of a kind back until it is told to go on."""

    def __init__(self, kind: str) -> None:
        self.kind, self.reached, self.go_on = kind, threading.Event(), threading.Event()
        self._plain = thread_queue._call

    def __call__(self, kind: Any, block: Any) -> int:
        if kind == self.kind and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(30)
        return self._plain(kind, block)


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[NvmeTier]:
    monkeypatch.setenv(IO_VARIABLE, "python")
    made = NvmeTier([str(tmp_path)])
    made.reserve({"a": NBYTES, "b": NBYTES})
    yield made
    made.close()


def test_waiting_for_one_record_locks_no_other(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = SlowDrive("read")
    monkeypatch.setattr(thread_queue, "_call", drive)
    values, slow = torch.arange(NBYTES).to(torch.uint8), torch.ones(NBYTES, dtype=torch.uint8)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(tier.read("a", slow).wait)
        assert drive.reached.wait(30)
        for _ in range(3):
            found = torch.zeros(NBYTES, dtype=torch.uint8)
            tier.write("b", values).wait()
            tier.read("b", found).wait()
            assert torch.equal(found, values) and not waiting.done()
        drive.go_on.set()
        waiting.result(30)
    assert not slow.any()


def test_a_read_of_what_another_thread_writes_waits_without_the_lock(
    tier: NvmeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = SlowDrive("write")
    monkeypatch.setattr(thread_queue, "_call", drive)
    values, found = torch.arange(NBYTES).to(torch.uint8), torch.zeros(NBYTES, dtype=torch.uint8)
    with ThreadPoolExecutor(2) as threads:
        writing = tier.write("a", values)
        assert drive.reached.wait(30)
        reading = threads.submit(lambda: tier.read("a", found).wait())
        tier.write("b", values).wait()
        assert not reading.done()
        drive.go_on.set()
        reading.result(30)
        writing.wait()
    assert torch.equal(found, values)


@pytest.mark.parametrize("all_of_it", [False, True])
def test_giving_up_what_is_being_written_locks_nobody_out(
    tier: NvmeTier, monkeypatch: pytest.MonkeyPatch, all_of_it: bool
) -> None:
    drive, waits, plain = SlowDrive("write"), threading.Event(), state_file.outcome_of

    def noted(*args: Any) -> Exception | None:
        waits.set()
        return plain(*args)

    monkeypatch.setattr(thread_queue, "_call", drive)
    monkeypatch.setattr(state_file, "outcome_of", noted)
    values = torch.arange(NBYTES).to(torch.uint8)
    tier.reserve({"c": NBYTES})
    with ThreadPoolExecutor(2) as threads:
        tier.write("a", values)
        assert drive.reached.wait(30)
        other = tier.write("c", values)
        giving_up = threads.submit(tier.close) if all_of_it else threads.submit(tier.release, ["a", "b"])
        assert waits.wait(30)
        try:
            threads.submit(other.wait).result(10)
            assert not giving_up.done()
        finally:
            drive.go_on.set()
        giving_up.result(30)
    tier.close()
