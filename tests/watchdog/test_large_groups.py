"""The watchdog in groups of thousands of ranks: whom it asks, and how long its reports are."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zero_strategy.watchdog.diagnosis import Report, Wait
from zero_strategy.watchdog.peers import own_card
from zero_strategy.watchdog.waits import Group
from zero_strategy.watchdog.watchdog import Watchdog

MANY = 4096


class Asked:
    """A group of gloo that notes whom it asks; asking the ranks of `living` runs out of time, others refuse."""

    def __init__(self, rank: int, size: int, living: set[int]) -> None:
        self._rank, self._size, self.living, self.asked = rank, size, living, list[int]()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def recv(self, buffers: list[Any], peer: int, tag: int) -> Asked:
        self.asked.append(peer)
        return self

    def wait(self, timeout: timedelta) -> None:
        text = "Timed out waiting 1ms for recv operation to complete" if self.asked[-1] in self.living else "closed"
        raise RuntimeError(text)


def asked_by(rank: int, size: int, living: set[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whom a rank asks to break a group's connections."""
    monkeypatch.setattr(Group, "on_device", property(lambda group: False))
    backend = Asked(rank, size, living)
    Group(backend, list(range(size))).abort()
    return backend.asked


def test_breaking_a_large_group_asks_only_ranks_that_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked_by(5, MANY, set(), monkeypatch)
    steps = {sign * (1 << place) % MANY for place in range(12) for sign in (1, -1)}
    assert sorted((peer - 5) % MANY for peer in found) == sorted(steps)
    # A wait that runs out of time closes all connections of the group.
    assert asked_by(5, MANY, {4, 6, 7}, monkeypatch) == [6]
    assert asked_by(5, MANY, {4}, monkeypatch) == [6, 4]


def test_breaking_a_small_group_asks_every_rank_until_one_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_by(3, 6, set(), monkeypatch) == [0, 1, 2, 4, 5]
    assert asked_by(3, 6, {1, 5}, monkeypatch) == [0, 1]


def test_gloo_says_so_when_a_wait_runs_out_of_time() -> None:
    """And the first one closes the connections to all other ranks."""
    store = dist.HashStore()
    groups: dict[int, Any] = {}

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=30))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    received = groups[2].recv([torch.empty(1)], 0, 7)
    Group(groups[0], [0, 1, 2]).abort()
    with pytest.raises(RuntimeError, match="closed"):
        received.wait(timedelta(seconds=20))
    with pytest.raises(RuntimeError, match=r"(?i)closed|application timeout"):
        groups[0].send([torch.empty(1)], 2, 8).wait(timedelta(seconds=20))


@pytest.mark.parametrize(
    "ranks", [(), (3,), (1, 2), (0, 5, 7, 9, 3), (5, 4, 3), tuple(range(MANY)), tuple(range(3, MANY, 8))]
)
def test_a_report_of_many_ranks_is_short_and_comes_out_as_it_was(ranks: tuple[int, ...]) -> None:
    report = Report(3, wait=Wait("an exchange", ranks, "control", 7, group=ranks), sees=ranks)
    text = json.dumps(report.encode())
    assert Report.decode(json.loads(text)) == report
    assert len(text) < 500


def test_a_track_of_many_ranks_has_a_short_name_that_tells_groups_apart() -> None:
    watchdog = Watchdog(0, [own_card()], dist.HashStore, "test", wait_seconds=60.0, silence_seconds=60.0)
    groups = [range(MANY), range(MANY - 1), range(0, MANY, 2), range(1, MANY, 2), (0, 1), (0, 2)]
    tracks = [watchdog.track("control", group) for group in groups]
    watchdog.close()
    assert len({track.key for track in tracks}) == len(groups)
    assert max(len(track.key) for track in tracks) < 50
    assert tracks[4].key == "control 0-1"
