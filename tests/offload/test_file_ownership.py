"""Files of dead processes go, those of living ones stay: kills, runs that share a directory, other hosts."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zero_strategy.offload import part_file as ownership
from zero_strategy.offload.part_file import Owner, new_name, owner_of, remove_stale, this_process
from zero_strategy.offload.state_file import StateFile

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys, torch
from zero_strategy.offload.state_file import StateFile
state = StateFile(sys.argv[1], {"r": 32 << 20}, keep_name=sys.argv[2] == "keep")
memory = torch.ones(32 << 20, dtype=torch.uint8)
print("writing", flush=True)
while True:
    state.write("r", memory).wait()
"""


def killed_while_writing(folder: Path, how: str) -> int:
    """Its number."""
    command = [sys.executable, "-c", WRITER, str(folder), how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        time.sleep(0.05)
        os.kill(writer.pid, signal.SIGKILL)
    return writer.pid


def test_a_kill_leaves_nothing_at_all(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, "no name")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_a_kill_left_goes_at_the_next_start(tmp_path: Path) -> None:
    pid = killed_while_writing(tmp_path, "keep")
    (left,) = tmp_path.iterdir()
    owner = owner_of(left.name)
    assert owner is not None and owner.pid == pid and owner.gone()
    with StateFile(tmp_path, {"r": 1}) as state:
        assert state.removed == [left]
    assert list(tmp_path.iterdir()) == []


def test_runs_that_share_a_directory_leave_each_other_alone(tmp_path: Path) -> None:
    with StateFile(tmp_path, {"r": 5000}, keep_name=True) as mine, StateFile(tmp_path, {"r": 10}, keep_name=True) as b:
        command = [sys.executable, "-c", WRITER, str(tmp_path), "keep"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "writing\n"
            assert len(list(tmp_path.iterdir())) == 3
            assert remove_stale(tmp_path) == [] and mine.paths[0].exists() and b.paths[0].exists()
            other.kill()
        assert len(remove_stale(tmp_path)) == 1
        assert mine.paths[0].exists() and b.paths[0].exists()


def stale_file(folder: Path, **changes: object) -> Path:
    """A file of an owner that differs from this process in something."""
    owner = dataclasses.replace(this_process(), **changes)  # type: ignore[arg-type]
    path = folder / f"zero-strategy.{owner.host}.{owner.boot}.{owner.pid}.{owner.start}.a.rank0.00.state"
    path.touch()
    return path


def test_who_is_gone(tmp_path: Path) -> None:
    me = this_process()
    assert me.pid == os.getpid() and me.start > 0 and owner_of(new_name("a.b/c", 7)) == me
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = [
        stale_file(tmp_path, pid=child.pid),
        stale_file(tmp_path, start=me.start + 1),  # the number has been given out again
        stale_file(tmp_path, boot="0123456789abcdef"),  # of another boot, or an earlier version: nobody holds its lock
        stale_file(tmp_path, boot=f"{me.boot}1"),  # of another container
        stale_file(tmp_path, boot="unknown", pid=child.pid),
    ]
    stays = [
        stale_file(tmp_path),
        stale_file(tmp_path, host="elsewhere", pid=child.pid),
        stale_file(tmp_path, host="elsewhere", boot="0123456789abcdef"),
    ]
    names = ("data.state", "zero-strategy.state", "zero-strategy.a.b.c.state", "zero-strategy.vm.x.1.1.a.rank0.0.bin")
    for name in names:
        stays.append(tmp_path / name)
        stays[-1].touch()
    assert sorted(remove_stale(tmp_path)) == sorted(gone)
    assert sorted(tmp_path.iterdir()) == sorted(stays)


def test_a_process_that_has_ended_but_is_still_listed_is_gone() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        assert ownership._started(child) is None
        assert Owner(this_process().host, this_process().boot, child, 5).gone()
    finally:
        os.waitpid(child, 0)


@pytest.mark.parametrize("boot", [None, "0123456789abcdef", "unknown"])
def test_a_lock_counts_where_process_numbers_do_not(tmp_path: Path, boot: str | None) -> None:
    # As of a process in another container of the same name, whose numbers mean nothing here.
    path = stale_file(tmp_path, start=1) if boot is None else stale_file(tmp_path, boot=boot)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert remove_stale(tmp_path) == []
    assert remove_stale(tmp_path) == [path]


def test_without_locks_files_of_other_containers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)  # as on some network file systems
    me = this_process()
    again = stale_file(tmp_path, start=me.start + 1)
    stays = [stale_file(tmp_path, boot=boot) for boot in ("0123456789abcdef", f"{me.boot}1", "unknown")]
    assert remove_stale(tmp_path) == [again]
    assert sorted(tmp_path.iterdir()) == sorted(stays)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="makes a PID namespace")
def test_a_container_leaves_a_running_jobs_file_alone(tmp_path: Path) -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", *(["--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces cannot be made here")
    code = "import fcntl, sys; from pathlib import Path; from zero_strategy.offload import remove_stale; "
    code += "print(len(remove_stale(Path(sys.argv[1])))); "
    code += "fcntl.flock = lambda *_: open('/'); "  # an error: there are no locks
    code += "print(len(remove_stale(Path(sys.argv[1]))))"
    with StateFile(tmp_path, {"r": 10}, keep_name=True) as state:
        command = [*unshare, sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.stdout == "0\n0\n", done.stderr
        assert state.paths[0].exists()


@pytest.mark.parametrize("keep_name", [False, True])
def test_a_forked_child_leaves_its_parents_file_alone(tmp_path: Path, keep_name: bool) -> None:
    with StateFile(tmp_path, {"r": 10}, keep_name=keep_name) as state:
        child = os.fork()
        if child == 0:
            del state
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert state.paths[0].exists() == keep_name
        state.write("r", torch.ones(10, dtype=torch.uint8)).wait()


def test_names_can_be_read_by_people() -> None:
    assert re.search(r"\.my-run\.rank12\.[0-9a-f]{8}\.state$", new_name("my run", 12))
