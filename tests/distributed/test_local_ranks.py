"""Ranks that a command starts: results, failures by rank, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from zero_strategy.distributed.local_ranks import LocalRankError, run_local_ranks

HERE = "tests.distributed.test_local_ranks"


def fail_or_wait(folder: str, failing: bool) -> None:
    Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    if failing and dist.get_rank() == 1:
        raise ValueError("this is what was wrong")
    time.sleep(600)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_failure_is_told_by_rank_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(LocalRankError, match="this is what was wrong") as info:
        run_local_ranks(f"{HERE}:fail_or_wait", (str(tmp_path), True), 2, timeout=120)
    assert set(info.value.failures) == {1}
    assert not any(alive(int(path.read_text())) for path in tmp_path.iterdir())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_command_ends(tmp_path: Path, how: signal.Signals) -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # else as the tests were started
    code += f"from zero_strategy.distributed.local_ranks import run_local_ranks as run; run('{HERE}:fail_or_wait', "
    process = subprocess.Popen([sys.executable, "-c", f"{code}({str(tmp_path)!r}, False), 1)"], stderr=subprocess.PIPE)
    while not list(tmp_path.iterdir()):
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(how)
    process.communicate(timeout=60)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids and not any(alive(pid) for pid in pids)
