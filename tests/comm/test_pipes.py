"""Ranks that tell each other through pipes: in order, and never waiting for one that cannot come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest

from zero_strategy.comm.shared_memory import MeetingPipes
from zero_strategy.watchdog.flight_recorder import TransportError


def connected(size: int, timeout: float = 20.0) -> list[MeetingPipes]:
    """Ranks that are all in this process."""
    ranks = [MeetingPipes(rank, timeout) for rank in range(size)]
    for mine in ranks:
        for peer, other in enumerate(ranks):
            if mine is not other:
                mine.connect(peer, os.getpid(), other.number)
    return ranks


def at_once(calls: list[Callable[[], None]]) -> list[BaseException | None]:
    """The exceptions of calls in threads of their own."""
    errors: list[BaseException | None] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            calls[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_hears_every_other_in_order(size: int) -> None:
    ranks = connected(size)
    heard: list[list[dict[int, tuple[int, int]]]] = [[] for _ in ranks]

    def wait_for_all(rank: int) -> None:
        for number in range(200):
            heard[rank].append(ranks[rank].wait_for_all(number, -rank))

    assert at_once([partial(wait_for_all, rank) for rank in range(size)]) == [None] * size
    for rank in range(size):
        others = [peer for peer in range(size) if peer != rank]
        assert heard[rank] == [{peer: (number, -peer) for peer in others} for number in range(200)]


def test_aborting_ends_waits_on_both_sides() -> None:
    ranks = connected(3)
    aborted = threading.Timer(0.2, ranks[1].abort)
    aborted.start()
    errors = at_once(
        [lambda: ranks[0].wait_for_all(0, 0) and None, lambda: ranks[1].wait_for_all(0, 0) and None]
    )  # rank 2 never comes
    assert all(isinstance(error, TransportError) for error in errors)
    assert [str(error) for error in errors] == ["rank 1 of the group has broken off", "this rank has broken off"]
    with pytest.raises(TransportError, match="rank 1 of the group has broken off"):
        ranks[0].wait_for_all(1, 0)  # for ever


def test_time_is_bounded() -> None:
    first, _ = connected(2, timeout=0.2)
    with pytest.raises(TransportError, match=r"rank 1 of the group did not come within 0\.2 s"):
        first.wait_for_all(0, 0)


_OTHER = """
import os, sys
from zero_strategy.comm.shared_memory import MeetingPipes
mine = MeetingPipes(1, 20.0)
print(mine.number, flush=True)
mine.connect(0, int(sys.argv[1]), int(sys.argv[2]))
print(mine.wait_for_all(0, 7), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("sigpipe", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_process_that_ends_is_noticed_at_once(sigpipe: signal.Handlers) -> None:
    """Keep counting messages from before; writing to it is no signal."""
    before = signal.signal(signal.SIGPIPE, sigpipe)
    mine = MeetingPipes(0, 20.0)
    command = [sys.executable, "-c", _OTHER, str(os.getpid()), str(mine.number)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        mine.connect(1, other.pid, int(other.stdout.readline()))
        assert mine.wait_for_all(0, 5) == {1: (0, 7)}
        assert other.stdout.readline() == "{0: (0, 5)}\n"
        other.kill()
        with pytest.raises(TransportError, match="the process of rank 1 of the group has ended"):
            mine.wait_for_all(1, 5)
        with pytest.raises(TransportError, match="has ended"):
            mine.wait_for_all(2, 5)
    finally:
        signal.signal(signal.SIGPIPE, before)
        other.kill()
        other.wait()


def test_descriptors_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ranks = connected(2)
    assert len(os.listdir("/proc/self/fd")) == before + 2 * 4
    del ranks
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_that_cannot_be_opened() -> None:
    mine = MeetingPipes(0, 1.0)
    with pytest.raises(FileNotFoundError):
        mine.connect(1, os.getpid(), 1 << 20)
