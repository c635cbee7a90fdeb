"""Conclusions of ranks from each other's reports."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from zero_strategy.config import load_config
from zero_strategy.watchdog.diagnosis import (
    NO_BACKWARD,
    Begun,
    Failure,
    FailureBoard,
    Report,
    Wait,
    find_failure,
    positions,
)
from zero_strategy.watchdog.flight_recorder import call_site_of, call_site_of_error, subject
from zero_strategy.watchdog.peers import ProcessCard, condition, own_card
from zero_strategy.watchdog.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[2]
ALL = (0, 1, 2, 3)
GATHER: Begun = ("all_gather", "layers.3", 64, "float32")
REDUCE: Begun = ("reduce_scatter", "layers.7", 64, "float32")


def waiting(rank: int, track: str, number: int, begun: Begun = GATHER, site: str = "", **more: Any) -> Report:
    """A rank in the last collective that it began."""
    kind, of, *_ = begun
    wait = Wait(f"{kind} of `{of}`", ALL, track, number)
    counts = {"gather": 0, "reduce": 0, track: number}
    return Report(rank, 1, 10, 5.0, site, wait, counts=counts, recent={track: {number: begun}}, **more)


def busy(rank: int, **counts: int) -> Report:
    return Report(rank, 1, 10, 5.0, "forward, data.py:3", counts=counts)


def find(own: Report, *others: Report, fresh: tuple[int, ...] = ALL) -> Failure | None:
    return find_failure(own, others, fresh=fresh, silence=5.0)


def test_ranks_in_different_groups_wait_for_each_other() -> None:
    own = waiting(0, "reduce", 4, REDUCE, "backward")
    others = [waiting(1, "gather", 9, GATHER, "forward, train.py:88"), waiting(2, "reduce", 4, REDUCE, "backward")]
    found = find(own, *others, waiting(3, "reduce", 4, REDUCE, "backward"))
    assert found is not None and found.kind == "locked" and found.rank == 1
    assert found.text == (
        "ranks wait for each other: ranks 0, 2, 3 wait in reduce_scatter of `layers.7` (backward); rank 1 waits in "
        f"all_gather of `layers.3` (forward, train.py:88). {NO_BACKWARD}"
    )


def test_different_collectives_of_one_group() -> None:
    other: Begun = ("all_gather", "layers.4", 64, "float32")
    found = find(waiting(0, "gather", 9), waiting(1, "gather", 9, other))
    assert found is not None and found.kind == "different"
    assert "number 9 of the same group rank 0 began all_gather of `layers.3` (64 bytes, float32), rank 1" in found.text


def test_advice_where_the_other_report_is_old() -> None:
    """The rank that runs a backward has told where it is, but not just now."""
    own = waiting(1, "gather", 9, site="forward, train.py:5")
    other = waiting(0, "gather", 9, begun=("all_gather", "layers.7", 64, "float32"), site="backward, train.py:7")
    for fresh in ((), (0,)):
        found = find(own, other, fresh=fresh)
        assert found is not None and found.kind == "different"
        assert "(backward, train.py:7)" in found.text and NO_BACKWARD in found.text
    again = find(own, waiting(0, "gather", 9, begun=REDUCE, site="forward, train.py:7"))
    assert again is not None and NO_BACKWARD not in again.text


@pytest.mark.parametrize(
    "others",
    [
        [],  # nobody has said anything
        [busy(1, gather=8)],  # late
        [waiting(1, "gather", 9), busy(2, gather=8)],  # two wait for a third that computes
        [waiting(1, "gather", 10)],  # has come, and gone on: what was sent is under way
        [waiting(1, "reduce", 4, REDUCE), Report(2, wait=Wait("a wait for a message", (0,), message=True))],
    ],
    ids=lambda others: str(len(others)),
)
def test_what_may_still_come(others: list[Report]) -> None:
    fresh = tuple(report.rank for report in others if report.rank != 1)  # what rank 1 says may have changed
    assert find(waiting(0, "gather", 9), *others, fresh=fresh) is None


def test_an_exception_is_given_time() -> None:
    def noted(idle: float, ended: bool = False) -> Report:
        return Report(1, note="raised KeyError: 'x' (forward, train.py:5)", idle=idle, ended=ended)

    own = waiting(0, "gather", 9)
    assert find(own, noted(4.0)) is None
    for report in (noted(6.0), noted(0.0, True)):
        found = find(own, report)
        assert found is not None and found.text.startswith("rank 1 raised KeyError: 'x' (forward, train.py:5); rank 0 ")
    assert find(own, Report(1, note="raised", idle=9.0, counts={"gather": 9})) is None  # it has come to this one


def test_foreign_collectives() -> None:
    own = Report(0, wait=Wait("torch.distributed.barrier", ALL))
    assert find(own, *(Report(rank, wait=own.wait) for rank in (1, 2, 3))) is None  # all are there
    found = find(own, Report(1, wait=own.wait), waiting(2, "gather", 9), busy(3))
    assert found is not None and found.rank == 2 and "rank 2 waits in all_gather" in found.text


def test_reports_travel() -> None:
    report = waiting(1, "gather", 9, site="forward, a.py:1", note="raised")
    assert Report.decode(json.loads(json.dumps(report.encode()))) == report
    assert positions([busy(0), busy(2)]) == "ranks 0, 2 are in no collective (forward, data.py:3)"


def test_desync_names() -> None:
    assert subject(["layers.3.up.weight", "layers.3.norm.bias"]) == "layers.3"
    assert subject(["layers.3.weight"]) == "layers.3.weight"
    assert subject(["stem.weight", "head.weight", "scale"]) == "stem.weight and 2 more"


def test_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        card = ProcessCard(own_card().host, child.pid, int(fields[19]))
        assert condition(own_card()) == condition(card) == "running"
        os.kill(child.pid, signal.SIGSTOP)
        end = time.monotonic() + 10
        while condition(card) != "stopped" and time.monotonic() < end:
            time.sleep(0.01)
        assert condition(card) == "stopped"
        assert condition(card._replace(started=1)) == "gone" and condition(card._replace(host="x")) == "unknown"
    finally:
        child.kill()
        child.wait()
    assert condition(card) == "gone"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="makes a PID namespace")
def test_processes_of_a_namespace_that_proc_does_not_show() -> None:
    """As in containers that keep the host's /proc: numbers there are of other processes, or of none."""
    unshare = ["unshare", "--pid", "--fork", *(["--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces cannot be made here")
    code = "from zero_strategy.watchdog.peers import condition, own_card; print(condition(own_card()))"
    done = subprocess.run([*unshare, sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "unknown\n", done.stderr


def test_processes_that_cannot_be_looked_at() -> None:
    """No descriptor is left, as data loaders may have it: that says nothing of others."""
    card, (soft, hard) = own_card(), resource.getrlimit(resource.RLIMIT_NOFILE)
    assert condition(card) == "running"
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        assert condition(card) == "unknown"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_the_end_of_a_process_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, with the exception that ended it; not that of a fork, which has all of its memory."""
    store, unseen = dist.FileStore(str(tmp_path / "store"), 2), own_card()._replace(started=1)
    watchdog = Watchdog(0, [own_card(), unseen], lambda: store, "end", wait_seconds=9.0, silence_seconds=9.0)
    monkeypatch.setattr(sys, "last_value", LookupError("no such sample"), raising=False)
    assert watchdog._evidence(Report(0), Wait("x", (0, 1)), 0.0) is None  # it could not be seen from the beginning
    child = os.fork()
    if child == 0:
        watchdog._at_exit()
        os._exit(0)
    os.waitpid(child, 0)
    assert FailureBoard(store, "zero_strategy/guard/end").first() is None
    watchdog._at_exit()
    found = FailureBoard(store, "zero_strategy/guard/end").first()
    assert found is not None and found.text == "rank 0 raised LookupError: no such sample, and has ended"
    watchdog.close()


def guard_of(world: int, tmp_path: Path) -> Watchdog:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    return Watchdog(0, [own_card()] * world, lambda: store, "one", wait_seconds=9.0, silence_seconds=9.0)


def test_ranks_wait_for_each_other_only_if_they_say_so_again(tmp_path: Path) -> None:
    """A rank that keeps the GIL after a barrier cannot say that it has left it."""
    watchdog, barrier = guard_of(2, tmp_path), Wait("torch.distributed.barrier", (0, 1), group=(0, 1))
    own = Report(0, wait=Wait("torch.distributed.all_reduce", (0, 1), group=(0, 1)))
    for beat in (1, 2):
        watchdog._store_client._learn(Report(1, beat, wait=barrier))
    assert [watchdog._confirmed(own) for _ in range(3)] == [None, None, None]
    watchdog._store_client._learn(Report(1, 3, wait=barrier))
    found = watchdog._confirmed(own)
    assert found is not None and found.kind == "locked"
    watchdog.close()


def test_meetings_that_were_given_up_are_not_compared(tmp_path: Path) -> None:
    watchdog = guard_of(2, tmp_path)
    tracks = [watchdog.track(str(compared), [0, 1], compared=compared) for compared in (True, False)]
    for track in tracks:
        track.begin("state_dict()")
    report = watchdog._report(call_site_of(None), None, 0.0)
    assert report.recent == {"True 0-1": {1: ("state_dict()", "", 0, "")}} and len(report.counts) == 2
    watchdog.close()


def test_few_ranks_read_the_reports_of_all_at_a_time(tmp_path: Path) -> None:
    watchdog = guard_of(1000, tmp_path)
    for ranks in (range(1000), (0, 7)):
        reads = [watchdog._to_read(Wait("x", tuple(ranks)), beat) for beat in range(6 * 63)]
        assert sum(len(read) == 999 for read in reads) == 6
        assert {len(read) for read in reads} == {999, 0 if len(ranks) > 2 else 1}
    assert watchdog._to_read(Wait("x", (0, 1)), 6 * 63) == list(range(1, 1000))
    watchdog.close()
    small = guard_of(4, tmp_path)
    assert all(small._to_read(Wait("x", ALL), beat) == [1, 2, 3] for beat in range(20))
    small.close()


def test_sites() -> None:
    assert call_site_of(None).place.startswith("test_desync.py:") and call_site_of(None).foreign is None
    try:
        raise KeyError("x")
    except KeyError as error:
        assert str(call_site_of_error(error)).startswith("test_desync.py:")


def test_config(tmp_path: Path) -> None:
    file = tmp_path / "zero.yaml"
    for text, mode in (
        ("watchdog: off", "off"),
        ("watchdog: on", "default"),
        ("watchdog: strict", "strict"),
        ("watchdog: {mode: off}", "off"),
    ):
        file.write_text(text)
        assert load_config(file).watchdog.mode == mode
    assert load_config(watchdog="off").origin_of("watchdog.mode") == "user: keyword"
    for wrong, kind in (("maybe", ValueError), (3, TypeError), (1.0, TypeError), ({"mode": 1}, TypeError)):
        with pytest.raises(kind, match="watchdog"):
            load_config(watchdog=wrong)
