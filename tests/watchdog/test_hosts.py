"""Ranks of other hosts, whose processes cannot be looked at: silence, and who vouches for whom."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.launcher import Launcher, RankError
from tests.watchdog.faults import PATIENCE
from zero_strategy.comm.mesh import Mesh
from zero_strategy.comm.store import own_store
from zero_strategy.watchdog.diagnosis import Report, rank_label
from zero_strategy.watchdog.peers import Heartbeats, StoreClient, own_card
from zero_strategy.watchdog.watchdog import Watchdog

UNHEARD = 2.0


def train_apart() -> None:
    """Each rank believes that it is alone on its host. Rank 1 is late first, then its process is stopped."""
    mesh = Mesh.build(replicate=1, shard=2, timeout=60.0, barrier_seconds=10.0, name="apart")
    cards = [
        card._replace(host=f"host {rank}") for rank, card in enumerate(mesh.control.all_gather_objects(own_card()))
    ]
    rank, store = dist.get_rank(), own_store(2)
    watchdog = Watchdog(
        rank, cards, partial(own_store, 2), "apart", wait_seconds=0.3, silence_seconds=0.6, unheard_seconds=UNHEARD
    )
    mesh.gather.guarded(watchdog, "gather")
    if rank == 1:
        store.set("pid", str(os.getpid()))
        time.sleep(1.5 * UNHEARD)
    mesh.gather.all_gather(torch.ones(8), of="layers.0").wait()
    assert watchdog.failure is None
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        stack.callback(os.kill, int(store.get("pid")), signal.SIGKILL)
        mesh.gather.all_gather(torch.ones(8), of="layers.1").wait()


def test_a_rank_that_is_stopped_alone_on_its_host(ranks: Launcher) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, timeout=60, grace=PATIENCE)(train_apart)
    told = caught.value.failures[0]
    assert told.exception.endswith("DesyncError"), told
    last = told.text.splitlines()[-1]
    assert "rank 1 has not been heard for 2 s: a process or a host is stopped, the network between is broken" in last
    assert "; rank 0 waits in all_gather of `layers.1`" in last
    assert "rank 1 has not been heard for" in told.log and "given up after 2 s (watchdog.unheard_seconds)" in told.log


def test_silences(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def store_client() -> StoreClient:
        return StoreClient(lambda: dist.FileStore(str(tmp_path / "store"), 1), "hosts")

    there, here = store_client(), store_client()
    speaker = Heartbeats(1, [0, 2], there, seconds=0.6, shortest=0.01)
    listener = Heartbeats(0, [1, 2], here, seconds=0.6, shortest=0.01)
    own, found = Report(0), list[Any]()

    def wait(seconds: float, speaks: bool, others: list[Report]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if speaks:
                speaker.tell(time.monotonic())
            here.exchange(None, listen=listener.listen([1]))
            found.append(listener.silent([1], own, others, rank_label))
            time.sleep(0.02)

    assert speaker.interval == pytest.approx(0.1) and listener.listen([0, 1, 2, 3]) == [1, 2]
    wait(1.0, True, [])
    assert not any(found)
    wait(1.0, False, [Report(3, sees=(1,))])  # its neighbour sees it: it is busy, if not stopped
    assert not any(found)
    listener.forget()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        wait(1.0, False, [])
    failures = [failure for failure in found if failure is not None]
    assert len(caplog.records) == 1 and "rank 1 has not been heard for 0 s" in caplog.records[0].getMessage()
    assert failures and failures[0].kind == "silent" and failures[0].rank == 1
    for each in (there, here):
        each.close()


class OutOfReach:
    """A store whose connection breaks with the first message."""

    def set(self, *_: object) -> None:
        raise dist.DistNetworkError("Connection timed out")


def test_a_store_whose_connection_is_broken_answers_no_more() -> None:
    store_client = StoreClient(OutOfReach, "broken")
    hearing = Heartbeats(0, [1], store_client, seconds=0.5, shortest=0.01)
    hearing.tell(time.monotonic())
    end = time.monotonic() + 60
    while (found := hearing.silent([1], Report(0), [], rank_label)) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert found.kind == "silent" and "has not answered" in found.text
    assert store_client.unanswered() >= 0.5
    store_client.close()


def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    def connect() -> Any:
        time.sleep(0.5)
        return dist.FileStore(str(tmp_path / "store"), 1)

    store_client = StoreClient(connect, "slow")
    hearing = Heartbeats(0, [1], store_client, seconds=0.2, shortest=0.01)
    hearing.tell(time.monotonic())
    time.sleep(0.3)
    found = hearing.silent([1], Report(0), [], rank_label)
    assert found is not None and "the store through which ranks hear of each other has not answered" in found.text
    store_client.close()
    assert (
        Heartbeats(0, [1], store_client, seconds=float("inf"), shortest=1.0).silent([1], Report(0), [], rank_label)
        is None
    )
    assert Heartbeats(0, [0], store_client, seconds=1.0, shortest=1.0).listen([0, 1]) == []  # all are on this host
