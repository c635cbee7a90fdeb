"""End of a process whose ranks could not go on: with the exception, and in no other way."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import subprocess
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from tests.launcher import fork_server
from tests.watchdog.faults import Training

QUICK = {"mode": "default", "wait_seconds": 0.1, "silence_seconds": 0.2}


def train(rank: int) -> None:
    """Rank 1 leaves with an exception, while an exchange of its own is under way."""
    training = Training(3, QUICK)
    training.step()
    flat = torch.ones(8)
    if rank == 1:
        training.engine.mesh.reduce.all_gather(flat, of="something")
        raise LookupError("no such sample")
    training.step()


def script(rank: int, port: int, out: Path) -> None:
    """Exit of the interpreter after a script."""
    for number in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    try:
        train(rank)
    except Exception as error:
        traceback.print_exc()
        sys.last_value = error
    sys.stderr.flush()
    gc.freeze()  # the end of what was loaded would take seconds
    ctypes.pythonapi.Py_Exit(ctypes.c_int(1))


def scripts(rank: int, ports: list[int], folder: Path) -> None:
    """Several at a time, in processes that have everything loaded; leaves their exit codes."""
    children = []
    for port in ports:
        if (child := os.fork()) == 0:
            script(rank, port, folder / f"{port}.{rank}")
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / f"codes.{rank}").write_text(str(codes))


def test_scripts_that_end_with_what_they_were_told(tmp_path: Path) -> None:
    with ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in free:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in free]
    ranks = [fork_server().Process(target=scripts, args=(rank, ports, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        rank.kill()
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told.pop("codes.0", "") == told.pop("codes.1", "") == "[1, 1, 1]", told
    for name, text in told.items():
        words = "LookupError: no such sample" if name.endswith(".1") else "DesyncError: rank 1 raised LookupError"
        assert words in text, text
        assert "terminate" not in text, text


DROPPED = """
import sys, time, pathlib
from zero_strategy.runtime.worker import BackgroundWorker, Watch

class Looker:
    def look(self):
        pathlib.Path(sys.argv[1], "begun").touch()
        time.sleep(0.3)
        pathlib.Path(sys.argv[1], "looked").touch()
        return 9.0

def job():
    time.sleep(0.3)
    pathlib.Path(sys.argv[1], "worked").touch()

looker, watch, worker = Looker(), Watch(), BackgroundWorker()
watch.start(looker)
worker.submit(job)
while not pathlib.Path(sys.argv[1], "begun").exists():
    time.sleep(0.01)
del watch, worker
"""


def test_threads_of_what_was_dropped_end_before_the_process_does(tmp_path: Path) -> None:
    """In a call of torch's that returns when the interpreter is gone, such a thread would abort the process."""
    subprocess.run([sys.executable, "-c", DROPPED, str(tmp_path)], check=True, timeout=60)
    assert {path.name for path in tmp_path.iterdir()} == {"begun", "looked", "worked"}
