"""Questions to a lighthouse: it answers late, or is out of reach."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torchft")

from zero_strategy.survive.agent import lighthouse_command
from zero_strategy.survive.membership import Membership


@pytest.fixture
def lighthouse() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """One that answers when two ask."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [lighthouse_command(), "--bind", f"127.0.0.1:{port}", "--min_replicas", "2", "--join_timeout_ms", "500"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def test_a_question_waits_for_the_others_and_not_for_a_lighthouse_out_of_reach(
    lighthouse: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    address, process = lighthouse
    first, second = (Membership(address, place, "127.0.0.1", str(tmp_path), absent_seconds=2.0) for place in range(2))
    with ThreadPoolExecutor(1) as late:
        # The first one waits for the second, longer than a lighthouse may be away.
        told = late.submit(lambda: (time.sleep(5), second.quorum(1))[1])
        assert first.quorum(1).names == told.result().names == [first.name, second.name]
    asked = first.ask(2)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="has not answered for"):
        first.answer(asked)
    process.send_signal(signal.SIGCONT)
    for each in (first, second):
        each.close()


def test_those_who_wait_for_a_third_give_it_up_together(
    lighthouse: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """The one that has come later, too: else it would go on waiting while the other forms."""
    first, second = (Membership(lighthouse[0], place, "127.0.0.1", str(tmp_path)) for place in range(2))
    with ThreadPoolExecutor(1) as early:
        told = early.submit(first.first_quorum, 3, 1.5)
        time.sleep(0.8)
        found = second.first_quorum(3, 1.5)
        assert found.key == told.result().key and found.names == [first.name, second.name]
    for each in (first, second):
        each.close()
