"""Small trainings in processes that are forked from one which has imported everything: a try takes no start of Python.

The parent's end, `Forked`, starts `python -m tests.attack.forked` and hands it a job on a line; the answer is a line.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_NEW_MOUNTS, _NEW_USER, _PRIVATE = 0x20000, 0x10000000, 0x44000


@dataclasses.dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        folder: Of all its files.
        what: Function of `module:name`, from the folder to the line that it has to say.
        ranks: Processes.
        variables: Of their environment.
        limits: Pairs of a resource's number and the most of it.
        disks: Pairs of a directory and the bytes of the file system that is mounted there, for these processes alone.
        full: Directories whose file system is filled up before the training begins.
        umask: Of the files it makes; None: as it is.
        directory: Working directory; one that is not there is made, and removed once the process is in it.
        seconds: After which it counts as a hang, on a machine with other work.
    """

    folder: str
    what: str = "tests.attack.small_run:said"
    ranks: int = 1
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limits: Sequence[tuple[int, int]] = ()
    disks: Sequence[tuple[str, int]] = ()
    full: Sequence[str] = ()
    umask: int | None = None
    directory: str | None = None
    seconds: float = 240.0


class Forked:
    """The process from which trainings are forked.

    Args:
        variables: Of its environment, beside this process's.
    """

    def __init__(self, **variables: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)} | variables
        command = [sys.executable, "-m", "tests.attack.forked"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def lines(self, job: Job) -> list[str]:
        """The line that each rank says; "died ..." or "hung ..." of one that says nothing."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
        found: list[str] = json.loads(self._process.stdout.readline())
        return found

    def said(self, job: Job) -> tuple[str, str]:
        """("digest", "error", "died", "hung" or "not allowed", text) of all ranks, or of the first with another end."""
        lines = self.lines(job)
        other = next((line for line in lines if line != lines[0]), lines[0])
        kind, _, text = other.partition(" ")
        return kind, text


def not_allowed() -> str:
    """Why this user may mount nothing, even for processes of its own; empty where it may."""
    pid = os.fork()
    if pid == 0:
        try:
            _mount([("/dev/shm", 1 << 16)])
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 255)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return os.strerror(code) if code else ""


def _mount(disks: Sequence[tuple[str, int]]) -> None:
    """Mount file systems in memory, of so many bytes, which this process and its children alone see.

    Raises:
        OSError: If that is not allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: Any, *arguments: Any) -> None:
        if function(*arguments) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    try:
        call(libc.unshare, _NEW_MOUNTS)
    except PermissionError:
        call(libc.unshare, _NEW_MOUNTS | _NEW_USER)
    call(libc.mount, b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None)
    for place, nbytes in disks:
        options = f"size={nbytes},mode=1777".encode()
        call(libc.mount, b"tmpfs", os.fsencode(place), b"tmpfs", ctypes.c_ulong(0), options)


def _fill(folder: str) -> None:
    """Write until the file system has no room."""
    with open(f"{folder}/full", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def _rank(job: Job) -> str:
    os.environ.update(job.variables)
    if job.disks:
        _mount(job.disks)
    for place in job.full:
        _fill(place)
    if job.umask is not None:
        os.umask(job.umask)
    if job.directory is not None:
        goes = not os.path.exists(job.directory)
        if goes:
            os.mkdir(job.directory)
        os.chdir(job.directory)
        if goes:
            os.rmdir(job.directory)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for what, most in job.limits:
        resource.setrlimit(what, (most, most))
    module, _, name = job.what.partition(":")
    line: str = getattr(importlib.import_module(module), name)(job.folder)
    return line


def _begun(job: Job, rank: int, port: int) -> tuple[int, int]:
    """Forks a rank; its process, and the descriptor from which its line comes."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    try:
        os.close(ours)
        os.setpgid(0, 0)
        if job.ranks > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        try:
            line = _rank(job)
        except BaseException:
            line = "died " + traceback.format_exc().replace("\n", " ")[-600:]
        os.write(theirs, line.encode(errors="backslashreplace")[:60_000])
    finally:
        os._exit(0)


def _ended(pid: int, descriptor: int, seconds: float, deadline: float) -> str:
    found = b""
    while select.select([descriptor], [], [], max(deadline - time.monotonic(), 0.0))[0]:
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        found += part
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    hung = time.monotonic() >= deadline
    return found.decode() if found else f"hung after {seconds:g} s" if hung else f"died of {-code}"


def _serve() -> None:
    for line in sys.stdin:
        job = Job(**json.loads(line))
        os.makedirs(job.folder, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        deadline = time.monotonic() + job.seconds
        begun = [_begun(job, rank, port) for rank in range(job.ranks)]
        print(json.dumps([_ended(pid, descriptor, job.seconds, deadline) for pid, descriptor in begun]), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for needed in ("tests.attack.small_run", "tests.attack.leaks", "torch._dynamo"):
        importlib.import_module(needed)
    _serve()
