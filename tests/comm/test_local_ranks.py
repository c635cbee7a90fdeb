"""Ranks that a command starts: results, failures by rank, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.local_ranks import LocalRankError, run_local_ranks
from zero_strategy.comm.transport import KEY_VARIABLE

HERE = "tests.comm.test_local_ranks"


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
    code += f"from zero_strategy.comm.local_ranks import run_local_ranks as run; run('{HERE}:fail_or_wait', "
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_command_killed_before_a_rank_runs_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import os, signal, subprocess
from zero_strategy.comm.local_ranks import run_local_ranks

class KillsWhoeverStartsIt(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen = KillsWhoeverStartsIt
run_local_ranks("{HERE}:fail_or_wait", ({str(tmp_path)!r}, False), 1)
"""
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert command.stdout is not None
    rank = int(command.stdout.readline())
    try:
        command.communicate(timeout=120)  # until the rank ends, which has the same stderr
        assert not list(tmp_path.iterdir())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses, as the kernel writes them, and ports of the TCP sockets on which a process listens."""
    inodes = set[str]()
    for number in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(number))
        except FileNotFoundError:  # closed meanwhile
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


def children(pid: int) -> list[int]:
    return [
        int(child) for path in Path(f"/proc/{pid}/task").iterdir() for child in (path / "children").read_text().split()
    ]


LOOPBACK = {"0100007F", "0" * 24 + "01000000"}


def meet_and_wait(folder: str) -> int:
    dist.barrier()  # so that all connections are made
    Path(folder, f"{dist.get_rank()}.met").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    dist.barrier()
    return dist.get_rank()


def set_in_a_store(key: str, value: bytes) -> bytes:
    """Bytes that a client of a TCPStore sends to set a key."""
    validate, store = struct.pack("=BI", 0, 0x3C85F7CE), struct.pack("=B", 1)
    return validate + store + b"".join(struct.pack("=Q", len(text)) + text for text in (f"/{key}".encode(), value))


class Planted:
    """Runs code where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_only_the_loopback_is_listened_on_and_nothing_of_it_unpickled(tmp_path: Path) -> None:
    code = f"from zero_strategy.comm.local_ranks import run_local_ranks as run; print(run('{HERE}:meet_and_wait', "
    code += f"({str(tmp_path)!r},), 2))"
    temporary = tmp_path / "temporary"
    temporary.mkdir(mode=0o755)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "no-such-interface", "TMPDIR": str(temporary)}
    command = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while len(list(tmp_path.glob("*.met"))) < 2:
            assert command.poll() is None, command.communicate()[1]
            time.sleep(0.02)
        ranks = children(command.pid)
        assert len(ranks) == 2
        ports = {pid: listening(pid) for pid in (command.pid, *ranks)}
        assert not ports[command.pid] and all(ports[pid] for pid in ranks)
        assert {address for found in ports.values() for address, _ in found} <= LOOPBACK
        (private,) = temporary.iterdir()
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        # As another user of the host would, who takes any port for that of a key-value store and leaves a result there.
        message = set_in_a_store("result0", pickle.dumps((True, Planted(tmp_path / "ran"))))
        for port in {port for found in ports.values() for _, port in found}:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(message)
        (tmp_path / "go").touch()
        said, errors = command.communicate(timeout=60)
    finally:
        command.kill()
        command.communicate()
    assert said == "[0, 1]\n", errors
    assert not (tmp_path / "ran").exists() and not list(temporary.iterdir())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_doctor_and_the_verify_in_it_listen_on_the_loopback_alone() -> None:
    doctor = [sys.executable, "-m", "zero_strategy.cli", "doctor"]
    command = subprocess.Popen(doctor, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = set[tuple[str, int]]()
    try:
        while command.poll() is None:
            for pid in (command.pid, *children_of_living(command.pid)):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    seen |= listening(pid)
            time.sleep(0.02)
    finally:
        command.kill()
        said = command.communicate()[0]
    assert command.returncode == 0, said
    assert seen and {address for address, _ in seen} <= LOOPBACK


def children_of_living(pid: int) -> list[int]:
    try:
        return children(pid)
    except (FileNotFoundError, ProcessLookupError):
        return []


def exchange(marker: str, keyless: bool) -> list[object]:
    """Rank 1 sends what runs code where it is unpickled, and does not know the key if it is `keyless`."""
    sent: object = {"rank": 0, "text": "x" * 100}
    if dist.get_rank() == 1:
        sent = Planted(Path(marker))
        if keyless:
            os.environ[KEY_VARIABLE] = "guessed"
    return Communicator(dist.group.WORLD, CommunicationCounters()).all_gather_objects(sent)


def test_objects_are_unpickled_only_if_one_of_the_ranks_has_sent_them(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(LocalRankError, match="does not come from it") as info:
        run_local_ranks(f"{HERE}:exchange", (str(marker), True), 2, timeout=120)
    assert "rank 1" in info.value.failures[0] and not marker.exists()
    with pytest.raises(LocalRankError, match="File exists"):  # both unpickle it, as they may: rank 1 has the key
        run_local_ranks(f"{HERE}:exchange", (str(marker), False), 2, timeout=120)
    assert marker.exists()
