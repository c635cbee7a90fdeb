"""Ends of collectives on a GPU, told by stand-ins for its streams: what the watchdog asks, and when it does not."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from zero_strategy.runtime import compute_device
from zero_strategy.runtime.compute_device import beside_captures
from zero_strategy.watchdog.flight_recorder import CollectiveLog, CollectiveRecord

GPU = torch.device("cuda", 1)
RELAXED, GLOBAL = 2, 0


class Owner:
    """Of a log: nothing has failed."""

    rank = 0

    def check(self) -> None:
        pass


class Driver:
    """Streams, events and the thread's capture mode; everything is over at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.mode, self.capturing = GLOBAL, False
        self.made: list[tuple[torch.device, int]] = []
        self.asked_in: list[int] = []
        patch.setattr(torch.cuda, "Stream", self._stream)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(compute_device, "_exchange_of_capture_modes", lambda: self._exchange)

    def _exchange(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def _stream(self, device: torch.device, priority: int = 0) -> Driver:
        self.made.append((device, priority))
        return self

    def record_event(self) -> Driver:
        return self

    def query(self) -> bool:
        self.asked_in.append(self.mode)
        return True


class Unfinished:
    """A work that the device has not come to."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def is_completed(self) -> bool:
        return False


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def log() -> tuple[CollectiveLog, CollectiveRecord, Unfinished]:
    """Of a group with one collective, which has begun."""
    owner: Any = Owner()
    track, work = CollectiveLog(owner, "gather", [0, 1]), Unfinished()
    record = track.begin("all_gather", "blocks.0")
    track.under_way(record, work, GPU)
    return track, record, work


def test_events_are_asked_beside_a_capture_of_another_thread(driver: Driver) -> None:
    track, record, work = log()
    track.waited(record)
    assert work.waits == 1 and track.oldest_under_way() is None
    assert driver.asked_in == [RELAXED] and driver.mode == GLOBAL


def test_each_group_has_a_stream_that_copies_do_not_get(driver: Driver) -> None:
    for _ in range(2):
        track, record, _ = log()
        track.waited(record)
    assert driver.made == [(GPU, -1), (GPU, -1)]


def test_nothing_waits_for_what_is_being_captured(driver: Driver) -> None:
    track, record, work = log()
    driver.capturing = True
    track.waited(record)
    assert not driver.made and not work.waits and record.work is None


def test_the_mode_is_left_alone_where_there_is_no_such_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    with beside_captures():  # CUDA is not initialised
        pass
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    compute_device._exchange_of_capture_modes.cache_clear()
    with beside_captures():
        pass
    compute_device._exchange_of_capture_modes.cache_clear()
